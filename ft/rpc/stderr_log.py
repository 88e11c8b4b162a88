"""The log of the lighthouse and of a group's server, on stderr. A thread writes it: where nobody reads stderr (Ctrl-S in a terminal, a full
pipe, hung storage), a write blocks, and the event loop must go on."""

from __future__ import annotations

import logging
import os
import queue
import sys
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener

MAX_MESSAGES = 1000  # most messages that wait to be written
FLUSH_S = 2.0  # timeout of `flush`


class StderrHandler(QueueHandler):
    """A handler for the root logger. Messages that do not fit into its queue are dropped and counted. At its end the process calls `flush`
    (logging.shutdown)."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_MESSAGES)
        super().__init__(self._waiting)
        self._dropped = 0  # messages since the last one that was queued
        _Writer(self._waiting).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._dropped:
            record.msg = f"(stderr was blocked: {self._dropped} messages before the next are missing)\n{record.msg}"
        try:
            self._waiting.put_nowait(record)
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Returns when the queued messages are written, or after FLUSH_S."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, FLUSH_S)


class _Writer(QueueListener):
    """Writes past sys.stderr: the interpreter's end waits for the lock of that object, which a blocked write would hold."""

    def handle(self, record: logging.LogRecord) -> None:
        if sys.stderr:  # else it was closed at the start, and descriptor 2 is another file
            with suppress(OSError):
                os.write(2, f"{record.getMessage()}\n".encode(errors="backslashreplace"))


def log_to_stderr(program: str) -> None:
    """Sends all messages of this process to stderr, each with the time and the program's name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {program}: %(message)s", handlers=[StderrHandler()])
