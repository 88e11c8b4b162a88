"""scripts/hf.py: a mismatch is reported with actual and expected values before anything is written; an interrupted call leaves no file that
looks complete."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import models
from configs.load import load
from contrib.interchange.files import Weights, landing
from contrib.interchange.hf import TensorByTensor
from scripts import make_seed_checkpoint
from tests.scripts.hf_world import refusal, run, tokenizers_of
from tests.scripts.tiny_job import ROOT, finished, python, struck
from training.checkpoint_files import list_steps

# transformers is imported, and some tests start processes, each with an import of torch
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("in_the_folder")]


def edit(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    content = load_file(file)
    change(content)
    save_file(content, file, metadata={"format": "pt"})


def edited(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    return lambda file: edit(file, change)


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return edited(lambda content: content.update({name: make(content[name])}))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def configured(**changes: Any) -> Callable[[Path], None]:
    return lambda file: edit_config(file.parent, **changes)


def text_of(name: str, text: str) -> Callable[[Path], Any]:
    return lambda file: (file.parent / name).write_text(text)


def tampered_header(file: Path) -> None:
    """Writes a header that is JSON of the right length, but whose shape does not match its bytes."""
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header, values = file.read_bytes()[8 : 8 + length], file.read_bytes()[8 + length :]
    changed = json.loads(header)
    changed[OUT]["shape"] = [64, 63]
    file.write_bytes(
        length.to_bytes(8, "little") + json.dumps(changed, separators=(",", ":")).encode().ljust(length) + values
    )


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def small_vocabulary(file: Path) -> None:
    """Reduces the model to twelve rows, fewer than the ids of its tokenizer."""
    tokenizers_of(file.parent)
    edit_config(file.parent, vocab_size=12)
    ends = ("lm_head.weight", "model.embed_tokens.weight")
    edit(file, lambda content: content.update({name: content[name][:12].clone() for name in ends}))


def headed(file: Path, header: str) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())


NOT_WHOLE = "F: not a whole safetensors file: .*"
OUT = "model.layers.0.self_attn.o_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
GAIN = "model.layers.0.input_layernorm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tampered header": (
        tampered_header,
        rf"{NOT_WHOLE}; {OUT}: F32 \[64, 63\] takes 16,128 bytes, but has 16,384 by its header",
    ),
    "no header": (lambda file: file.write_bytes(b"\xff" * 16), f"{NOT_WHOLE}header too large; it has 16 bytes"),
    "a list for a header": (lambda file: headed(file, "[1, 2]"), f"{NOT_WHOLE}; it has 14 bytes"),
    "a bottomless header": (lambda file: headed(file, "[" * 100_000), f"{NOT_WHOLE}; it has 100,008 bytes"),
    "no tensors": (
        lambda file: headed(file, "{}"),
        r"F: model.embed_tokens.weight: missing; expected F32 \[300, 64\]; .*",
    ),
    "empty": (lambda file: file.write_bytes(b""), f"{NOT_WHOLE}; it has 0 bytes"),
    "truncated": (truncated, rf"{NOT_WHOLE}; it has [\d,]+ bytes, expected [\d,]+ by its header"),
    "missing tensor": (edited(lambda c: c.pop(UP)), rf"F: {UP}: missing; expected F32 \[96, 64\]"),
    "wrong shape": (
        replaced(UP, lambda t: t[:95].clone()),
        rf"F: {UP}: shape \[95, 64\], expected \[96, 64\] by config.json",
    ),
    "wrong rank": (
        replaced(GAIN, lambda t: t[None].clone()),
        rf"F: {GAIN}: shape \[1, 64\], expected \[64\] by config.json",
    ),
    "extra tensor": (
        edited(lambda c: c.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        r"F: model.layers.0.self_attn.q_proj.bias: F32 \[64\], which LlamaForCausalLM of 2 layers does not have",
    ),
    "a layer too many": (
        configured(num_hidden_layers=1),
        r"F: model.layers.1\..*, which LlamaForCausalLM of 1 layer does not have; .*; .*; and 6 more",
    ),
    "wrong dtype": (replaced(UP, Tensor.half), f"F: {UP}: dtype F16, expected F32"),
    "integers": (replaced(UP, Tensor.int), f"F: {UP}: dtype I32, expected F32"),
    "pickles": (
        lambda file: file.rename(file.with_name("pytorch_model.bin")),
        "D: has neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin is a pickle, .*",
    ),
    "nothing": (lambda file: file.unlink(), "D: has neither model.safetensors nor model.safetensors.index.json"),
    "no config": (lambda file: (file.parent / "config.json").unlink(), "D/config.json: no such file"),
    "a bottomless config": (text_of("config.json", "[" * 100_000), "D/config.json: nested too deeply"),
    "a broken config": (text_of("config.json", "{"), "D/config.json: not JSON: .*"),
    "another activation": (
        configured(hidden_act="gelu"),
        'D/config.json: hidden_act = "gelu": the feed-forward here is SwiGLU; supported: "silu"',
    ),
    "another model": (
        configured(model_type="mistral"),
        'D/config.json: model_type = "mistral": another architecture; supported: llama, qwen3_moe, qwen3',
    ),
    "no model": (configured(model_type=None), "D/config.json: model_type = null: another architecture; .*"),
    "heads of odd width": (
        configured(hidden_size=36, head_dim=9),
        "D/config.json: model.n_heads = 4: must divide model.dim = 36 into heads of an even width.*",
    ),
    "another head than the embedding": (
        configured(tie_word_embeddings=True),
        "F: lm_head.weight: values differ from model.embed_tokens.weight; must be equal, .* tie_word_embeddings = true",
    ),
    "more ids than rows": (
        small_vocabulary,
        "D/tokenizer.json: 15 ids, but config.json has vocab_size = 12; must be at least as large",
    ),
    "a broken tokenizer": (text_of("tokenizer.json", "{}"), "D/tokenizer.json is not a tokenizer.json: .*"),
}


def of_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        path = source / "model.safetensors.index.json"
        body = json.loads(path.read_text())
        change(body["weight_map"])
        path.write_text(json.dumps(body))

    return apply


def nowhere(source: Path) -> None:
    of_index(lambda where: where.pop("model.norm.weight"))(source)
    for file in source.glob("*.safetensors"):
        edit(file, lambda content: content.pop("model.norm.weight", None))


FIRST, LAST = "model-00001-of-00007.safetensors", "model-00007-of-00007.safetensors"
INDEX_DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file is missing": (
        lambda source: (source / LAST).unlink(),
        rf"source/{LAST}: missing; source/model.safetensors.index.json names it",
    ),
    "a file is cut": (lambda source: truncated(source / LAST), rf"source/{LAST}: not a whole safetensors file: .*"),
    "a tensor is elsewhere": (
        of_index(lambda where: where.update({"model.norm.weight": FIRST})),
        rf"source/{FIRST}: model.norm.weight: missing; model.safetensors.index.json lists it for this file",
    ),
    "a tensor is not listed": (
        of_index(lambda where: where.pop("model.norm.weight")),
        r"source/model-\d+-of-00007.safetensors: model.norm.weight: F32 \[64\], which model.safetensors.index.json does not list .*",
    ),
    "a tensor is nowhere": (
        nowhere,
        r"D/model.safetensors.index.json: model.norm.weight: missing; expected F32 \[64\]",
    ),
    "a file of another folder": (
        of_index(lambda where: where.update({"model.norm.weight": "../x.safetensors"})),
        "D/model.safetensors.index.json: model.norm.weight: '../x.safetensors': must be the name of a file in source",
    ),
    "no list": (
        lambda source: (source / "model.safetensors.index.json").write_text("{}"),
        "D/model.safetensors.index.json: has no weight_map, the file of each tensor",
    ),
    "two sets": (
        lambda source: shutil.copy2(source / FIRST, source / "model.safetensors"),
        "source: has model.safetensors and model.safetensors.index.json, two sets of weights; remove one",
    ),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *INDEX_DAMAGES])
def test_what_does_not_fit_is_named_and_nothing_is_written(
    damage: str, published: Path, capsys: pytest.CaptureFixture[str]
):
    whole = damage in DAMAGES
    shutil.copytree(published / ("grouped" if whole else "sharded"), "source")
    change, message = DAMAGES[damage] if whole else INDEX_DAMAGES[damage]
    change(Path("source/model.safetensors" if whole else "source"))
    pattern = re.sub("^F:", "source/model.safetensors:", re.sub("^D", "source", message))
    said = refusal(capsys, "import", "source", "out")
    assert re.fullmatch(f"hf: {pattern}", said), said


def test_frequencies_in_old_files_and_keys_that_nobody_knows_are_told(
    published: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(published / "grouped", "source")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(Path("source/model.safetensors"), lambda content: content.update({name: torch.ones(8)}))
    edit_config(Path("source"), unsloth_fixed=True)
    assert run("import", "source", "out") == 0
    said = capsys.readouterr().out
    assert "rotary_emb.inv_freq is not read: it is computed from rope_theta" in said
    assert "source/config.json: not used for LlamaForCausalLM; ignored: unsloth_fixed" in said


def test_export_refuses_what_it_cannot_publish(capsys: pytest.CaptureFixture[str]):
    assert make_seed_checkpoint.main(["tiny.toml"]) == 0
    ours, step = Path("outputs/tiny"), Path("outputs/tiny/checkpoint/step-0")
    settings = (ours / "config.toml").read_text()

    def refused(message: str, *arguments: object) -> None:
        said = refusal(capsys, "export", *arguments)
        assert re.fullmatch(f"hf: {message}", said), said

    refused("nowhere: neither a run's folder .* nor a checkpoint .*", "nowhere", "out")
    refused("outputs/tiny: exists; remove it, or name a different folder", ours, ours)
    refused("tiny.toml/out: .*/tiny.toml is a file, not a folder", ours, "tiny.toml/out")
    refused("--step 7: outputs/tiny/checkpoint has 0", ours, "out", "--step", "7")
    refused(
        "--step 0: outputs/tiny/checkpoint/step-0 is a checkpoint; name the run's folder instead",
        step,
        "out",
        "--step",
        "0",
    )
    for change, message in {
        "hidden_dim = 24|hidden_dim = 25": rf"{step}: layers.0.feed_forward.w1.weight: shape \[24, 16\], expected \[25, 16\] by .*",
        "n_layers = 1|n_layers = 2": rf"{step}: layers.1.attention_norm.weight: missing; expected \[16\]; .*; and 6 more",
        "rope_theta = 500000.0|rope_theta = 10000.0": f"{step}: freqs_cis: not the values of .model. in .*",
        "tokenizer_path = ''|tokenizer_path = 'tiny.toml'": 'model.tokenizer_path = "tiny.toml": .* is not a tokenizer.json: .*',
    }.items():
        before, _, after = change.replace("'", '"').partition("|")
        assert before in settings
        (ours / "config.toml").write_text(settings.replace(before, after))
        refused(message, ours, "out")
    (ours / "config.toml").write_text(settings)
    shutil.copytree(step, "alone")
    refused("alone: no parent folder has a config.toml, which describes the model", "alone", "out")
    damaged = bytearray((step / "__0_0.distcp").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (step / "__0_0.distcp").write_bytes(damaged)
    refused("__0_0.distcp: bytes 0 to .* are not what was written .*", step, "out")
    refused("__0_0.distcp: bytes 0 to .* are not what was written .*", ours, "out", "--step", "0")


def test_a_lost_tokenizer_is_told_and_the_weights_go_out(published: Path, capsys: pytest.CaptureFixture[str]):
    assert run("import", published / "grouped", "ours") == 0
    Path("ours/tokenizer/tokenizer.json").unlink()
    assert run("export", "ours", "theirs") == 0
    said = capsys.readouterr().out
    assert 'model.tokenizer_path = "ours/tokenizer": no such file, so theirs has no tokenizer.json' in said
    assert not Path("theirs/tokenizer.json").exists()
    # by the model's own generation_config.json
    assert json.loads(Path("theirs/config.json").read_text())["eos_token_id"] == 2


def test_an_import_without_a_tokenizer_needs_one(published: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(published / "grouped", "source")
    own = Path("source/tokenizer.json").rename("own.json")
    assert refusal(capsys, "import", "source", "out") == (
        'hf: source: has no tokenizer.json; name one, or its folder, with --tokenizer PATH; --tokenizer "" takes bytes as tokens'
    )
    for path in ("nowhere", "source"):
        said = refusal(capsys, "import", "source", "out", "--tokenizer", path)
        assert said == f"hf: --tokenizer {path}: there is no such file, or no tokenizer.json in that folder"
    assert run("import", "source", "out", "--tokenizer", own) == 0
    assert load(["out/config.toml"]).model.tokenizer_path == "out/tokenizer"
    assert Path("out/tokenizer/tokenizer.json").read_bytes() == own.read_bytes()
    assert json.loads(Path("out/tokenizer/generation_config.json").read_text())["eos_token_id"] == 2
    shutil.copy(own, "source/tokenizer.json")
    assert run("import", "source", "other", "--tokenizer", own) == 0
    ids = "the ids are those of the other tokenizer"
    assert [path.name for path in Path("other/tokenizer").iterdir()] == ["tokenizer.json"], ids
    assert run("import", "source", "bytes", "--tokenizer", "") == 0
    assert load(["bytes/config.toml"]).model.tokenizer_path == "" and not Path("bytes/tokenizer").exists()


def test_a_model_of_a_fork_is_refused(published: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert make_seed_checkpoint.main(["tiny.toml"]) == 0
    settings = Path("outputs/tiny/config.toml")
    settings.write_text(settings.read_text().replace('name = "llama"', 'name = "relu2"'))
    fork = tmp_path / "fork"
    fork.mkdir()
    (fork / "relu2.py").write_text("from models.llama import Config, build\n")
    models.__path__.append(str(fork))
    try:
        said = refusal(capsys, "export", "outputs/tiny", "out")
        models.__path__.insert(0, models.__path__.pop())  # the folder of the formats is the first
        for name in ("relu2", "relu3"):
            (fork / f"{name}_hf.py").write_text("from models import llama_hf\nclass Format(llama_hf.Format): ...\n")
        twice = refusal(capsys, "import", published / "grouped", "out")
    finally:
        models.__path__.remove(str(fork))
        for name in ("relu2", "relu3"):
            sys.modules.pop(f"models.{name}_hf", None)
    assert twice.endswith(
        'config.json: model_type = "llama": models/relu2_hf.py and models/relu3_hf.py both have it; must differ'
    )
    assert said == (
        'hf: outputs/tiny/config.toml: model.name = "relu2": there is no models/relu2_hf.py with its names in Hugging Face\'s format; '
        "there are those of llama, moe, qwen3"
    )


# -- nothing half done


KILL = """
import signal, sys
from scripts import hf
from tests.scripts.test_hf_refusals import READERS
from tests.scripts.tiny_job import struck

reader = READERS[sys.argv[1]]
reader.read = struck(reader.read, 9, signal.SIGKILL)
hf.main(sys.argv[1:])
"""
READERS = {"import": Weights, "export": TensorByTensor}


def ready(command: str, published: Path) -> list[str]:
    """Returns the arguments of a call that takes a while."""
    if command == "import":
        return ["import", str(published / "sharded"), "out"]
    assert run("import", published / "sharded", "ours") == 0
    return ["export", "ours", "out", "--shard-gb", "0.00001"]


@pytest.mark.parametrize("command", READERS)
def test_a_kill_leaves_nothing_that_looks_complete(command: str, published: Path):
    arguments = ready(command, published)
    python("-c", KILL, *arguments, code=-signal.SIGKILL)
    assert not Path("out").exists()
    left = [str(path.relative_to("out.partial")) for path in Path("out.partial").rglob("*")]
    assert left and "config.json" not in left and "config.toml" not in left
    assert list_steps(Path("out.partial/checkpoint")) == []
    assert run(*arguments) == 0
    assert Path("out").exists() and not Path("out.partial").exists()


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_frees_what_was_written(
    command: str,
    number: signal.Signals,
    published: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    arguments = ready(command, published)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(READERS[command], "read", struck(READERS[command].read, 9, number))
            assert run(*arguments) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.startswith("hf: ")
    assert not Path("out").exists() and not Path("out.partial").exists()
    assert run(*arguments) == 0


def test_two_at_once_do_not_meet(capsys: pytest.CaptureFixture[str], published: Path):
    with landing(Path("out")) as partial:
        (partial / "file").write_text("")
        assert "a different process is writing it" in refusal(capsys, "import", published / "grouped", "out")
        assert (partial / "file").exists()
    assert Path("out/file").exists()
    assert "exists" in refusal(capsys, "import", published / "grouped", "out")


def test_a_disk_without_room_is_told_before_anything_is_written(
    published: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run("import", published / "grouped", "ours") == 0
    monkeypatch.setattr(make_seed_checkpoint.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    for command, source in (("import", published / "grouped"), ("export", Path("ours"))):
        assert run(command, source, "out") == 1
        assert re.search(r" \d[\d.]*kB are needed and 1\.00kB are free", capsys.readouterr().err)
        assert not Path("out").exists() and not Path("out.partial").exists()


def test_an_error_of_the_disk_is_told_with_its_file(published: Path, capsys: pytest.CaptureFixture[str]):
    Path("loop").symlink_to("loop")  # fails for every user, as a disk may
    assert run("import", published / "grouped", "loop/ours") == 1
    assert re.fullmatch(r"hf: loop/ours[^:]*: Too many levels of symbolic links\n", capsys.readouterr().err)


def test_without_safetensors_one_line_says_how_to_install_it(tmp_path: Path):
    """Runs in a separate process, where the package cannot be imported."""
    blocked = "import sys; sys.modules['safetensors'] = None; sys.argv = ['hf.py', 'import', 'a', 'b']; "
    script = blocked + f"import runpy; runpy.run_path({str(ROOT / 'scripts' / 'hf.py')!r}, run_name='__main__')"
    [line] = finished([sys.executable, "-c", script], code=2).stderr.splitlines()
    assert line.startswith("hf: hf.py import: needs the package safetensors, which is not installed;")
    assert line.endswith('-m pip install -e ".[hf]"')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: command"),
        (("import", "a"), "required: OUT"),
        (("export", "a", "b", "--shard-gb", "0"), "--shard-gb: 0: must be above 0"),
        (("export", "a", "b", "--shard-gb", "x"), "--shard-gb: invalid"),
        (("export", "a", "b", "--max-positions", "0"), "--max-positions: 0: must be at least 1"),
        (("export", "a", "b", "--dtype", "int8"), "--dtype: invalid choice: 'int8'"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_settings_that_do_not_load_are_told_with_their_place(published: Path, capsys: pytest.CaptureFixture[str]):
    Path("bad.toml").write_text("[training]\nseq_len = -1\n")
    said = refusal(capsys, "import", published / "grouped", "out", "--config", "bad.toml")
    assert said.startswith("hf: bad.toml:2: training.seq_len = -1: must be")
    assert refusal(capsys, "import", "nowhere", "out").startswith("hf: nowhere: no such folder")
