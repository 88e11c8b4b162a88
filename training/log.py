"""Log lines of one rank, on standard output, which the launcher redirects to a file per rank."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn, TextIO

# Select Graphic Rendition codes (ECMA-48, 8.3.117); the set without bright colours is legible on light and dark terminals.
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35"}


class Log(logging.Handler):
    """Writes lines `[rank step] message`: info from global rank 0 only, warnings and errors from every rank. Methods take printf
    arguments as those of logging.Logger do. Each message is one write, so that lines of ranks that share a pipe
    do not interleave up to its atomic size (4096 bytes on Linux). `step`: last committed optimizer step, set by the loop. Thread-safe."""

    def __init__(
        self, *, global_rank: int = 0, group: str = "", stream: TextIO | None = None, colour: bool = True
    ) -> None:
        """`group`: name of the replica group; "": there is only one. `colour`: use colours on a terminal, unless NO_COLOR is set."""
        super().__init__()
        self._lock = threading.Lock()  # not logging.Handler's, which is taken at exit: a full pipe may block a writer
        self.global_rank = global_rank
        self.step: int | None = None
        self._group = group
        self._stream = sys.stdout if stream is None else stream
        self._missing = ""  # error of the last line, if it could not be written
        self.is_terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self.colour = colour and self.is_terminal and not os.environ.get("NO_COLOR")

    def info(self, message: str, *args: object) -> None:
        """Logs on global rank 0 only; `warning`, and `error` for failures that end the run, log on every rank."""
        if self.global_rank == 0:
            self._write("", message, args)

    def warning(self, message: str, *args: object) -> None:
        self._write(self.paint("warning: ", "yellow"), message, args)

    def error(self, message: str, *args: object) -> None:
        self._write(self.paint("error: ", "red"), message, args)

    def attach_to(self, name: str) -> None:
        """Handles the records of Python's logger `name` and its children, which ft/ uses."""
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        (self.info if record.levelno < logging.WARNING else self.warning)("%s", record.getMessage())

    def overwrite(self, text: str) -> None:
        """Replaces the terminal's current line (a progress bar); does nothing without a terminal or on other ranks."""
        if self.is_terminal and self.global_rank == 0:
            self._put(f"\r\x1b[K{text}")  # EL: erase to the end of the line

    def paint(self, text: str, *styles: str) -> str:
        """Returns `text` in the given styles (names in _CODES), unchanged without colours."""
        if not self.colour:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"

    def prefix(self) -> str:
        """Returns `[rank step]`, or `[group/rank step]` with replica groups; without a step before the first one."""
        rank = f"{self._group}/{self.global_rank}" if self._group else f"{self.global_rank}"
        return f"[{rank}]" if self.step is None else f"[{rank} {self.step}]"

    def _write(self, level: str, message: str, args: tuple[object, ...]) -> None:
        text = message % args if args else message
        self._put(f"{self.paint(self.prefix(), 'dim')} {level}{text}\n")

    def _put(self, text: str) -> None:
        """Writes `text`; a closed pipe (`| head`) or full disk is ignored, and the first line that can be written again reports a gap."""
        with self._lock:
            try:
                if self._missing:
                    text = f"{self.prefix()} warning: lines of this log are missing here: {self._missing}\n{text}"
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:  # a text sample or a path, with an ASCII locale
                    self._stream.write(text.encode("ascii", "backslashreplace").decode())
                self._stream.flush()  # a pipe is block-buffered: without it the last lines of a killed rank are lost
                self._missing = ""
            except BrokenPipeError:
                pass
            except OSError as error:
                self._missing = error.strerror or str(error)


def end_process(code: int) -> NoReturn:
    """Ends the process with `code`, after non-daemon threads and exit handlers, but without the interpreter's finalization, in which a
    torch thread that acquires the GIL (a gloo thread that frees a tensor, a daemon thread whose store call returns) would abort the process
    (SIGABRT), and which would visit all objects once more, 0.4 s with torch loaded. A stop signal that comes late ends it at once, with
    the same code: its launcher's would say that nothing was saved."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, lambda *_: os._exit(code))
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
