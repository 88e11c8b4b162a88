"""The state that a joiner receives: named pairs of state_dict and load_state_dict, in the form of a manifest and the memory of its tensors.

Flow: the trainer registers model, optimizer and metrics, and the Manager its ledger, in a StateRegistry. A source takes a StateView at
a step boundary and offers it; a joiner takes one of its own state, receives into its tensors, and loads the other values. Only local shards
are used, without a collective, so each rank heals from the same rank of a different replica group, and waits for no rank of its own.

A chunk inside one contiguous tensor in host memory *is* that memory: a transport sends and receives it in place. TensorPayload copies all
others (of several small tensors, of tensors that are not contiguous or are on a device) through a StagingBuffer, pinned for a device.
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

REFUSAL = ""  # name of the reason in a state that cannot be sent; no registered state may have it
# Element types for copying any data of that size in bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StateView:
    """The current state. Tensors are not copied, so it is valid until the next commit. `registered`: the tensors by name; `local`: their
    local shards, for DTensors. `device`: that of the tensors, None: the host. `ready`: event on `device`, recorded after all writes to the
    tensors; None on the host."""

    manifest: StateManifest
    local: Mapping[str, torch.Tensor]
    registered: Mapping[str, torch.Tensor]
    device: torch.device | None
    ready: Any

    @staticmethod
    def refusal(why: str) -> StateView:
        """Returns an empty state that is offered in place of one that cannot be sent: a joiner fails with the reason (`body_for`)."""
        return StateView(StateManifest((), {REFUSAL: why}), {}, {}, None, None)

    def body(self, manifest: StateManifest | None = None) -> TensorPayload:
        manifest = manifest or self.manifest
        return TensorPayload(manifest, [self.local[entry.name] for entry in manifest.entries], self.device, self.ready)

    def body_for(self, theirs: StateManifest) -> TensorPayload:
        """Returns our memory for the state that `theirs` describes. Raises FormatError, which names the tensor, if ours differs."""
        if REFUSAL in theirs.values:
            raise FormatError(f"the source cannot send its state: {str(theirs.values[REFUSAL])[:1000]}")
        ours, given = ({entry.name: str(entry) for entry in one.entries} for one in (self.manifest, theirs))
        for name in [*given, *ours]:
            if name not in ours or name not in given:
                hint = (
                    "; a program creates its optimizer's state before the first step: ft.init_optim_state, ft.Optimizer"
                )
                whose = f"the source has such a tensor{hint}" if name in given else "this group has such a tensor"
                raise FormatError(f"{name}: only {whose}")
            if given[name] != ours[name]:
                raise FormatError(f"{name}: the source has {given[name]}, this group {ours[name]}")
        if differing := sorted(theirs.values.keys() ^ self.manifest.values.keys()):
            raise FormatError(f"not registered by both: {', '.join(differing)[:200]}")
        return self.body(theirs)

    def values_of(self, theirs: StateManifest) -> dict[str, Any]:
        """Returns their state, with our own tensors, which must have received their bytes before."""
        tensors = [self.registered[entry.name] for entry in theirs.entries]
        return {name: from_json(tree, tensors) for name, tree in theirs.values.items()}


class StateRegistry:
    """The state of one rank, in named parts: what a source offers, and a joiner receives."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register_state(self, name: str, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]) -> None:
        """Registers state under a new name. `state_dict` must return the same tensors each time, not copies, as a heal writes into them."""
        if name in self._pairs:
            raise ValueError(f"state {name} is registered already")
        if not name or "/" in name:
            raise ValueError(f"state {name!r}: a name must not be empty or contain '/'")
        self._pairs[name] = (state_dict, load_state_dict)

    def view(self) -> StateView:
        """Returns the current state. Raises FormatError, with the name of the value, if some state cannot be sent."""
        registered, local = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

        def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
            registered[name], local[name] = tensor, _local(name, tensor)
            return local[name]

        manifest = StateManifest.describe({name: state_dict() for name, (state_dict, _) in self._pairs.items()}, note)
        devices = {tensor.device for tensor in local.values() if streams_of(tensor.device)}
        if len(devices) > 1:
            raise FormatError(f"one rank's state lies on one device, not on {' and '.join(sorted(map(str, devices)))}")
        device = next(iter(devices), None)
        ready = streams_of(device).current_stream(device).record_event() if device is not None else None
        return StateView(manifest, local, registered, device, ready)

    def load(self, values: Mapping[str, Any]) -> None:
        """Loads all state, in the order of registration."""
        assert values.keys() == self._pairs.keys(), f"{sorted(values)} for {sorted(self._pairs)}"
        for name, (_, set_) in self._pairs.items():
            set_(values[name])


class StagingBuffer:
    """A buffer of `chunks` chunks, for the thread that makes it. Pinned, with a stream (of `streams`), if the body is on a device."""

    def __init__(
        self, body: TensorPayload, chunks: int = 1, *, streams: Any = None, allocate: Callable[..., Any] = torch.empty
    ) -> None:
        self._streams = streams or (streams_of(body.device) if body.device is not None else None)
        if self._streams is not None:  # CUDA begins each thread on device 0, and pins memory in its context
            self._streams.set_device(body.device)
        self.bytes = allocate(chunks * CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._streams is not None)
        self.view = self.bytes.numpy().data
        self.stream: Any = None
        if self._streams is not None:
            self.stream = self._streams.Stream(body.device)
            self.stream.wait_event(body.ready)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queues the block's copies on its stream, if there is one; they are complete at its end."""
        with torch.no_grad(), self._streams.stream(self.stream) if self._streams is not None else nullcontext():
            yield
        if self.stream is not None:
            self.stream.synchronize()


class TensorPayload:
    """The tensors' bytes, as numbered chunks. `tensors`: as in the manifest, on `device` or the host. Copies wait only for `ready`."""

    def __init__(
        self, manifest: StateManifest, tensors: Sequence[torch.Tensor], device: torch.device | None, ready: Any
    ) -> None:
        self.manifest, self.device, self.ready = manifest, device, ready
        self._tensors = [  # the same memory: flat bytes of a contiguous tensor, else integers of the element size
            x.view(-1).view(torch.uint8) if x.is_contiguous() else x.view(_INTEGERS[x.element_size()])
            for x in (tensor.detach() for tensor in tensors)
        ]
        self._views = [x.numpy().data if x.is_contiguous() and x.device.type == "cpu" else None for x in self._tensors]

    def release(self) -> None:
        """Drops the tensors. Afterwards nothing can be read or written."""
        self._tensors, self._views = [], []

    def direct(self, first: int, last: int) -> memoryview | None:
        """Returns the memory of chunks first..last, or None if it is not one piece of host memory."""
        start, end = first * CHUNK_BYTES, min((last + 1) * CHUNK_BYTES, self.manifest.total_bytes)
        # inline, as it is called for each chunk: `pieces` takes ten times as long
        index = bisect_right(self.manifest.offsets, start) - 1
        low = start - self.manifest.offsets[index]
        view = self._views[index]
        return view[low : low + end - start] if view is not None and low + end - start <= len(view) else None

    def read(self, chunk: int, staging: StagingBuffer, at: int = 0) -> memoryview:
        """Copies a chunk to place `at` of the staging buffer, with zeros between the tensors."""
        start, end = self.manifest.span(chunk)
        view = staging.view[at * CHUNK_BYTES : at * CHUNK_BYTES + end - start]
        if (memory := self.direct(chunk, chunk)) is not None:
            np.copyto(np.asarray(view), np.asarray(memory))  # releases the GIL, and does not use torch's threads
        else:
            self._copy(chunk, staging, at, _get)
        return view

    def write(self, chunk: int, staging: StagingBuffer, at: int = 0) -> None:
        """Copies a chunk from place `at` of the staging buffer into the tensors."""
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
    """Returns this rank's shard of a tensor. Raises FormatError for tensors without plain memory of their own."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor, whose module takes a second to import
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # the pending result of a functional collective
        tensor = tensor.wait()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise FormatError(f"{name}: a tensor without plain memory ({tensor.layout}, {tensor.device}) cannot be sent")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise FormatError(f"{name}: an expanded tensor cannot be received into")
    if tensor.is_conj() or tensor.is_neg():
        raise FormatError(f"{name}: a lazily conjugated or negated tensor cannot be sent")
    return tensor


def _get(bits: torch.Tensor, low: int, high: int, place: torch.Tensor) -> None:
    """Copies bytes low..high of a tensor, in the order of its elements, into `place`."""
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
    # copied first, as `place` may not be aligned to this element size
    numbers = place.to(bits.device, copy=True).view(bits.dtype)
    bits.put_(torch.arange(low // size, high // size, device=bits.device), numbers)
