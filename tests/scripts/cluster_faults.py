"""scripts/check_cluster.py with faults planted beneath it: `cluster_faults.py FAULT@RANK,... [FLAG ...]`, for test_check_cluster.py.

The faults are in torch's functions, as a broken card, cable or library would have them; the tool itself knows nothing of them.
Ranks are forked from this process, so what is replaced here is replaced in them.
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
    """One rank has `fault` instead of torch.distributed's function; it is given that function, and then its arguments."""
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
    """What this rank sends to all has one wrong element; its own copy is right."""

    def broadcast(real: Callable[..., Any], tensor: Any, src: int, *rest: Any) -> Any:
        if src != rank:
            return real(tensor, src, *rest)
        sent = tensor.clone()
        sent[7] = -1
        return real(sent, src, *rest)

    _replace("broadcast", rank, broadcast)


def errs(rank: int) -> None:
    """An operation raises, on this rank alone."""

    def reduce(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _replace("reduce", rank, reduce)


def clock(rank: int) -> None:
    """This rank's clock is five seconds ahead."""
    real = time.time
    time.time = lambda: real() + (5.0 if _is(rank) else 0.0)


def stopped(rank: int) -> None:
    """This rank stops (SIGSTOP) when the others are on their way into a collective. The signal is this thread's: sent to the process, the
    main thread may take it while this one goes on for a moment."""
    _at("values: all_reduce MIN", rank, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP))


def killed(rank: int) -> None:
    _at("values: gather", rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def absent(rank: int) -> None:
    """This rank ends before it says who it is."""
    _at("arrive", rank, lambda: os._exit(1))


def hangs(rank: int) -> None:
    """This rank waits in C code for ever, where no exception reaches it."""
    _at("values: scatter", rank, lambda: signal.sigwait({signal.SIGUSR2}))


def none(rank: int) -> None:
    pass


def _is(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)


def _at(step: str, rank: int, do: Callable[[], object]) -> None:
    """When the others know that this rank is there, so that they go into the collective; "arrive": before they do."""
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
