"""Groups that step by themselves, as processes: of six one is killed in its inner steps, one while its sums are on their way, one before
its outer step, and one is stopped, wakes when the others have gone on without it, and comes back. The others lose no inner step, hold
equal weights, and every window is trained on once."""

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
# in this order
HARMS = {"c": "kill-in-inner-steps", "d": "kill-in-prepare", "e": "kill-in-outer-step", "f": "stop-in-inner-steps"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.long  # both tiers have the same deaths in one process, and e2e/test_semi_sync.py
@pytest.mark.timeout(LIMIT_S + 60)
def test_deaths_at_every_place_of_a_round(tmp_path: Path):
    with ExitStack() as stack:
        lighthouse = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=30_000)  # a survivor is waited for
        stack.callback(lighthouse.shutdown)
        out = {name: tmp_path / name for name in "abcdef"}
        logs = {name: tmp_path / f"{name}.log" for name in out}
        processes: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str, harm: str = "none") -> None:
            told = str(tmp_path / f"{name}.told")
            command = [sys.executable, "-m", "tests.ft.round_process", name, lighthouse.address(), harm, told]
            file, log = (stack.enter_context(path.open("ab")) for path in (out[name], logs[name]))
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes[name] = subprocess.Popen(command, stdout=file, stderr=log, cwd=ROOT, env=env)
            stack.callback(processes[name].kill)

        for name in out:
            start(name, HARMS.get(name, "none"))
        end_s = time.monotonic() + LIMIT_S

        def until(what: str, holds: Any) -> None:
            while not holds():
                if time.monotonic() > end_s or any(processes[name].poll() not in (None, 0) for name in "ab"):
                    pytest.fail(f"{what}\n{where_they_are()}")
                time.sleep(0.02)

        def where_they_are() -> str:
            for process in processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)  # its threads' stacks
            time.sleep(1)
            return "\n".join(
                f"---- {name}: {processes[name].poll()}, {lines(out[name])[-2:]}\n{logs[name].read_text()[-6000:]}"
                for name in out
            )

        def until_round_of(names: str, after: int = 0, again: str = "") -> None:
            def there() -> bool:
                if again and processes[again].poll() is not None:
                    start(again)
                rows = [row for row in lines(out["a"])[-3:] if row["step"] > after]
                return any({owner[0] for _, owner in row["slots"]} == set(names) for row in rows)

            until(f"a round of {names}", there)

        for place, name in enumerate(HARMS):
            until_round_of("ab" + "".join(HARMS)[place:])
            (tmp_path / f"{name}.told").touch()
        until("three deaths", lambda: all(processes[name].poll() == -signal.SIGKILL for name in "cde"))
        until("a group that is stopped", (stopped := tmp_path / "f.told").read_text)
        until_round_of("ab", after=int(stopped.read_text()))  # in which it had a window: it is lost
        processes["f"].send_signal(signal.SIGCONT)
        # It returns under another id, or ends, for its connections broke while it was stopped: then it is started anew
        until_round_of("abf", after=lines(out["a"])[-1]["step"], again="f")
        (tmp_path / "soon").touch()
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
            for step in set(range(steps[0], max(states) + 1)).difference(steps):
                # it took the state after it from one that had all sums when it had not: its own were among them
                owners = [owner for _, owner in states[step][1]]
                assert any(owner.startswith(f"{name}:") for owner in owners), "a survivor passed over a round"
            computed = told[name][-1]["computed"]
            assert len({number for number, _ in computed}) == len(computed), "a survivor computed a round twice"
            for number, first in computed:
                owners = dict(states[number + 1][1])
                assert owners[first].startswith(f"{name}:"), "a survivor's inner steps were lost"
