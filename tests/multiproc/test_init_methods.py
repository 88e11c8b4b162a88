"""`comm.init_method`: ranks meet by each of the three methods, and settings that cannot work are refused before anybody waits."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from parallelisms.distributed import CommConfig, launch_store, open_store, parse_init_method, why_unusable
from tests.scripts.tiny_job import ROOT, python
from tests.unit.fakes import set_device_module


@pytest.mark.timeout(240)
def test_ranks_meet_in_each_way(tmp_path: Path):
    said = python("-m", "tests.multiproc.meeting_ranks", tmp_path)
    expected = {f"{way} {rank}: 3.0 ['rank 0', 'rank 1'] yes" for way in ("env", "file", "tcp") for rank in range(2)}
    assert set(said.split("\n")) - {""} == expected


@pytest.mark.parametrize(
    ("method", "host", "port", "path"),
    [
        ("env://", None, None, ""),
        ("file:///shared/meet", None, None, "/shared/meet"),
        ("tcp://10.1.1.20:23456", "10.1.1.20", 23456, ""),
        ("tcp://[fe80::1]:80", "fe80::1", 80, ""),
    ],
)
def test_methods_are_read(method: str, host: str | None, port: int | None, path: str):
    url = parse_init_method(method)
    assert (url.hostname, url.port, url.path) == (host, port, path)


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("env", "unknown scheme"),
        ("env://host", "unknown scheme"),
        ("mpi://", "unknown scheme"),
        ("file://meet", "a file needs three slashes: file:///absolute/path"),
        ("file:///", "a file needs three slashes: file:///absolute/path"),
        ("file:///no/such/folder/meet", "there is no folder /no/such/folder"),
        ("tcp://10.1.1.20", "must be tcp://host:port with a port from 1 to 65535"),
        ("tcp://10.1.1.20:70000", "must be tcp://host:port with a port from 1 to 65535"),
        ("tcp://:23456", "must be tcp://host:port with a port from 1 to 65535"),
        ("tcp://a:1?rank=0", "?rank=0 is not supported: the launcher assigns the ranks"),
    ],
)
def test_bad_methods_are_told(method: str, cause: str):
    with pytest.raises(ValueError) as told:
        CommConfig(init_method=method).check()
    assert str(told.value) == (
        f'comm.init_method = "{method}": {cause}; it takes "env://", "file:///path/on/a/shared/disk" or '
        '"tcp://host:port" of rank 0; nearest: "env://"'
    )


def test_a_file_of_other_content_is_refused(tmp_path: Path):
    """A file of other content is refused, since stores append to it."""
    config = CommConfig(init_method=f"file://{tmp_path}/meet")
    (tmp_path / "meet").touch()
    config.check()
    dist.FileStore(str(tmp_path / "meet")).set("key", "value")
    config.check()  # of another rank, or an earlier launch
    (tmp_path / "meet").write_text("a user's notes")
    with pytest.raises(ValueError, match="the file has other content; name a new one"):
        config.check()


@pytest.mark.parametrize("method", ["env", "file"])
def test_a_restart_does_not_read_what_killed_ranks_wrote(tmp_path: Path, method: str):
    """The nodes need not agree on the number of restarts either, of which each counts its own."""
    agent = dist.HashStore()

    def join(rank: int, restarts: int) -> dist.Store:
        environ, url = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}, f"file://{tmp_path}/meet"
        opened = open_store(url, global_rank=rank, world_size=2, timeout_s=5, environ=environ)
        return launch_store(agent if method == "env" else opened, global_rank=rank, world_size=2, timeout_s=30)

    with ThreadPoolExecutor() as ranks:
        killed, new = (list(ranks.map(join, range(2), restarts)) for restarts in ((0, 0), (1, 0)))
    for store in (killed, new):
        store[0].set("address of 0", str(id(store)))
    assert [store.get("address of 0").decode() for store in (killed[1], new[1])] == [str(id(killed)), str(id(new))]


def test_an_environment_without_an_address_is_told():
    with pytest.raises(ValueError, match="env:// needs MASTER_PORT in the environment"):
        open_store("env://", global_rank=0, world_size=2, timeout_s=5, environ={"MASTER_ADDR": "localhost"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "env:// needs MASTER_ADDR and MASTER_PORT in the environment; launchers set them",
        ),
        ({"RANK": "abc"}, "RANK = abc: must be a whole number; launchers set it"),
    ],
)
def test_train_tells_it_in_one_line(tmp_path: Path, environ: dict[str, str], message: str):
    command = [sys.executable, ROOT / "train.py", ROOT / "configs/llama.toml", f"--job.dump_folder={tmp_path}"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environ}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (2, f"pharos: {message}\n")


def test_backends_that_cannot_be_used_are_told(monkeypatch: pytest.MonkeyPatch):
    def is_built_with(backend: str, built: bool) -> None:
        monkeypatch.setattr(f"torch.distributed.is_{backend}_available", lambda: built)

    is_built_with("nccl", True)
    set_device_module(monkeypatch, SimpleNamespace(is_available=lambda: False))
    assert why_unusable("nccl") == "it needs a CUDA device, and there is none here"
    set_device_module(monkeypatch, SimpleNamespace(is_available=lambda: True))
    assert why_unusable("nccl") == why_unusable("gloo") == ""
    CommConfig(backend="gloo").check()
    for backend in ("nccl", "mpi"):
        is_built_with(backend, False)
    cause = why_unusable("mpi")
    assert cause.startswith("this torch (") and cause.endswith(") was built without it")
    with pytest.raises(ValueError) as told:
        CommConfig(backend="nccl").check()
    assert str(told.value) == f'comm.backend = "nccl": {cause}; legal here: "auto", "gloo"'
