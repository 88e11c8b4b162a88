"""One operation under way, as torch's Work: what a collective returns."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from ft.process_groups.operations import Operation


class GroupWork(Work):
    """Ends once: with the operation (when its tensors are complete in memory, on a GPU too), with its failure, or when the group is given
    up. `wait` blocks the calling thread and no stream, so whoever waits can be woken."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation.name
        self.started_s = time.monotonic()
        self._outputs = operation.outputs_flat()
        devices = {tensor.device for tensor in operation.tensors_flat() if tensor.is_cuda}
        self._future: Future[Any] = Future(devices=sorted(devices, key=str))
        self._claim = threading.Lock()
        self._ended = ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())  # the first of its callbacks: others may call wait
        self._error: Exception | None = None
        self._source = -1

    def end(self, error: Exception | None, source: int = -1) -> bool:
        """The first call counts: whether this was it."""
        if not self._claim.acquire(blocking=False):
            return False
        self._error, self._source = error, source
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True at the end. Raises GroupError with the cause, or TimeoutError after `timeout` (0: the group's own limit)."""
        limit_s = timeout.total_seconds()
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            raise TimeoutError(f"{self.operation} has not ended after {limit_s:g} s")
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error
        return True

    def get_future(self) -> Future[Any]:
        """Of the list of output tensors. It is set at the physical end: whoever reads them then, on any stream, reads the result."""
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Of a message that was received."""
        return self._source

    _source_rank = source_rank
