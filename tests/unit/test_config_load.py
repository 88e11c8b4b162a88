"""TOML and overrides to dataclasses, on toy sections: every source of values, and the message of every error."""

# ruff: noqa: E501 (exact messages stay on one line)

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from configs.document import Origin, read
from configs.errors import MAX_SHOWN, ConfigError
from configs.keys import keys_of
from configs.load import build, parse_argv


@dataclass(frozen=True)
class Loader:
    num_workers: Annotated[int, "processes", ">= 0"] = 0
    pin_memory: Annotated[bool, "page-locked"] = False


@dataclass(frozen=True)
class Training:
    steps: Annotated[int, "optimizer steps", ">= 1"] = 100
    local_batch_size: Annotated[int, "sequences", ">= 1"] = 8
    global_batch_size: Annotated[int, "sequences", ">= -1", "!= 0"] = -1
    dataset_path: Annotated[str, "where"] = ""
    seed: int = 0
    dataloader: Loader = field(default_factory=Loader)


@dataclass(frozen=True)
class Group:
    pattern: Annotated[str, "names"]
    lr_factor: Annotated[float, "times lr", ">= 0"] = 1.0


@dataclass(frozen=True)
class Optimizer:
    lr: Annotated[float, "peak", "> 0"] = 8e-4
    implementation: Annotated[Literal["fused", "foreach", "for-loop"], "kernel"] = "fused"
    betas: Annotated[tuple[float, ...], "decays", ">= 0", "< 1"] = (0.9, 0.95)
    frozen: Annotated[tuple[str, ...], "names"] = ()
    level: Annotated[Literal[0, 1, 2], "how much"] = 0
    parts: Annotated[tuple[Literal["model", "loss"], ...], "what"] = ()
    groups: Annotated[tuple[Group, ...], "exceptions"] = ()


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    interval: Annotated[int, "steps", ">= 1"] = 500


SECTIONS = {"training": Training, "optimizer": Optimizer, "checkpoint": Checkpoint}
Load = Callable[..., dict[str, Any]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(toml, *overrides) -> the sections; the file is called t.toml in the messages."""
    monkeypatch.chdir(tmp_path)

    def load(toml: str | bytes, *argv: str) -> dict[str, Any]:
        Path("t.toml").write_bytes(toml.encode() if isinstance(toml, str) else toml)
        file, given = parse_argv(["t.toml", *argv])
        return build(SECTIONS, read(file), given)[0]

    return load


def refused(do: Callable[..., object], *given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        do(*given)
    return str(error.value)


def test_nothing_given_is_all_defaults(load: Load) -> None:
    assert load("") == {"training": Training(), "optimizer": Optimizer(), "checkpoint": Checkpoint()}


def test_every_type(load: Load) -> None:
    toml = """
    [training]
    steps = 2_000
    dataloader.num_workers = 3
    dataset_path = "a\\tb"
    [optimizer]
    lr = 1               # an int where a float is due
    implementation = "for-loop"
    betas = [0, 0.5]
    frozen = ["a", "b"]
    parts = ["loss"]
    [[optimizer.groups]]
    pattern = "*norm*"
    [[optimizer.groups]]
    pattern = "out"
    lr_factor = 2
    """
    loaded = load(toml)
    groups = (Group("*norm*"), Group("out", 2.0))
    assert loaded["training"] == Training(steps=2000, dataset_path="a\tb", dataloader=Loader(3))
    assert loaded["optimizer"] == Optimizer(1.0, "for-loop", (0.0, 0.5), ("a", "b"), 0, ("loss",), groups)
    assert type(loaded["optimizer"].lr) is float


@pytest.mark.parametrize("style", ["{key} {value}", "{key}={value}"])
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("training.steps", "7", 7),
        ("training.global_batch_size", "-1", -1),
        ("optimizer.lr", "3e-4", 3e-4),
        ("optimizer.lr", ".5", 0.5),
        ("optimizer.lr", "1", 1.0),
        ("optimizer.implementation", "foreach", "foreach"),
        ("optimizer.implementation", '"foreach"', "foreach"),
        ("training.dataset_path", "a=b c", "a=b c"),
        ("training.dataset_path", "2024", "2024"),
        ("training.dataset_path", "true", "true"),
        ("training.dataset_path", '"quo\\"ted"', 'quo"ted'),
        ("training.dataset_path", '"only one quote', '"only one quote'),
        ("training.dataset_path", "", ""),
        ("training.dataset_path", "1\n[x]", "1\n[x]"),
        ("optimizer.frozen", '["a", "b"]', ("a", "b")),
        ("optimizer.betas", "[0.5]", (0.5,)),
        ("optimizer.groups", '[{pattern = "a", lr_factor = 3}]', (Group("a", 3.0),)),
        ("checkpoint.enable", "true", True),
        ("checkpoint.enable", "false", False),
        ("training.dataloader.num_workers", "2", 2),
        ("training.dataloader", "{num_workers = 2}", Loader(2)),
    ],
)
def test_overrides(load: Load, style: str, key: str, value: str, expected: object) -> None:
    name = f"--{key}"
    argv = [f"{name}={value}"] if "=" in style else [name, value]
    loaded = load("[checkpoint]\nenable = true\n[training]\nsteps = 5\n", *argv)
    section, *names = key.split(".")
    found = loaded[section]
    for part in names:
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


def test_a_bare_flag_is_true(load: Load) -> None:
    assert load("", "--checkpoint.enable")["checkpoint"].enable
    loaded = load("", "--training.dataloader.pin_memory", "--checkpoint.enable", "--training.steps", "3")
    assert loaded["training"] == Training(steps=3, dataloader=Loader(pin_memory=True))


BAD = [
    # the key
    ("[training]\nlerning_rate = 1", "t.toml:2: training.lerning_rate: no such key; did you mean optimizer.lr?"),
    ("[training]\n\nlr = 1", "t.toml:3: training.lr: no such key here; it is optimizer.lr"),
    ("[training]\nstep = 1", "t.toml:2: training.step: no such key; did you mean training.steps?"),
    ("[optimizer]\nstepz = 1", "t.toml:2: optimizer.stepz: no such key; did you mean training.steps?"),
    ("[training]\nbatch_size = 1", "t.toml:2: training.batch_size: no such key; did you mean training.local_batch_size?"),
    ("[training]\nworkers = 1", "t.toml:2: training.workers: no such key; did you mean training.dataloader.num_workers?"),
    ("[checkpoint]\nenable_checkpoint = true", "t.toml:2: checkpoint.enable_checkpoint: no such key; did you mean checkpoint.enable?"),
    ("[checkpoint]\ninterval_type = 1", "t.toml:2: checkpoint.interval_type: no such key; checkpoint.interval counts steps"),
    ("[debug]\nseed = 1", "t.toml:2: debug.seed: no such key; did you mean training.seed?"),
    ("[checkpoint]\nqqqqq = 1", "t.toml:2: checkpoint.qqqqq: no such key; [checkpoint] has enable, interval"),
    ("[[optimizer.groups]]\npatern = 'a'", "t.toml:2: optimizer.groups[0].patern: no such key; did you mean optimizer.groups[].pattern?"),
    ("[[optimizer.groups]]\nlr_factor = 1", "t.toml:1: optimizer.groups[0]: needs pattern: a string"),
    # the section
    ("[trainig]\nsteps = 1", "t.toml:1: trainig: no such section; did you mean [training]?"),
    ("[zzz]\nqqqqq = 1", "t.toml:2: zzz.qqqqq: no such section; there are training, optimizer, checkpoint"),
    ("[zzz]", "t.toml:1: zzz: no such section; there are training, optimizer, checkpoint"),
    ("steps = 1", "t.toml:1: steps: a key outside of any section; did you mean training.steps?"),
    ("qqqqq = 1", "t.toml:1: qqqqq: a key outside of any section"),
    ("training = 1", "t.toml:1: training = 1: must be a table: [training], then its keys"),
    ("[training]\ndataloader = 1", "t.toml:2: training.dataloader = 1: must be a table: [training.dataloader], then its keys"),
    # the value
    ("[training]\nsteps = 'x'", 't.toml:2: training.steps = "x": must be an integer >= 1'),
    ("[training]\nsteps = '5'", 't.toml:2: training.steps = "5": must be an integer >= 1; did you mean 5?'),
    ("[training]\nsteps = 5.0", "t.toml:2: training.steps = 5.0: must be an integer >= 1; did you mean 5?"),
    ("[training]\nsteps = 5.5", "t.toml:2: training.steps = 5.5: must be an integer >= 1"),
    ("[training]\nsteps = true", "t.toml:2: training.steps = true: must be an integer >= 1"),
    ("[training]\nsteps = -5", "t.toml:2: training.steps = -5: must be an integer >= 1"),
    ("[training]\nsteps = [1]", "t.toml:2: training.steps = [1]: must be an integer >= 1"),
    ("[training]\nsteps = 2024-01-01", "t.toml:2: training.steps = 2024-01-01: must be an integer >= 1"),
    ("[training]\nglobal_batch_size = 0", "t.toml:2: training.global_batch_size = 0: must be an integer >= -1 and != 0 (sequences)"),
    ("[training]\ndataset_path = 5", 't.toml:2: training.dataset_path = 5: must be a string; did you mean "5"?'),
    ("[training]\ndataset_path = ['a']", 't.toml:2: training.dataset_path = ["a"]: must be a string'),
    ("[optimizer]\nlr = nan", "t.toml:2: optimizer.lr = nan: must be a finite number > 0"),
    ("[optimizer]\nlr = inf", "t.toml:2: optimizer.lr = inf: must be a finite number > 0"),
    ("[optimizer]\nlr = 0", "t.toml:2: optimizer.lr = 0: must be a number > 0"),
    ("[optimizer]\nlr = true", "t.toml:2: optimizer.lr = true: must be a number > 0"),
    ("[optimizer]\nlr = '1e-3'", 't.toml:2: optimizer.lr = "1e-3": must be a number > 0; did you mean 0.001?'),
    ("[optimizer]\nbetas = 0.5", "t.toml:2: optimizer.betas = 0.5: must be a list of numbers >= 0 and < 1; did you mean [0.5]?"),
    ("[optimizer]\nbetas = [0.5, 2]", "t.toml:2: optimizer.betas = [0.5, 2]: must be a list of numbers >= 0 and < 1"),
    ("[optimizer]\nfrozen = 'a'", 't.toml:2: optimizer.frozen = "a": must be a list of strings; did you mean ["a"]?'),
    ("[optimizer]\nparts = ['modle']", 't.toml:2: optimizer.parts = ["modle"]: must be a list of "model" or "loss"'),
    ("[optimizer]\nlevel = true", "t.toml:2: optimizer.level = true: must be 0, 1 or 2"),
    ("[optimizer]\nlevel = 3", "t.toml:2: optimizer.level = 3: must be 0, 1 or 2"),
    ("[optimizer]\ngroups = 5", "t.toml:2: optimizer.groups = 5: must be a list of tables"),
    ("[optimizer]\ngroups = [5]", "t.toml:2: optimizer.groups[0] = 5: must be a table: [optimizer.groups[0]], then its keys"),
    (
        "[optimizer]\nimplementation = 'Fused'",
        't.toml:2: optimizer.implementation = "Fused": must be "fused", "foreach" or "for-loop"; did you mean "fused"?',
    ),
    ("[checkpoint]\nenable = 1", "t.toml:2: checkpoint.enable = 1: must be true or false; did you mean true?"),
    ("[checkpoint]\nenable = 'no'", 't.toml:2: checkpoint.enable = "no": must be true or false; did you mean false?'),
    ("[training]\nsteps = " + "9" * 20, f"t.toml:2: training.steps = {'9' * 20}: must be an integer >= 1"),
    ("[optimizer]\nlr = " + "9" * 400, f"t.toml:2: optimizer.lr = {'9' * 57}...: must be a number > 0"),
    # the file
    ("[training\nsteps = 1", "t.toml:1: not TOML: Expected ']' at the end of a table declaration: [training"),
    ("[training]\nname = llama", "t.toml:2: not TOML: Invalid value; strings need quotes: name = llama"),
    ("[training]\nsteps =\n", "t.toml:2: not TOML: Invalid value; no value: steps ="),
    ("[training]\nsteps = 1\nsteps = 2", "t.toml:3: not TOML: Cannot overwrite a value: steps = 2"),
    (b"[training]\nsteps = 1\n# \xe9t\xe9", "t.toml:3: not UTF-8: byte 0xe9; save the file as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "message"), BAD, ids=[message.partition(" ")[2][:40] for _, message in BAD])
def test_bad_files(load: Load, toml: str | bytes, message: str) -> None:
    assert refused(load, toml) == message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training.lerning_rate", "1"], "--training.lerning_rate: no such key; did you mean optimizer.lr?"),
        (["--training.lr=1"], "--training.lr: no such key here; it is optimizer.lr"),
        (["--steps", "1"], "--steps: overrides are --section.key; did you mean --training.steps?"),
        (["--training", "1"], "--training: overrides are --section.key"),
        (["--trainin.qq", "1"], "--trainin.qq: no such section; there are training, optimizer, checkpoint"),
        (["--training.steps.x", "1"], "--training.steps.x: no such key; training.steps is a value, not a table"),
        (["--training.steps"], "--training.steps: no value, as in --training.steps=100; it takes an integer >= 1"),
        (["--training.steps", "--checkpoint.enable"], "--training.steps: no value, as in --training.steps=100; it takes an integer >= 1"),
        (["--training.steps", "1e3"], "--training.steps = 1000.0: must be an integer >= 1; did you mean 1000?"),
        (["--training.steps", "5\n[x]\ny = 1"], '--training.steps = "5\\n[x]\\ny = 1": must be an integer >= 1'),
        (["--training.steps="], '--training.steps = "": must be an integer >= 1'),
        (["--training.steps", "5", "--training.steps=6"], "--training.steps: given twice, 5 and 6; keep one"),
        (["--checkpoint.enable", "True"], '--checkpoint.enable = "True": must be true or false; did you mean true?'),
        (["--optimizer.lr", "-inf"], "--optimizer.lr = -inf: must be a finite number > 0"),
        (["--optimizer.groups", "[{lr_factor = 2}]"], "--optimizer.groups[0]: needs pattern: a string"),
        (["other.toml"], "other.toml: not an override; wanted CONFIG.toml, then overrides: --section.key value"),
        (["-x"], "-x: not an override; wanted CONFIG.toml, then overrides: --section.key value"),
        (["--training.dataset_path", "\udcff"], '--training.dataset_path = "\udcff": must be a string'),
        (["--training.steps", "9" * 99], f"--training.steps = {'9' * 57}...: must be an integer >= 1"),
    ],
)  # fmt: skip
def test_bad_overrides(load: Load, argv: list[str], message: str) -> None:
    assert refused(load, "", *argv) == message


def test_all_problems_at_once_in_the_order_of_the_file(load: Load) -> None:
    said = refused(load, "[optimizer]\nlr = 0\nx = 1\n[training]\nsteps = 0\n", "--checkpoint.interval=0")
    assert [line.split(" ")[:2] for line in said.split("\n")] == [
        ["t.toml:2:", "optimizer.lr"],
        ["t.toml:3:", "optimizer.x:"],
        ["t.toml:5:", "training.steps"],
        ["--checkpoint.interval", "="],
    ]


def test_an_override_into_what_is_no_table(load: Load) -> None:
    said = refused(load, "training = 1", "--training.dataloader.num_workers=2", "--training.steps=2")
    assert said == "t.toml:1: training = 1: must be a table: [training], then its keys"


def test_overrides_leave_the_document_as_it_was_read(load: Load) -> None:
    load("[training]\nsteps = 5\n")
    written = read("t.toml")
    build(SECTIONS, written, parse_argv(["t.toml", "--training.steps=6"])[1])
    assert written == read("t.toml")


def test_a_flood_of_problems_is_cut(load: Load) -> None:
    lines = refused(load, "[training]\n" + "".join(f"x{i} = 1\n" for i in range(30))).split("\n")
    assert len(lines) == MAX_SHOWN + 1
    assert lines[-1] == f"... and {30 - MAX_SHOWN} more"


def test_an_override_wins_and_hides_a_bad_value_in_the_file(load: Load) -> None:
    assert load("[training]\nsteps = 0\n", "--training.steps", "9")["training"].steps == 9


def test_windows_files_and_byte_order_marks(load: Load) -> None:
    assert load(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")["training"].steps == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no config file; wanted CONFIG.toml, then overrides: --section.key value"),
        (["--training.steps", "1"], "--training.steps: the config file comes first; wanted CONFIG.toml, then overrides: --section.key value"),
    ],
)  # fmt: skip
def test_command_lines_without_a_file(argv: list[str], message: str) -> None:
    assert refused(parse_argv, argv) == message


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    for name in ("llama.toml", "other.toml"):
        Path("configs", name).touch()
    for file, message in {
        "configs/lama.toml": "configs/lama.toml: no such file; did you mean configs/llama.toml?",
        "configs/zzzzzzzzzzz": "configs/zzzzzzzzzzz: no such file; there are configs/llama.toml, configs/other.toml",
        "llama.toml": "llama.toml: no such file; did you mean configs/llama.toml?",
        "configs": "configs: a folder, not a TOML file; there are configs/llama.toml, configs/other.toml",
    }.items():
        assert refused(read, file) == message


def test_origin_names_places() -> None:
    origin = Origin(
        "t.toml", {"training.steps": 4, "training.dataloader": 9}, frozenset({"optimizer.lr", "training.dataloader"})
    )
    assert origin.place("training.steps") == "t.toml:4: training.steps"
    assert origin.place("training.seed") == "t.toml: training.seed"
    assert origin.place("optimizer.lr") == "--optimizer.lr"
    assert origin.place("optimizer.lr_factor") == "t.toml: optimizer.lr_factor"
    assert origin.place("training.dataloader.num_workers") == "--training.dataloader.num_workers"
    assert origin.explain("training.steps = 3: too few") == "t.toml:4: training.steps = 3: too few"
    assert origin.explain("optimizer.groups[0].pattern = 'x': no") == "t.toml: optimizer.groups[0].pattern = 'x': no"
    assert origin.explain("something else: 3.5") == "something else: 3.5"
    assert pickle.loads(pickle.dumps(origin)) == origin


@dataclass(frozen=True)
class BadType:
    key: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BadBound:
    key: Annotated[int, "help", "about 3"] = 3


@dataclass(frozen=True)
class BoundOnText:
    key: Annotated[str, "help", "> 3"] = ""


@pytest.mark.parametrize("section", [BadType, BadBound, BoundOnText])
def test_a_field_that_toml_cannot_fill_is_told_to_its_author(section: type) -> None:
    with pytest.raises(TypeError, match=rf"{section.__name__}\.key"):
        keys_of(section)
