"""The process of the fork server (fork_server.py). It imports torch only after it is tied to its parent."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from contextlib import suppress

from ft.children import die_with
from ft.process_groups.fork_server import FORK, READY, Channel


def main() -> None:
    """Runs `python -m ft.process_groups.fork_server_main DESCRIPTOR PARENT_PID`. Each request brings a socket for a child; the reply is the
    child's process ID (pid). Ends when the parent closes the channel."""
    die_with(int(sys.argv[2]))
    gc.disable()  # imports leave no garbage
    import ft.process_groups.baby  # noqa: F401  # with torch

    gc.enable()
    gc.freeze()  # the pages stay shared: garbage collection in a child does not write to them
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    control.send(READY)
    while (message := control.receive()) is not None:
        with suppress(ChildProcessError):  # pids of children are not reused before they are reaped
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        what, descriptors = message
        if what != FORK:
            continue
        pid = 0  # the answer if no process is left, or no descriptor for the socket; other children live on
        for descriptor in descriptors:
            with suppress(OSError):
                pid = _fork(control, descriptor)
            os.close(descriptor)
        control.send(str(pid).encode())


def _fork(control: Channel, descriptor: int) -> int:
    """Forks a child, which serves the process at the other end of the socket `descriptor`, and exits. Returns its pid."""
    from ft.process_groups.baby import ChildGroup

    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with(parent)
        control.close()
        ChildGroup(Channel(socket.socket(fileno=descriptor))).serve()
        os._exit(0)  # without waiting for torch's threads, which may never end
    except BaseException:  # noqa: BLE001 (printed here, as this is the end of the process)
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
