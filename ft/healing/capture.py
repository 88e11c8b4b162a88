"""The state that a group must receive to equal the others: named pairs of state_dict and load_state_dict, seen as a manifest and the memory
of its tensors.

Flow: the trainer registers model, optimizer and metrics, the Manager the ledger, in a StateRegistry. A source takes a StateSnapshot at a
step's boundary and offers it; a joiner takes one of its own state, receives into its tensors, and loads what came with them. Only local
shards are looked at: no collective, so each rank heals from its own counterpart and none waits for another.

A chunk that lies in one contiguous tensor in host memory *is* that memory: a transport sends it from there and receives it into there.
All others pass through a StagingBuffer: several small tensors in a chunk, tensors that are not contiguous, tensors on a device (pinned,
on a stream of its own). That happens in TensorPayload and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ft.device import streams_of
from ft.healing.format import CHUNK_BYTES, FormatError, StateManifest, from_json

# Any bits of that size may be moved as these
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StateSnapshot:
    """The state as it stands: tensors are not copied, so it is valid until the next commit. `registered`: the tensors, by name; a DTensor
    is itself there, and its local shard in `local`. `ready`: event on `device` (None: all are the host's) of when it was taken; a body is
    made later, by a thread that may find the next forward queued by then."""

    manifest: StateManifest
    local: Mapping[str, torch.Tensor]
    registered: Mapping[str, torch.Tensor]
    device: torch.device | None
    ready: Any

    def body(self, manifest: StateManifest | None = None) -> TensorPayload:
        manifest = manifest or self.manifest
        return TensorPayload(manifest, [self.local[entry.name] for entry in manifest.entries], self.device, self.ready)

    def body_for(self, theirs: StateManifest) -> TensorPayload:
        """Our memory for the state that `theirs` announces. Raises FormatError, which names the tensor, where ours is another, before
        a byte has been written."""
        ours, given = ({entry.name: str(entry) for entry in one.entries} for one in (self.manifest, theirs))
        for name in [*given, *ours]:
            if name not in ours or name not in given:
                raise FormatError(f"{name}: only {'they have' if name in given else 'we have'} such a tensor")
            if given[name] != ours[name]:
                raise FormatError(f"{name}: they have {given[name]}, we {ours[name]}")
        if differing := sorted(theirs.values.keys() ^ self.manifest.values.keys()):
            raise FormatError(f"not registered by both: {', '.join(differing)[:200]}")
        return self.body(theirs)

    def values_of(self, theirs: StateManifest) -> dict[str, Any]:
        """Their state, with our own tensors in it, which have their bytes by now."""
        tensors = [self.registered[entry.name] for entry in theirs.entries]
        return {name: from_json(tree, tensors) for name, tree in theirs.values.items()}


class StateRegistry:
    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register_state(self, name: str, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]) -> None:
        """A name may be used once. `state_dict` must give the same tensors each time, not copies: they are received into."""
        if name in self._pairs:
            raise ValueError(f"state {name} is registered already")
        if not name or "/" in name:
            raise ValueError(f"state {name!r}: a name has characters, none of them /")
        self._pairs[name] = (state_dict, load_state_dict)

    def snapshot(self) -> StateSnapshot:
        """Raises FormatError, which names the place, where something is registered that cannot be sent."""
        registered, local = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

        def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
            registered[name], local[name] = tensor, _local(name, tensor)
            return local[name]

        manifest = StateManifest.describe({name: state_dict() for name, (state_dict, _) in self._pairs.items()}, note)
        devices = {tensor.device for tensor in local.values() if streams_of(tensor.device)}
        assert len(devices) <= 1, f"one rank's state lies on one device, not on {sorted(map(str, devices))}"
        device = next(iter(devices), None)
        ready = streams_of(device).current_stream(device).record_event() if device is not None else None
        return StateSnapshot(manifest, local, registered, device, ready)

    def load(self, values: Mapping[str, Any]) -> None:
        """Sets all of it. The order is that of registration."""
        assert values.keys() == self._pairs.keys(), f"{sorted(values)} for {sorted(self._pairs)}"
        for name, (_, set_) in self._pairs.items():
            set_(values[name])


class StagingBuffer:
    """Room for `chunks` chunks, for the thread that makes it. Pinned, with a stream (of `streams`), if the body lies on a device."""

    def __init__(
        self, body: TensorPayload, chunks: int = 1, *, streams: Any = None, allocate: Callable[..., Any] = torch.empty
    ) -> None:
        self._streams = streams or (streams_of(body.device) if body.device is not None else None)
        if self._streams is not None:  # CUDA begins each thread with device 0, and pins memory in a context of it
            self._streams.set_device(body.device)
        self.bytes = allocate(chunks * CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._streams is not None)
        self.view = self.bytes.numpy().data
        self.stream: Any = None
        if self._streams is not None:
            self.stream = self._streams.Stream(body.device)
            self.stream.wait_event(body.ready)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, copies are queued on its stream, where it has one; they are done at the end."""
        with torch.no_grad(), self._streams.stream(self.stream) if self._streams is not None else nullcontext():
            yield
        if self.stream is not None:
            self.stream.synchronize()


class TensorPayload:
    """The tensors' bytes, as numbered chunks. `tensors` are in the manifest's order, of its dtypes and shapes, on `device` or on the host;
    a copy waits for `ready`, on the device, and for nothing that was queued after it."""

    def __init__(
        self, manifest: StateManifest, tensors: Sequence[torch.Tensor], device: torch.device | None, ready: Any
    ) -> None:
        self.manifest, self.device, self.ready = manifest, device, ready
        self._tensors = [  # the same memory: flat bytes if a tensor is contiguous, else whole numbers of the same size
            x.view(-1).view(torch.uint8) if x.is_contiguous() else x.view(_INTEGERS[x.element_size()])
            for x in (tensor.detach() for tensor in tensors)
        ]
        self._views = [x.numpy().data if x.is_contiguous() and x.device.type == "cpu" else None for x in self._tensors]

    def direct(self, first: int, last: int) -> memoryview | None:
        """The memory of chunks first..last, if it is one piece of host memory."""
        start, end = first * CHUNK_BYTES, min((last + 1) * CHUNK_BYTES, self.manifest.total_bytes)
        # once per chunk, so in few words: `pieces` takes ten times as long
        index = bisect_right(self.manifest.offsets, start) - 1
        low = start - self.manifest.offsets[index]
        view = self._views[index]
        return view[low : low + end - start] if view is not None and low + end - start <= len(view) else None

    def read(self, chunk: int, staging: StagingBuffer, at: int = 0) -> memoryview:
        """Copies a chunk into the staging buffer's place number `at`, with zeros between the tensors."""
        start, end = self.manifest.span(chunk)
        view = staging.view[at * CHUNK_BYTES : at * CHUNK_BYTES + end - start]
        if (memory := self.direct(chunk, chunk)) is not None:
            np.copyto(np.asarray(view), np.asarray(memory))  # without the interpreter's lock, and torch's threads
        else:
            self._copy(chunk, staging, at, _get)
        return view

    def write(self, chunk: int, staging: StagingBuffer, at: int = 0) -> None:
        """Copies a chunk from the staging buffer's place number `at` to where it belongs."""
        self._copy(chunk, staging, at, _put)

    def _copy(self, chunk: int, staging: StagingBuffer, at: int, copy: Callable[..., None]) -> None:
        start, end = self.manifest.span(chunk)
        place = staging.bytes[at * CHUNK_BYTES : at * CHUNK_BYTES + end - start]
        pieces = self.manifest.pieces(start, end)
        if copy is _get and sum(high - low for _, low, high in pieces) < end - start:
            place.zero_()
        with staging.copying():
            for index, low, high in pieces:
                offset = self.manifest.entries[index].offset + low - start
                copy(self._tensors[index], low, high, place[offset : offset + high - low])


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, in memory of its own shape. Raises FormatError for tensors that have no bytes of their own."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor; its module costs a second to import
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # what a functional collective still computes
        tensor = tensor.wait()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise FormatError(f"{name}: a tensor without plain memory ({tensor.layout}, {tensor.device}) cannot be sent")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise FormatError(f"{name}: an expanded tensor cannot be received into")
    if tensor.is_conj() or tensor.is_neg():
        raise FormatError(f"{name}: a lazily conjugated or negated tensor cannot be sent")
    return tensor


def _get(bits: torch.Tensor, low: int, high: int, place: torch.Tensor) -> None:
    """Bytes low..high of a tensor, in the order of its elements, into `place`."""
    if bits.is_contiguous():
        part = bits[low:high]
    else:
        size = bits.element_size()
        part = torch.take(bits, torch.arange(low // size, high // size, device=bits.device)).view(torch.uint8)
    place.copy_(part, non_blocking=True)


def _put(bits: torch.Tensor, low: int, high: int, place: torch.Tensor) -> None:
    if bits.is_contiguous():
        bits[low:high].copy_(place, non_blocking=True)
        return
    size = bits.element_size()
    # a place may begin where no element of this size could: move its bytes first
    numbers = place.to(bits.device, copy=True).view(bits.dtype)
    bits.put_(torch.arange(low // size, high // size, device=bits.device), numbers)
