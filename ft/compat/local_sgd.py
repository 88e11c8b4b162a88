"""torchft's LocalSGD and DiLoCo: replica groups step by themselves, and reduce only now and then, through the Manager.

    with DiLoCo(manager, [model], inner, outer, sync_every=100):
        for batch in data:
            inner.zero_grad()
            loss(model(batch)).backward()
            inner.step()                        # reduces, and steps the outer optimizer, when that is due

semi_sync.py has the algorithm. A reduction is a step of the Manager (`current_step`); with fragment_sync_delay its body has inner steps.
Failed reductions are repeated with the same values if groups have one rank. If a step is dropped (a failure or a reported error with
groups of several ranks; a reported error in a group that is alone), no weights change, and the next reduction includes the changes. If a
group of one rank among others reports an error, all groups take the mean of the others, and that group loses its inner steps since the last
reduction. A group that heals starts from the outer weights, and sends zeros in its first reduction; so do, at step 0 with init_sync, all
groups but one: they lose the inner steps before the first reduction.
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
    """Reduces fragments in turn, by `schedule`, in hooks of `optimizer`. A context manager: the hooks are removed at its exit."""

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
        self.inner_steps_done = 0  # optimizer steps since the last reduction
        self._works: list[dist.Work] = []
        self._pieces: list[Tensor] = []  # views of the current reduction's buckets, by parameter
        self._quantized = quantized
        self._feedback: list[list[ErrorFeedback]] = [[] for _ in fragments]  # by fragment and bucket
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
            self._send(self._current)
        if self.inner_steps_done == self._schedule.inner_steps:
            self._complete()

    def _complete(self) -> None:
        self.inner_steps_done, fragment = 0, self.fragments[self._current]
        for work in self._works:
            work.wait()
        if self._manager.should_commit():
            fragment.step(self._pieces)
        self._works, self._pieces = [], []

    @property
    def _current(self) -> int:
        """Index of the fragment that is reduced next."""
        return self._manager.current_step() % len(self.fragments)

    def _send(self, index: int) -> None:
        """Sends a fragment in buckets, each of one dtype on one device, in an order that is the same in all groups."""
        self._pieces, buckets = in_buckets(self.fragments[index].pseudo_gradients(), self._bucket_bytes)
        feedback = self._feedback[index] = self._feedback[index] or [ErrorFeedback() for _ in buckets]
        self._works = [
            self._manager.allreduce(bucket, self._quantized, feedback=own)
            for bucket, own in zip(buckets, feedback, strict=True)
        ]

    def _heal(self, index: int, state: dict[str, Any]) -> None:
        self.fragments[index].load_state_dict(state)
        self.fragments[index].reset()
        self._feedback[index] = []


class LocalSGD(_Syncs):
    """Sets the model's weights to the mean over all groups after every `sync_every` steps of `optimizer` (Stich, arXiv 1805.09767).

    Raises ValueError for a `sync_every` below 1."""

    def __init__(self, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> None:
        schedule = Schedule(sync_every)
        schedule.check(("sync_every", "", "", ""))
        super().__init__(manager, [Fragment(_trained(model), None)], optimizer, schedule)

    def sync(self) -> None:
        """Averages the weights now, such as at the end of an epoch, and counts inner steps anew. Each group calls it in place of its
        next reduction."""
        self._manager.start_quorum()
        self._send(self._current)
        self._complete()


class DiLoCo(_Syncs):
    """Averages the changes of a fragment's weights after every `sync_every` steps of `inner_optimizer`, and steps `outer_optimizer` with
    them (Douillard et al., arXiv 2311.08105); with several fragments, one every sync_every / len(model_fragments) steps (arXiv 2501.18512).

    `outer_optimizer`: one over the parameters of all fragments, or one for each. `fragment_sync_delay`: inner steps that a reduction may
    overlap; `fragment_update_alpha`: weight of a group's local weights. `should_quantize`: reduce in int8, with error feedback
    (quantized.py). `bucket_cap_mb`: size limit of a bucket in MiB. `backup_device`, `pin_memory` and `use_bucketization` have no effect:
    outer weights are on the device of the local ones, and reductions always use buckets. Raises ValueError for an invalid schedule."""

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
            raise ValueError(f"outer_optimizer: {len(outer)} optimizers for {count} fragments; nearest: 1 or {count}")
        fragments = [
            Fragment(_trained(module), optimizer, alpha=fragment_update_alpha)
            for module, optimizer in zip(model_fragments, outer, strict=True)
        ]
        super().__init__(
            manager, fragments, inner_optimizer, schedule, bucket_mb=bucket_cap_mb, quantized=should_quantize
        )


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def in_buckets(tensors: Sequence[Tensor], max_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
    """Copies tensors into flat buckets of one dtype, of at most `max_bytes` or one tensor each; returns their views, and the buckets."""
    pieces, flats = dict[int, Tensor](), list[Tensor]()
    for bucket in _take_tensors(tensors, max_bytes):
        flats.append(flat := _flatten_dense_tensors(bucket))
        pieces.update(zip(map(id, bucket), _unflatten_dense_tensors(flat, bucket), strict=True))
    return [pieces[id(tensor)] for tensor in tensors], flats
