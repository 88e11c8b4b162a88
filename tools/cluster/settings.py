"""Settings of check_cluster.py: flags, and this process's rank from the launcher's environment. Standard library only."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Environment variables of each launcher: (rank, world size, local rank). The first launcher whose first two are set is used.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # the latter two are set in job steps, not in batch scripts
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
# Share of the usual value below which a rank is slow. CROWDED: for ranks that share cores and delay each other unevenly.
USUAL_SHARE, CROWDED_SHARE = 0.5, 0.1


@dataclass(frozen=True)
class RankPlace:
    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def read(environ: Mapping[str, str]) -> RankPlace | None:
        """Returns None if no launcher started this process. Raises ValueError: variables of a launcher that are not a rank."""
        for launcher, names in LAUNCHERS.items():
            rank, size, local = (environ.get(name, "") for name in names)
            if not rank or not size:
                continue
            if not all(text.isdecimal() for text in (rank, size, local or "0")) or int(rank) >= int(size):
                given = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
                raise ValueError(f"{given}: must be whole numbers as set by {launcher}, the rank below the size")
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
    slow: float  # share of the usual value; 0: USUAL_SHARE or CROWDED_SHARE
    skew_ms: float
    least_mb_s: float

    @property
    def op_s(self) -> float:
        """Timeout of one collective: below timeout_s, so that the ranks that wait in it can still report."""
        return 0.4 * self.timeout_s

    @staticmethod
    def parse(argv: Sequence[str]) -> CheckSettings:
        """Reads the flags. Raises ValueError. On --help and on unknown flags argparse exits (codes 0 and 2)."""
        about = "Checks and times every collective and link between the ranks of a cluster, and names slow and faulty ranks and links."
        parser = argparse.ArgumentParser(
            prog="check_cluster.py",
            description=about,
            epilog="Under torchrun, srun or mpirun it uses their ranks. Otherwise it starts NPROC ranks on this node (default: one per "
            "GPU, else 1); on several nodes set NNODES, NODE_RANK and RDZV_ENDPOINT=host:port as for run_train.sh. "
            "Exit code: 0 no findings; 1 findings; 2 bad input.",
        )
        add, number = parser.add_argument, partial(parser.add_argument, type=float)
        add("--backend", choices=("auto", "gloo", "nccl", "mpi"), default="auto", help="auto: nccl on GPUs, else gloo")
        init_methods = "env:// (default), file:///path or tcp://host:port, as comm.init_method"
        add("--init_method", default="env://", help=init_methods)
        silence = "seconds after which a rank that does not respond is reported (default 30)"
        number("--timeout", dest="timeout_s", metavar="TIMEOUT", default=30, help=silence)
        arrive = "seconds for all ranks to connect (default 300)"
        number("--start_timeout", dest="start_s", metavar="START_TIMEOUT", default=300, help=arrive)
        sizes = "1KiB,64KiB,1MiB"
        add("--sizes", default=sizes, help=f"sizes of a rank's largest buffer (default {sizes})")
        folder = "folder of runs, in which a checkpoint is written and read (default outputs)"
        add("--folder", type=Path, default=Path("outputs"), help=folder)
        number("--disk_mib", default=2, help="MiB that each rank writes there (default 2; for a real disk 1000)")
        slow = "report rates below this share of the usual one (default 0.5; 0.1 where CPU ranks outnumber cores)"
        number("--slow", default=0, help=slow)
        number("--skew_ms", default=500, help="report clocks that differ by more milliseconds (default 500)")
        number("--least_mb_s", default=0, help="report links below this rate, MB/s, in any case (default 0: none)")
        given = parser.parse_args(argv, CheckSettings())
        times = {"timeout": given.timeout_s, "start_timeout": given.start_s}
        for name, value in {**times, "disk_mib": given.disk_mib, "skew_ms": given.skew_ms}.items():
            if not 0 < value < math.inf:  # nor NaN
                raise ValueError(f"--{name} {value:g}: must be > 0{' and finite' if value > 0 else ''}")
        if not 0 <= given.slow < 1:
            raise ValueError(f"--slow {given.slow:g}: must be a share of the usual rate, at least 0 and below 1")
        if given.folder.exists() and not given.folder.is_dir():
            raise ValueError(f"--folder {given.folder}: is a file; must be a folder")
        given.sizes = tuple(map(_bytes, vars(given)["sizes"].split(",")))
        return given


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(B|KiB|MiB|GiB)?", text.strip())
    if not found or int(found[1]) == 0:
        raise ValueError(f'--sizes {text}: must be sizes such as "1KiB,64KiB,1MiB"')
    return int(found[1]) << {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2] or "B"]
