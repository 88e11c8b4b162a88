"""The child's program: a group of torch that may be killed at any moment, without loss to the process that trains.

The process that trains starts this program once (`python -m ft.process_groups.baby_worker DESCRIPTOR`), as its *fork server*: it imports
torch, starts no thread, and waits. For each generation it is asked for a child. It forks, and the pages of torch are shared; but a fork of
so large a process, and the first writes of the child to pages that it shares, take tens of milliseconds on a busy machine. So one child,
the spare, is always forked ahead, when nobody waits: it gets its socket when it is asked for.

Nobody outlives the process that trains: Linux kills the fork server with the thread that started it and each child with it; elsewhere,
or should that fail, all leave when their socket ends.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from ft.children import die_with

FORK, BURY, READY = b"fork", b"bury", b"ready"
REST_S = 1.0  # after a child was asked for, until the next spare is made: the step that waits for that child is over


def main() -> None:
    parent = int(sys.argv[2])
    die_with(parent)
    from ft.process_groups.channel import Channel

    control = Channel(socket.socket(fileno=int(sys.argv[1])))

    import ft.process_groups.inline
    import ft.process_groups.shared  # noqa: F401

    gc.freeze()  # the pages stay shared: a collection in a child does not write on them
    ForkServerProcess(control).serve()


class ForkServerProcess:
    """Hands out a child for each message, which brings the child's socket; answers with its process number."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._spare: tuple[int, Any] | None = None  # its number, and the channel that it waits at

    def serve(self) -> None:
        self._spare = self._fork()
        self._control.send(READY)
        while (message := self._next()) is not None:
            _bury()
            what, descriptors = message
            if what == FORK:
                self._control.send(str(self._give(descriptors[0])).encode())

    def _next(self) -> Any:
        """Returns the next request; None when the parent has hung up. Makes a spare while it waits."""
        if self._spare is None and not self._control.waits(REST_S):
            self._spare = self._fork()
        return self._control.receive()

    def _give(self, descriptor: int) -> int:
        """That end of a socket to the spare, or to a child that is forked now. The child's number."""
        while True:
            number, channel = self._spare or self._fork()
            self._spare = None
            try:
                channel.send(FORK, [descriptor])
            except OSError:  # it was killed, by whoever looks for memory
                continue
            else:
                os.close(descriptor)
                return number
            finally:
                channel.close()

    def _fork(self) -> tuple[int, Any]:
        """A child that waits for its socket, and the channel to it."""
        from ft.process_groups.channel import Channel

        ours, theirs = Channel.pair()
        me = os.getpid()
        number = os.fork()
        if number == 0:
            die_with(me)
            ours.close()
            self._control.close()
            _become(Channel(theirs))
        theirs.close()
        return number, ours


def _become(waiting: Any) -> None:
    """A child, for whoever is at the other end of the socket that comes."""
    from ft.process_groups.channel import Channel

    try:
        if (message := waiting.receive()) is not None:
            waiting.close()
            ChildGroup(Channel(socket.socket(fileno=message[1][0]))).serve()
    finally:
        os._exit(0)  # without a word to torch's threads: they may never end


class ChildGroup:
    """Carries out commands, one after the other, until its socket ends."""

    def __init__(self, channel: Any) -> None:
        from ft.process_groups.channel import Form, Map, MapDevice, Start, Unmap
        from ft.process_groups.shared import SharedPoolClient

        self._channel = channel
        self._memory = SharedPoolClient()
        self._engine: Any = None
        self._handlers: dict[type[Any], Callable[[Any, list[int]], None]] = {
            Form: self._form,
            Map: self._map,
            MapDevice: self._map_device,
            Unmap: self._unmap,
            Start: self._start,
        }

    def serve(self) -> None:
        while (message := self._channel.receive()) is not None:
            command = pickle.loads(message[0])
            self._handlers[type(command)](command, message[1])

    def _form(self, command: Any, descriptors: list[int]) -> None:
        """In a thread: this one sees the end of the socket meanwhile."""
        if command.device is not None:
            import torch

            torch.cuda.set_device(command.device)  # of this thread: it maps memory, and starts operations
        threading.Thread(target=self._build, args=(command,), name="ft-form", daemon=True).start()

    def _build(self, command: Any) -> None:
        from ft.process_groups.channel import FAILED, READY
        from ft.process_groups.gloo import form_gloo
        from ft.process_groups.group_init import GroupInit
        from ft.process_groups.nccl import form_nccl
        from ft.process_groups.rendezvous import Rendezvous

        group_init = GroupInit("child", lambda it: self._engine, shape=command.shape, holders=command.holders)
        try:
            rendezvous = Rendezvous(group_init, command.store, command.rank, command.size, command.limit_s)
            if command.kind == "gloo":
                self._engine = form_gloo(group_init, rendezvous, command.interface)
            else:
                self._engine = form_nccl(group_init, rendezvous, command.device)
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
            self._reply(FAILED, 0, str(error), [group_init.absent, group_init.strangers])
        else:
            self._reply(READY, 0, None, [])

    def _map(self, command: Any, descriptors: list[int]) -> None:
        self._memory.add(command.number, command.size, descriptors[0])

    def _map_device(self, command: Any, descriptors: list[int]) -> None:
        self._memory.add_device(command.number, command.export)

    def _unmap(self, command: Any, descriptors: list[int]) -> None:
        from ft.process_groups.channel import DROPPED

        self._memory.drop(command.numbers)
        self._reply(DROPPED, 0, None, command.numbers)

    def _start(self, command: Any, descriptors: list[int]) -> None:
        def ended(error: Exception | None, source: int) -> None:
            from ft.process_groups.channel import ENDED

            self._reply(ENDED, command.number, None if error is None else str(error), source)

        try:
            if command.after is not None:
                _wait_for(command.after)
            operation = command.operation.each(lambda place, read, written: self._memory.tensor(place))
            self._engine.start(operation, ended)
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
            ended(error, -1)

    def _reply(self, *reply: Any) -> None:
        try:
            self._channel.send(json.dumps(reply).encode())
        except OSError:
            os._exit(0)  # the parent is gone


def _wait_for(event: tuple[int, bytes]) -> None:
    """This process' stream waits until the parent has written the tensors."""
    import torch

    device, handle = event
    torch.cuda.current_stream(device).wait_event(torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle))


def _bury() -> None:
    """Takes leave of the children that have ended. Their numbers are not given to others before."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
