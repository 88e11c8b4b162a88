"""scripts/launch.py over a stub of train.py and of configs: handling of exit codes, signals, output and failures.

With one rank a stub of torch is enough; more ranks need the real one, for its agent.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistError, PrefixStore, TCPStore

from scripts.agent import wait_for_nodes
from scripts.launch_settings import LaunchSettings
from tests.scripts.slurm_cluster import free_ports

ROOT = Path(__file__).resolve().parents[2]
# Says who it is, then does what its argument says.
TRAIN = """\
import os, signal, sys
from pathlib import Path

signals = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
rank, how = int(os.environ.get("RANK", "0")), sys.argv[2]
last_rank = int(os.environ.get("WORLD_SIZE", "1")) - 1
Path("outputs/job").mkdir(parents=True, exist_ok=True)
print(f"rank {rank} is {os.getpid()} with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
if how == "bad":
    print("pharos: training.steps = 0: must be > 0", file=sys.stderr)
    sys.exit(2)
if how == "crash" and rank != last_rank:
    Path("started").write_text("")  # a pipe: returns once the last rank reads it
if how == "crash" and rank == last_rank:
    if rank:  # SIGTERM must find the other rank past its first lines
        Path("started").read_text()
    raise RuntimeError("the disk is full")
if how == "where":
    print(os.environ["MASTER_ADDR"])
    sys.exit(0)
if how == "letter":
    from training.log import Log
    Log().info(chr(969))
    sys.exit(0)
while how != "finish":
    if signal.sigwait(signals) == signal.SIGTERM and how != "deaf":
        print(f"rank {rank} has saved", flush=True)
        sys.exit(1 if how == "crash" else 0)
"""
LOAD = """\
import types
from pathlib import Path
from ft.config import FaultTolerance

def load(argv):
    if argv[0] != "job.toml":
        raise ValueError(f"{argv[0]}: no such file")
    groups = FaultTolerance(enable="--groups" in argv)
    return types.SimpleNamespace(run_folder=Path("outputs/job"), fault_tolerance=groups)
"""
CHECK = """\
def check(config, *, world_size):
    if world_size == 3:
        raise ValueError("training.global_batch_size = 8: must be a multiple of 3")

def check_resume(config, changed, *, world_size):
    pass
"""
TORCH = """\
import types
__version__ = "2.13.0+cpu"
version = types.SimpleNamespace(cuda=None)
cuda = types.SimpleNamespace(is_available=lambda: GPUS > 0, device_count=lambda: GPUS)
"""
NVIDIA_SMI = """\
#!/bin/sh
case "$1" in -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-1)" ;; *) echo 570.10 ;; esac
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository in which all but scripts/launch.py and its imports is a stub."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for package in ("training", "ft"):
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "configs").mkdir()
    shutil.copy2(ROOT / "configs" / "errors.py", tmp_path / "configs")
    os.mkfifo(tmp_path / "started")
    for name, text in {
        "train.py": TRAIN,
        "configs/__init__.py": "",
        "configs/load.py": LOAD,
        "configs/check.py": CHECK,
        "configs/saved.py": "def check_saved(config, folder, **ranks): return {}\ndef fetch_saved(config): return config\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def stub_torch(tree: Path) -> None:
    (tree / "torch.py").write_text(TORCH.replace("GPUS", "0"))


@pytest.fixture
def start(tree: Path, cleanup: ExitStack) -> Start:
    # else ignored, also here, in a script's background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cleanup.callback(signal.signal, signal.SIGINT, before)

    def start(
        *arguments: str, script: str = "launch.py", through: Sequence[str] = (), **env: str
    ) -> subprocess.Popen[str]:
        drop = {"OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"}
        process = subprocess.Popen(
            [*through, sys.executable, str(tree / "scripts" / script), *arguments],
            cwd=tree,
            env={**{name: value for name, value in os.environ.items() if name not in drop}, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        cleanup.callback(process.communicate)
        cleanup.callback(process.kill)
        return process

    return start


# one rank: this very process


@pytest.mark.usefixtures("stub_torch")
@pytest.mark.parametrize(("how", "code"), [("finish", 0), ("bad", 2), ("crash", 1)])
def test_one_rank_is_the_process_itself(tree: Path, start: Start, how: str, code: int):
    process = start("job.toml", how)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"rank 0 is {process.pid} with " in out
    assert (tree / "outputs" / "job" / "logs" / "rank0.log").read_text() == out + err
    if how == "crash":
        assert err.splitlines()[-1] == "RuntimeError: the disk is full"


@pytest.mark.usefixtures("stub_torch")
def test_a_letter_that_the_terminal_lacks_is_escaped_there_and_whole_in_the_log(tree: Path, start: Start):
    code, out, err = end(start("job.toml", "letter", PYTHONIOENCODING="ascii"))
    assert (code, err) == (0, "") and out.endswith("[0] \\u03c9\n")
    assert (tree / "outputs" / "job" / "logs" / "rank0.log").read_text() == out.replace("\\u03c9", chr(969))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_before_training_is_one_line(tree: Path, start: Start, number: signal.Signals, code: int):
    # not signal.pause(): it would wait for ever for a signal that comes just before
    (tree / "torch.py").write_text("import os; os.write(1, b'imports')\nwhile True: pass")
    process = start("job.toml", "finish")
    assert process.stdout is not None and process.stdout.read(7) == "imports"
    process.send_signal(number)
    assert end(process) == (code, "", f"pharos: stopped by {number.name} while no step was under way\n")


@pytest.mark.usefixtures("stub_torch")
def test_a_stop_ends_the_launch_of_groups_while_their_lighthouse_hangs(tree: Path, start: Start):
    """The state file is a FIFO without a writer, like one on a disk that does not answer."""
    state_file = tree / "outputs" / "job" / "groups" / "lighthouse.json"
    state_file.parent.mkdir(parents=True)
    os.mkfifo(state_file)
    process = start("job.toml", "--groups", "1", script="replicas.py")
    with state_file.open("w"):  # when the lighthouse reads it
        process.send_signal(signal.SIGINT)
        assert end(process) == (130, "", "pharos: stopped by SIGINT while no step was under way\n")


@pytest.mark.usefixtures("stub_torch")
@pytest.mark.parametrize(("config", "closed", "code"), [("job.toml", ">&-", 0), ("lob.toml", "2>&-", 2)])
def test_a_standard_stream_may_be_closed(tree: Path, start: Start, config: str, closed: str, code: int):
    launched = start(config, "finish", through=("bash", "-c", f'exec "$@" {closed}', "bash"))
    assert end(launched) == (code, "", "")
    log = tree / "outputs" / "job" / "logs" / "rank0.log"
    assert log.exists() == (code == 0) and (code or log.read_text().startswith("rank 0 is "))


@pytest.mark.usefixtures("stub_torch")
def test_a_bad_variable_of_groups_is_refused_before_one_rank_starts(start: Start):
    process = start("job.toml", "finish", "--groups", REPLICA_GROUP_ID="a/b")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("pharos: REPLICA_GROUP_ID = a/b: a group's name must be ") and err.count("\n") == 1


@pytest.mark.usefixtures("stub_torch")
def test_one_rank_saves_on_sigterm(start: Start):
    process = start("job.toml", "wait")
    ranks_of(process, 1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "rank 0 has saved\n", "")


@pytest.mark.usefixtures("stub_torch")
@pytest.mark.parametrize(
    ("config", "env", "said"),
    [
        ("lob.toml", {}, "lob.toml: no such file"),
        ("job.toml", {"NPROC": "0"}, "NPROC=0: must be a whole number from 1"),
        ("job.toml", {"NPROC": "1", "NGPU": "2"}, "NPROC=1: differs from its alias NGPU=2; set one of them"),
        (
            "job.toml",
            {"NNODES": "2", "RDZV_ENDPOINT": "a"},
            "RDZV_ENDPOINT=a: with NNODES=2 it must be host:port of node 0",
        ),
        ("job.toml", {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2: must be a whole number from 0 to 1"),
        ("job.toml", {"LOG_RANK": "first"}, 'LOG_RANK=first: must be ranks such as "0" or "0,3", or "all"'),
        # as in a shell inside another launcher's job
        (
            "job.toml",
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "WORLD_SIZE=2: of another launcher; this one starts 1 rank: unset it, or set NPROC",
        ),
        ("job.toml", {"NPROC": "3"}, "training.global_batch_size = 8: must be a multiple of 3"),
    ],
)
def test_bad_input_starts_no_rank(tree: Path, start: Start, config: str, env: dict[str, str], said: str):
    code, out, err = end(start(config, "finish", **env))
    assert (code, out, err) == (2, "", f"pharos: {said}\n")
    assert not (tree / "outputs").exists()


@pytest.mark.usefixtures("stub_torch")
def test_a_gpu_that_torch_cannot_see(tree: Path, start: Start):
    (tree / "bin").mkdir()
    (tree / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tree / "bin" / "nvidia-smi").chmod(0o755)
    path = f"{tree}/bin:{os.environ['PATH']}"
    code, out, err = end(start("job.toml", "finish", PATH=path))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "nvidia-smi sees 1 GPU (driver 570.10), but torch 2.13.0+cpu (CUDA none) sees none: it is a CPU build" in err
    process = start("job.toml", "finish", PATH=path, CUDA_VISIBLE_DEVICES="-1")
    assert process.wait(timeout=30) == 0, "the way out that the message names"


def test_more_ranks_than_gpus(tree: Path, start: Start):
    (tree / "torch.py").write_text(TORCH.replace("GPUS", "2"))
    code, _, err = end(start("job.toml", "finish", NPROC="4"))
    assert (code, err) == (2, "pharos: NPROC=4: more ranks than the 2 GPUs that are visible here\n")


# two ranks, under torch's agent


def test_two_ranks_finish_and_one_is_shown(tree: Path, start: Start):
    code, out, err = end(start("job.toml", "finish", NPROC="2", LOG_RANK="1", OMP_NUM_THREADS="7"))
    assert (code, err) == (0, "")
    assert re.fullmatch(r"rank 1 is \d+ with 7 threads\n", out)
    logs = tree / "outputs" / "job" / "logs"
    assert [file.read_text()[:9] for file in sorted(logs.iterdir())] == ["rank 0 is", "rank 1 is"]


def test_two_ranks_of_a_machine_meet_without_a_name(start: Start):
    """Not even localhost has an address everywhere: a container's /etc/hosts may be empty."""
    code, out, err = end(start("job.toml", "where", NPROC="2"))
    assert (code, out.splitlines()[-1], err) == (0, "127.0.0.1", "")


def test_two_ranks_blame_the_input(start: Start):
    code, _, err = end(start("job.toml", "bad", NPROC="2", LOG_RANK="1"))
    assert code == 2 and err in ("", "pharos: training.steps = 0: must be > 0\n")  # "": rank 1 was first


def test_a_rank_crashes(start: Start):
    code, out, err = end(start("job.toml", "crash", NPROC="2"))
    assert code == 1
    assert err == (
        "pharos: rank 1 failed (exit code 1): RuntimeError: the disk is full; log: outputs/job/logs/rank1.log\n"
    ), "the first to fail, not the one that was told to stop after it"
    assert "rank 0 has saved" in out


def test_a_rank_that_crashes_is_started_again(tree: Path, start: Start):
    code, out, err = end(start("job.toml", "crash", NPROC="1", MAX_RESTARTS="1"))
    assert code == 1 and "rank 0 failed" in err
    assert len(re.findall("rank 0 is", out)) == 2


def test_two_ranks_save_on_sigterm(start: Start):
    process = start("job.toml", "wait", NPROC="2", LOG_RANK="all")
    pids = ranks_of(process, 2)
    process.send_signal(signal.SIGUSR1)  # is for the ranks, too: it ends nobody
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["rank 0 has saved", "rank 1 has saved"]
    assert not any(alive(pid) for pid in pids)


def test_ranks_that_do_not_save_in_time_are_ended(start: Start):
    process = start("job.toml", "deaf", NPROC="2", LOG_RANK="all", STOP_GRACE="0", MAX_RESTARTS="1")
    pids = ranks_of(process, 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "not saved within 0 s: killing the ranks" in err
    assert (
        "(ended by SIGKILL while it was stopping; an earlier checkpoint, if there is one, is intact)"
        in err.splitlines()[-1]
    )
    assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it, and only Linux")
def test_ranks_end_with_a_launcher_that_is_killed(start: Start):
    process = start("job.toml", "wait", NPROC="2", LOG_RANK="all")
    pids = ranks_of(process, 2)
    process.kill()
    process.wait(timeout=60)
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"left behind: {left}")


@pytest.mark.parametrize("given", ["[::1]:29755", "::1:29755"])
def test_an_ipv6_address_of_the_rendezvous_may_have_brackets(given: str):
    settings = LaunchSettings.read({"NNODES": "2", "RDZV_ENDPOINT": given})
    assert settings.endpoint == "::1:29755", "as torch and check_cluster split it, at the last colon"


@pytest.mark.parametrize("ordered", [True, False])
def test_two_nodes_meet(tree: Path, start: Start, ordered: bool):
    env = {"NNODES": "2", "RDZV_ENDPOINT": f"127.0.0.1:{free_ports(1)[0]}"}
    nodes = [start("job.toml", "finish", **env, **({"NODE_RANK": str(n)} if ordered else {})) for n in (0, 1)]
    shown = [node.communicate(timeout=60) for node in nodes]
    assert [(node.returncode, err) for node, (_, err) in zip(nodes, shown, strict=True)] == [(0, "")] * 2
    outs = [out[:9] for out, _ in shown]
    assert (outs if ordered else sorted(outs, reverse=True)) == ["rank 0 is", ""], (
        "rank 0 is on node 0, and only it is shown"
    )


def test_the_last_node_to_end_waits_for_none():
    # The node of the store may be one of those that it wakes: an answer to a later question may not come.
    host = TCPStore("127.0.0.1", 0, is_master=True)
    first, last = (TCPStore("127.0.0.1", host.port, is_master=False) for _ in range(2))
    with ThreadPoolExecutor(1) as node:
        waits = node.submit(wait_for_nodes, PrefixStore("job", first), 2, timedelta(seconds=60))
        while host.add("job/ended", 0) < 1:
            assert not waits.done()
        wait_for_nodes(AnswersNoWait("job", last), 2, timedelta(seconds=60))
        assert waits.result(timeout=60) is None


class AnswersNoWait(PrefixStore):
    def wait(self, *_arguments: object) -> None:
        pytest.fail("the process of the store has ended")


def test_a_node_that_failed_is_not_waited_for():
    with pytest.raises(DistError):
        wait_for_nodes(TCPStore("127.0.0.1", 0, is_master=True), 2, timedelta(milliseconds=1))


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for the end. Returns exit code, standard output, standard error."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def ranks_of(process: subprocess.Popen[str], count: int) -> list[int]:
    """Waits until `count` ranks have printed their pids."""
    assert process.stdout is not None
    lines = (process.stdout.readline() for _ in range(count))
    return [int(line.split()[3]) for line in lines]


def alive(pid: int) -> bool:
    """Returns True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
