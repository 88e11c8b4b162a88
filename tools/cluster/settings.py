"""The user's settings: flags, and the environment that says which rank this process is. Standard library only."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# How launchers tell a process its place: (rank, world size, rank on its node), and what tells them from one another.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # the latter two are set in steps, not in batch scripts
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
# The share of the usual figure below which a rank is slow. Ranks that share cores are held up by each other, some more, some less.
USUAL_SHARE, CROWDED_SHARE = 0.5, 0.1


@dataclass(frozen=True)
class RankPlace:
    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def read(environ: Mapping[str, str]) -> RankPlace | None:
        """None: no launcher started this process. Raises ValueError."""
        for launcher, names in LAUNCHERS.items():
            rank, size, local = (environ.get(name, "") for name in names)
            if not rank or not size:
                continue
            if not all(text.isdecimal() for text in (rank, size, local or "0")) or int(rank) >= int(size):
                given = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
                raise ValueError(f"{given}: not what {launcher} says: whole numbers, the rank below the size")
            return RankPlace(int(rank), int(size), int(local or "0"))
        return None


class CheckSettings(argparse.Namespace):
    backend: str
    init_method: str
    timeout_s: float
    start_s: float
    sizes: tuple[int, ...]  # bytes
    folder: Path
    disk_mib: float
    slow: float  # 0: USUAL_SHARE or CROWDED_SHARE
    skew_ms: float
    least_mb_s: float

    @property
    def op_s(self) -> float:
        """The longest time of one collective, in which a rank may have gone silent."""
        return 0.4 * self.timeout_s

    @staticmethod
    def parse(argv: Sequence[str]) -> CheckSettings:
        """Raises ValueError; on --help, and on flags that there are not, argparse ends the process (0, 2)."""
        about = "Runs every kind of communication over the ranks of a cluster, checks and times it, and names what is slow or broken."
        parser = argparse.ArgumentParser(
            prog="check_cluster.py",
            description=about,
            epilog="Under torchrun, srun or mpirun it joins their ranks. Else it starts them: NPROC ranks here (default: one per GPU, "
            "else 1); on several nodes NNODES, NODE_RANK and RDZV_ENDPOINT=host:port as for run_train.sh. "
            "Exit code: 0 all is well; 1 something was found, and named; 2 bad input.",
        )
        add, number = parser.add_argument, partial(parser.add_argument, type=float)
        add("--backend", choices=("auto", "gloo", "nccl", "mpi"), default="auto", help="auto: nccl on GPUs, else gloo")
        init_methods = "env:// (default), file:///path or tcp://host:port, as comm.init_method"
        add("--init_method", default="env://", help=init_methods)
        silence = "seconds within which a rank that says nothing is named (default 30)"
        number("--timeout", dest="timeout_s", metavar="TIMEOUT", default=30, help=silence)
        arrive = "seconds for all ranks to arrive (default 300)"
        number("--start_timeout", dest="start_s", metavar="START_TIMEOUT", default=300, help=arrive)
        sizes = "1KiB,64KiB,1MiB"
        add("--sizes", default=sizes, help=f"message sizes, the largest buffer of a rank (default {sizes})")
        folder = "folder of runs: a checkpoint is tried in it (default outputs)"
        add("--folder", type=Path, default=Path("outputs"), help=folder)
        number("--disk_mib", default=2, help="MiB that each rank writes there (default 2; a real disk wants 1000)")
        slow = "what is below this share of the usual is named (default 0.5; 0.1 where CPU ranks outnumber cores)"
        number("--slow", default=0, help=slow)
        number("--skew_ms", default=500, help="clocks may differ by this many milliseconds (default 500)")
        number("--least_mb_s", default=0, help="links below this are named whatever is usual, MB/s (default 0: none)")
        given = parser.parse_args(argv, CheckSettings())
        times = {"timeout": given.timeout_s, "start_timeout": given.start_s}
        for name, value in {**times, "disk_mib": given.disk_mib, "skew_ms": given.skew_ms}.items():
            if value <= 0:
                raise ValueError(f"--{name} {value:g}: must be > 0")
        if not 0 <= given.slow < 1:
            raise ValueError(f"--slow {given.slow:g}: a share of what is usual, below 1")
        if given.folder.exists() and not given.folder.is_dir():
            raise ValueError(f"--folder {given.folder}: a file, not a folder")
        given.sizes = tuple(map(_bytes, vars(given)["sizes"].split(",")))
        return given


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(B|KiB|MiB|GiB)?", text.strip())
    if not found or int(found[1]) == 0:
        raise ValueError(f'--sizes {text}: must be sizes such as "1KiB,64KiB,1MiB"')
    return int(found[1]) << {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2] or "B"]
