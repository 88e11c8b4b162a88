"""scripts/check_cluster.py as a user starts it: good ranks pass, every planted fault is named, nothing hangs or is left.

All runs of this file that need no network of their own start on two threads when the first is asked for. That 8 ranks end within
a minute is in docs/check_cluster.md; here nothing is asserted of a clock.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.drill_job import SUBNET, Network
from bench.job import descendants
from ft.rpc.access import has_ipv6
from tests.scripts.tiny_job import ROOT, finished

CHECK, FAULTS = ROOT / "scripts" / "check_cluster.py", ROOT / "tests" / "scripts" / "cluster_faults.py"
# --slow: ranks beside other programs on two cores hold each other up; what is named at which share is test_cluster_verdicts.py's.
SMALL = ("--sizes", "1KiB", "--disk_mib", "0.1", "--timeout", "20", "--slow", "0.02")
MEMORY_BYTES = 500e6


@dataclass(frozen=True)
class Ran:
    """Result of a run."""

    code: int
    out: str
    err: str
    report: dict[str, Any]
    peak_bytes: float  # of all processes together: PSS, which counts a shared page once
    left: list[int]  # processes

    @property
    def findings(self) -> list[str]:
        return [finding["text"] for finding in self.report["findings"]]

    def ranks(self, what: str) -> set[tuple[int, ...]]:
        return {tuple(finding["ranks"]) for finding in self.report["findings"] if finding["what"] == what}


def run(faults: str, nproc: int, *flags: str, folder: Path) -> Ran:
    process = subprocess.Popen(
        [sys.executable, FAULTS, faults, "--folder", folder / "outputs", *flags],
        env={**os.environ, "NPROC": str(nproc), "PHAROS_HOST": "here", "CUDA_VISIBLE_DEVICES": ""},
        stdout=(folder / "out").open("w"),
        stderr=(folder / "err").open("w"),
        cwd=folder,
    )
    peak, seen = 0.0, {process.pid}
    while process.poll() is None:
        family = [process.pid, *descendants(process.pid)]
        seen |= set(family)
        peak = max(peak, sum(map(_pss, family)))
        time.sleep(0.1)
    written = folder / "outputs" / "check_cluster" / "report.json"
    report = json.loads(written.read_text()) if written.exists() else {}
    left = [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    return Ran(process.returncode, (folder / "out").read_text(), (folder / "err").read_text(), report, peak, left)


CASES: dict[str, tuple[Any, ...]] = {
    "8": ("none", 8, "--slow", "0.02"),
    "2 file": ("none", 2, *SMALL, "--init_method", "file://{folder}/meet"),
    "4 tcp": ("none", 4, *SMALL, "--init_method", "tcp://127.0.0.1:{port}"),
    "wrong": ("result_of_all_reduce@2,input_of_reduce_scatter@3,broadcast_of_root@1,clock@0", 4, *SMALL),
    "stopped": ("stopped@0", 3, *SMALL),
    "stopped with the store": ("stopped@0", 2, *SMALL, "--init_method", "tcp://127.0.0.1:{port}", "--timeout", "8"),
    "killed": ("killed@1", 3, *SMALL),
    "hangs": ("hangs@2", 3, *SMALL),
    "absent": ("absent@1", 3, *SMALL, "--start_timeout", "15"),
    "errs": ("errs@1", 3, *SMALL),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Ran]]]:
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    names = {spec.params.get("name") for spec in chosen if spec}
    with ThreadPoolExecutor(2) as threads:
        runs = {}
        for name in (name for name in CASES if name in names):
            folder = tmp_path_factory.mktemp("check")
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            faults, nproc, *flags = CASES[name]
            flags = [flag.format(folder=folder, port=port) for flag in flags]
            runs[name] = threads.submit(run, faults, nproc, *flags, folder=folder)
        yield runs


pytestmark = pytest.mark.timeout(600)  # a test waits for its run, which waits for its turn


@pytest.mark.parametrize("name", [pytest.param("8", marks=pytest.mark.long), "2 file", "4 tcp"])
def test_good_ranks_pass_and_leave_their_report_alone(ran: dict[str, Future[Ran]], name: str):
    done = ran[name].result()
    assert (done.code, done.findings) == (0, []), done.out + done.err
    size, report = CASES[name][1], done.report
    assert report["good"] and report["world_size"] == size and report["hosts"] == ["here"] * size
    for rank, words in report["ranks"].items():
        figures = words["figures"]
        assert len(figures["values"]) == 23 and set(figures["values"].values()) == {"right"}
        assert set(figures["links"]) == {str(other) for other in range(size)} - {rank}
        assert all(row["bytes_s"] > 0 and row["latency_s"] > 0 for row in figures["links"].values())
        assert figures["matmul_flops"] > 0 and 0 < figures["core_share"] <= 1
        assert figures["disk"]["write_bytes_s"] > 0 and figures["disk"]["wrong"] == ""
    assert len(report["operations"]) == 11 and "no findings" in done.out
    assert done.peak_bytes < MEMORY_BYTES and done.left == []
    folder = Path(done.out.splitlines()[-1].split(",")[0]).parent
    assert sorted(path.name for path in folder.parent.iterdir()) == ["check_cluster"], "nothing else is left"
    picture = ElementTree.fromstring((folder / "report.svg").read_text())
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == size * (size - 1) and all(title.endswith("MB/s") for title in titles)


@pytest.mark.parametrize("name", ["wrong"])
def test_wrong_results_and_a_wrong_clock_are_named(ran: dict[str, Future[Ran]], name: str):
    """Four faults in one run, each with its rank: a result, an input, a broadcast, a clock."""
    done = ran[name].result()
    assert done.code == 1
    told = "\n".join(done.findings)
    assert "rank 2 on here: wrong result of all_reduce SUM at this rank only: element 5 is" in told
    assert (
        "rank 3 on here: reduce_scatter SUM is wrong at every rank; repeated between pairs of ranks, only with this"
        in told
    )
    assert "rank 1 on here: all data that it sends in broadcast arrives wrong: element 7 is -1" in told
    assert re.search(r"rank 0 on here: its clock is \+(4\.9|5\.0)\d\d s off", told), told
    assert done.ranks("wrong") == {(1,), (2,), (3,)} and done.ranks("clock") == {(0,)}
    ring = {words["figures"]["values"]["ring all_reduce SUM"] for words in done.report["ranks"].values()}
    assert ring == {"right"}  # it is made of isend and irecv


SILENT = {
    "stopped": (0, "values: all_reduce MIN", "rank 0 (pid {pid}) is stopped (SIGSTOP) and was killed"),
    "killed": (1, "values: gather", "rank 1 was ended by SIGKILL"),
    "hangs": (2, "values: scatter", ""),
    "absent": (1, "nothing yet", ""),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_rank_that_says_nothing_is_named_with_what_it_was_at(ran: dict[str, Future[Ran]], name: str):
    done, (rank, step, launcher) = ran[name].result(), SILENT[name]
    assert done.code == 1, done.out + done.err
    [finding] = done.report["findings"]
    assert (finding["what"], finding["ranks"]) == ("silent", [rank])
    assert finding["text"] == f"rank {rank} on here did not respond for 20 s; last step: {step}"
    assert re.search(re.escape(launcher).replace(r"\{pid\}", r"\d+"), done.err)
    assert done.left == []


@pytest.mark.parametrize("name", ["stopped with the store"])
def test_ranks_whose_store_stops_with_its_rank_end_too(ran: dict[str, Future[Ran]], name: str):
    """Rank 0 holds the store of tcp://, as under srun, so the store stops, too."""
    done = ran[name].result()
    assert done.code == 1 and done.left == [], done.out + done.err
    assert "rank 0 (pid" in done.err and "is stopped (SIGSTOP) and was killed" in done.err
    assert done.findings == [] if done.report else "rank 1 on here: the store at tcp://" in done.err


@pytest.mark.parametrize("name", ["errs"])
def test_an_error_is_its_ranks(ran: dict[str, Future[Ran]], name: str):
    done = ran[name].result()
    assert done.code == 1 and done.left == []
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert f"rank 1 on here: values: reduce SUM: {error}" in done.findings


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--sizes", "1KB"], {}, '--sizes 1KB: must be sizes such as "1KiB,64KiB,1MiB"'),
        (["--timeout", "0"], {}, "--timeout 0: must be > 0"),
        (["--disk_mib", "nan"], {}, "--disk_mib nan: must be > 0"),
        (["--skew_ms", "inf"], {}, "--skew_ms inf: must be > 0 and finite"),
        (["--folder", __file__], {}, f"--folder {__file__}: is a file; must be a folder"),
        ([], {"NPROC": "none"}, "NPROC=none: must be a whole number from 1"),
        ([], {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2, LOCAL_RANK=: must be whole numbers as set by torchrun"),
        ([], {"NNODES": "2", "RDZV_ENDPOINT": "a:1"}, "NNODES=2: each node must be given its NODE_RANK, from 0 to 1"),
    ],
)  # fmt: skip
def test_bad_input_is_told_before_torch_is_imported(arguments: list[str], env: dict[str, str], message: str):
    command = [sys.executable, "-X", "importtime", CHECK, *arguments]
    ran = finished(command, code=2, **env)
    assert f"check_cluster: {message}" in ran.stderr
    assert "| torch\n" not in ran.stderr and ran.stdout == ""


def test_the_ranks_of_torchrun(tmp_path: Path):
    """Ranks started by torchrun; those of srun are in test_slurm.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", CHECK, *SMALL, "--folder", tmp_path]
    said = finished(command, CUDA_VISIBLE_DEVICES="").stdout
    assert "2 ranks on 1 host" in said and "no findings" in said, said


def test_two_nodes_over_ipv6_without_a_launcher(tmp_path: Path):
    if not has_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        endpoint = f"::1:{free.getsockname()[1]}"
    command = [sys.executable, CHECK, *SMALL, "--folder", tmp_path, "--start_timeout", "60"]
    nodes = [{"NNODES": "2", "NODE_RANK": node, "RDZV_ENDPOINT": endpoint, "NPROC": "1"} for node in "01"]
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(finished, command, CUDA_VISIBLE_DEVICES="", **env) for env in nodes]
    assert "no findings" in "".join(done.result().stdout for done in runs)


def test_bad_init_methods_are_told():
    """The errors are those of comm.init_method (tests/multiproc/test_init_methods.py)."""
    assert finished([sys.executable, CHECK, "--init_method", "tcp://nowhere"], code=2).stderr == (
        'check_cluster: --init_method = "tcp://nowhere": must be tcp://host:port with a port from 1 to 65535; it takes "env://", '
        '"file:///path/on/a/shared/disk" or "tcp://host:port" of rank 0; nearest: "env://"\n'
    )


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except RuntimeError as error:
        pytest.skip(f"no network namespaces: {error}")
    yield made
    made.close()


def test_hosts_pass_and_the_one_behind_a_narrow_cable_is_named(network: Network, tmp_path: Path):
    """Three machines with a cable each; then tc's tbf makes one of them narrow."""
    for name in HOSTS:
        network.through(name)
    good, report = on_hosts(network, tmp_path / "good")
    assert set(good) == {0}, report
    network.narrow("node-b", 2)  # a hundredth of what is usual, or less
    codes, report = on_hosts(network, tmp_path / "narrow")
    assert set(codes) == {1}
    slow = [finding for finding in report["findings"] if finding["what"] == "slow link"]
    assert [finding["ranks"] for finding in slow] == [[1]], report["findings"]
    assert slow[0]["text"].startswith("rank 1 on node-b: slow links: ")


HOSTS = ("node-a", "node-b", "node-c")


def on_hosts(network: Network, folder: Path) -> tuple[list[int], dict[str, Any]]:
    """Runs one rank on each. Returns exit codes and the report."""
    folder.mkdir()
    processes = []
    for number, name in enumerate(HOSTS):
        env = {"NNODES": "3", "NODE_RANK": str(number), "NPROC": "1", "RDZV_ENDPOINT": f"{SUBNET}.1:29500"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "PHAROS_HOST": name, "CUDA_VISIBLE_DEVICES": ""}
        command = [*network.through(name), sys.executable, str(CHECK), *SMALL, "--folder", str(folder)]
        with (folder / f"{name}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log))
    codes = [process.wait() for process in processes]
    logs = "".join((folder / f"{name}.log").read_text() for name in HOSTS)
    written = folder / "check_cluster" / "report.json"
    return codes, json.loads(written.read_text()) if written.exists() else {"findings": [], "logs": logs}


def _pss(pid: int) -> float:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024.0 for line in rollup.splitlines() if line.startswith("Pss:"))
