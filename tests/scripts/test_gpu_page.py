"""bench/gpu.py: turns are taken once, whatever ends a call; its page has every row that a first run on a GPU is to fill, on either device,
and a verdict for each bound; the path, as far as a CPU goes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import BACKENDS, BEST, MORE_SIDES, GpuTurn, main, page, part_1, part_2, part_3, run
from bench.pairs import Failed

VERSIONS = {
    "python", "torch", "cuda", "device", "driver", "memory_gib", "NCCL", "cuDNN", "protobuf", "grpcio", "transformers", "torchtitan",
    "torchao", "attention", "ptrace scope",
}  # fmt: skip
BOUNDS = {
    *(f"{size}: {what}" for size in ("1b", "8b") for what in ("at least 1.05x torchtitan's tokens/s", "no more memory than torchtitan")),
    "8b: at least 45 % MFU", "a step with a replica group over nccl: at most 1.02x one without",
    "a step with a replica group over baby_nccl: at most 1.05x one without", "the next commit within 1 s of a kill",
    "no step lost", "equal bits", "no memory lost (64 MiB of slack), MiB", "the survivor trains on for 3 minutes",
    "healing: at least 0.8x a raw socket into pinned memory", "stall of an async checkpoint: at most 1.1x a copy of the state",
}  # fmt: skip
TRAINED = {"steps": 15, "loss": 6.0, "ms per step": 1.0, "tokens/s": 9, "GiB": 1.0}
KILLED = {"next step s": 0.1, "steps lost": 0, "bits equal": True, "MiB lost": 0, "watched s": 181, "all-reduce ms": 1}
FIGURES: dict[str, dict[str, Any]] = {  # of each kind of turn
    "1 versions": dict.fromkeys(VERSIONS, "x"),
    "1 tests": {"passed": 1, "skipped": 0, "failures": "none"},
    "1 train": TRAINED,
    "2 ": {"tokens_per_s": 9.0, "memory_mib": 1.0, "graphs": 1},
    "3 kill": KILLED,
    "3 survivor": KILLED,
    "3 steady": TRAINED,
    "3 healing": {"http": [1.0], "raw": [1.0]},
    "3 stall": {"stall": [1.0], "copy": [1.0]},
}


def settings(folder: Path, device: str = "cpu") -> argparse.Namespace:
    return argparse.Namespace(
        minutes=9.5, again=False, only="*", write=folder / "gpu.md", folder=folder, steps=1, peer_python="python", device=device,
        sizes=["tiny"] if device == "cpu" else ["1b", "8b"],
    )  # fmt: skip


def row(key: str, **figures: Any) -> dict[str, Any]:
    return {"key": key, "day": "2026-01-02", "took_s": 1.0, **figures}


def lines(text: str, section: str) -> list[str]:
    """Returns the lines of the section's table."""
    return text.partition(f"\n## {section}\n")[2].partition("```\n")[2].partition("\n```")[0].splitlines()[1:]


def rows(text: str, section: str) -> set[str]:
    """Returns the first cells of the section's table."""
    return {line.partition("  ")[0] for line in lines(text, section)}


def taking(keys: list[str], taken: list[str], *, fails: str = "") -> list[GpuTurn]:
    def do(key: str, limit_s: float) -> dict[str, Any]:
        taken.append(key)
        if key == fails:
            raise Failed("the reason")
        return FIGURES["1 tests"]

    return [GpuTurn(key, 60, partial(do, key)) for key in keys]


def test_a_second_call_goes_on_and_a_turn_that_failed_stops_nothing(tmp_path: Path) -> None:
    options, results = settings(tmp_path), tmp_path / "results.jsonl"
    keys, taken = ["1 tests a", "1 tests b", "1 tests c"], list[str]()
    assert run(iter(taking(keys[:2], taken, fails=keys[0])), results, options)
    assert "1 tests a" in options.write.read_text() and "the reason" in options.write.read_text()
    assert run(iter(taking(keys, taken)), results, options)
    assert taken == keys
    options.again = True
    assert run(iter(taking(keys, taken)), results, options)
    assert taken == [*keys, keys[0]]
    assert "the reason" not in options.write.read_text()


def test_a_turn_that_does_not_fit_is_left_to_the_next_call(tmp_path: Path) -> None:
    options, taken = settings(tmp_path), list[str]()
    options.minutes = 0.1
    assert not run(iter(taking(["1 tests a"], taken)), tmp_path / "results.jsonl", options)
    assert not taken and not (tmp_path / "results.jsonl").exists()


def test_each_bound_has_a_verdict() -> None:
    ours = row(f"2 8b 0 pharos: {BEST['pharos']}", tokens_per_s=9000.0, memory_mib=60_000.0)
    theirs = row(f"2 8b 0 torchtitan: {BEST['torchtitan']}", tokens_per_s=8000.0, memory_mib=50_000.0)
    killed = [row(key, **FIGURES["3 kill"]) for key in ("3 kill group, nccl", "3 survivor, nccl")]
    text = page([row("1 versions", device="NVIDIA H100 80GB HBM3"), ours, theirs, *killed], "cuda")
    verdicts = {line[: line.index("  ")]: line.split("  ")[-1].strip() for line in lines(text, "Bounds")}
    assert verdicts["8b: at least 1.05x torchtitan's tokens/s"] == "reached"
    assert verdicts["8b: no more memory than torchtitan"] == "not reached"
    assert verdicts["the survivor trains on for 3 minutes"] == "reached"
    assert verdicts["no step lost"] == "not run"  # one of three kills is not all
    assert verdicts["1b: at least 1.05x torchtitan's tokens/s"] == "not run"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_parts_list_their_turns_and_the_page_has_every_row(device: str, fails: bool, tmp_path: Path) -> None:
    """The order is 1B, then 8B. A turn that fails, such as that of a framework which is not installed, has its row at the end."""
    options = settings(tmp_path, device)
    turns = [turn for part in (part_1, part_2, part_3) for turn in part(options)]
    keys, sizes = [turn.key for turn in turns], options.sizes
    assert len(set(keys)) == len(keys) and all(turn.limit_s <= 9.5 * 60 for turn in turns)
    assert list(dict.fromkeys(key.split()[1] for key in keys if key.startswith("2 "))) == sizes
    figures = (
        {"failed": "why"} if fails else next(f for kind, f in FIGURES.items() if key.startswith(kind)) for key in keys
    )
    text = page([row(key, **found) for key, found in zip(keys, figures, strict=True)], device)
    assert rows(text, "Bounds") == BOUNDS
    assert rows(text, "Failed turns") == (set(keys) if fails else set())
    if fails:
        return
    backend = "" if device == "cuda" else "=aot_eager"
    inline, child = ("nccl", "baby_nccl") if device == "cuda" else ("gloo", "baby_gloo")
    expandable = ("expandable_segments:True", "expandable_segments:False")
    assert rows(text, "Versions") == VERSIONS
    assert all(any(row.startswith("tests ") and row.endswith(e) for row in rows(text, "Tests")) for e in expandable)
    repeats = range(5 if device == "cuda" else 1)
    steady = {f"steady {kind} {n}" for kind in ("none", inline, child) for n in repeats}
    assert rows(text, "train.py to its end") == {f"train {sizes[0]} eager", f"train {sizes[0]} compiled", *steady}
    sides = [(size, f"{side}: {what}") for size in sizes for side, what in (*BEST.items(), *MORE_SIDES[size])]
    assert rows(text, "Throughput") == {
        f"{size} {side}".replace(" compile", f" compile{backend}") for size, side in sides
    }
    kills = {f"kill child, {child}", f"kill group, {inline}", f"kill group, {child}", f"survivor, {inline}"}
    assert rows(text, "Two members on one device") == kills
    assert rows(text, "Healing and checkpoints") == {
        "healing: http", "healing: raw", "stall: stall", "stall: copy",
    }  # fmt: skip


@pytest.mark.long  # compiles on the CPU for a minute; both tiers check the page and its turns
@pytest.mark.timeout(600)
def test_without_a_device_turns_are_compiled_members_are_killed_and_a_missing_side_has_a_row(tmp_path: Path) -> None:
    """The cheapest turns of each part; `--device cpu --sizes tiny` takes every turn."""
    write = tmp_path / "gpu.md"
    ours = f"pharos: bf16 weights chunked=8192 compile={BACKENDS['cpu']}"
    asked = f"--device cpu --sizes tiny --steps 1 --peer-python /bin/false --folder {tmp_path} --write {write}".split()
    for only in (
        "1 versions",
        "1 train tiny compiled",
        f"2 tiny 0 {ours}",
        "2 tiny 0 transformers*",
        "3 steady none 0",
        "3 kill group, gloo",
    ):
        assert main([*asked, "--part", only[0], "--only", only]) == 0
    text = write.read_text()
    assert rows(text, "Versions") == VERSIONS and rows(text, "Failed turns") == {
        f"2 tiny 0 {': '.join(MORE_SIDES['tiny'][-1])}"
    }, text
    assert rows(text, "train.py to its end") == {"train tiny compiled", "steady none 0"}
    speed = next(line for line in text.splitlines() if line.startswith(f"tiny {ours}"))
    assert int(speed.split()[-1]) == 2, f"blocks and loss, a graph each: {speed}"
    killed = next(line.split() for line in text.splitlines() if line.startswith("kill group, gloo"))
    assert killed[4:6] == ["0", "True"], text  # no step lost, equal bits
