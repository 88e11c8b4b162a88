"""torchft's LocalSGD and DiLoCo: groups step by themselves, and sum now and then, with torchft's names over the Manager.

    with DiLoCo(manager, [model], inner, outer, sync_every=100):
        for batch in data:
            inner.zero_grad()
            loss(model(batch)).backward()
            inner.step()                        # sums, and steps the outer optimizer, when it is time

semi_sync.py has the algorithm. A sum is a step of the Manager (`current_step`); with fragment_sync_delay its body has inner steps. Sums
that fail are done again with the same values. Where a step is dropped all the same (a group of several ranks, a reported error) no weights
change, and the next sum carries what this one would have. A group that heals begins from the outer weights, with zeros in its first sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from ft.config import Schedule
from ft.quantized import ErrorFeedback
from ft.semi_sync import Fragment

if TYPE_CHECKING:
    from ft.compat.manager import Manager

BUCKET_MB = 32.0


class _Syncs:
    """Sums fragments in turns, by `schedule`, with hooks of `optimizer`. A context: outside of it the optimizer is as it was."""

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[Fragment],
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        bucket_mb: float | None = None,
        quantized: bool = False,
    ) -> None:
        self._manager, self.fragments, self._optimizer, self._schedule = manager, fragments, optimizer, schedule
        self._bucket_bytes = int((BUCKET_MB if bucket_mb is None else bucket_mb) * (1 << 20))
        self.inner_steps_done = 0  # optimizer steps since the last sum
        self._works: list[dist.Work] = []
        self._pieces: list[Tensor] = []  # of the buckets on their way, by parameter
        self._quantized = quantized
        self._feedback: list[list[ErrorFeedback]] = [[] for _ in fragments]  # of each, by bucket
        self._hooks: list[Any] = []
        manager.heal_from_one()
        for place, fragment in enumerate(fragments):
            manager.register_state_dict_fn(f"outer {place}", partial(self._heal, place), fragment.state_dict)

    def __enter__(self) -> _Syncs:
        before = self._optimizer.register_step_pre_hook(lambda *_: self._manager.disallow_state_dict_read())
        self._hooks += [before, self._optimizer.register_step_post_hook(lambda *_: self._stepped())]
        return self

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _stepped(self) -> None:
        self.inner_steps_done += 1
        if self.inner_steps_done == self._schedule.inner_steps - self._schedule.delay:
            self._manager.start_quorum()
            self._send(self._turn)
        if self.inner_steps_done == self._schedule.inner_steps:
            self.inner_steps_done, fragment = 0, self.fragments[self._turn]
            for work in self._works:
                work.wait()
            if self._manager.should_commit():
                fragment.step(self._pieces)
            self._works, self._pieces = [], []

    @property
    def _turn(self) -> int:
        return self._manager.current_step() % len(self.fragments)

    def _send(self, turn: int) -> None:
        """Whole buckets, in one order, each of one dtype on one device; so do all groups, also one that gives nothing."""
        self._pieces, buckets = in_buckets(self.fragments[turn].pseudo_gradients(), self._bucket_bytes)
        feedback = self._feedback[turn] = self._feedback[turn] or [ErrorFeedback() for _ in buckets]
        self._works = [
            self._manager.allreduce(bucket, self._quantized, feedback=own)
            for bucket, own in zip(buckets, feedback, strict=True)
        ]

    def _heal(self, turn: int, state: dict[str, Any]) -> None:
        self.fragments[turn].load_state_dict(state)
        self.fragments[turn].reset()
        self._feedback[turn] = []


class LocalSGD(_Syncs):
    """Every `sync_every` steps of `optimizer` the model's weights become the mean of all groups' (Stich, arXiv 1805.09767).

    Raises ValueError for a `sync_every` below 1."""

    def __init__(self, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> None:
        schedule = Schedule(sync_every)
        schedule.check(("sync_every", "", "", ""))
        super().__init__(manager, [Fragment(_trained(model), None)], optimizer, schedule)


class DiLoCo(_Syncs):
    """Every `sync_every` steps of `inner_optimizer` what a fragment's weights have moved is averaged, and `outer_optimizer` steps with it
    (Douillard et al., arXiv 2311.08105); of several fragments one every sync_every / len(model_fragments) steps (arXiv 2501.18512).

    `outer_optimizer`: over the fragments' parameters, one for all or one for each. `fragment_sync_delay`: inner steps that a sum may
    travel; `fragment_update_alpha`: the share of its own way that a group keeps. `should_quantize`: sums in eight bits, with error feedback
    (quantized.py). `bucket_cap_mb`: MiB that travel together at most.
    `backup_device`, `pin_memory`, `use_bucketization` change nothing: outer weights lie beside the local ones, and travel in buckets
    always. Raises ValueError for a schedule that does not fit."""

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: float | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        count = len(model_fragments)
        schedule = Schedule(sync_every, count, fragment_sync_delay, fragment_update_alpha)
        schedule.check(("sync_every", "len(model_fragments)", "fragment_sync_delay", "fragment_update_alpha"))
        outer = outer_optimizer if isinstance(outer_optimizer, Sequence) else [outer_optimizer] * count
        if len(outer) != count:
            raise ValueError(f"outer_optimizer: {len(outer)} of them for {count} fragments; nearest: one, or {count}")
        fragments = [
            Fragment(_trained(module), optimizer, alpha=fragment_update_alpha)
            for module, optimizer in zip(model_fragments, outer, strict=True)
        ]
        super().__init__(
            manager, fragments, inner_optimizer, schedule, bucket_mb=bucket_cap_mb, quantized=should_quantize
        )


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def in_buckets(tensors: Sequence[Tensor], most_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors as pieces of few flat ones of one kind each; and those. One larger than `most_bytes` is alone."""
    pieces, flats = dict[int, Tensor](), list[Tensor]()
    for bucket in _take_tensors(tensors, most_bytes):
        flats.append(flat := _flatten_dense_tensors(bucket))
        pieces.update(zip(map(id, bucket), _unflatten_dense_tensors(flat, bucket), strict=True))
    return [pieces[id(tensor)] for tensor in tensors], flats
