"""The state that a group must receive to equal the others: named get/set pairs, seen as a manifest and its tensors.

Flow: whoever drives healing registers model, optimizer, schedule and ledger here. A source takes a Snapshot at a step's boundary and
offers it; a joiner takes one of its own state, receives into its tensors, and loads what came with them. Only local shards are looked
at: no collective, so each rank heals from its own counterpart and none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ft.healing.format import Manifest, Refused, from_json, lay_out, to_json
from ft.healing.payload import TensorPayload, Written


@dataclass(frozen=True)
class Snapshot:
    """The state as it stands: tensors are not copied, so it holds until the next commit. `whole`: the tensors as they were registered, by
    name; a DTensor is itself there, and its local shard in `local`. `written`: of when it was taken; a body is made later, by a thread that
    may find the next forward queued by then."""

    manifest: Manifest
    local: Mapping[str, torch.Tensor]
    whole: Mapping[str, torch.Tensor]
    written: Written

    def body(self) -> TensorPayload:
        return TensorPayload(self.manifest, [self.local[entry.name] for entry in self.manifest.entries], self.written)

    def body_for(self, theirs: Manifest) -> TensorPayload:
        """Where what `theirs` announces is to be received. Raises Refused, by name, where it is not what we hold: before a byte has
        been written."""
        ours = {entry.name: entry for entry in self.manifest.entries}
        given = {entry.name: entry for entry in theirs.entries}
        for name in [*given, *ours]:
            if name not in ours or name not in given:
                raise Refused(f"{name}: only {'they have' if name in given else 'we have'} such a tensor")
            if (given[name].dtype, given[name].shape) != (ours[name].dtype, ours[name].shape):
                raise Refused(f"{name}: they have {given[name]}, we {ours[name]}")
        if theirs.values.keys() != self.manifest.values.keys():
            differing = sorted(theirs.values.keys() ^ self.manifest.values.keys())
            raise Refused(f"not registered by both: {', '.join(differing)[:200]}")
        return TensorPayload(theirs, [self.local[entry.name] for entry in theirs.entries], self.written)

    def values_of(self, theirs: Manifest) -> dict[str, Any]:
        """Their state, with our own tensors in it, which hold their bytes by now."""
        tensors = [self.whole[entry.name] for entry in theirs.entries]
        return {name: from_json(tree, tensors) for name, tree in theirs.values.items()}


class State:
    """The registered pairs."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """A name may be used once. `get` must give the same tensors each time, not copies: they are received into."""
        if name in self._pairs:
            raise ValueError(f"state {name} is registered already")
        if not name or "/" in name:
            raise ValueError(f"state {name!r}: a name has characters, none of them /")
        self._pairs[name] = (get, set)

    def snapshot(self) -> Snapshot:
        """Raises Refused, which names the place, where something is registered that cannot be sent."""
        whole: dict[str, torch.Tensor] = {}
        local: dict[str, torch.Tensor] = {}

        def note(name: str, tensor: torch.Tensor) -> int:
            whole[name] = tensor
            local[name] = _local(name, tensor)
            return len(whole) - 1

        values = {name: to_json(get(), name, note) for name, (get, _) in self._pairs.items()}
        entries = lay_out([(name, tensor.dtype, tensor.shape) for name, tensor in local.items()])
        return Snapshot(Manifest(entries, values), local, whole, Written(local.values()))

    def load(self, values: Mapping[str, Any]) -> None:
        """Sets all of it. The order is that of registration."""
        assert values.keys() == self._pairs.keys(), f"{sorted(values)} for {sorted(self._pairs)}"
        for name, (_, set_) in self._pairs.items():
            set_(values[name])


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, in memory of its own shape. Raises Refused for tensors that have no bytes of their own."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor; its module costs a second to import
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # what a functional collective still computes
        tensor = tensor.wait()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise Refused(f"{name}: a tensor without plain memory ({tensor.layout}, {tensor.device}) cannot be sent")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise Refused(f"{name}: an expanded tensor cannot be received into")
    if tensor.is_conj() or tensor.is_neg():
        raise Refused(f"{name}: a lazily conjugated or negated tensor cannot be sent")
    return tensor
