"""The sums of a model in fragments: each step those of one of them, in turns (semi_sync.py).

Flow: manager.py uses this as Gradients. Each fragment has Gradients of its own, with its own buckets and memory; the step alone determines
whose turn it is, so all groups send the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from ft.buckets import BUCKET_BYTES
from ft.gradients import Gradients


def _of_turn(name: str) -> Any:
    """Gradients' method of that name, called of the fragment whose turn it is."""
    return lambda self, *given, **more: getattr(self._turn, name)(*given, **more)


class FragmentGradients(Gradients):
    """`attach` is called once for each fragment, in their order. `dropped`: gradients were thrown away since it was last set to False."""

    def __init__(self, *, shared: bool = False, quantized: bool = False, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(shared=shared, quantized=quantized, bucket_bytes=bucket_bytes)
        self._fragments: list[Gradients] = []
        self._turn: Gradients
        self._holders: dict[int, Gradients] = {}  # by the step that they hold sums of
        self.dropped = False

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        fragment = Gradients(shared=self._shared, quantized=self._quantized, bucket_bytes=self._bucket_bytes)
        fragment.attach(parameters)
        self._fragments.append(fragment)

    @property
    def shape(self) -> tuple[tuple[str, str], ...]:
        shapes = [fragment.shape for fragment in self._fragments]
        return tuple(
            (name, hashlib.sha256(repr(alike).encode()).hexdigest()[:16])
            for name, alike in ((of[0][0], [value for _, value in of]) for of in zip(*shapes, strict=True))
        )

    def prepare(self) -> None:
        for fragment in self._fragments:
            fragment.prepare()

    def close(self) -> None:
        for fragment in self._fragments:
            fragment.close()

    # ------------------------------------------------------------------------------------------------ the one whose turn it is

    def open(self, group: dist.ProcessGroup, participants: int, *, contributes: bool = True, step: int = 0) -> None:
        self._turn = self._fragments[step % len(self._fragments)]
        self._turn.open(group, participants, contributes=contributes, step=step)

    begin, last_pass, send, launch = map(_of_turn, ("begin", "last_pass", "send", "launch"))
    wait, give_up, all_reduce = map(_of_turn, ("wait", "give_up", "all_reduce"))

    def deliver(self, held: int | None = None) -> None:
        (self._turn if held is None else self._holders.pop(held)).deliver(held)

    @property
    def can_repeat(self) -> bool:
        return self._turn.can_repeat

    # ------------------------------------------------------------------------------------------------ all of them

    def hold(self, step: int) -> None:
        self._holders[step] = self._turn
        self._turn.hold(step)

    def drop_held(self) -> None:
        self._holders.clear()
        for fragment in self._fragments:
            fragment.drop_held()

    def drop(self) -> None:
        self.dropped = True
        for fragment in self._fragments:
            fragment.drop()
