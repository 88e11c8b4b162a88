"""Signal handling: signals become requests, which the loop all-reduces in each step so that all ranks act on them at the same step."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from training.progress import Clock

STOP = 1  # save, then exit 0
SAVE = 2  # save, then continue
STEPS_TO_STOP = 3  # bound on the steps that groups commit from the step of a stop request on
SAME_SIGNAL_S = 2.0  # launcher, terminal and scheduler may each deliver a signal: repeats within this time are ignored

LOG_JOIN_S = 1.0  # longest wait for a log line, which blocks only if nobody reads the pipe


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a job to save and leave: SIGTERM, Ctrl-C and, unless it is ignored (nohup), the end of the terminal."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGTERM, signal.SIGINT, *hangup


class Signals:
    """Signal handlers, from construction in the main thread to `close`: `stop_signals` request STOP, SIGUSR1 requests SAVE. A second
    stop signal ends the process at once with code 128 + its number, even while the loop blocks in C code, where Python runs no handler: the
    interpreter writes each signal's number to a socket (signal.set_wakeup_fd), and a thread reads it. `log`: writes a line."""

    def __init__(
        self, *, log: Callable[[str], object], clock: Clock = time.monotonic, exit_now: Callable[[int], Any] = os._exit
    ) -> None:
        assert threading.current_thread() is threading.main_thread(), "signal handlers belong to the main thread"
        self._log, self._clock, self._exit_now = log, clock, exit_now
        self.nothing_saved = ""  # the reason, if the run saves no checkpoints; training/components.py sets it
        self._lock = threading.Lock()
        self.pending = 0  # requests that `take` would return
        self._stop_requested: float | None = None
        self._at_stop: Callable[[], object] = lambda: None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # These handlers only replace the default action, so that the interpreter writes to the socket.
        self._old_handlers = {
            number: signal.signal(number, lambda *_: None) for number in (*stop_signals(), signal.SIGUSR1)
        }
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._restore)  # otherwise a child's signal would reach the parent's socket

    def take(self, mask: int = STOP | SAVE) -> int:
        """Returns, and clears, the requests in `mask` that have arrived on this rank since the last call; 0: none."""
        with self._lock:
            requests, self.pending = self.pending & mask, self.pending & ~mask
        return requests

    def on_stop_request(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once at the first STOP, in the thread that reads signals; at once if STOP has been requested."""
        with self._lock:
            self._at_stop, requested = callback, self._stop_requested is not None
        if requested:
            callback()

    def close(self) -> None:
        """Restores the previous handlers. May be called twice."""
        if not self._old_handlers:
            return
        self._restore()
        self._writer.shutdown(socket.SHUT_RDWR)  # ends the reading thread, even if a forked child holds a copy
        self._thread.join(timeout=5.0)
        self._writer.close()
        self._reader.close()

    def handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            with self._lock:
                self.pending |= SAVE
            self._say(f"{name}: {self.nothing_saved or 'saving after this step, then going on'}")
            return
        now = self._clock()
        if self._stop_requested is None:
            with self._lock:
                self._stop_requested, callback = now, self._at_stop
                self.pending |= STOP
            callback()
            nothing = self.nothing_saved
            leaving = f"{nothing}, leaving after this step" if nothing else "saving after this step, then leaving"
            self._say(f"{name}: {leaving}; another one ends the run at once")
        elif now - self._stop_requested >= SAME_SIGNAL_S:
            # Not through the log, whose lock the blocked loop may hold; and not if the pipe is full, which would block. A reader such as
            # `| tee` has gone with the first Ctrl-C, which the terminal sends to it, too.
            with suppress(OSError):
                if select.select([], [2], [], 0)[1]:
                    os.write(2, f"{name} again: ending at once, without saving\n".encode())
            self._exit_now(128 + number)

    def _say(self, message: str) -> None:
        """Logs in a separate thread: a full pipe may block the line, and the next signal must be read."""
        logger = threading.Thread(target=self._log, args=(message,), name="signals-log", daemon=True)
        with suppress(RuntimeError):  # no thread is left: what the line announces happens all the same
            logger.start()
            logger.join(LOG_JOIN_S)

    def _read(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number in self._old_handlers:  # signals of other handlers are written here too
                    # no thread is left for a timer, or for the callback: the next signal must be read all the same
                    with suppress(RuntimeError):
                        self.handle(number)

    def _restore(self) -> None:
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}
