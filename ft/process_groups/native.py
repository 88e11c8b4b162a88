"""torch's own groups, of one backend each: for the engines of gloo and of NCCL alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.process_groups.errors import GroupError
from ft.process_groups.operations import Operation, Receive
from ft.process_groups.rendezvous import Rendezvous


def failure_of(wait: Callable[[], Any]) -> Exception | None:
    """Returns the error without its traceback, whose frames hold the group; None where there is none."""
    try:
        wait()
    except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to the work)
        return GroupError(_plain_words(str(error)))
    return None


def _plain_words(message: str) -> str:
    """Without the source line in front, and the advice and the stack of C++ behind."""
    message = message.split("\nException raised from", 1)[0].split(" This is typically caused", 1)[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", message)


def source_of(work: dist.Work, operation: Operation) -> int:
    return work._source_rank() if isinstance(operation, Receive) and operation.source is None else -1


def group_of(backend: Any, name: str, device: str, rendezvous: Rendezvous) -> dist.ProcessGroup:
    """torch's ProcessGroup around one backend: it knows all the names that collectives have."""
    group = dist.ProcessGroup(c10d.HashStore(), rendezvous.rank, rendezvous.size)
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
