"""All-reduce of a user's tensor over the replica groups (torchft's `allreduce`).

The user waits for the result before the step is decided. So the tensor's values are kept when the result overwrites them, and a retry of
the step reduces them again. A failed attempt leaves the tensor unchanged; only a complete one is committed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ft.buckets import BufferPool, to_local
from ft.device import streams_of
from ft.process_groups.base import GroupWork
from ft.quantized import CollectiveQueue, ErrorFeedback


class QueuedWork(GroupWork):
    """A work whose result may still be queued on a stream when it ends. `wait` blocks the caller's current stream until it is written."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        ended = super().wait(timeout)
        if ended:
            self.get_future().wait()  # on the host it returns at once
        return ended

    synchronize = block_current_stream = wait


class UserAllreduce:
    """All-reduce of one user's tensor, over all attempts of a step. `work`: the user's; it never fails, and when it ends the tensor has the
    result, or on a failure its own values. `mean`: divide the sum by the participants. `keep`: keep the values for a retry. `repeat`: a
    retry may write the result. `after_buckets`: it was requested after the last backward. `quantized`, `feedback`: as in
    CollectiveQueue.allreduce_quantized. Raises ValueError for a tensor that cannot have such a result."""

    def __init__(
        self,
        tensor: Tensor,
        buffers: BufferPool,
        *,
        mean: bool,
        keep: bool,
        after_buckets: bool,
        repeat: bool = True,
        quantized: bool = False,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        if mean and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"the mean of a tensor of {tensor.dtype} is not supported: only of floating-point numbers")
        if quantized and not tensor.is_floating_point():
            raise ValueError(
                f"a quantized sum of a tensor of {tensor.dtype}: supports only real floating-point numbers"
            )
        if torch._debug_has_internal_overlap(to_local(tensor)) == 1:  # torch's own check before it writes
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with overlapping memory: pass its clone()")
        self.after_buckets, self.quantized, self._feedback = after_buckets, quantized, feedback
        self._tensor = to_local(tensor.detach())
        self._buffers, self._mean, self._keep, self._repeat = buffers, mean, keep and repeat, repeat
        self._lock = threading.Lock()  # the thread that ends the operation writes the result
        self._original: Tensor | None = None  # the values, once the result has overwritten them
        self._version = _version(self._tensor)  # the tensor's version after our newest write, or at the beginning
        self._sum: Tensor | None = None  # buffer of the current attempt
        self._written = False
        self.used: Any = None  # event after the newest write, the last use of the buffers; None: nothing is queued
        self._num_participants = 1
        self.work = QueuedWork("AllReduce", [tensor])
        self._streams = streams_of(tensor.device)
        self._stream = self._streams.current_stream(tensor.device) if self._streams else None

    @property
    def changed(self) -> bool:
        """True when a retry must not write the result: the user has written to the tensor since our newest write, or may have copied it."""
        with self._lock:
            return not self._repeat or _version(self._tensor) != self._version

    @property
    def launched(self) -> bool:
        return self._sum is not None

    def launch(
        self, via: dist.ProcessGroup | CollectiveQueue, num_participants: int, *, contributes: bool, opts: Any = ()
    ) -> dist.Work:
        """Reduces the tensor's original values, or zeros. The first attempt ends `work`; `finish` writes a retry's result. `opts`: further
        arguments of a process group's allreduce, which adds up by default."""
        if self.work.is_completed():
            self.work.wait()  # the first attempt may have queued its write, and that of `_original`, on another stream
        self._sum, self._num_participants, self._written = self._buffers.take(self._tensor), num_participants, False
        if contributes:
            self._sum.copy_(self._tensor if self._original is None else self._original)
        else:
            self._sum.zero_()
        if self.quantized:
            assert isinstance(via, CollectiveQueue)
            reduction: dist.Work = via.allreduce_quantized(self._sum, self._feedback, contributes=contributes)
        else:
            reduction = via.allreduce([self._sum], *opts)
        if not self.work.is_completed():
            reduction.get_future().add_done_callback(lambda _: self._ended(reduction.exception() is None))
        return reduction

    def finish(self, contributors: int | None = None) -> None:
        """Writes the result of a complete attempt. `contributors`: as in Gradients.deliver; a group may have been left out of a retry."""
        with self._lock:
            if contributors and contributors != self._num_participants and _version(self._tensor) == self._version:
                self._num_participants, self._written = contributors, False
            self._write()
        if self._feedback is not None:
            self._feedback.commit()

    def abandon(self) -> Tensor | None:
        """Ends `work`, and returns the buffer of the current attempt, which a collective may still write to."""
        with self._lock:
            buffer, self._sum = self._sum, None
        self.work.end(None)
        return buffer

    def set_aside(self) -> None:
        """Postpones the result to a later `finish`, which overwrites the tensor."""
        self._written, self._keep = False, False

    def forget(self) -> None:
        """Returns the buffers to their pool, at the end of the step."""
        for buffer in (self.abandon(), self._original):
            if buffer is not None:
                self._buffers.give(buffer, self.used)
        self._original = None

    def _ended(self, complete: bool) -> None:
        with ExitStack() as on_stream:
            if self._streams:
                # a notice ends a work in its own thread, which CUDA begins on device 0: leaving the stream alone would use that
                on_stream.enter_context(self._streams.device(self._tensor.device))
                on_stream.enter_context(self._streams.stream(self._stream))
            try:
                with self._lock:
                    if complete and not self.work.is_completed():
                        self._write()
            finally:  # an error is raised by `finish`, in the trainer's thread
                self.work.end(None)

    def _write(self) -> None:
        if self._sum is None or self._written:
            return
        if self._keep and self._original is None:
            self._original = self._buffers.take(self._tensor)
            self._original.copy_(self._tensor)
        if self._mean:
            torch.div(self._sum, self._num_participants, out=self._tensor)
        else:
            self._tensor.copy_(self._sum)
        self._written, self._version = True, _version(self._tensor)
        if self._streams:  # `finish` may be called on another stream than the constructor
            self.used = self._streams.current_stream(self._tensor.device).record_event()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # an inference tensor has no version counter
