"""bench/gpu.py: turns are taken once, whatever ends a call, and the page gives each bound a verdict."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import SIZES, GpuTurn, part_1, part_2, part_3, run
from bench.gpu_page import BEST, page
from bench.pairs import Failed


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        minutes=9.5, again=False, only="*", write=tmp_path / "gpu.md", device="cpu", sizes=["tiny"], folder=tmp_path,
        rounds=None, steps=1, peer_python="python",
    )  # fmt: skip


def taking(keys: list[str], taken: list[str], *, fails: str = "") -> list[GpuTurn]:
    def turn(key: str) -> GpuTurn:
        def do(limit_s: float) -> dict[str, Any]:
            taken.append(key)
            if key == fails:
                raise Failed("the reason")
            return {"passed": 1, "skipped": 0, "bad": []}

        return GpuTurn(key, 60, do)

    return [turn(key) for key in keys]


def test_a_second_call_goes_on_and_a_turn_that_failed_stops_nothing(options: argparse.Namespace) -> None:
    keys, taken, results = ["1 tests a", "1 tests b", "1 tests c"], list[str](), options.folder / "results.jsonl"
    assert run(iter(taking(keys[:2], taken, fails=keys[0])), results, options)
    assert "1 tests a" in options.write.read_text() and "the reason" in options.write.read_text()
    assert run(iter(taking(keys, taken)), results, options)
    assert taken == keys
    options.again = True
    assert run(iter(taking(keys, taken)), results, options)
    assert taken == [*keys, keys[0]]
    assert "the reason" not in options.write.read_text()


def test_a_turn_that_does_not_fit_is_left_to_the_next_call(options: argparse.Namespace) -> None:
    options.minutes, taken = 0.1, list[str]()
    assert not run(iter(taking(["1 tests a"], taken)), options.folder / "results.jsonl", options)
    assert not taken and not (options.folder / "results.jsonl").exists()


def test_each_bound_has_a_verdict() -> None:
    def row(key: str, **figures: Any) -> dict[str, Any]:
        return {"key": key, "day": "2026-01-02", "took_s": 1.0, **figures}

    ours = row(f"2 8b 0 pharos: {BEST['pharos']}", tokens_per_s=9000.0, memory_mib=60_000.0)
    theirs = row(f"2 8b 0 torchtitan: {BEST['torchtitan']}", tokens_per_s=8000.0, memory_mib=50_000.0)
    killed = row(
        "3 kill group, nccl", next_step_s=0.4, steps_lost=0, bits=True, memory_lost_mib=1, watched_s=181, sum_ms=9
    )
    rows = [row("1 versions", device="NVIDIA H100 80GB HBM3"), ours, theirs, killed]
    verdicts = {
        line[: line.index("  ")]: line.split("  ")[-1].strip()
        for line in page(rows, SIZES, "cuda").partition("## Bounds")[2].partition("## Versions")[0].splitlines()
        if "  " in line
    }
    assert verdicts["8b: 1.05x torchtitan's tokens/s"] == "reached"
    assert verdicts["8b: no more memory than torchtitan"] == "not"
    assert verdicts["the survivor lives three minutes"] == "reached"
    assert verdicts["no step lost"] == "not run"  # one of three kills is not all
    assert verdicts["1b: 1.05x torchtitan's tokens/s"] == "not run"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_list_their_turns_and_1b_comes_before_8b(device: str, options: argparse.Namespace) -> None:
    options.device, options.sizes = device, ["tiny"] if device == "cpu" else ["1b", "8b"]
    turns = [turn for part in (part_1, part_2, part_3) for turn in part(options)]
    keys = [turn.key for turn in turns]
    assert len(set(keys)) == len(keys) and all(turn.limit_s <= 9.5 * 60 for turn in turns)
    sizes = [key.split()[1] for key in keys if key.startswith("2 ")]
    assert sizes == sorted(sizes)
