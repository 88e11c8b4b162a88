"""All-reduce in int8, with error feedback: a quarter of the bytes, and the rounding error of one reduction is added to the next.

Flow: gradients.py and user_allreduce.py send quantized reductions through a CollectiveQueue; quantize and dequantize define the format.

A reduction is two exchanges. Each rank owns a share of the tensor. First every rank sends each owner that owner's share of its values, in
int8 (all-to-all); owners add these up in fp32, in the order of ranks, and send the sums to all, in int8 again (all-gather). So a rank sends
2 (n - 1) / n bytes per value where a ring in fp32 sends 8 (n - 1) / n, and all ranks decode the same bytes.

Errors of both exchanges are fed back (Seide et al., Interspeech 2014; Tang et al., DoubleSqueeze, arXiv 1905.05957): each rank adds its own
rounding errors to its next values, and an owner does so with the rounding errors of its sums. So over many steps nothing is lost: the
delivered sums and all residuals add up to the contributed values. That does not depend on the membership, since an owner contributes its
residual as values of its own, whichever rank owns that share in the next reduction. Only a group that heals, or drops its gradients, loses
what its residual holds, as it loses the gradients (Gradients.drop).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ft.buckets import zeros
from ft.device import current_device, device_thread, streams_of
from ft.process_groups.base import GroupWork
from ft.process_groups.errors import Abandoned

BLOCK = 256  # values that share one scale (4 bytes)
LEVELS = 127  # on either side of 0
PIECE = (1 << 20) // BLOCK  # blocks that are quantized at a time, so that temporaries stay in the cache


class ErrorFeedback:
    """The error feedback of one tensor. `residual`: rounding errors in this group, fp32, flat. Only `commit` changes it."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.pending: list[Tensor] = []  # residual of the newest attempt, once it is reduced

    def commit(self) -> None:
        """Replaces the residual by that of the newest attempt, whose sums are delivered."""
        if self.pending:
            self.residual = self.pending.pop()


class CollectiveQueue:
    """Runs an attempt's reductions on a process group that has formed, one after the other in a thread: a quantized one has two exchanges,
    and all ranks must start all exchanges in the same order. So an attempt that uses a queue sends everything through it.

    A wait ends no later than one on the process group: abandoning the group ends the works, too. `shared`: a child maps the messages."""

    def __init__(self, process_group: dist.ProcessGroup, *, shared: bool = False) -> None:
        self._process_group, self._shared = process_group, shared
        self._rank, self._ranks = process_group.rank(), process_group.size()
        self._lock = threading.Lock()  # no exchange may start after `close`: the process group may have formed anew
        self._error: Exception | None = None  # first error, with which all later works fail
        self._tasks = queue.SimpleQueue[tuple[GroupWork, torch.device, Any, Callable[[], None]] | None]()
        self._thread = device_thread(self._run, name="ft-quantized", device=current_device())
        self._thread.start()

    def allreduce(self, tensors: list[Tensor]) -> GroupWork:
        """Reduces one tensor in place, without quantization."""
        [tensor] = tensors
        return self._put(tensor, lambda: self._exchange(lambda: self._process_group.allreduce([tensor])))

    def allreduce_quantized(
        self, tensor: Tensor, feedback: ErrorFeedback | None, *, contributes: bool = True
    ) -> GroupWork:
        """Reduces a floating-point tensor in place, in int8. Without `feedback` errors are lost. contributes=False: sends
        zeros, and keeps the residual for the next reduction."""
        before, residuals = None, list[Tensor]()
        if feedback is not None:
            before, feedback.pending = feedback.residual, residuals
        return self._put(tensor, lambda: self._sum(tensor, before, residuals, contributes=contributes))

    def close(self) -> None:
        """Fails all works that have not ended; nothing is sent any more. Ends the thread, but does not wait for it."""
        with self._lock:
            self._error = self._error or Abandoned("the attempt was abandoned")
        self._tasks.put(None)

    def join(self) -> None:
        """Returns when nothing writes to a tensor any more: after `close`, once the process group has ended."""
        self._thread.join()

    def _put(self, tensor: Tensor, task: Callable[[], None]) -> GroupWork:
        work = GroupWork("AllReduce", [tensor])
        streams = streams_of(tensor.device)
        ready = streams.current_stream(tensor.device).record_event() if streams else None
        self._tasks.put((work, tensor.device, ready, task))
        return work

    def _run(self) -> None:
        own: dict[torch.device, Any] = {}  # streams of this queue
        while (item := self._tasks.get()) is not None:
            work, device, ready, task = item
            streams = streams_of(device)
            if self._error is None:
                try:
                    if streams and device not in own:
                        own[device] = streams.Stream(device)
                    with streams.stream(own[device]) if streams else nullcontext(), torch.no_grad():
                        if streams:
                            own[device].wait_event(ready)
                        task()
                        if streams:
                            own[device].synchronize()  # a work ends when its tensors are complete in memory
                except Exception as error:  # noqa: BLE001 (any error is the work's)
                    self._error = self._error or error.with_traceback(None)
            work.end(self._error)
            del work, task, item

    def _exchange(self, start: Callable[[], dist.Work]) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            work = start()
        work.wait()

    def _sum(self, tensor: Tensor, before: Tensor | None, residuals: list[Tensor], *, contributes: bool) -> None:
        """Reduces `tensor` in place. `before`: residual of earlier reductions; that of this one is appended to `residuals`."""
        rank, ranks = self._rank, self._ranks
        if not tensor.numel():
            return
        share = -(-tensor.numel() // (ranks * BLOCK))  # blocks that each rank owns
        given = torch.zeros(ranks * share, BLOCK, device=tensor.device)
        flat = given.view(-1)[: tensor.numel()]
        if contributes:
            flat.copy_(tensor.reshape(-1))
            if before is not None:
                flat.add_(before)
        if ranks == 1:
            tensor.copy_(flat.view(tensor.shape))
            if contributes:
                residuals.append(torch.zeros_like(flat))
            return

        def message(shares: int) -> Tensor:
            """Returns a buffer for that many ranks' shares."""
            count = shares * message_bytes(share)
            return zeros(count, torch.uint8, tensor.device, shared=self._shared).view(shares, -1)

        sent, received = message(ranks), message(ranks)
        for other in range(ranks):
            quantize(given[other * share : (other + 1) * share], sent[other])  # leaves the rounding errors there
        self._exchange(lambda: self._process_group.alltoall_base(received, sent, [], []))
        total = torch.zeros(share, BLOCK, device=tensor.device)
        for other in range(ranks):
            dequantize(received[other], total, add=True)
        mine = message(1)
        quantize(total, mine[0])
        given[rank * share : (rank + 1) * share].add_(total)
        self._exchange(lambda: self._process_group._allgather_base(received, mine))
        if before is not None and not contributes:
            flat.add_(before)
        residuals.append(flat)
        given = torch.empty_like(given)
        for other in range(ranks):
            dequantize(received[other], given[other * share : (other + 1) * share])
        tensor.copy_(given.view(-1)[: tensor.numel()].view(tensor.shape))


def message_bytes(blocks: int) -> int:
    """Bytes of that many blocks: a signed byte for each value, block by block, then the blocks' scales, in fp32."""
    return blocks * (BLOCK + 4)


def quantize(values: Tensor, message: Tensor) -> None:
    """Quantizes `values` (blocks, BLOCK), fp32, into `message` (bytes), and leaves the rounding errors in `values`. A block's scale is its
    largest absolute value / LEVELS, so no error exceeds half of the scale. A block with an infinite value or NaN is decoded as all NaN."""
    codes, scales = _parts(message, len(values))
    levels = torch.tensor(float(LEVELS), device=values.device)  # a number would make CUDA multiply by its inverse
    for own, code, scale in zip(values.split(PIECE), codes.split(PIECE), scales.split(PIECE), strict=True):
        torch.div(own.abs().amax(dim=1), levels, out=scale)
        divisor = torch.where((scale > 0) & scale.isfinite(), scale, 1.0).unsqueeze(1)
        rounded = (own / divisor).round_().clamp_(-LEVELS, LEVELS).nan_to_num_(0.0)
        code.copy_(rounded)
        scale.copy_(torch.where(scale.isfinite(), scale, torch.nan))
        own.sub_(rounded.mul_(scale.unsqueeze(1)))


def dequantize(message: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Dequantizes a message written by `quantize`: stores the values in `out` (blocks, BLOCK), fp32, or with `add` adds them to it."""
    codes, scales = _parts(message, len(out))
    for own, code, scale in zip(out.split(PIECE), codes.split(PIECE), scales.split(PIECE), strict=True):
        values = code.to(torch.float32).mul_(scale.unsqueeze(1))
        if add:
            own.add_(values)
        else:
            own.copy_(values)


def _parts(message: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Returns a message's codes (blocks, BLOCK) and scales (blocks)."""
    codes = message[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    return codes, message[blocks * BLOCK :].view(torch.float32)
