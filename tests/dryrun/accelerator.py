"""A device that computes nothing: torch's slot for out-of-tree backends, with streams and events that count the waits for them.

One process can have one such backend, for good: only processes that end after it may import this module.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ft.device import HAVE_STREAMS
from parallelisms.device import DEVICE_TRAITS

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
    device = torch.device("cpu")  # until there is the other one

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()

    def synchronize(self) -> None:
        WAITS["stream"] += 1


class Module(backend_registration._DummyBackendModule):
    """The module of this device, as torch.cuda is that of CUDA."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self._current = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

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
    DEVICE_TRAITS[NAME] = DEVICE_TRAITS["cuda"]
    HAVE_STREAMS.add(NAME)
    Stream.device = torch.device(NAME, 0)
    F.scaled_dot_product_attention = _attention  # type: ignore[assignment]


def _attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """The kernel that CUDA has for bf16; torch decides by kinds of devices that it knows, and would multiply in fp32 here."""
    result: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return result[0]


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, *_: Any, **__: Any) -> Tensor:
    """Creates the few tensors that are made outside of the mode without memory."""
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


_LIBRARY = torch.library.Library("aten", "IMPL")


Shape = tuple[int, ...]


class Traffic(TorchDispatchMode):
    """Counts what a step of this device's rank does, to be held against what it may do.

    reads       what leaves the device for the host, by function
    from_host   copies to the device that the host waits for, by function
    gathered    the most bytes of fp32 that an all-gather takes or gives
    products    what matmuls multiply that is no bf16, by dtype
    wide        copies to fp32 in a shape of `whole`, those of weights; sums of gradients over microbatches may have it
    """

    def __init__(self, whole: Collection[Shape] = ()) -> None:
        super().__init__()
        self._whole = whole
        self.paused = False
        self._find_shapes: Any = None
        self.reads: Counter[str] = Counter()
        self.from_host: Counter[str] = Counter()
        self.gathered = 0
        self.products: Counter[str] = Counter()
        self.wide = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True, as torch.compile otherwise skips blocks: it traces nothing under a mode that it does not take for a tool."""
        return True

    def __enter__(self) -> Traffic:
        # DTensor finds the shapes of results by tensors of the whole size, which nobody holds
        self._find_shapes = find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*arguments: Any) -> Any:
            self.paused = True
            try:
                return find_shapes(*arguments)
            finally:
                self.paused = False

        cast(Any, ShardingPropagator)._propagate_tensor_meta_non_cached = unseen
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        cast(Any, ShardingPropagator)._propagate_tensor_meta_non_cached = self._find_shapes

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor's operation comes again as those on its local part
        result = op(*args, **(kwargs or {}))
        if not self.paused:
            given = _tensors((args, kwargs))
            self._note(op, given, _tensors(result))
            if op in _COPIES and not ((kwargs or {}).get("non_blocking") or (args[2:] and args[2])):
                ends = given[-1].device.type, _tensors(result)[0].device.type
                if ends == ("cpu", NAME):
                    self.from_host[_callers()[0]] += 1
        return result

    def _note(self, op: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if any(x.device.type == NAME for x in given) and (
            op is torch.ops.aten._local_scalar_dense.default or any(x.device.type == "cpu" for x in made)
        ):
            names = _callers()
            if "_warmup_p2p" in _callers(torch_too=True):
                return  # torch opens a pipeline's connections in the first step, and waits for them
            self.reads[names[0]] += 1
        name = op.name()
        if "all_gather" in name or "allgather" in name:
            self.gathered = max([self.gathered, *(x.numel() * 4 for x in (*given, *made) if x.dtype == torch.float32)])
        if factors := _PRODUCTS.get(name.partition(".")[0]):
            self.products.update(str(x.dtype) for x in given[factors] if x.dtype != torch.bfloat16)
        if op is torch.ops.aten._to_copy.default and "to_accumulated_grad_if_needed" not in _callers(torch_too=True):
            self.wide += sum(x.dtype == torch.float32 and tuple(x.shape) in self._whole for x in made)


def _callers(*, torch_too: bool = False) -> list[str]:
    """Returns the names of this repository's functions on the stack, without tests/dryrun, innermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if torch_too or (file.startswith(_ROOT) and not file.startswith((_OWN, torch.__path__[0]))):
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return [*names, "?", "?"]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


_OWN = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2])
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_PRODUCTS = {  # and which of the tensors given to it are multiplied
    "aten::mm": slice(0, 2),
    "aten::bmm": slice(0, 2),
    "aten::addmm": slice(1, 3),
    "aten::baddbmm": slice(1, 3),
    "aten::_scaled_dot_product_flash_attention": slice(0, 3),
    "aten::_scaled_dot_product_flash_attention_backward": slice(0, 4),
}
