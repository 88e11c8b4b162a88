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

REST_S = 1.0  # delay from a request to the fork of the next standby: the step that waits for that child is then over


def main() -> None:
    """Runs `python -m ft.process_groups.fork_server_main DESCRIPTOR PARENT_PID`. Each request brings a socket for a child; the reply is the
    child's process ID (pid). Forks a standby child while there are no requests. Ends when the parent closes the channel."""
    die_with(int(sys.argv[2]))
    gc.disable()  # imports leave no garbage
    import ft.process_groups.baby  # noqa: F401  # with torch

    gc.enable()
    gc.freeze()  # the pages stay shared: garbage collection in a child does not write to them
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    standby: tuple[int, Channel] | None = None
    with suppress(OSError):
        standby = _fork(control)
    control.send(READY)
    while True:
        if standby is None and not control.poll(REST_S):
            with suppress(OSError):  # no process or descriptor is left: tried again later
                standby = _fork(control)
        if (message := control.receive()) is None:
            return
        with suppress(ChildProcessError):  # pids of children are not reused before they are reaped
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        what, descriptors = message
        if what != FORK:
            continue
        pid = 0  # 0 is the answer if no process or descriptor is left; other children live on
        while not pid:
            try:
                forked, channel = standby or _fork(control)
            except OSError:
                break
            standby = None
            with suppress(OSError):  # the standby may have been killed, as when the system is out of memory
                channel.send(FORK, descriptors)
                pid = forked
            channel.close()
        os.close(descriptors[0])
        control.send(str(pid).encode())


def _fork(control: Channel) -> tuple[int, Channel]:
    """Forks a child that waits for its socket. Returns its pid and the channel to it."""
    ours, theirs = Channel.pair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with(parent)
        ours.close()
        control.close()
        _run_child(Channel(theirs))
    theirs.close()
    return pid, ours


def _run_child(waiting: Channel) -> None:
    """Receives the child's socket, serves the process at its other end, and exits."""
    from ft.process_groups.baby import ChildGroup

    try:
        if (message := waiting.receive()) is not None:
            waiting.close()
            ChildGroup(Channel(socket.socket(fileno=message[1][0]))).serve()
        os._exit(0)  # without waiting for torch's threads, which may never end
    except BaseException:  # noqa: BLE001 (printed here, as this is the end of the process)
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
