"""The log lines of one rank, on standard output: the launcher keeps each rank's output in files."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn, TextIO

# Select Graphic Rendition codes (ECMA-48, 8.3.117); the bright-free set is legible on light and dark terminals.
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35"}


class Log(logging.Handler):
    """Writes lines as `[rank step] text`: information from global rank 0 only, warnings and errors from every rank. The methods take printf
    arguments as logging.Logger's do. A text is one write, so lines of ranks that share a pipe do not interleave below its atomic size
    (4096 bytes on Linux). Safe to use from several threads. `step`: the last committed optimizer step, set by the loop."""

    def __init__(
        self, *, global_rank: int = 0, group: str = "", stream: TextIO | None = None, colour: bool = True
    ) -> None:
        """`group` names the replica group once there are several. `colour` permits colour; only a terminal gets it."""
        super().__init__()
        self._lock = threading.Lock()  # not the handler's, which is taken at exit: a full pipe may hold up a writer
        self.global_rank = global_rank
        self.step: int | None = None
        self._group = group
        self._stream = sys.stdout if stream is None else stream
        self._missing = ""  # why the last line could not be written
        self.is_terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self.colour = colour and self.is_terminal

    def info(self, message: str, *args: object) -> None:
        """On global rank 0 alone; `warning` and `error`, the cause that ends the run, on every rank."""
        if self.global_rank == 0:
            self._write("", message, args)

    def warning(self, message: str, *args: object) -> None:
        self._write(self.paint("warning: ", "yellow"), message, args)

    def error(self, message: str, *args: object) -> None:
        self._write(self.paint("error: ", "red"), message, args)

    def attach_to(self, name: str) -> None:
        """Takes the records of Python's logger `name` and of those below it, which ft/ uses."""
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        (self.info if record.levelno < logging.WARNING else self.warning)("%s", record.getMessage())

    def overwrite(self, text: str) -> None:
        """Replace the terminal's current line (a progress bar); elsewhere, and on other ranks, nothing."""
        if self.is_terminal and self.global_rank == 0:
            self._put(f"\r\x1b[K{text}")  # EL: erase to the end of the line

    def paint(self, text: str, *styles: str) -> str:
        """`text` in the given styles (names in _CODES), or as it is where there is no colour."""
        if not self.colour:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"

    def prefix(self) -> str:
        """`[rank step]`, or `[group/rank step]` once there are groups; no step before the first is known."""
        who = f"{self._group}/{self.global_rank}" if self._group else f"{self.global_rank}"
        return f"[{who}]" if self.step is None else f"[{who} {self.step}]"

    def _write(self, level: str, message: str, args: tuple[object, ...]) -> None:
        text = message % args if args else message
        self._put(f"{self.paint(self.prefix(), 'dim')} {level}{text}\n")

    def _put(self, text: str) -> None:
        """Goes on without a reader (`| head`), and on a full disk; once there is room again a line says that some are missing."""
        with self._lock:
            try:
                if self._missing:
                    text = f"{self.prefix()} warning: lines of this log are missing here: {self._missing}\n{text}"
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:  # a sample of text, or a path, where few letters are known
                    self._stream.write(text.encode("ascii", "backslashreplace").decode())
                self._stream.flush()  # a pipe is block-buffered: without it the last lines of a killed rank are lost
                self._missing = ""
            except BrokenPipeError:
                pass
            except OSError as error:
                self._missing = error.strerror or str(error)


def end_process(code: int) -> NoReturn:
    """Ends the process with `code`, after its other threads and its exit handlers, but without the interpreter's finalization: in that, a
    thread inside torch that asks for the interpreter's lock (a gloo thread that frees a tensor, a daemon thread whose call of a store
    returns) ends the process by SIGABRT; and Python would visit all of its objects once more, 0.4 s with torch loaded."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
