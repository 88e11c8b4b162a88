"""The fork server's process (fork_server.py). It imports torch only once it is tied to its parent."""

from __future__ import annotations

import gc
import os
import socket
import sys
from contextlib import suppress

from ft.children import die_with
from ft.process_groups.fork_server import FORK, READY, Channel

REST_S = 1.0  # after a child was asked for, until the next standby is made: the step that waits for that child is over


def main() -> None:
    """`python -m ft.process_groups.baby_worker DESCRIPTOR PARENT`. Hands out a child for each message, which brings the child's socket;
    answers with its process number. Ends when the parent has hung up. Makes a standby child when there is nothing to do."""
    die_with(int(sys.argv[2]))
    import ft.process_groups.baby  # noqa: F401  # with torch

    gc.freeze()  # the pages stay shared: a collection in a child does not write on them
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    standby: tuple[int, Channel] | None = _fork(control)
    control.send(READY)
    while True:
        if standby is None and not control.waits(REST_S):
            standby = _fork(control)
        if (message := control.receive()) is None:
            return
        with suppress(ChildProcessError):  # numbers of children that have ended are not given to others before
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        what, descriptors = message
        if what != FORK:
            continue
        given = False
        while not given:
            number, channel = standby or _fork(control)
            standby = None
            with suppress(OSError):  # it was killed, as by a system that is out of memory
                channel.send(FORK, descriptors)
                given = True
            channel.close()
        os.close(descriptors[0])
        control.send(str(number).encode())


def _fork(control: Channel) -> tuple[int, Channel]:
    """A child that waits for its socket, and the channel to it."""
    ours, theirs = Channel.pair()
    me = os.getpid()
    number = os.fork()
    if number == 0:
        die_with(me)
        ours.close()
        control.close()
        _become(Channel(theirs))
    theirs.close()
    return number, ours


def _become(waiting: Channel) -> None:
    """A child, for the process at the other end of the socket that comes."""
    from ft.process_groups.baby import ChildGroup

    try:
        if (message := waiting.receive()) is not None:
            waiting.close()
            ChildGroup(Channel(socket.socket(fileno=message[1][0]))).serve()
    finally:
        os._exit(0)  # without a wait for torch's threads: they may never end


if __name__ == "__main__":
    main()
