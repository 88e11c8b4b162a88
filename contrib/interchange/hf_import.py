"""A folder of published Llama weights -> a checkpoint that a run begins with, its settings, and its tokenizer.

Flow: scripts/hf.py -> this: all checks come first, then one tensor after the other is written into OUT.partial, which becomes OUT.

    OUT/config.toml          settings: [model] by config.json, the rest by --config, checkpoint.initial_load_path
    OUT/checkpoint/step-0/   the weights, as scripts/make_seed_checkpoint.py writes them
    OUT/tokenizer/           the tokenizer's files, where there are any
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from configs.check import check_settings
from configs.keys import to_text
from configs.load import load
from configs.saved import to_toml
from configs.schema import Config
from contrib.interchange.folder import TOKENIZER, carried, copy, landing, put, refuse
from contrib.interchange.weights import CODES, Weights, read_json
from models import llama, llama_hf
from models.llama_hf import ARCHITECTURE, DERIVED, EMBEDDING, HEAD, Entry, Published
from scripts.make_seed_checkpoint import WriteProgress, check_room, for_any_machine
from training import checkpoint_dcp, checkpoint_files
from training.checkpoint_dcp import Streamed
from training.checkpoint_files import CheckpointFailed, Manifest, step_folder
from training.log import Log
from training.tokenizer import build_tokenizer

FREQUENCIES = "freqs_cis"  # the model's one buffer, which is computed


@dataclass(frozen=True)
class PublishedWeights:
    """Published weights that have been looked through."""

    published: Published
    entries: tuple[Entry, ...]
    weights: Weights
    dtype: torch.dtype  # of the checkpoint


def import_folder(folder: Path, out: Path, *, config_file: Path, dtype: str, log: Log) -> None:
    """Writes OUT, or raises ValueError, OSError or CheckpointFailed. `dtype` "": as the files have it."""
    refuse(out)
    source = look_through(folder, dtype=dtype)
    published, model = source.published, source.published.config
    config = settings(source, out, config_file)
    seq_len = config.training.seq_len
    count = sum(torch.Size(entry.shape).numel() for entry in source.entries)
    log.info("import    %s, %s parameters, %s", ARCHITECTURE, f"{count:,}", str(source.dtype).removeprefix("torch."))
    if published.tied:
        log.info("import    tied embeddings: the output gets a copy of them; in training the two go apart")
    if any(name.endswith(DERIVED) for name in source.weights.found):
        log.info("import    *%s is not read: it follows from rope_theta", DERIVED)
    if published.unknown:
        cause = "not known to a Llama, here or in transformers, and not used"
        log.warning("%s: %s: %s", folder / "config.json", cause, ", ".join(published.unknown))
    if not (folder / TOKENIZER).is_file():
        settings_file = out / "config.toml"
        log.warning("%s: no %s: set model.tokenizer_path in %s before it is used", folder, TOKENIZER, settings_file)
    # On the meta device: names, sizes and dtypes. The model itself is not built, as torch would load its compiler to initialise even that
    tensors = {entry.ours: torch.empty(entry.shape, dtype=source.dtype, device="meta") for entry in source.entries}
    tensors[FREQUENCIES] = torch.empty(seq_len, model.dim // model.n_heads // 2, 2, device="meta")
    entries = {f"model.{entry.ours}": entry for entry in source.entries}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_room(out, total_bytes)
    progress = WriteProgress(total_bytes, log, what="import")

    def make(name: str) -> Tensor:
        if name not in entries:
            return llama.rotary_table(model, seq_len)
        return entries[name].to_ours(source.weights.read(entries[name].theirs)).to(source.dtype)

    with landing(out) as partial:
        if files := carried(folder):
            (partial / "tokenizer").mkdir()
            for file in files:
                copy(file, partial / "tokenizer" / file.name)
        checkpoints = partial / config.checkpoint.folder
        step_0 = checkpoint_files.begin(checkpoints, 0)
        try:
            planner = Streamed(make, written=progress.add)
            records = checkpoint_dcp.write({"model": tensors}, step_0, group=None, planner=planner)
        except checkpoint_dcp.OtherRankFailed as failure:
            raise CheckpointFailed(f"{step_0}: not written: {failure}") from None
        manifest = Manifest(0, "model", ("model",), 1, torch.__version__, "", tuple(records))
        checkpoint_files.publish(checkpoints, manifest)
        put(partial / "config.toml", to_toml(config))
    keys = [f"{name} = {to_text(value)}" for name, value in vars(config.model).items()]
    log.info("%s is written; these settings fit it:\n\n%s\n", out, "\n".join(["[model]", *keys]))
    log.info("train     ./scripts/run_train.sh %s --training.seq_len ... --optimizer.lr ...", out / "config.toml")
    log.info("text      python scripts/generate.py %s --prompt ...", out)
    if (most := published.max_positions) > seq_len:
        log.info("back      python scripts/hf.py export RUN ... --max-positions %d, else training.seq_len", most)


def look_through(folder: Path, *, dtype: str) -> PublishedWeights:
    """Every check that needs the files. Raises ValueError, which names the file and what is wrong in it."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; it should hold config.json and *.safetensors (nothing is fetched)")
    config_json = folder / "config.json"
    body = read_json(config_json)
    try:
        published = llama_hf.read_config(body)
        published.config.check()
    except ValueError as error:
        raise ValueError(f"{config_json}: {error}") from None
    if published.dtype and published.dtype not in CODES and not dtype:
        raise ValueError(
            f'{config_json}: dtype = "{published.dtype}": must be one of {", ".join(CODES)}; --dtype converts'
        )
    vocab_size = published.config.vocab_size
    entries = tuple(llama_hf.entries(published.config, vocab_size=vocab_size, tied=published.tied))
    weights = Weights(folder)
    wanted = {entry.theirs: entry.shape for entry in entries}
    if published.tied and HEAD in weights.found:
        wanted[HEAD] = wanted[EMBEDDING]
    usual, _ = Counter(found.code for found in weights.found.values()).most_common(1)[0]
    code = "" if dtype else CODES.get(published.dtype, "") or usual
    layers = f"{published.config.n_layers} layer{'s' * (published.config.n_layers > 1)}"
    weights.check(wanted, code=code, ignore=DERIVED, architecture=f"{ARCHITECTURE} of {layers}")
    if published.tied and HEAD in weights.found and not torch.equal(weights.read(HEAD), weights.read(EMBEDDING)):
        raise ValueError(
            f"{weights.found[HEAD].file}: {HEAD}: other values than {EMBEDDING}, expected the same, as config.json says "
            "tie_word_embeddings = true"
        )
    if (folder / TOKENIZER).is_file():
        try:
            known = build_tokenizer(str(folder)).vocab_size
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f'model.tokenizer_path = "{folder}": ')) from None
        if known > vocab_size:
            raise ValueError(
                f"{folder / TOKENIZER}: {known} ids, and config.json says vocab_size = {vocab_size}; it must be at least as large"
            )
    stored = {code: name for name, code in CODES.items()}[weights.found[EMBEDDING].code]
    return PublishedWeights(published, entries, weights, getattr(torch, dtype or stored))


def settings(source: PublishedWeights, out: Path, config_file: Path) -> Config:
    """Settings of the run that begins with OUT: [model] is the weights', all else the file's. Raises ValueError."""
    base = load([str(config_file)])
    name = out.name
    if (Path(base.job.dump_folder) / name).absolute() == out.absolute():
        name += "-run"  # a run does not begin in the folder of what it begins with
    checkpoint = replace(
        base.checkpoint,
        initial_load_path=str(step_folder(out / base.checkpoint.folder, 0)),
        exclude_from_loading=(f"model.{FREQUENCIES}",),  # so that another training.seq_len may be chosen
        create_seed_checkpoint=False,  # OUT is one
    )
    model = replace(source.published.config, tokenizer_path=str(out / "tokenizer"))
    config = replace(base, job=replace(base.job, name=name), model=model, checkpoint=checkpoint)
    check_settings(for_any_machine(config), world_size=1)
    return config
