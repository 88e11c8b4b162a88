"""A device that computes nothing: torch's slot for backends of others, with streams and events that count who waits for them.

One process can have one such backend, for good: only processes that end after it may import this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelisms.device import DIFFERENCES

NAME = "dryrun"
WAITS: Counter[str] = Counter()  # of the host for the device


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> Event:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        WAITS["event"] += 1


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()

    def synchronize(self) -> None:
        WAITS["stream"] += 1


class Module(backend_registration._DummyBackendModule):
    """What torch.cuda is for CUDA."""

    Stream, Event = Stream, Event

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        WAITS["device"] += 1

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None: ...


def register() -> None:
    """Makes the device, with the decisions of CUDA."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    _LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
    _LIBRARY.impl("empty_strided", lambda size, stride, dtype=None, **_: _empty(size, dtype), "PrivateUse1")
    _LIBRARY.impl("_copy_from", lambda source, target, non_blocking=False: target, "PrivateUse1")
    DIFFERENCES[NAME] = DIFFERENCES["cuda"]


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, *_: Any, **__: Any) -> Tensor:
    """For the few that are made outside of the mode without memory."""
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


_LIBRARY = torch.library.Library("aten", "IMPL")


class Traffic(TorchDispatchMode):
    """Counts what leaves the device for the host, and the bytes of fp32 that are gathered in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: Counter[str] = Counter()
        self.gathered = 0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        here = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == NAME]
        there = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type == "cpu"]
        if here and (there or op is torch.ops.aten._local_scalar_dense.default):
            self.to_host[str(op)] += 1
        if "all_gather" in op.name() or "allgather" in op.name():
            wide = [
                x.numel() * 4 for x in tree_leaves((args, result)) if isinstance(x, Tensor) and x.dtype == torch.float32
            ]
            self.gathered = max([self.gathered, *wide])
        return result
