"""scripts/check_cluster.py with faults planted beneath it: `cluster_faults.py FAULT@RANK,... [FLAG ...]`, for test_check_cluster.py.

The faults are in torch's functions, as from a broken card, cable or library; the tool itself is unchanged.
Ranks are forked from this process, so a replacement here applies to them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import check_cluster  # noqa: E402


def _replace(name: str, rank: int, fault: Callable[..., Any]) -> None:
    """Replaces a function of torch.distributed by `fault` on one rank; `fault` gets that function, then its arguments."""
    real = getattr(dist, name)

    def called(*rest: Any, **named: Any) -> Any:
        return fault(real, *rest, **named) if _is(rank) else real(*rest, **named)

    setattr(dist, name, called)


def result_of_all_reduce(rank: int) -> None:
    """Changes one element of the result on this rank."""

    def all_reduce(real: Callable[..., Any], tensor: Any, *rest: Any, **named: Any) -> Any:
        done = real(tensor, *rest, **named)
        tensor[5] += 1
        return done

    _replace("all_reduce", rank, all_reduce)


def input_of_reduce_scatter(rank: int) -> None:
    """Changes the input of this rank, so all ranks get a wrong result."""

    def reduce_scatter(real: Callable[..., Any], output: Any, tensor: Any, *rest: Any, **named: Any) -> Any:
        return real(output, tensor * 3, *rest, **named)

    _replace("reduce_scatter_tensor", rank, reduce_scatter)


def broadcast_of_root(rank: int) -> None:
    """Changes one element of the tensor that this rank broadcasts; its own copy is correct."""

    def broadcast(real: Callable[..., Any], tensor: Any, src: int, *rest: Any) -> Any:
        if src != rank:
            return real(tensor, src, *rest)
        sent = tensor.clone()
        sent[7] = -1
        return real(sent, src, *rest)

    _replace("broadcast", rank, broadcast)


def errs(rank: int) -> None:
    """Makes an operation raise, on this rank only."""

    def reduce(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _replace("reduce", rank, reduce)


def clock(rank: int) -> None:
    """Sets this rank's clock five seconds ahead."""
    real = time.time
    time.time = lambda: real() + (5.0 if _is(rank) else 0.0)


def stopped(rank: int) -> None:
    """Stops this rank (SIGSTOP) while the others enter a collective. The signal is sent to this thread: with one to the process, the main
    thread may take it while this one continues for a moment."""
    _at("values: all_reduce MIN", rank, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP))


def killed(rank: int) -> None:
    _at("values: gather", rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def absent(rank: int) -> None:
    """Ends this rank before it reports its name."""
    _at("arrive", rank, lambda: os._exit(1))


def hangs(rank: int) -> None:
    """Blocks this rank in C code forever, where no exception reaches it."""
    _at("values: scatter", rank, lambda: signal.sigwait({signal.SIGUSR2}))


def none(rank: int) -> None:
    pass


def _is(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)


def _at(step: str, rank: int, do: Callable[[], object]) -> None:
    """Calls `do` after the barrier `step`, so that the others enter the collective; before it if `step` is "arrive"."""
    real = Control.meet

    def meet(self: Control, name: str, timeout_s: float = 0.0) -> None:
        if _is(rank) and name == step == "arrive":
            do()
        real(self, name, timeout_s)
        if _is(rank) and name == step:
            do()

    Control.meet = meet  # type: ignore[method-assign]


if __name__ == "__main__":
    check_cluster.quiet_torch()
    import torch.distributed as dist

    from tools.cluster.rank import Control

    for planted in sys.argv[1].split(","):
        fault, _, where = planted.partition("@")
        globals()[fault](int(where or 0))
    sys.exit(check_cluster.main(sys.argv[2:]))
