"""contrib/torchx_component.py, started by TorchX's scheduler of local processes; its other schedulers are not covered."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.rpc.peer import install
from tests.scripts.slurm_cluster import free_ports
from tests.scripts.tiny_job import ROOT, Started, assert_exact, write_job
from tests.system_packages import Unavailable

COMPONENT = ROOT / "contrib" / "torchx_component.py"
# What of it is not in requirements-dev.lock; its Docker scheduler is imported, used or not.
PINS = (
    "torchx==0.7.0",
    "docker==7.1.0",
    "docstring-parser==0.16",
    "importlib-metadata==8.7.0",
    "mypy-extensions==1.0.0",
    "pyre-extensions==0.0.32",
    "tabulate==0.9.0",
    "typing-inspect==0.9.0",
    "urllib3==1.26.20",
    "zipp==3.21.0",
)


class Component(Started):
    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)  # upon which it ends its replicas
        self.process.wait(60)


def start(folder: Path, component: str, *arguments: str) -> Component:
    try:
        packages = install(ROOT / ".venv-torchx", PINS)
    except Unavailable as error:
        pytest.skip(f"no TorchX: {error}")
    run = ["-m", "torchx.cli.main", "run", "--wait", "--scheduler=local_cwd"]
    command = [sys.executable, *run, f"{COMPONENT}:{component}", *arguments]
    env = {"PYTHONPATH": str(packages), "PYTHON": sys.executable}
    return Component(command, folder / f"{component}.txt", cwd=folder, **env)


@pytest.mark.timeout(600)
def test_a_lighthouse_and_two_groups(tmp_path: Path):
    write_job(tmp_path)
    (tmp_path / "token").write_text("t" * 32)
    [port] = free_ports(1)
    common = ("--token_file", "token", "--root", str(ROOT))
    lighthouse = ("--min_replicas", "2", "--bind", f"127.0.0.1:{port}")
    words = ("--config", "tiny.toml", "--lighthouse", f"http://127.0.0.1:{port}", "--groups", "2")
    with (
        closing(start(tmp_path, "lighthouse", *common, *lighthouse)),
        closing(start(tmp_path, "groups", *common, *words, "--", "--training.steps=20")) as groups,
    ):
        assert groups.end() == 0, "\n".join(path.read_text()[-3000:] for path in tmp_path.glob("*.txt"))
    rows = assert_exact(tmp_path / "outputs" / "tiny", 20)
    assert {owner.partition(":")[0] for row in rows for owner in row.slots.values()} == {"0", "1"}
