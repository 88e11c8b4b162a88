"""Groups that step by themselves, as processes: of six one is killed in its inner steps, one while its sums are on their way, one before
its outer step, and one is stopped, wakes too late and comes
back. The others lose no inner step, hold equal weights, and every window is trained on once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ft import LighthouseServer

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
HARMS = {  # how many are there when it happens, to whom
    "c": (6, "kill-in-inner-steps"),
    "d": (5, "kill-in-prepare"),
    "e": (4, "kill-in-outer-step"),
    "f": (3, "stop-in-inner-steps"),
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.timeout(LIMIT_S + 60)
def test_deaths_at_every_place_of_a_round(tmp_path: Path):
    with ExitStack() as stack:
        lighthouse = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=30_000)  # a survivor is waited for
        stack.callback(lighthouse.shutdown)
        out = {name: tmp_path / name for name in "abcdef"}
        processes: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str, groups: int, harm: str) -> None:
            command = [sys.executable, "-m", "tests.ft.round_process", name, lighthouse.address(), str(groups), harm]
            file = stack.enter_context(out[name].open("ab"))
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes[name] = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL, cwd=ROOT, env=env)
            stack.callback(processes[name].kill)

        for name in out:
            start(name, *HARMS.get(name, (len(out), "none")))
        end_s = time.monotonic() + LIMIT_S

        def until(what: str, holds: Any) -> None:
            while not holds():
                assert time.monotonic() < end_s, what
                assert processes["a"].poll() in (None, 0) and processes["b"].poll() in (None, 0), what
                time.sleep(0.02)

        for name in "cde":
            until(f"the death of {name}", lambda name=name: processes[name].poll() == -signal.SIGKILL)
        until(
            "a round without the one that stopped", lambda: any(len(row["slots"]) == 2 for row in lines(out["a"])[-3:])
        )
        processes["f"].send_signal(signal.SIGCONT)
        until("the end of the one that was lost", lambda: processes["f"].poll() is not None)
        start("f", 0, "back")
        until("the end", lambda: all(processes[name].poll() == 0 for name in "abf"))

        told = {name: lines(path) for name, path in out.items()}
        states = {}
        for row in (row for rows in told.values() for row in rows):
            state = (row["digest"], row["slots"], row["holes"])
            assert states.setdefault(row["step"], state) == state, f"two versions of round {row['step']}"
        assert set(states) == set(range(1, max(states) + 1))
        trained = [slot for _, slots, _ in states.values() for slot, _ in slots]
        assert len(trained) == len(set(trained)), "a window is in two rounds"
        window, holes = 8, set(states[max(states)][2])
        assert set(trained) | holes == set(range(0, max(trained) + window, window)), "a window is in none"
        for name in "ab":
            steps = [row["step"] for row in told[name]]
            assert steps == list(range(steps[0], max(states) + 1)), "a survivor passed over a round"
            computed = told[name][-1]["computed"]
            assert len({number for number, _ in computed}) == len(computed), "a survivor computed a round twice"
            for number, first in computed:
                owners = dict(states[number + 1][1])
                assert owners[first].startswith(f"{name}:"), "a survivor's inner steps were lost"
