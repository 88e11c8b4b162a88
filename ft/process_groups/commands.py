"""What a group says to its child, and the child to it. The first are dataclasses, pickled: a process to its own child. The second are
JSON: the child talks to the network, and nothing that comes from there is ever unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft.process_groups.operations import Operation
from ft.protocol.messages import Shape

READY, FAILED, ENDED, DROPPED = (
    "ready",
    "failed",
    "ended",
    "dropped",
)  # of replies: [what, number, error, more]; more of FAILED: absent ranks, and strangers; of DROPPED: what Unmap named


@dataclass(frozen=True)
class Form:
    """Build the group; answered by READY or FAILED."""

    kind: str  # gloo, nccl
    store: str
    rank: int
    size: int
    limit_s: float
    interface: str | None
    device: int | None  # CUDA device, for nccl
    shape: Shape = ()
    holders: Sequence[int] = ()


@dataclass(frozen=True)
class Map:
    """The descriptor that comes along is memory, to be known by this number."""

    number: int
    size: int


@dataclass(frozen=True)
class MapDevice:
    """Memory of a GPU, to be known by this number: what torch's `_share_cuda_` gave for it."""

    number: int
    export: tuple[Any, ...]


@dataclass(frozen=True)
class Unmap:
    """Answered by DROPPED."""

    numbers: list[int]


@dataclass(frozen=True)
class Start:
    """Start an operation, with a Place where it has a tensor; answered by ENDED. `after`: a CUDA event of the parent to wait for first."""

    number: int
    operation: Operation
    after: Any = None
