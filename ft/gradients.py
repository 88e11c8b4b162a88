"""Gradients, reduced over replica groups out of place, and kept until the step commits.

    gradients = Gradients()
    gradients.attach(model.parameters())
    gradients.begin_attempt(process_group, num_participants=3)  # a process group is formed: an attempt begins
    with gradients.last_backward():
        loss.backward()                                 # hooks launch what is complete while the backward goes on
    gradients.launch_remaining(tail)                    # the rest, with the tail
    try:
        tail = gradients.wait()
        gradients.deliver()                             # .grad of every parameter is the sum
    except ProcessGroupError as error:                  # this group's own gradients are still kept
        process_group.abandon(str(error), then=gradients.abandon())
        ...                                             # form a new one, begin_attempt, launch_remaining, wait

The *tail* is the last elements of the last bucket: numbers of the step, such as tokens per slot and loss (protocol/step.py).

The hook of a parameter (`_on_gradient`) copies its gradient into its bucket (buckets.py), on the CPU while it is in the cache, on an
accelerator together with the whole bucket, and launches the all-reduce of each bucket when it and all before it are complete. With FSDP2
the hook comes after the reduce-scatter inside the group, in the stream of its result: so a bucket has shards of the group's sum, and is
all-reduced between the same ranks of all groups. The total becomes `.grad` by pointing there (`deliver`): nothing is copied back. A retry
copies the same gradients into another buffer set, so it reduces the same bits.

Memory: memory.py has the formula; users' tensors take twice their size more, and a quantized bucket, while it is reduced, that of three
buckets. Autograd's own gradients live until `deliver`. With keep=False those of at least 1 MiB are reduced in place; the others (with
shared=True or `slots`: all) are freed when they are copied. A failure loses both.

`deterministic_reduce` (`slots` = S > 0): addition of floats is not associative, so the bits of one sum depend on the groups that have
computed the slots. Here the layout has S copies of each gradient, one for each slot. A slot's owner sends its gradients in that copy, all
others zeros, whose addition is exact in any order; then each rank adds the S sums in the order of the slots. This costs S times traffic and
memory.

Quantized (`quantized`): buckets are reduced in int8 with error feedback (quantized.py), except for the last one, which has the tail.
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
from ft.user_allreduce import UserAllreduce


@dataclass
class _Attempt:
    """One try to reduce a step's gradients, on one generation of the process group."""

    process_group: dist.ProcessGroup
    num_participants: int
    contributes: bool
    buffers: GradBuffers
    missing: list[int]  # by bucket: number of gradients whose hooks have not been called
    ready: set[int] = field(default_factory=set)  # indices of gradients whose hooks have been called
    copied: set[int] = field(default_factory=set)  # indices of gradients that are in their buckets
    in_place: dict[int, Tensor] = field(default_factory=dict)  # gradients that are reduced in place, by index
    streams: set[Any] = field(default_factory=set)  # device streams on which gradients were computed
    launched: int = 0  # number of buckets whose all-reduce was launched, in order
    works: list[dist.Work] = field(default_factory=list)
    tail: Tensor | None = None  # None: not launched yet
    complete: bool = False
    allreduces: list[UserAllreduce] = field(default_factory=list)  # those of the step, once the step has ended
    queue: CollectiveQueue | None = None  # used for every collective from the first quantized one on


@dataclass
class _StepState:
    """State that all attempts of one step share."""

    kept: dict[int, Tensor] = field(default_factory=dict)  # gradients, by index
    is_kept: bool = False  # `kept` is complete
    is_lost: bool = False  # a failed attempt has overwritten or freed gradients
    after_last_backward: bool = False
    problem: str = ""  # error that was found while buckets were launched; launch_remaining raises it
    allreduces: list[UserAllreduce] = field(default_factory=list)  # in the order they were handed over


class Gradients:
    """The gradients of one rank. `keep`: a failed attempt can be repeated. `shared`: buffers are in memory that a child process maps.
    `slots`: a step's slots, reduced separately and added in order; 0: a group adds up its own slots first. `quantized`: reduce in int8;
    requires `keep` and no `slots`. `bucket_bytes`: size limit of a bucket, unless a single gradient is larger. `device`: that of the tail
    if there are no parameters.

    For the thread of the step: the trainer's, or autograd's while the trainer is in `backward`. Only the hooks and the callable that
    `abandon` returns may run in others."""

    can_run_ahead = True  # False: its hooks need an attempt that has begun

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
        self._first_index = 0  # index of the first parameter's gradient in the slot's copy
        self._device = torch.device(device)
        self._parameters: list[nn.Parameter] = []
        self._streams: dict[torch.device, Any] = {}  # device.streams_of, by device of a parameter
        self._frozen: list[nn.Parameter] = []  # attached parameters that require no gradient
        self._hooks: list[Any] = []
        self._lock = threading.RLock()
        self._buffers: BufferPool | None = None  # buffers of users' tensors, once there are any
        self._attempt: _Attempt | None = None
        self._step = _StepState()
        self._in_last_backward = False
        self._set_count = 0  # number of buffer sets, including those in use
        self._delivered: GradBuffers | None = None  # set that .grad may point into
        self._held: dict[int, _Attempt] = {}  # by step: attempts that `hold` has set aside

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers the parameters that are trained. Their order is part of the layout and must be the same in each group. Called once for
        each part of the model, before `fingerprint` is read. With `quantized` raises ValueError for a complex parameter."""
        assert "_layout" not in self.__dict__, "parameters are attached before the first step"
        known = {id(parameter) for parameter in self._parameters}
        for parameter in parameters:
            if self._quantized and parameter.is_complex():
                raise ValueError(f"a parameter of {parameter.dtype}: reductions in int8 support only real numbers")
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
        """Properties that must be equal in all groups, each with its digest: (("gradient shapes", "5f0c..."), ...)."""
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
        """Unused buffer sets, in the order in which they were returned."""
        return deque(self._make_set() for _ in range(KEPT_SETS))

    def _make_set(self) -> GradBuffers:
        self._set_count += 1
        return GradBuffers(self._layout, self._parameters * self._copies, shared=self._shared)

    def _return_set(self, buffers: GradBuffers) -> None:
        """Returns a set to the unused ones, or frees it if there are more than KEPT_SETS. From any thread."""
        with self._lock:
            if self._set_count > KEPT_SETS:
                self._set_count -= 1
            else:
                self._free_sets.append(buffers)

    def prepare(self) -> None:
        """Allocates and touches the buffer sets that `begin_attempt` takes, so that no member of a generation waits for that later."""
        _ = self._free_sets

    def close(self) -> None:
        """Removes the hooks. Nothing is sent any more."""
        if self._attempt is not None and self._attempt.queue is not None:
            self._attempt.queue.close()
        while self._hooks:
            self._hooks.pop().remove()

    # ------------------------------------------------------------------------------------------------ an attempt

    def begin_attempt(
        self, process_group: dist.ProcessGroup, num_participants: int, *, contributes: bool = True, step: int = 0
    ) -> None:
        """Begins an attempt on a process group that has formed. `num_participants`: divisor of means. contributes=False: this group sends
        only zeros. `step`: unused here; FragmentGradients chooses the fragment by it. An earlier attempt must be complete or abandoned."""
        with self._lock:
            if self._attempt is not None:
                assert self._attempt.complete, "an incomplete attempt must be abandoned first"
                self.abandon()()
            if (delivered := self._delivered) is not None:
                gradients = (*(parameter.grad for parameter in self._parameters), *self._step.kept.values())
                used = {to_local(g).untyped_storage().data_ptr() for g in gradients if g is not None}
                if used.isdisjoint(delivered.addresses):
                    self._return_set(delivered)
                    self._delivered = None
            buffers = self._free_sets.popleft() if self._free_sets else self._make_set()
            missing = [len(bucket.members) for bucket in self._layout.buckets]
            self._attempt = _Attempt(process_group, num_participants, contributes, buffers, missing)

    def begin_backward(self, slot_indices: Sequence[int] = (0,)) -> None:
        """Prepares the backwards of a step: their gradients are added to those that an earlier attempt has kept. `slot_indices`, with
        separate slots: indices, among the step's slots, of those that are computed."""
        attempt, step = self._attempt, self._step
        step.after_last_backward = step.is_kept = False
        if self._per_slot:
            assert attempt is not None, "begin_attempt comes first"
            awaited = {index for slot_index in slot_indices for index in self._indices_of(slot_index)}
            attempt.missing = [len(awaited.intersection(bucket.members)) for bucket in self._layout.buckets]
            return
        for index, local in step.kept.items():  # autograd accumulates into them
            self._parameters[index].grad = dtensor_like(self._parameters[index], local)
        step.kept = {}

    @contextmanager
    def last_backward(self, slot_index: int = 0) -> Iterator[None]:
        """Wraps the backward that completes the gradients: inside it buckets are launched as they become complete; without it
        `launch_remaining` launches all. Separate slots: wraps the last backward of each slot, with its index in the step; .grad is None
        after it."""
        self._in_last_backward, self._first_index = True, self._indices_of(slot_index).start if self._per_slot else 0
        try:
            yield
        finally:
            self._in_last_backward = False
        if self._per_slot:  # the next slot's gradients must not be added to these
            with self._lock:
                attempt = self._attempt
                assert attempt is not None, "begin_attempt comes first"
                if attempt.contributes:
                    self._copy(attempt, self._indices_of(slot_index))
                self._drop_gradients()
        self._step.after_last_backward = True

    def launch_buckets(self) -> None:
        """Launches the all-reduce of all buckets except for the last: the gradients are complete, but the values of the tail are not known
        yet."""
        with self._lock:
            attempt = self._attempt
            assert attempt is not None, "begin_attempt comes first"
            self._step.after_last_backward = True
            self._launch_all_but_last(attempt, zeros=not attempt.contributes)

    def launch_remaining(self, tail: Sequence[float], *, zeros: bool = False) -> None:
        """Launches the all-reduce of all remaining buckets, in order; the last one has the tail, in fp32. A parameter without gradient adds
        zeros. `zeros`: every parameter does; if gradients are launched already, the tail must say that this contribution does not count.
        Returns at once. Raises RuntimeError for gradients that cannot be reduced, or that are lost (keep=False)."""
        with self._lock:
            attempt, step = self._attempt, self._step
            assert attempt is not None, "begin_attempt comes first"
            assert attempt.tail is None, "launch_remaining is called once per attempt"
            if step.problem:
                raise RuntimeError(step.problem)
            if len(tail) > TAIL_ELEMENTS:
                raise RuntimeError(f"the tail has {len(tail)} numbers: at most {TAIL_ELEMENTS} are supported")
            for parameter in self._frozen:
                if parameter.requires_grad:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} requires a gradient now, and did not when it was attached: "
                        "it would not be reduced, and the groups' weights would differ"
                    )
            zeros = zeros or not attempt.contributes
            if step.is_lost and not zeros:
                raise RuntimeError("the gradients were lost in an attempt that failed: keep_gradients is false")
            for user_allreduce in step.allreduces:
                self._launch_user_allreduce(attempt, user_allreduce, after_buckets=False)
            self._launch_all_but_last(attempt, zeros=zeros)
            for user_allreduce in step.allreduces:
                self._launch_user_allreduce(attempt, user_allreduce, after_buckets=True)
            bucket = self._layout.buckets[-1]
            start = bucket.stop - bucket.start  # start of the tail
            last = attempt.buffers.buckets[-1][: start + len(tail)]
            if zeros:
                last.zero_()
            elif not attempt.copied.issuperset(bucket.members):
                self._copy(attempt, bucket.members)
            if step.problem:  # found in what was sent just now
                raise RuntimeError(step.problem)
            attempt.tail = last[start:]
            attempt.tail.copy_(torch.tensor(tail, dtype=torch.float32), non_blocking=True)
            attempt.works.append((attempt.queue or attempt.process_group).allreduce([last]))
            step.is_kept = step.is_kept or (self._keep and not zeros)

    def wait(self) -> tuple[float, ...]:
        """Returns the reduced tail when all reductions are complete. Raises ProcessGroupError if one has failed."""
        attempt = self._attempt
        assert attempt is not None, "begin_attempt comes first"
        assert attempt.tail is not None, "launch_remaining comes first"
        for work in attempt.works:
            work.wait()
        for user_allreduce in self._step.allreduces:
            user_allreduce.work.wait()
        attempt.complete = True
        return tuple(attempt.tail.cpu().tolist())  # to the host, where the step is decided

    def abandon(self) -> Callable[[], None]:
        """Abandons the attempt; gradients stay kept. Returns a callable that releases its buffers: call it once nothing writes to them."""
        with self._lock:
            attempt, self._attempt, step = self._attempt, None, self._step
            if attempt is None:
                return lambda: None
            if attempt.queue is not None:
                attempt.queue.close()
            if self._keep and step.after_last_backward and not step.is_kept:
                for index in range(len(self._parameters) * self._copies):
                    self._gradient(index)  # the trainer may zero .grad before it adds more
                step.is_kept = True
            buffers = [(buffer, each.used) for each in step.allreduces if (buffer := each.abandon()) is not None]
            if not self._keep and attempt.copied:
                step.is_lost = True
                self._drop_gradients()

        def give_back() -> None:
            if attempt.queue is not None:
                attempt.queue.join()
            self._return_set(attempt.buffers)
            for buffer, used in buffers:
                assert self._buffers is not None
                self._buffers.give(buffer, used)

        return give_back

    # ------------------------------------------------------------------------------------------------ the end of a step

    def deliver(self, held: int | None = None, *, contributors: int | None = None) -> None:
        """Points .grad of every parameter at the sum (not the mean: the optimizer divides by Commit.divisor) until it is zeroed, writes the
        results of users' tensors, and drops the kept gradients. `held`: delivers the sums that `hold` has set aside for this step.
        `contributors`: number of groups that are in the sums; None: all participants of the attempt."""
        with self._lock:
            attempt = self._end_step() if held is None else self._held.pop(held)
            buffers = attempt.buffers
            if self._per_slot:
                slots = [[buffers.shards[index] for index in self._indices_of(slot)] for slot in range(self._copies)]
                if first := slots[0]:  # receives the sum of all slots, in their order
                    torch._foreach_add_(first, 0.0)  # turns -0.0 into 0.0, as adding the zeros of other groups does
                    for added in slots[1:]:
                        torch._foreach_add_(first, added)
            for index, parameter in enumerate(self._parameters, (self._copies - 1) * len(self._parameters)):
                memory = attempt.in_place.get(index)
                parameter.grad = buffers.gradients[index] if memory is None else dtensor_like(parameter, memory)
            for user_allreduce in attempt.allreduces:
                user_allreduce.finish(contributors)
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
        """Sets the sums aside for a later `deliver`: the state that they belong to is still arriving."""
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
        """Discards the gradients, which no sum may contain any more, and with them all rounding errors; .grad becomes None."""
        with self._lock:
            self._drop_gradients()
            for user_allreduce in self._step.allreduces:
                user_allreduce.forget()
            self._step = _StepState()
            self.drop_feedback()
            # an attempt is complete here; `begin_attempt` abandons it, and none of its gradients are lost by that
            if self._attempt is not None:
                self._attempt.copied.clear()

    def drop_feedback(self) -> None:
        """Discards the rounding errors of earlier quantized reductions: the gradients are given up, or a state without them is loaded."""
        self._feedback.clear()

    @property
    def can_repeat(self) -> bool:
        """True when a further attempt would send the same values: gradients are kept, and the user has not written to a tensor since."""
        with self._lock:
            return self._keep and not any(user_allreduce.changed for user_allreduce in self._step.allreduces)

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        mean: bool = True,
        repeat: bool = True,
        quantized: bool = False,
        feedback: ErrorFeedback | None = None,
    ) -> GroupWork:
        """Reduces a tensor beside the gradients: when the work ends it has the mean over the participants (or the sum). On failure it keeps
        its values, and Gradients.wait raises the error. A retry reduces its values at this call, and `deliver` writes the result.

        Each group calls it for the same tensors in the same order, before or after the last backward. `repeat`: False if the user copies
        the result, where a retry would not write; then `can_repeat` is False. `quantized`: in int8; `feedback` then receives the rounding
        error when the result is delivered. Raises ValueError for the mean of integers, for `quantized` with other than real floating-point
        numbers, and for a tensor with overlapping memory; RuntimeError outside an attempt, after launch_remaining, during the last
        backward, or with separate slots."""
        if self._per_slot:
            raise RuntimeError("fault_tolerance.deterministic_reduce = true: supports only gradients, no other tensors")
        with self._lock:
            attempt, after = self._attempt, self._step.after_last_backward
            if attempt is None or attempt.tail is not None or self._in_last_backward:
                raise RuntimeError(
                    "call allreduce of a tensor inside a step, before its reduction is launched, and not during its last backward"
                )
            buffers = self._buffers = self._buffers or BufferPool(shared=self._shared)
            user_allreduce = UserAllreduce(
                tensor,
                buffers,
                mean=mean,
                keep=self._keep,
                after_buckets=after,
                repeat=repeat,
                quantized=quantized,
                feedback=feedback,
            )
            self._step.allreduces.append(user_allreduce)
            if after:  # the same order in each group, whichever gradients it has
                self._launch_all_but_last(attempt, zeros=not attempt.contributes)
            self._launch_user_allreduce(attempt, user_allreduce, after_buckets=after)
            return user_allreduce.work

    # ------------------------------------------------------------------------------------------------ sending

    # A gradient's index counts parameters within a copy; the copies are in reverse order of the slots. So the backward of the first slot,
    # which is computed first, completes gradients from the highest index down, the order in which the layout sends them.

    def _indices_of(self, slot_index: int) -> range:
        """Indices of a slot's gradients, in the order of the parameters."""
        count = len(self._parameters)
        first = (self._copies - 1 - slot_index) * count
        return range(first, first + count)

    def _parameter(self, index: int) -> nn.Parameter:
        return self._parameters[index % len(self._parameters)]

    def _on_gradient(self, parameter_index: int, parameter: Tensor) -> None:
        """Sends a bucket if this gradient completes it: the hook of a parameter. Never raises or waits. Frequent cases are inline."""
        with self._lock:
            attempt, step, index = self._attempt, self._step, self._first_index + parameter_index
            if attempt is None or not attempt.contributes or step.problem:
                return
            if not self._in_last_backward:  # with `_per_slot` it may be the gradient of another slot
                if step.after_last_backward and not self._per_slot and attempt.tail is None:
                    step.problem = f"{self._name(index)} got a gradient after last_backward: a retry would include it, but the sums do not"
                return
            if index in attempt.ready:
                step.problem = f"{self._name(index)} got a gradient twice: last_backward wraps only the last backward"
                return
            attempt.ready.add(index)
            attempt.missing[self._layout.bucket_of[index]] -= 1
            gradient = parameter.grad
            if streams := self._streams[parameter.device]:  # copied later, with one kernel for the whole bucket
                attempt.streams.add(streams.current_stream(parameter.device))
            elif (
                self._keep
                and gradient is not None
                and gradient.layout is torch.strided
                and getattr(gradient, "placements", None) == getattr(parameter, "placements", None)  # no partial sum
            ):
                # copied while it is in the cache
                step.kept[index] = local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                attempt.copied.add(index)
                attempt.buffers.shards[index].copy_(local)
            else:
                self._copy(attempt, [index])
            while attempt.launched < len(attempt.missing) - 1 and attempt.missing[attempt.launched] == 0:
                self._launch_next_bucket(attempt)

    def _copy(self, attempt: _Attempt, members: Sequence[int]) -> None:
        """Copies gradients into their buckets, unless they are there already; zeros for a parameter without gradient."""
        shards, gradients = [], []
        for index in members:
            if index in attempt.copied:
                continue
            attempt.copied.add(index)
            gradient = self._gradient(index)
            if index not in attempt.buffers.shards:
                local = to_local(self._parameter(index).detach())
                attempt.in_place[index] = torch.zeros_like(local) if gradient is None else gradient.contiguous()
            elif gradient is None:
                attempt.buffers.shards[index].zero_()
            else:
                shards.append(attempt.buffers.shards[index])
                gradients.append(gradient)
                if not self._keep:
                    self._parameter(index).grad = None
        for stream in attempt.streams:  # on which the gradients were computed
            streams_of(stream.device).current_stream(stream.device).wait_stream(stream)
        if shards:
            torch._foreach_copy_(shards, gradients)

    def _gradient(self, index: int) -> Tensor | None:
        """Returns this rank's shard of a gradient: the kept one, else that of .grad, which is kept from now on; None: there is none."""
        step = self._step
        computed = range(self._first_index, self._first_index + len(self._parameters))  # indices of the current slot
        if step.is_kept or (self._per_slot and (index in step.kept or index not in computed)):
            return step.kept.get(index)
        gradient = self._parameter(index).grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            step.problem = f"{self._name(index)}: a gradient of layout {gradient.layout} cannot be reduced"
            return None
        if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
            step.problem = (
                f"{self._name(index)}: a gradient that is a partial sum over ranks cannot be reduced over groups"
            )
            return None
        local = to_local(gradient)
        if self._keep:
            step.kept[index] = local
        return local

    def _launch_next_bucket(self, attempt: _Attempt, *, zeros: bool = False) -> None:
        """Sends the next bucket, but never the last one, which `launch_remaining` sends."""
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
            work = (attempt.queue or attempt.process_group).allreduce([memory])
        attempt.works.append(work)
        attempt.launched += 1

    def _launch_all_but_last(self, attempt: _Attempt, *, zeros: bool) -> None:
        while attempt.launched < len(attempt.missing) - 1:
            self._launch_next_bucket(attempt, zeros=zeros)

    def _launch_user_allreduce(self, attempt: _Attempt, user_allreduce: UserAllreduce, *, after_buckets: bool) -> None:
        if user_allreduce.after_buckets == after_buckets and not user_allreduce.launched:
            via = self._queue(attempt) if user_allreduce.quantized else attempt.queue or attempt.process_group
            attempt.works.append(user_allreduce.launch(via, attempt.num_participants, contributes=attempt.contributes))

    def _queue(self, attempt: _Attempt) -> CollectiveQueue:
        if attempt.queue is None:
            attempt.queue = CollectiveQueue(attempt.process_group, shared=self._shared)
        return attempt.queue

    def _end_step(self) -> _Attempt:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None and attempt.complete, "wait must have returned"
        if attempt.queue is not None:
            attempt.queue.close()
        attempt.allreduces, self._step = self._step.allreduces, _StepState()
        return attempt

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _name(self, index: int) -> str:
        return f"parameter {index % len(self._parameters)} of shape {tuple(self._parameter(index).shape)}"
