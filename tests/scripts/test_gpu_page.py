"""bench/gpu.py: its page has every row that a first run on a GPU is to fill, on either device; the path, as far as a CPU goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import BACKENDS, SIDES, SIZES, main, part_1, part_2, part_3
from bench.gpu_page import page

VERSIONS = {
    "python", "torch", "cuda", "device", "driver", "memory_gib", "NCCL", "cuDNN", "protobuf", "grpcio", "transformers", "torchtitan",
    "torchao", "attention", "ptrace scope",
}  # fmt: skip
BOUNDS = {
    *(f"{size}: {what}" for size in ("1b", "8b") for what in ("1.05x torchtitan's tokens/s", "no more memory than torchtitan")),
    "8b: 45 % MFU", "a step by nccl: at most 1.02x", "a step by baby_nccl: at most 1.05x", "the next commit within 1 s of a kill",
    "no step lost", "equal bits", "no memory lost (64 MiB of slack), MiB", "the survivor lives three minutes",
    "healing: 80 % of a pinned copy over the same wire", "an async checkpoint stalls 1.1x of a copy",
}  # fmt: skip
FIGURES: dict[str, dict[str, Any]] = {  # of each kind of turn
    "1 versions": dict.fromkeys(VERSIONS, "x"),
    "1 tests": {"passed": 1, "skipped": 0, "bad": []},
    "1 train": {"steps": 15, "loss": 6.0, "step_ms": 1.0, "tokens_per_s": 9, "memory_gib": 1.0},
    "2 ": {"tokens_per_s": 9.0, "memory_mib": 1.0, "graphs": 1},
    "3 kill": {"next_step_s": 0.1, "steps_lost": 0, "bits": True, "memory_lost_mib": 0, "watched_s": 181, "sum_ms": 1},
    "3 steady": {"steps": 15, "loss": 6.0, "step_ms": 1.0, "tokens_per_s": 9, "memory_gib": 1.0},
    "3 healing": {"http": [1.0], "raw": [1.0], "share": 1.0},
    "3 stall": {"stall": [1.0], "copy": [1.0], "share": 1.0},
}


def rows(text: str, section: str) -> set[str]:
    """First cells of the section's table."""
    table = text.partition(f"\n## {section}\n")[2].partition("```\n")[2].partition("\n```")[0]
    return {line.partition("  ")[0] for line in table.splitlines()[1:]}


@pytest.mark.parametrize(("device", "sizes"), [("cuda", ["1b", "8b"]), ("cpu", ["tiny"])])
@pytest.mark.parametrize("fails", [False, True])
def test_the_page_has_every_row(device: str, sizes: list[str], fails: bool, tmp_path: Path) -> None:
    """A turn that fails, such as that of a side which a machine lacks, has its row at the end."""
    options = argparse.Namespace(
        device=device, sizes=sizes, folder=tmp_path, rounds=None, steps=1, peer_python="python"
    )
    keys = [turn.key for part in (part_1, part_2, part_3) for turn in part(options)]
    taken = []
    for key in keys:
        figures = {"failed": "why"} if fails else next(f for kind, f in FIGURES.items() if key.startswith(kind))
        taken.append({"key": key, "day": "2026-01-02", "took_s": 1.0, **figures})
    text = page(taken, SIZES, device)
    assert rows(text, "Bounds") == BOUNDS
    if fails:
        assert rows(text, "Left out") == set(keys)
        return
    backend = "" if device == "cuda" else "=aot_eager"
    inline, child = ("nccl", "baby_nccl") if device == "cuda" else ("gloo", "baby_gloo")
    expandable = ("expandable_segments:True", "expandable_segments:False")
    assert rows(text, "Versions") == VERSIONS
    assert all(any(row.startswith("tests ") and row.endswith(e) for row in rows(text, "Tests")) for e in expandable)
    repeats = range(3 if device == "cuda" else 1)
    steady = {f"steady {kind} {n}" for kind in ("none", inline, child) for n in repeats}
    assert rows(text, "train.py to its end") == {f"train {sizes[0]} eager", f"train {sizes[0]} compiled", *steady}
    sides = {f"{side}: {setting}".replace(" compile", f" compile{backend}") for side, setting in SIDES}
    assert rows(text, "Throughput") == {f"{size} {side}" for size in sizes for side in sides}
    assert rows(text, "Two members on one device") == {
        f"kill child, {child}",
        f"kill group, {inline}",
        f"kill group, {child}",
    }
    assert rows(text, "Healing and checkpoints") == {
        *(f"healing: {name}" for name in ("http", "raw", "share")), *(f"stall: {name}" for name in ("stall", "copy", "share")),
    }  # fmt: skip
    assert rows(text, "Left out") == set()


@pytest.mark.timeout(600)
def test_without_a_device_turns_are_compiled_members_are_killed_and_a_missing_side_has_a_row(tmp_path: Path) -> None:
    """The cheapest turns of each part; `--device cpu --sizes tiny` takes every turn."""
    write = tmp_path / "gpu.md"
    ours = f"pharos: bf16 weights checkpoint chunked=8192 compile={BACKENDS['cpu']}"
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
    assert rows(text, "Versions") == VERSIONS and rows(text, "Left out") == {f"2 tiny 0 {': '.join(SIDES[-1])}"}, text
    assert rows(text, "train.py to its end") == {"train tiny compiled", "steady none 0"}
    speed = next(line for line in text.splitlines() if line.startswith(f"tiny {ours}"))
    assert int(speed.split()[-1]) == 2, f"blocks and loss, a graph each: {speed}"
    killed = next(line.split() for line in text.splitlines() if line.startswith("kill group, gloo"))
    assert killed[4:6] == ["0", "True"], text  # no step lost, equal bits
