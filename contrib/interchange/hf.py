"""Imports a folder of published weights as a checkpoint that a run starts from, and exports a run's checkpoint as such a folder.

All checks come first; then tensors are written one by one into OUT.partial, which is renamed to OUT at the end. An import writes:

    OUT/config.toml          settings: [model] from config.json, the rest from --config, checkpoint.initial_load_path
    OUT/checkpoint/step-0/   the weights, as scripts/make_seed_checkpoint.py writes them
    OUT/tokenizer/           the tokenizer's files, if there are any
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import models
from configs.check import check_settings
from configs.keys import to_text
from configs.load import HELD_OUT, load, with_held_out_share
from configs.saved import CONFIG_FILE, to_toml
from configs.schema import RunConfig
from contrib.interchange import files
from contrib.interchange.files import CODES, TOKENIZER, TOKENIZER_CONFIG, Weights, read_json
from models.contract import ModelConfig
from models.llama_hf import Entry, Format, Published
from scripts.generate import checkpoint_of, read_surviving, state_of
from scripts.make_seed_checkpoint import check_room
from training import checkpoint_dcp, checkpoint_files
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_dcp import StreamingPlanner
from training.checkpoint_files import (
    CheckpointFailed,
    Manifest,
    Removed,
    is_same,
    list_steps,
    read_verified,
    step_folder,
)
from training.log import Log
from training.object_store import is_url
from training.progress import Bar
from training.tokenizer import ByteTokenizer, FileTokenizer, build_tokenizer

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"  # of the built-in byte tokenizer
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class PublishedWeights:
    """Published weights that have passed all checks."""

    format: Format
    published: Published
    entries: tuple[Entry, ...]
    weights: Weights
    tokenizer: dict[str, Path]  # name -> file to copy; {}: bytes
    dtype: torch.dtype  # of the checkpoint to write


def import_folder(folder: Path, out: Path, *, config_file: Path, tokenizer: str | None, dtype: str, log: Log) -> None:
    """Writes OUT. `tokenizer`: a tokenizer.json or its folder; "": bytes; None: that of the folder. `dtype` "": that of the files. Raises
    ValueError, OSError, CheckpointFailed."""
    files.refuse(out)
    source = check_published(folder, tokenizer=tokenizer, dtype=dtype)
    published, format = source.published, source.format
    config = settings(source, out, config_file)
    seq_len = config.training.seq_len
    count = sum(torch.Size(entry.shape).numel() for entry in source.entries)
    log.info(
        "import    %s, %s parameters, %s", format.architecture, f"{count:,}", str(source.dtype).removeprefix("torch.")
    )
    if any(name.endswith(format.derived) for name in source.weights.found):
        log.info("import    *%s is not read: it is computed from rope_theta", format.derived)
    if published.unknown:
        cause = f"not used for {format.architecture}; ignored"
        log.warning("%s: %s: %s", folder / "config.json", cause, ", ".join(published.unknown))
    # On the meta device, for shapes and dtypes. The model is not built, since its initialization would import torch's compiler
    tensors = {entry.ours: torch.empty(entry.shape, dtype=source.dtype, device="meta") for entry in source.entries}
    tensors |= (buffers := format.buffers(published.config, seq_len))
    entries = {f"model.{entry.ours}": entry for entry in source.entries}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_room(out, total_bytes)
    bar = Bar(total_bytes, "import", log=log)

    def make(name: str) -> Tensor:
        if name not in entries:
            return buffers[name.removeprefix("model.")]
        return entries[name].to_ours(map(source.weights.read, entries[name].parts)).to(source.dtype)

    with files.landing(out) as partial, closing(bar):
        if source.tokenizer:
            (partial / "tokenizer").mkdir()
            for name, file in source.tokenizer.items():
                shutil.copyfile(file, partial / "tokenizer" / name)
        checkpoints = partial / CheckpointConfig.folder
        step_0 = checkpoint_files.begin(checkpoints, 0)
        try:
            planner = StreamingPlanner(make, written=bar.update)
            records = checkpoint_dcp.write({"model": tensors}, step_0, group=None, planner=planner)
        except checkpoint_dcp.OtherRankFailed as failure:
            raise CheckpointFailed(f"{step_0}: not written: {failure}") from None
        manifest = Manifest(0, "model", ("model",), 1, torch.__version__, tuple(records))
        checkpoint_files.publish(checkpoints, manifest)
        # unless it was set, the share follows from the validation of the run that starts here
        text = to_toml(config, without="" if config.origin.has(HELD_OUT) else HELD_OUT)
        (partial / "config.toml").write_text(text, encoding="utf-8")
    keys = [f"{name} = {to_text(value)}" for name, value in vars(config.model).items()]
    log.info("%s is written, with these settings:\n\n%s\n", out, "\n".join(["[model]", *keys]))
    if list_steps(config.run_folder / config.checkpoint.local_folder):
        log.warning(
            "%s has a run, which the command below continues: add --job.name NAME for a new one", config.run_folder
        )
    log.info(
        "train     ./scripts/run_train.sh %s --training.seq_len ... --optimizer.lr ...", quote(str(out / "config.toml"))
    )
    log.info("text      python scripts/generate.py %s --prompt ...", quote(str(out)))
    if (most := published.max_positions) > seq_len:
        log.info("back      python scripts/hf.py export RUN ... --max-positions %d, else training.seq_len", most)


def check_published(folder: Path, *, tokenizer: str | None, dtype: str) -> PublishedWeights:
    """Runs every check that needs the files. Arguments: see import_folder. Raises ValueError, which names the file and the cause."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; must have config.json and *.safetensors (nothing is downloaded)")
    config_json = folder / "config.json"
    body = read_json(config_json)
    try:
        kind = body.get("model_type")
        by_type = formats_by_type()
        if not (format := by_type.get(str(kind))):
            raise ValueError(f"model_type = {json.dumps(kind)}: another architecture; supported: {', '.join(by_type)}")
        published = format.read_config(body)
        published.config.check()
    except ValueError as error:
        raise ValueError(f"{config_json}: {error}") from None
    if published.dtype and published.dtype not in CODES and not dtype:
        raise ValueError(
            f'{config_json}: dtype = "{published.dtype}": must be one of {", ".join(CODES)}; --dtype converts'
        )
    vocab_size = published.config.vocab_size
    entries = tuple(format.entries(published.config, vocab_size=vocab_size))
    weights, embedding, head = Weights(folder), format.embedding, format.head
    wanted = {name: shape for entry in entries for name, shape in entry.parts.items()}
    if copied_head := head not in wanted and head in weights.found:  # tied, but in the files all the same
        wanted[head] = wanted[embedding]
    usual = Counter(found.code for found in weights.found.values()).most_common(1)
    code = "" if dtype else CODES.get(published.dtype) or (usual[0][0] if usual else "")
    layers = f"{published.config.n_layers} layer{'s' * (published.config.n_layers > 1)}"
    weights.check(wanted, code=code, ignore=format.derived, architecture=f"{format.architecture} of {layers}")
    if copied_head and not torch.equal(weights.read(head), weights.read(embedding)):
        raise ValueError(
            f"{weights.found[head].file}: {head}: values differ from {embedding}; must be equal, as config.json has "
            "tie_word_embeddings = true"
        )
    copied = {} if tokenizer == "" else tokenizer_files(Path(tokenizer).expanduser() if tokenizer else folder)
    if TOKENIZER in copied:
        try:
            known = build_tokenizer(str(copied[TOKENIZER])).vocab_size
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f'model.tokenizer_path = "{copied[TOKENIZER]}": ')) from None
        if known > vocab_size:
            raise ValueError(
                f"{copied[TOKENIZER]}: {known} ids, but config.json has vocab_size = {vocab_size}; must be at least as large"
            )
        # its ids are those of the folder's own tokenizer
        if (folder / files.GENERATION).is_file() and not (tokenizer and (folder / TOKENIZER).is_file()):
            copied[files.GENERATION] = folder / files.GENERATION
    elif tokenizer:
        raise ValueError(f"--tokenizer {tokenizer}: there is no such file, or no {TOKENIZER} in that folder")
    elif tokenizer is None:
        raise ValueError(
            f'{folder}: has no {TOKENIZER}; name one, or its folder, with --tokenizer PATH; --tokenizer "" takes bytes as tokens'
        )
    stored = {code: name for name, code in CODES.items()}[weights.found[embedding].code]
    return PublishedWeights(format, published, entries, weights, copied, getattr(torch, dtype or stored))


def formats() -> list[str]:
    """Returns the models with a Hugging Face format, models/<name>_hf.py."""
    return sorted(path.stem.removesuffix("_hf") for path in Path(models.__path__[0]).glob("*_hf.py"))


def formats_by_type() -> dict[str, Format]:
    """Returns the formats by the model_type of config.json. Raises ValueError if two have the same."""
    found: dict[str, Format] = {}
    for format in filter(None, map(format_of, formats())):
        if (other := found.setdefault(format.model_type, format)) is not format:
            names = " and ".join(f"models/{each.name}_hf.py" for each in (other, format))
            raise ValueError(f'model_type = "{format.model_type}": {names} both have it; must differ')
    return found


def format_of(name: object) -> Format | None:
    """Returns the Hugging Face format of a model, found by its name as the model is; None: it has none."""
    if name not in formats():
        return None
    found: Format = importlib.import_module(f"models.{name}_hf").Format()
    return found


def settings(source: PublishedWeights, out: Path, config_file: Path) -> RunConfig:
    """Returns the settings of a run that starts from OUT: [model] of the weights, the rest from the file. Raises ValueError."""
    base = load([str(config_file)])
    name = out.name
    if replace(base, job=replace(base.job, name=name)).run_folder.absolute() == out.absolute():
        name += "-run"  # the run's folder must differ from OUT
    checkpoint = replace(
        base.checkpoint,
        # one of another run could have its checkpoints, which this run would resume from instead of the import
        folder=base.checkpoint.folder if is_url(base.checkpoint.folder) else CheckpointConfig.folder,
        load_step=-1,
        initial_load_model_only=True,
        initial_load_path=str(step_folder(out / CheckpointConfig.folder, 0)),
        exclude_from_loading=(),
        create_seed_checkpoint=False,  # OUT has one
    )
    model = replace(source.published.config, tokenizer_path=str(out / "tokenizer") if source.tokenizer else "")
    config = with_held_out_share(replace(base, job=replace(base.job, name=name), model=model, checkpoint=checkpoint))
    check_settings(config.for_any_machine(), world_size=1)
    return config


class TensorByTensor(FileSystemReader):
    """Reads a checkpoint tensor by tensor, in one process. Unpickles .metadata, so verify its digest first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = super().read_metadata()
        saved = self._metadata.state_dict_metadata
        self.tensors = {name: value for name, value in saved.items() if isinstance(value, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the cached metadata, since reading that of hundreds of ranks takes seconds."""
        return self._metadata

    def read(self, name: str) -> Tensor:
        """Returns the unsharded tensor, on the CPU and in its saved dtype. Raises OSError."""
        saved = self.tensors[name]
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        if problem := checkpoint_dcp.load_into({name: tensor}, Path(self.path), group=None, reader=self):
            raise OSError(f"{self.path}: {name}: {problem}")
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose digests and shapes have been verified."""

    path: Path
    manifest: Manifest
    state: str  # that has the weights: generate.state_of
    format: Format
    model: ModelConfig
    entries: tuple[Entry, ...]
    reader: TensorByTensor
    dtype: torch.dtype

    def read(self, entry: Entry) -> Tensor:
        return self.reader.read(f"{self.state}.{entry.ours}")


def export_run(
    run: Path, out: Path, *, step: int, shard_bytes: int, dtype: str, ema: bool, max_positions: int, log: Log
) -> None:
    """Writes OUT, whole or not at all. `dtype` "": as saved; `ema`: the average of the weights; `max_positions` 0: training.seq_len. A run
    that goes on may remove the checkpoint that is read: then the next newest is taken. Raises ValueError, Damaged, OSError,
    CheckpointFailed."""
    files.refuse(out)

    def export() -> None:
        log.info("export    verifying the digests of %s", run)
        path, manifest, config = find_checkpoint(run, step=step)
        try:
            checkpoint = check_checkpoint(path, manifest, config, dtype=dtype, ema=ema)
            _write(checkpoint, out, shard_bytes, dtype, max_positions or config.training.seq_len, log)
        except (OSError, ValueError):
            if not is_same(path, manifest):
                raise Removed(path) from None
            raise

    cure = "without --step the newest is exported" if step >= 0 else ""
    if (run / ".metadata").is_file():
        cure = "name the run's folder to export its newest checkpoint"
    read_surviving(export, cure, log.warning)


def _write(checkpoint: Checkpoint, out: Path, shard_bytes: int, dtype: str, max_positions: int, log: Log) -> None:
    copied, texts, special = _tokenizer(checkpoint.model.tokenizer_path, out, log)
    target = getattr(torch, dtype) if dtype else checkpoint.dtype
    shapes = {name: shape for entry in checkpoint.entries for name, shape in entry.parts.items()}
    entries = {name: entry for entry in checkpoint.entries for name in entry.parts}
    tensors = {name: torch.empty(shape, dtype=target, device="meta") for name, shape in shapes.items()}
    parts, total_bytes = list(files.shards(tensors, shard_bytes)), sum(tensor.nbytes for tensor in tensors.values())
    check_room(out, total_bytes)
    log.info("export    %s, %s of %.1f GB", checkpoint.path, str(target), total_bytes / 1e9)
    bar = Bar(total_bytes, "export", log=log)

    read = dict[str, Tensor]()  # parts of one parameter, of which each is taken once

    def make(name: str) -> Tensor:
        if name not in read:
            read.update(zip(entries[name].parts, entries[name].to_theirs(checkpoint.read(entries[name])), strict=True))
        return read.pop(name).to(target)

    with files.landing(out) as partial, closing(bar):
        for part, its in parts:
            files.write_file(partial / part, its, make, bar.update)
        for name, file in copied.items():
            shutil.copyfile(file, partial / name)
        body = checkpoint.format.write_config(
            checkpoint.model,
            vocab_size=checkpoint.entries[0].shape[0],
            dtype=str(target).removeprefix("torch."),
            max_positions=max_positions,
            special=special,
        )
        texts["config.json"] = json.dumps(body, indent=2) + "\n"
        if len(parts) > 1:
            texts[files.INDEX] = files.index_json(parts)
        if files.GENERATION not in copied:  # else the file of the tokenizer's folder is copied
            texts[files.GENERATION] = json.dumps({"_from_model_config": True, **special}, indent=2) + "\n"
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        if not is_same(checkpoint.path, checkpoint.manifest):  # parts of two checkpoints may have been read
            raise Removed(checkpoint.path)
    log.info('%s is written: transformers.AutoModelForCausalLM.from_pretrained("%s")', out, out)


def find_checkpoint(run: Path, *, step: int) -> tuple[Path, Manifest, RunConfig]:
    """Returns a verified checkpoint, and the run's settings. `run`: a run's folder, or a checkpoint in it. Raises ValueError,
    Damaged, Removed."""
    is_checkpoint = (run / ".metadata").is_file()
    # Parents of a checkpoint: checkpoint.folder, which may be nested, and the run's folder
    folders = run.absolute().parents[:3] if is_checkpoint else [run]
    settings = next((folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()), None)
    if is_checkpoint and step >= 0:
        raise ValueError(f"--step {step}: {run} is a checkpoint; name the run's folder instead")
    if settings is None:
        of_checkpoint = f"no parent folder has a {CONFIG_FILE}, which describes the model"
        other = f"neither a run's folder (it has no {CONFIG_FILE}) nor a checkpoint (it has no .metadata)"
        raise ValueError(f"{run}: {of_checkpoint if is_checkpoint else other}")
    config = load([str(settings)])
    if not format_of(config.model.name):
        raise ValueError(
            f'{settings}: model.name = "{config.model.name}": there is no models/{config.model.name}_hf.py with its names in Hugging '
            f"Face's format; there are those of {', '.join(formats())}"
        )
    if is_checkpoint:
        return run, read_verified(run), config
    return *checkpoint_of(run / config.checkpoint.local_folder, step, who="hf"), config


def check_checkpoint(path: Path, manifest: Manifest, config: RunConfig, *, dtype: str, ema: bool) -> Checkpoint:
    """Runs every check that needs the checkpoint. Raises ValueError, OSError."""
    settings, model, format = config.origin.file, config.model, format_of(config.model.name)
    assert format, "find_checkpoint checks it"
    reader, state = TensorByTensor(path), state_of(path, manifest, ema=ema)
    table = reader.tensors.get("model.tok_embeddings.weight")
    vocab_size = model.vocab_size or (table.size[0] if table else 0)
    entries = tuple(format.entries(model, vocab_size=vocab_size))
    problems = []
    for entry in entries:
        saved, expected = reader.tensors.get(f"{state}.{entry.ours}"), list(entry.shape)
        if saved is None:
            problems.append(f"{path}: {entry.ours}: missing; expected {expected}")
        elif list(saved.size) != expected:
            problems.append(f"{path}: {entry.ours}: shape {list(saved.size)}, expected {expected} by {settings}")
    buffers = [f"model.{name}" for name in format.buffers(model, 1)]
    known = {*(f"model.{entry.ours}" for entry in entries), *buffers}
    others = [name for name in reader.tensors if name.startswith("model.") and name not in known]
    problems += [f"{path}: {name.removeprefix('model.')}: not in the model of {settings}" for name in others]
    files.raise_all(problems)
    dtypes = {reader.tensors[f"{state}.{entry.ours}"].properties.dtype for entry in entries}
    if not dtype and (len(dtypes) > 1 or str(next(iter(dtypes))).removeprefix("torch.") not in CODES):
        saved_as = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{path}: has {saved_as}; choose one with --dtype bfloat16 or float32")
    # Computed buffers, such as the rotary embedding of the training, must be those that config.json describes
    for name in (name for name in buffers if name in reader.tensors):
        saved_values, plain = reader.read(name), name.removeprefix("model.")
        # rounded if only weights were saved, in 16 bits
        tolerance = 1e-5 if saved_values.dtype == torch.float32 else 1e-2
        expected_values = format.buffers(model, len(saved_values))[plain]
        if not torch.allclose(saved_values.float(), expected_values, rtol=0, atol=tolerance):
            raise ValueError(
                f"{path}: {plain}: not the values of [model] in {settings}; trained with different settings"
            )
    return Checkpoint(path, manifest, state, format, model, entries, reader, dtypes.pop())


def _tokenizer(path: str, out: Path, log: Log) -> tuple[dict[str, Path], dict[str, str], dict[str, Any]]:
    """Returns published name -> file to copy, published name -> text to write, and the special token ids. Raises ValueError for an unusable
    file."""
    copied = tokenizer_files(Path(path).expanduser()) if path else {}
    texts, special = {} if path else byte_tokenizer(), dict[str, Any]()
    if not path or TOKENIZER in copied:
        tokenizer = build_tokenizer(path)
        # tokens around each document in training
        special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        if isinstance(tokenizer, FileTokenizer) and TOKENIZER_CONFIG not in copied:
            # readers would know no BOS and no EOS, and take the class of the model's own tokenizer, which divides text differently
            names = {"bos_token": tokenizer.token(tokenizer.bos_id), "eos_token": tokenizer.token(tokenizer.eos_id)}
            texts[TOKENIZER_CONFIG] = tokenizer_config(names)
    else:
        log.warning('model.tokenizer_path = "%s": no such file, so %s has no %s', path, out, TOKENIZER)
    generation = read_json(copied[files.GENERATION]) if files.GENERATION in copied else {}
    return copied, texts, {**special, **{name: generation[name] for name in _IDS if generation.get(name) is not None}}


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Returns published name -> file, of a tokenizer.json or its folder and of the files beside it."""
    file = path / TOKENIZER if path.is_dir() else path
    found = {TOKENIZER: file} if file.is_file() else {}
    return found | {each.name: each for each in files.tokenizer_files(file.parent) if each.name != TOKENIZER}


def byte_tokenizer() -> dict[str, str]:
    """Returns the built-in byte tokenizer as Hugging Face files: name -> content. Byte-level BPE without merges gives ByteTokenizer's ids,
    after a BOS. The character of a byte is that of GPT-2: itself if Latin-1 prints it, else one from U+0100 on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    vocab = {chr(0x100 + hidden.index(byte)) if byte in hidden else chr(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens([BOS, EOS, PAD])  # in the order of ByteTokenizer's ids, after the bytes
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bos = [(BOS, ByteTokenizer.bos_id)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", "$A $B:1", bos)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    return {TOKENIZER: tokenizer.to_str() + "\n", TOKENIZER_CONFIG: tokenizer_config(names)}


def tokenizer_config(names: dict[str, str]) -> str:
    """Returns tokenizer_config.json for a tokenizer.json that is used as it is. `names`: the special tokens."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    return json.dumps(config, indent=2) + "\n"
