"""torchft's whole stack on our lighthouse: a job of its Manager in which a group is killed and heals, and the tests of torchft itself."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rpc.peer import ROOT

WAIT_S = 150.0  # for what must come; torch takes seconds to load, and on a busy machine a minute
Step = dict[str, Any]


def environment(torchft: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(torchft)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "CUDA_VISIBLE_DEVICES": "",  # what is shown here needs none
        "RUST_LOG": "warn",
    }


# ------------------------------------------------------------------------------------------------ a job


class Trainer:
    """One group: a process, and the steps that it has committed."""

    def __init__(self, group: int, seed: int, environ: dict[str, str], log: Path) -> None:
        self.steps: list[Step] = []
        self._log = log
        self._new: queue.Queue[Step | None] = queue.Queue()
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("torchft_trainer.py"), str(group), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
            )
        self._reader = threading.Thread(target=self._read, name=f"group-{group}")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # the rest is torchft's log
                self._new.put(json.loads(line))
        self._new.put(None)

    def until(self, done: Callable[[Step], bool]) -> Step:
        """Its next step of which that is true. Fails when it does not come in time, or the process ends."""
        deadline = time.monotonic() + WAIT_S
        while True:
            step = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            assert step is not None, f"it ended with code {self.process.wait()}: {self._log.read_text()[-2000:]}"
            self.steps.append(step)
            if done(step):
                return step

    def train_to(self, last_step: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{last_step}\n")
        self.process.stdin.flush()

    def finish(self) -> int:
        """Its exit code, once it has got there."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.steps += [step for step in iter(self._new.get, None) if step]
        return code

    def digests(self) -> dict[int, str]:
        return {step["step"]: step["digest"] for step in self.steps}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        assert self.process.stdin and self.process.stdout
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()


@pytest.fixture
def lighthouse(tmp_path: Path) -> Iterator[str]:
    """Ours, as a process of its own: its address."""
    flags = ["--min_replicas", "1", "--join_timeout_ms", "60000", "--heartbeat_timeout_ms", "2000", "--http", "none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ft.rpc.lighthouse_main", "--bind", "127.0.0.1:0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout
    yield process.stdout.readline().strip()
    process.kill()
    process.communicate()


@pytest.mark.timeout(400)
def test_a_killed_group_heals_from_the_other(torchft: Path, lighthouse: str, tmp_path: Path):
    """Different weights at the start, different data: equal states are the peer's healing and reduction, in quorums of ours."""
    environ = {**environment(torchft), "TORCHFT_LIGHTHOUSE": lighthouse}
    with ExitStack() as stack:

        def start(group: int, seed: int) -> Trainer:
            trainer = Trainer(group, seed, environ, tmp_path / f"{group}.{seed}.log")
            stack.callback(trainer.close)
            return trainer

        a, b = start(0, 1), start(1, 2)
        a.until(both), b.until(both)
        b.process.send_signal(signal.SIGKILL)
        assert b.process.wait(WAIT_S) == -signal.SIGKILL
        at = a.until(lambda step: step["groups"] == 1)
        c = start(1, 3)
        first = c.until(both)
        assert first["step"] > at["step"], "it goes on where the other is, not at its own step 0"
        last = a.until(lambda step: step["step"] >= first["step"])["step"] + 30
        for trainer in (a, c):
            trainer.train_to(last)
        assert [trainer.finish() for trainer in (a, c)] == [0, 0], "nobody errs"
        for trainer in (a, c):
            steps = [step["step"] for step in trainer.steps]
            assert steps == list(range(steps[0], steps[-1] + 1)) and last in steps, "each step once"
        survivor, healed = a.digests(), c.digests()
        assert len(set(survivor.values())) == len(survivor), "they train"
        together = range(
            first["step"], last
        )  # whoever is through with the last one goes, and may leave the other alone in it
        assert [survivor[step] for step in together] == [healed[step] for step in together], "bit for bit"


def both(step: Step) -> bool:
    return bool(step["groups"] == 2)


# ------------------------------------------------------------------------------------------------ its own tests


@pytest.mark.timeout(400)
def test_its_own_tests_pass_on_our_lighthouse(torchft: Path, tmp_path: Path):
    """Read from its wheel and run where it lies: the tests of its lighthouse, and jobs of its Manager that fail and recover."""
    files = [str(torchft / "torchft" / name) for name in ("lighthouse_test.py", "manager_integ_test.py")]
    plugins = ["-p", "tests.rpc.torchft_shim", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(torchft)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", *plugins, *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment(torchft), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=300,
    )
    passed = set(re.findall(r"^PASSED .*::test_(\w+)", done.stdout, re.MULTILINE))
    assert done.returncode == 0, done.stdout[-5000:]
    assert passed >= {
        "join_timeout_behavior",
        "heartbeat_timeout_ms_sanity",
        "lighthouse_client_behavior",
        "heartbeat_round_trip",
        "ddp_healthy",
        "ddp_recovery_0_async_quorum",
        "ddp_recovery_1_sync_quorum",
        "ddp_recovery_multi_rank",
        "quorum_timeout",
    }
    made = re.search(r"^lighthouses of ours: (\d+)$", done.stdout, re.MULTILINE)
    assert made and int(made[1]) >= len(passed)
