"""torchft's whole stack on our lighthouse: a job of its Manager in which a group is killed and heals, and the tests of torchft itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.job import JobSide, RecoveryJob, our_lighthouse
from tests.rpc.peer import ROOT

LOAD_S = 150.0  # on a busy machine torch takes a minute to load


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


class OnOurLighthouse(JobSide):
    def lighthouse(self, folder: Path, bind: str) -> list[str]:
        # torchft's groups are silent for seconds on a busy machine, and would go on one without the other
        return our_lighthouse(1, bind=bind, join_timeout_ms=60000, heartbeat_timeout_ms=10000)


@pytest.mark.timeout(600)
def test_a_killed_group_heals_from_the_other(torchft: Path, monkeypatch: pytest.MonkeyPatch):
    """Different weights at the start, different data: equal states are the peer's healing and reduction, in quorums of ours."""
    for name, value in environment(torchft).items():
        monkeypatch.setenv(name, value)
    side = OnOurLighthouse("torchft", program=Path(__file__).with_name("torchft_trainer.py"))
    with RecoveryJob(side, 2, step_ms=20) as job:
        a, b = job.groups
        job.start()
        job.steps(1, 2, limit_s=LOAD_S)
        killed_s = b.kill()
        job.steps(1, 1, [a])
        at = next(line for line in a.since(killed_s, "commit") if line.contributors == 1)
        b.start(SEED="3")
        job.steps(1, 2, limit_s=LOAD_S)
        first = next(line for line in b.since(b.started_s, "commit") if line.contributors == 2)
        assert first.step > at.step, "it goes on where the other is, not at its own step 0"
        last = job.finish()[0].step
        assert [group.process and group.process.returncode for group in job.groups] == [0, 0], "nobody errs"
        survivor, healed = a.since(0.0, "commit"), b.since(b.started_s, "commit")
    for lines in (survivor, healed):
        steps = [line.step for line in lines]
        assert steps == list(range(steps[0], last + 1)), "each step once"
    assert len({line.digest for line in survivor}) == len(survivor), "they train"
    # whoever is through with the last one goes, and may leave the other alone in it
    both = [
        {line.step: line.digest for line in lines if first.step <= line.step < last} for lines in (survivor, healed)
    ]
    alone = [[line.step for line in lines if line.contributors != 2] for lines in (survivor, healed)]
    assert len(both[0]) >= 20 and both[0] == both[1], f"bit for bit, steps of one group alone: {alone}"


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
