"""scripts/check_cluster.py with a fault planted beneath it: `cluster_faults.py FAULT [FLAG ...]`, for test_check_cluster.py.

The faults are in torch's functions, as a broken card, cable or library would have them; the tool itself knows nothing of them.
They strike the rank in FAULT_RANK. Ranks are forked from this process, so what is replaced here is replaced in them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402

from scripts import check_cluster  # noqa: E402
from scripts.cluster.control import Control  # noqa: E402


def struck() -> bool:
    return os.environ.get("RANK") == os.environ["FAULT_RANK"]


def result_of_all_reduce() -> None:
    """What it gives this rank has one wrong element."""

    def strike(real: Callable[..., Any], tensor: Any, *rest: Any, **named: Any) -> Any:
        done = real(tensor, *rest, **named)
        tensor[5] += 1
        return done

    _replace("all_reduce", strike)


def input_of_all_reduce() -> None:
    """What this rank puts in has one wrong element, so all get a wrong result."""

    def strike(real: Callable[..., Any], tensor: Any, *rest: Any, **named: Any) -> Any:
        tensor[5] *= 2
        return real(tensor, *rest, **named)

    _replace("all_reduce", strike)


def broadcast_of_root() -> None:
    def strike(real: Callable[..., Any], tensor: Any, src: int, *rest: Any) -> Any:
        mine = tensor.clone()
        mine[7] = -1 if src == dist.get_rank() else mine[7]
        done = real(mine, src, *rest)
        if src != dist.get_rank():
            tensor.copy_(mine)
        return done

    _replace("broadcast", strike)


def stopped() -> None:
    """This rank stops (SIGSTOP) on its way into a collective."""
    _at("values: all_reduce MIN", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def killed() -> None:
    _at("values: gather", lambda: os.kill(os.getpid(), signal.SIGKILL))


def absent() -> None:
    """This rank never comes: it ends before it says who it is."""
    _at("arrive", lambda: os._exit(1))


def hangs() -> None:
    """This rank waits in C code for ever, where no exception can reach it."""
    _at("values: scatter", lambda: signal.sigwait({signal.SIGUSR2}))


def errs() -> None:
    def strike(real: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _replace("reduce", strike)


def clock() -> None:
    import time

    real = time.time
    time.time = lambda: real() + (5.0 if struck() else 0.0)


def _replace(name: str, strike: Callable[..., Any]) -> None:
    real = getattr(dist, name)
    setattr(dist, name, lambda *rest, **named: strike(real, *rest, **named) if struck() else real(*rest, **named))


def _at(step: str, do: Callable[[], object]) -> None:
    """After the others have been told that this rank is there, so they go into the collective."""
    real = Control.meet

    def meet(self: Control, name: str, timeout_s: float = 0.0) -> None:
        if struck() and name == step == "arrive":
            do()
        real(self, name, timeout_s)
        if struck() and name == step:
            do()

    Control.meet = meet  # type: ignore[method-assign]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(check_cluster.main(sys.argv[2:]))
