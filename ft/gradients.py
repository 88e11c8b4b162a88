"""Gradients, summed over replica groups out of place, and kept until the step commits.

    gradients = Gradients()
    gradients.attach(model.parameters())
    gradients.begin_attempt(group, participants=3)      # a process group is formed: an attempt begins
    with gradients.last_backward():
        loss.backward()                                 # hooks send what is complete while the backward goes on
    gradients.launch_tail(tail)                         # the rest, with the tail: figures of protocol/step.py
    try:
        tail = gradients.wait()
        gradients.deliver()                             # .grad of every parameter is the sum
    except ProcessGroupError as error:                         # the originals are still there
        group.abandon(str(error), then=gradients.abandon())
        ...                                             # form again, begin_attempt, launch_tail, wait

The hook of a parameter (`_on_gradient`) copies its gradient into its bucket (buckets.py), on the CPU while it is in the cache, on an
accelerator with all of the bucket at once, and sends each bucket when it and all before it are complete. The sum becomes `.grad` by
pointing there (`deliver`): nothing is copied back. A retry copies the same gradients into other buckets, so it sends the same bits.

Memory, on top of autograd's own gradients, which live until `deliver`: see memory.py; also twice the size of tensors that a user
hands over, and three buckets while a quantised one is summed.
With keep=False gradients from 1 MiB on are reduced in place, or, with shared=True, freed when they are copied: a failure loses them.

Sums per slot (`slots` = S > 0): addition of floats is not associative, so the bits of one sum depend on the groups that computed the
slots. Here the layout has S copies of each gradient, one for each slot. A slot's owner sends its gradients in that copy, all others zeros,
which are exact in any order; then each rank adds the S sums in the order of the slots. This costs S times the traffic and the memory.

Quantised (`quantized`): buckets are summed in int8 with error feedback (quantized.py), except the last one, which has the tail.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ft.buckets import (
    BUCKET_BYTES,
    KEPT_SETS,
    TAIL_ELEMENTS,
    BucketLayout,
    BufferPool,
    GradBuffers,
    dtensor_like,
    to_local,
)
from ft.device import streams_of
from ft.process_groups.base import GroupWork
from ft.quantized import CollectiveQueue, ErrorFeedback
from ft.user_sums import ManagedAllreduce


@dataclass
class _Attempt:
    """One try to sum a step's gradients, on one generation."""

    group: dist.ProcessGroup
    participants: int
    contributes: bool
    buffers: GradBuffers
    missing: list[int]  # by bucket: gradients whose hooks have not been called
    ready: set[int] = field(default_factory=set)  # gradients whose hooks have been called
    copied: set[int] = field(default_factory=set)  # gradients that are in their buckets
    in_place: dict[int, Tensor] = field(default_factory=dict)  # what is reduced where it is
    streams: set[Any] = field(default_factory=set)  # of the device, that gradients came on
    launched: int = 0  # buckets; they go in order
    works: list[dist.Work] = field(default_factory=list)
    tail: Tensor | None = None  # since it was launched
    complete: bool = False
    allreduces: list[ManagedAllreduce] = field(default_factory=list)  # of the step, once it has ended
    queue: CollectiveQueue | None = None  # all goes by it, from the first quantised sum on


@dataclass
class _StepState:
    """State that all attempts of one step share."""

    kept: dict[int, Tensor] = field(default_factory=dict)  # gradients, by index
    is_kept: bool = False  # they are all there: a launch had them
    is_lost: bool = False  # an attempt has used them up
    after_last_backward: bool = False
    problem: str = ""  # that a hook saw
    allreduces: list[ManagedAllreduce] = field(default_factory=list)  # in the order they were handed over


class Gradients:
    """`keep`: a failed attempt can be repeated. `shared`: sums lie in memory that a child process maps. `slots`: of each step, which are
    summed one by one and added in their order; 0: a group adds up its slots first. `quantized`: sums in int8; with `keep`, without `slots`.
    `bucket_bytes`: what travels together at most, unless a gradient is larger. `device`: of the tail where there are no parameters.

    For one thread only, except the hooks, which autograd may call from another, and the callable that `abandon` returns."""

    def __init__(
        self,
        *,
        keep: bool = True,
        shared: bool = False,
        slots: int = 0,
        quantized: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        assert not quantized or (keep and not slots)
        self._keep, self._shared, self._bucket_bytes = keep, shared, bucket_bytes
        self._quantized = quantized
        self._feedback: dict[int, ErrorFeedback] = {}  # by bucket
        self._per_slot, self._copies = slots > 0, max(1, slots)  # copies of each gradient in the layout
        self._first_index = 0  # of the first parameter's gradient, in the copy of the slot that is computed
        self._device = torch.device(device)
        self._parameters: list[nn.Parameter] = []
        self._streams: dict[torch.device, Any] = {}  # of their devices (device.streams_of)
        self._frozen: list[nn.Parameter] = []  # attached with them, and not trained
        self._hooks: list[Any] = []
        self._lock = threading.RLock()
        self._buffers: BufferPool | None = None  # for tensors of users, once there are any
        self._attempt: _Attempt | None = None
        self._step = _StepState()
        self._in_last_backward = False
        self._made = 0  # sets, those in use included
        self._delivered: GradBuffers | None = None  # may be in .grad
        self._held: dict[int, _Attempt] = {}

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers the parameters that are trained. Their order is part of the layout and must be the same in each group. Once per part of
        the model, before `fingerprint` is asked for. Raises ValueError for a complex one where sums are quantised."""
        assert "_layout" not in self.__dict__, "parameters are attached before the first step"
        known = {id(parameter) for parameter in self._parameters}
        for parameter in parameters:
            if self._quantized and parameter.is_complex():
                raise ValueError(f"a parameter of {parameter.dtype}: sums in int8 are of real numbers alone")
            if not parameter.requires_grad:
                self._frozen.append(parameter)
            elif id(parameter) not in known:
                known.add(id(parameter))
                hook = partial(self._on_gradient, len(self._parameters))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                self._parameters.append(parameter)
                self._streams[parameter.device] = streams_of(parameter.device)

    @property
    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Properties that all groups must have alike, each with its digest: (("gradient shapes", "5f0c..."), ...)."""
        return self._layout.fingerprint

    @cached_property
    def _layout(self) -> BucketLayout:
        return BucketLayout(
            [to_local(parameter.detach()) for parameter in self._parameters] * self._copies,
            bucket_bytes=self._bucket_bytes,
            in_place=not self._keep and not self._shared and not self._per_slot,
            device=self._device,
            quantized=self._quantized,
        )

    @cached_property
    def _free_sets(self) -> deque[GradBuffers]:
        """Sets that nothing uses; the one that was returned first comes first."""
        return deque(self._make_set() for _ in range(KEPT_SETS))

    def _make_set(self) -> GradBuffers:
        self._made += 1
        return GradBuffers(self._layout, self._parameters * self._copies, shared=self._shared)

    def _return_set(self, buffers: GradBuffers) -> None:
        """Keeps KEPT_SETS sets at least, and frees what was made beyond them. From any thread."""
        with self._lock:
            if self._made > KEPT_SETS:
                self._made -= 1
            else:
                self._free_sets.append(buffers)

    def prepare(self) -> None:
        """Allocates and touches the sets that `begin_attempt` takes, so that no member of a generation waits for it. Free when repeated."""
        _ = self._free_sets

    def close(self) -> None:
        """Takes the hooks away. Nothing is sent any more."""
        if self._attempt is not None and self._attempt.queue is not None:
            self._attempt.queue.close()
        while self._hooks:
            self._hooks.pop().remove()

    # ------------------------------------------------------------------------------------------------ an attempt

    def begin_attempt(
        self, group: dist.ProcessGroup, participants: int, *, contributes: bool = True, step: int = 0
    ) -> None:
        """A new attempt on a process group that is formed. `participants`: the divisor of means. contributes=False: this group sends
        zeros alone. `step`: unused here; FragmentGradients chooses the fragment by it. An earlier attempt is complete, or was abandoned."""
        with self._lock:
            if self._attempt is not None:
                assert self._attempt.complete, "an attempt that has not ended is abandoned first"
                self.abandon()()
            if (delivered := self._delivered) is not None:
                gradients = (*(parameter.grad for parameter in self._parameters), *self._step.kept.values())
                used = {to_local(g).untyped_storage().data_ptr() for g in gradients if g is not None}
                if used.isdisjoint(delivered.addresses):
                    self._return_set(delivered)
                    self._delivered = None
            buffers = self._free_sets.popleft() if self._free_sets else self._make_set()
            missing = [len(bucket.members) for bucket in self._layout.buckets]
            self._attempt = _Attempt(group, participants, contributes, buffers, missing)

    def begin_backward(self, slot_indices: Sequence[int] = (0,)) -> None:
        """Prepares the backwards of this attempt: their gradients are added to those that an earlier attempt has kept. `slot_indices`:
        of the slots that they are for, among the step's slots, where slots are summed one by one."""
        attempt, step = self._attempt, self._step
        assert attempt is not None, "begin_attempt comes first"
        step.after_last_backward = step.is_kept = False
        if self._per_slot:
            awaited = {index for slot_index in slot_indices for index in self._indices_of(slot_index)}
            attempt.missing = [len(awaited.intersection(bucket.members)) for bucket in self._layout.buckets]
            return
        for index, local in step.kept.items():  # autograd goes on from there
            self._parameters[index].grad = dtensor_like(self._parameters[index], local)
        step.kept = {}

    @contextmanager
    def last_backward(self, slot_index: int = 0) -> Iterator[None]:
        """Wraps the backward that completes the gradients: inside, they are sent as they come, else all of them in `launch_tail`. Where
        slots are summed one by one, wraps the last backward of each, with its index among the step's slots; .grad is None after it."""
        self._in_last_backward, self._first_index = True, self._indices_of(slot_index).start if self._per_slot else 0
        try:
            yield
        finally:
            self._in_last_backward = False
        if self._per_slot:  # out of the way of the next slot's
            with self._lock:
                attempt = self._attempt
                assert attempt is not None, "begin_attempt comes first"
                if attempt.contributes:
                    self._copy(attempt, self._indices_of(slot_index))
                self._drop_gradients()
        self._step.after_last_backward = True

    def launch_buckets(self) -> None:
        """Sends all buckets but the last: the gradients are complete, the tail's values are not known yet."""
        with self._lock:
            attempt = self._attempt
            assert attempt is not None, "begin_attempt comes first"
            self._step.after_last_backward = True
            self._launch_all_but_last(attempt, zeros=not attempt.contributes)

    def launch_tail(self, tail: Sequence[float], *, zeros: bool = False) -> None:
        """Sends what has not gone yet, in order; then the tail, in fp32, with the last bucket. A parameter without gradient sends zeros.
        zeros: every parameter does. Buckets that were sent stay sent, so the tail must say that this contribution does not count. Returns
        at once. Raises RuntimeError for gradients that cannot be summed, or that are lost (keep=False)."""
        with self._lock:
            attempt, step = self._attempt, self._step
            assert attempt is not None, "begin_attempt comes first"
            assert attempt.tail is None, "an attempt is launched once"
            if step.problem:
                raise RuntimeError(step.problem)
            if len(tail) > TAIL_ELEMENTS:
                raise RuntimeError(f"a tail of {len(tail)} numbers: at most {TAIL_ELEMENTS}")
            for parameter in self._frozen:
                if parameter.requires_grad:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} requires a gradient now, and did not when it was attached: "
                        "it would not be summed, and weights of the groups would differ"
                    )
            zeros = zeros or not attempt.contributes
            if step.is_lost and not zeros:
                raise RuntimeError("the gradients were used up by an attempt that failed: they are not kept")
            for user_allreduce in step.allreduces:
                self._launch_user_allreduce(attempt, user_allreduce, after_buckets=False)
            self._launch_all_but_last(attempt, zeros=zeros)
            for user_allreduce in step.allreduces:
                self._launch_user_allreduce(attempt, user_allreduce, after_buckets=True)
            bucket = self._layout.buckets[-1]
            start = bucket.stop - bucket.start  # of the tail
            last = attempt.buffers.buckets[-1][: start + len(tail)]
            if zeros:
                last.zero_()
            elif not attempt.copied.issuperset(bucket.members):
                self._copy(attempt, bucket.members)
            if step.problem:  # of what was sent just now
                raise RuntimeError(step.problem)
            attempt.tail = last[start:]
            attempt.tail.copy_(torch.tensor(tail, dtype=torch.float32), non_blocking=True)
            attempt.works.append((attempt.queue or attempt.group).allreduce([last]))
            step.is_kept = step.is_kept or (self._keep and not zeros)

    def wait(self) -> tuple[float, ...]:
        """The summed tail, once all sums are there. Raises ProcessGroupError if one failed."""
        attempt = self._attempt
        assert attempt is not None, "begin_attempt comes first"
        assert attempt.tail is not None, "launch_tail comes first"
        for work in attempt.works:
            work.wait()
        for user_allreduce in self._step.allreduces:
            user_allreduce.work.wait()
        attempt.complete = True
        return tuple(attempt.tail.cpu().tolist())  # the host decides by it what comes next

    def abandon(self) -> Callable[[], None]:
        """Abandons the attempt; kept gradients stay. Returns a callable that gives its memory back, once nothing writes to it any more."""
        with self._lock:
            attempt, self._attempt, step = self._attempt, None, self._step
            if attempt is None:
                return lambda: None
            if attempt.queue is not None:
                attempt.queue.close()
            if self._keep and step.after_last_backward and not step.is_kept:
                for index in range(len(self._parameters) * self._copies):
                    self._gradient(index)  # the trainer may zero .grad before more is added
                step.is_kept = True
            buffers = [buffer for user_allreduce in step.allreduces if (buffer := user_allreduce.abandon()) is not None]
            if not self._keep and attempt.copied:
                step.is_lost = True
                self._drop_gradients()

        def give_back() -> None:
            if attempt.queue is not None:
                attempt.queue.join()
            self._return_set(attempt.buffers)
            for buffer in buffers:
                assert self._buffers is not None
                self._buffers.give(buffer)

        return give_back

    # ------------------------------------------------------------------------------------------------ what becomes of it

    def deliver(self, held: int | None = None) -> None:
        """Points .grad of every parameter at the sum (not the mean: the optimizer divides by Commit.divisor) until it is zeroed, writes the
        results of users' tensors, drops the originals. `held`: delivers the sums that `hold` has set aside for this step."""
        with self._lock:
            attempt = self._end_step() if held is None else self._held.pop(held)
            buffers = attempt.buffers
            if self._per_slot:
                slots = [[buffers.sums[index] for index in self._indices_of(slot)] for slot in range(self._copies)]
                if first := slots[0]:  # gets the sum of all, in the slots' order
                    torch._foreach_add_(first, 0.0)  # -0.0 becomes 0.0, as it is beside others' zeros
                    for added in slots[1:]:
                        torch._foreach_add_(first, added)
            for index, parameter in enumerate(self._parameters, (self._copies - 1) * len(self._parameters)):
                memory = attempt.in_place.get(index)
                parameter.grad = buffers.gradients[index] if memory is None else dtensor_like(parameter, memory)
            for user_allreduce in attempt.allreduces:
                user_allreduce.finish()
                user_allreduce.forget()
            if self._delivered is not None:
                self._return_set(self._delivered)
            self._delivered = buffers
            if held is None:
                for feedback in self._feedback.values():
                    feedback.commit()
            if self._buffers is not None:
                self._buffers.step_done()

    def hold(self, step: int) -> None:
        """The sums are put aside: the state that they belong to is still arriving."""
        with self._lock:
            self._held[step] = attempt = self._end_step()
            for user_allreduce in attempt.allreduces:
                user_allreduce.set_aside()

    def drop_held(self) -> None:
        with self._lock:
            for attempt in self._held.values():
                self._return_set(attempt.buffers)
                for user_allreduce in attempt.allreduces:
                    user_allreduce.forget()
            self._held.clear()

    def drop(self) -> None:
        """Discards the gradients, as their state no longer exists; .grad becomes None."""
        with self._lock:
            self._drop_gradients()
            for user_allreduce in self._step.allreduces:
                user_allreduce.forget()
            self._step = _StepState()
            self._feedback.clear()

    @property
    def can_repeat(self) -> bool:
        """True when another attempt would send the same values: gradients are kept, and no user_allreduce's tensor was written to since."""
        with self._lock:
            return self._keep and not any(user_allreduce.changed for user_allreduce in self._step.allreduces)

    def all_reduce(
        self, tensor: Tensor, *, mean: bool = True, quantized: bool = False, feedback: ErrorFeedback | None = None
    ) -> GroupWork:
        """A tensor beside the gradients: when the work ends it holds the mean over participants (or the sum). On failure it
        keeps its own values, and Gradients.wait raises the error. A retry of the step reduces the values that it had when it came, and
        `deliver` writes the new result.

        Each group hands over the same ones in the same order, before the last backward or after it. `quantized`: in int8; then `feedback`
        receives the rounding error, and is updated when the result is delivered. Raises ValueError for the mean of integers and for a
        tensor with overlapping memory, RuntimeError where no attempt is open for it, or slots are summed one by one."""
        if self._per_slot:
            raise RuntimeError("fault_tolerance.deterministic_reduce sums gradients alone: no tensor beside them")
        if mean and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"the mean of a tensor of {tensor.dtype}: only of floating point numbers")
        if quantized and not tensor.is_floating_point():
            raise ValueError(f"a quantised sum of a tensor of {tensor.dtype}: only of real floating point numbers")
        if torch._debug_has_internal_overlap(to_local(tensor)) == 1:  # as torch itself asks before it writes into one
            raise ValueError(
                f"a sum of a tensor of shape {tuple(tensor.shape)}, with overlapping memory: nearest: its clone()"
            )
        with self._lock:
            attempt, after = self._attempt, self._step.after_last_backward
            if attempt is None or attempt.tail is not None or self._in_last_backward:
                raise RuntimeError("a tensor is summed between begin_attempt and launch_tail, not inside last_backward")
            buffers = self._buffers = self._buffers or BufferPool(shared=self._shared)
            user_allreduce = ManagedAllreduce(
                tensor, buffers, mean=mean, keep=self._keep, after_buckets=after, quantized=quantized, feedback=feedback
            )
            self._step.allreduces.append(user_allreduce)
            if after:  # the same order in each group, whatever gradients it lacks
                self._launch_all_but_last(attempt, zeros=not attempt.contributes)
            self._launch_user_allreduce(attempt, user_allreduce, after_buckets=after)
            return user_allreduce.work

    # ------------------------------------------------------------------------------------------------ sending

    # A gradient's index counts parameters within a copy, and has the copy of the last slot first: a backward of the first slot, which is
    # computed first, completes gradients from the highest index down, the order in which the layout sends them.

    def _indices_of(self, slot_index: int) -> range:
        """Indices of a slot's gradients, in the order of the parameters."""
        count = len(self._parameters)
        first = (self._copies - 1 - slot_index) * count
        return range(first, first + count)

    def _parameter(self, index: int) -> nn.Parameter:
        return self._parameters[index % len(self._parameters)]

    def _on_gradient(self, parameter_index: int, parameter: Tensor) -> None:
        """The hook of one parameter: its gradient is complete. Never raises, never waits. Called once for each parameter in each step, so
        that what is the same for most of them is done here without a further call."""
        with self._lock:
            attempt, step, index = self._attempt, self._step, self._first_index + parameter_index
            if attempt is None or not attempt.contributes or step.problem:
                return
            if not self._in_last_backward:
                if step.after_last_backward and not self._per_slot and attempt.tail is None:  # else of another slot
                    step.problem = f"{self._name(index)} got a gradient after last_backward: a retry would include it, the sums do not"
                return
            if index in attempt.ready:
                step.problem = f"{self._name(index)} got a gradient twice: last_backward is for the last backward alone"
                return
            attempt.ready.add(index)
            attempt.missing[self._layout.bucket_of[index]] -= 1
            gradient = parameter.grad
            if streams := self._streams[parameter.device]:  # one kernel for the whole bucket, later
                attempt.streams.add(streams.current_stream(parameter.device))
            elif (
                self._keep
                and gradient is not None
                and gradient.layout is torch.strided
                and getattr(gradient, "placements", None) == getattr(parameter, "placements", None)  # no partial sum
            ):
                # Copied while it is in the cache.
                step.kept[index] = local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                attempt.copied.add(index)
                attempt.buffers.sums[index].copy_(local)
            else:
                self._copy(attempt, [index])
            while attempt.launched < len(attempt.missing) - 1 and attempt.missing[attempt.launched] == 0:
                self._launch_next_bucket(attempt)

    def _copy(self, attempt: _Attempt, members: Sequence[int]) -> None:
        """Gradients into their buckets, unless they are there; zeros where there is none."""
        into, given = [], []
        for index in members:
            if index in attempt.copied:
                continue
            attempt.copied.add(index)
            gradient = self._gradient(index)
            if index not in attempt.buffers.sums:
                local = to_local(self._parameter(index).detach())
                attempt.in_place[index] = torch.zeros_like(local) if gradient is None else gradient.contiguous()
            elif gradient is None:
                attempt.buffers.sums[index].zero_()
            else:
                into.append(attempt.buffers.sums[index])
                given.append(gradient)
                if not self._keep:
                    self._parameter(index).grad = None
        for stream in attempt.streams:  # that they came on
            streams_of(stream.device).current_stream(stream.device).wait_stream(stream)
        if into:
            torch._foreach_copy_(into, given)

    def _gradient(self, index: int) -> Tensor | None:
        """This rank's shard of a gradient: the one that is kept, else .grad, which is kept from now on."""
        step = self._step
        computed = range(self._first_index, self._first_index + len(self._parameters))  # of the slot that is
        if step.is_kept or (self._per_slot and (index in step.kept or index not in computed)):
            return step.kept.get(index)
        gradient = self._parameter(index).grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            step.problem = f"{self._name(index)}: a gradient of layout {gradient.layout} cannot be summed"
            return None
        if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
            step.problem = (
                f"{self._name(index)}: a gradient that is a partial sum over ranks cannot be summed over groups"
            )
            return None
        local = to_local(gradient)
        if self._keep:
            step.kept[index] = local
        return local

    def _launch_next_bucket(self, attempt: _Attempt, *, zeros: bool = False) -> None:
        """Sends the next bucket; never the last one, which `launch_tail` sends."""
        bucket = self._layout.buckets[attempt.launched]
        if not zeros and not attempt.copied.issuperset(bucket.members):
            self._copy(attempt, bucket.members)
        elif zeros and bucket.in_place:
            [index] = bucket.members
            attempt.in_place[index] = torch.zeros_like(to_local(self._parameter(index).detach()))
        memory = attempt.in_place[bucket.members[0]] if bucket.in_place else attempt.buffers.buckets[attempt.launched]
        if self._quantized:
            feedback = self._feedback.setdefault(attempt.launched, ErrorFeedback())
            work: dist.Work = self._queue(attempt).allreduce_quantized(memory, feedback, contributes=not zeros)
        else:
            if zeros and not bucket.in_place:
                memory.zero_()
            work = (attempt.queue or attempt.group).allreduce([memory])
        attempt.works.append(work)
        attempt.launched += 1

    def _launch_all_but_last(self, attempt: _Attempt, *, zeros: bool) -> None:
        while attempt.launched < len(attempt.missing) - 1:
            self._launch_next_bucket(attempt, zeros=zeros)

    def _launch_user_allreduce(self, attempt: _Attempt, own: ManagedAllreduce, *, after_buckets: bool) -> None:
        if own.after_buckets == after_buckets and not own.launched:
            via = self._queue(attempt) if own.quantized else attempt.queue or attempt.group
            attempt.works.append(own.launch(via, attempt.participants, contributes=attempt.contributes))

    def _queue(self, attempt: _Attempt) -> CollectiveQueue:
        if attempt.queue is None:
            attempt.queue = CollectiveQueue(attempt.group, shared=self._shared)
        return attempt.queue

    def _end_step(self) -> _Attempt:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None and attempt.complete, "sums are taken when wait has returned"
        if attempt.queue is not None:
            attempt.queue.close()
        attempt.allreduces, self._step = self._step.allreduces, _StepState()
        return attempt

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _name(self, index: int) -> str:
        return f"parameter {index % len(self._parameters)} of shape {tuple(self._parameter(index).shape)}"
