#!/usr/bin/env python3
"""Checks a cluster before it is burnt: every kind of communication, every link, every rank, the clocks and the folder of runs.

    NPROC=4 python scripts/check_cluster.py                                  ranks on this machine
    torchrun --nnodes 2 ... scripts/check_cluster.py                         the ranks of a launcher; srun and mpirun, too
    NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=host:port NPROC=8 python scripts/check_cluster.py     the same without one

Flow: here -> tools/cluster/local.py (forks the ranks) -> cluster/rank.py -> cluster/work.py (measures) -> cluster/verdicts.py (judges)
-> cluster/report.py. Exit code: 0 all is well; 1 something was found, and named by rank and host; 2 bad input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "tools"))]

from scripts.launch import Plan, ranks_here, set_defaults  # noqa: E402
from tools.cluster.settings import Place, Settings  # noqa: E402 (our packages first)


def main(argv: Sequence[str]) -> int:
    try:
        settings, place, plan = Settings.parse(argv), Place.read(os.environ), Plan.read(os.environ)
        if place is None and plan.nnodes > 1 and plan.node_rank is None:
            raise ValueError(
                f"NNODES={plan.nnodes}: each node must be given its NODE_RANK, from 0 to {plan.nnodes - 1}"
            )
        quiet_torch()
        set_defaults(os.environ, nproc=plan.nproc or 1)
        check_comm(settings)
        if place is not None:
            from tools.cluster.rank import run_rank

            return leave(run_rank(settings, place))
        return start_ranks(settings, plan)
    except ValueError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2


def check_comm(settings: Settings) -> None:
    """Raises ValueError. The settings of `[comm]` by the same rules."""
    from parallelisms.distributed import CommConfig

    comm = CommConfig(
        backend=settings.backend,  # type: ignore[arg-type]  # one of argparse's choices
        init_method=settings.init_method,
        init_timeout_seconds=max(1, int(settings.start_s)),
        train_timeout_seconds=1,
    )
    try:
        comm.check()
    except ValueError as error:
        raise ValueError(str(error).replace("comm.", "--", 1)) from None


def start_ranks(settings: Settings, plan: Plan) -> int:
    """Raises ValueError."""
    import tools.cluster.rank as rank  # with torch: once, for all of them
    from tools.cluster.local import Node, run_local

    host, _, port = plan.endpoint.rpartition(":")
    node = Node(ranks_here(plan))
    if plan.nnodes > 1:
        node = Node(ranks_here(plan), plan.nnodes, plan.node_rank or 0, host, int(port))
    return run_local(settings, node, rank.run_rank)


def quiet_torch() -> None:
    """Before torch is imported: no driver is woken that a fork could not use, no library starts threads that it would lose."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what went wrong is told once, by name


def leave(code: int) -> int:
    """Without waiting for a thread that may hang in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
