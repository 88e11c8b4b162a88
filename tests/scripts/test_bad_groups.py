"""Replica groups that cannot take part, beside one that trains: each prints one clear line and exits with 2; the other continues.

All of them start together: each costs an import of torch.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ft import LighthouseServer
from tests.scripts.tiny_job import ROOT, WAIT_S, Started, write_job
from training.durable_files import RunLock

TOKEN = "a" * 32
NOBODY = "http://127.0.0.1:1"  # no lighthouse listens there


class Group(Started):
    def __init__(self, folder: Path, name: str, lighthouse: str, *arguments: str, **env: str) -> None:
        """Starts the group in its own folder, as on a separate machine."""
        folder.mkdir(exist_ok=True)
        write_job(folder)
        said = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": name, "PHAROS_TOKEN": TOKEN, **env}
        steps = ("--training.steps=100000", "--checkpoint.enable=false", "--fault_tolerance.enable=true")
        command = [sys.executable, ROOT / "train.py", "tiny.toml", *steps, *arguments]
        super().__init__(command, folder / "out.txt", cwd=folder, **said)

    @property
    def steps(self) -> int:
        return len(re.findall(r"\] step \d+/", self.text))

    def until_steps(self, count: int) -> None:
        self.until(f"step {count}", lambda _: self.steps >= count)

    def refused(self) -> tuple[int, str]:
        """Returns the exit code, and the last line of the output."""
        code = self.process.wait(WAIT_S)
        assert "Traceback" not in self.text
        return code, self.text.splitlines()[-1]


@pytest.mark.timeout(3 * WAIT_S)
def test_each_is_told_why_and_the_job_goes_on(cleanup: ExitStack, tmp_path: Path):
    lighthouse = LighthouseServer("127.0.0.1:0", 1, token=TOKEN)
    cleanup.callback(lighthouse.shutdown)
    at = lighthouse.address()

    def start(folder: str, name: str, lighthouse: str, *arguments: str, **env: str) -> Group:
        group = Group(tmp_path / folder, name, lighthouse, *arguments, **env)
        cleanup.callback(group.kill)
        return group

    good = start("good", "0", at)
    good.until_steps(1)
    twin = start("twin", "0", at)
    other = start("other", "1", at, "--optimizer.lr=0.5", "--model.hidden_dim=96")
    stranger = start("stranger", "2", at, PHAROS_TOKEN="b" * 32)
    lost = start("lost", "3", NOBODY, TORCHFT_CONNECT_TIMEOUT_SEC="1")
    with pytest.raises(ValueError, match="is in use by replica groups"):
        RunLock(tmp_path / "good" / "outputs" / "tiny")
    with closing(RunLock(tmp_path / "beside" / "outputs" / "tiny")):  # as of a run without groups
        code, said = start("beside", "4", at).refused()
        assert code == 2 and "outputs/tiny is in use by process" in said
    code, said = twin.refused()
    assert code == 2 and said.startswith('pharos: group 0 cannot take part: two groups with the name "0": 0:')
    code, said = other.refused()
    assert code == 2
    assert re.fullmatch(
        "pharos: group 1 cannot take part: 1:[0-9a-f]+ differs from the job in model.hidden_dim and"
        " optimizer.lr and gradient shapes",
        said,
    )
    told = f"pharos: PHAROS_TOKEN: the lighthouse at {at} has a different token"
    assert stranger.refused() == (2, told)
    code, said = lost.refused()  # not the user's fault for sure: whoever started it may start it again
    assert code == 1 and f"no lighthouse answers at TORCHFT_LIGHTHOUSE = {NOBODY} within 1 s" in said
    assert "waiting 1 s for it" in lost.text
    good.until_steps(good.steps + 3)
