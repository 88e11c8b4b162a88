"""The face of all process groups between replica groups: what the Manager calls, and what torch calls.

    group = ProcessGroupGloo(timeout=60.0)
    group.configure("10.0.0.1:29500/job/7/0", rank, size)     # forms, or raises RendezvousFailed; never blocks longer than asked
    work = group.allreduce([tensor])                          # never raises for what peers do, never waits
    work.wait()                                               # or work.get_future()
    group.interrupt("a member is lost")                       # from any thread: who waits is woken, at once
    group.abandon("it failed", then=give_back_buffers)        # the same, and the generation is over
    group.errored()                                           # why it is of no use, or None
    group.configure("10.0.0.1:29500/job/8/0", rank, size)     # the next generation waits for nothing of the last

A subclass says how a generation is built (`_build`); all else is shared. A group is also torch's ProcessGroup: dist.all_reduce and its
like, functional collectives and DeviceMesh take it after `register`.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs have several signatures for each collective; ours take all of them.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ft.process_groups import operations as ops
from ft.process_groups.errors import Abandoned, GroupError, MustExit, RendezvousFailed
from ft.process_groups.generation import Generation, GroupWork
from ft.process_groups.group_init import Engine, GroupInit
from ft.process_groups.operations import Operation, flatten, reduction
from ft.process_groups.reaper import Reaper
from ft.process_groups.store import parse
from ft.protocol.messages import Shape

# torch's own timeouts are off: nobody waits for them, and a pending operation ends when its sockets are shut or its process is killed.
NEVER = timedelta(days=365)
GRACE_S = 0.5  # past rendezvous_s, for who builds to say itself what is missing


class Collectives(dist.ProcessGroup):
    """torch's names for what a group does, each turned into an Operation for `launch`. torch calls some by an older and a newer name."""

    def launch(self, operation: Operation) -> dist.Work:
        raise NotImplementedError

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.AllReduce(flatten(tensors), reduction(opts)))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.launch(ops.AllReduceCoalesced(list(tensors), reduction(opts)))

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None) -> dist.Work:
        """`opts`: torch's BroadcastOptions, or the rank of the root."""
        start = root if root is not None else opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        return self.launch(ops.Broadcast(flatten(tensors), start, getattr(opts, "rootTensor", 0)))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.Reduce(flatten(tensors), reduction(opts), getattr(opts, "rootRank", 0)))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.AllGather([list(out) for out in output_tensors], flatten(input_tensors)))

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.AllGatherCoalesced([list(out) for out in output_lists], list(input_list)))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.AllGatherSingle(flatten(outputs), flatten(inputs)))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        outputs = [list(out) for out in output_tensors]
        return self.launch(ops.Gather(outputs, flatten(input_tensors), getattr(opts, "rootRank", 0)))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        inputs = [list(part) for part in input_tensors]
        return self.launch(ops.Scatter(flatten(output_tensors), inputs, getattr(opts, "rootRank", 0)))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        inputs = [list(part) for part in input_tensors]
        return self.launch(ops.ReduceScatter(flatten(output_tensors), inputs, reduction(opts)))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.ReduceScatterSingle(flatten(outputs), flatten(inputs), reduction(opts)))

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(ops.AllToAll(list(output_tensors), list(input_tensors)))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (), opts: Any = None
    ) -> dist.Work:
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        return self.launch(ops.AllToAllSingle([output], [input], *splits))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self.launch(ops.Barrier())

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 (torch's name)
        return self.launch(ops.Send(flatten(tensors), dstRank, tag))

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        return self.launch(ops.Receive(flatten(tensors), srcRank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self.launch(ops.Receive(flatten(tensors), None, tag))

    _allgather_base = all_gather_single = all_gather_single_coalesced = allgather_into_tensor_coalesced
    _reduce_scatter_base = reduce_scatter_single = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


class ProcessGroup(Collectives):
    """`timeout`: seconds (or a timedelta) that an operation may take, the backstop behind the notices; `rendezvous_s`: that forming may
    take."""

    KIND = "ft"
    IN_CHILD = False  # operations are another process's: tensors in its memory (shared.empty) are spared a copy

    def __init__(self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # missing in the stubs
        self.timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        self.rendezvous_s = rendezvous_s
        self.reaper = Reaper()
        self._state = threading.Lock()
        self._forming: GroupInit | None = None
        self._generation: Generation | None = None
        self._quorum_id = self._interrupted = 0  # of the newest generation; the newest that `interrupt` was said of
        self._why_none: Exception = GroupError("the group was never configured")
        self._rank, self._size = 0, 1
        self._registered = self._torch_name = self._torch_text = ""

    # ------------------------------------------------------------------------------------------------ the Manager's face

    def prepare(self) -> None:
        """Waits for what forming needs of this machine alone, such as an import of torch in a child process. `configure` does so itself,
        and not on the time of rendezvous_s; but others may wait by then, so call it before anybody counts on this member."""

    def configure(
        self,
        store: Store | str,
        rank: int,
        size: int,
        *,
        quorum_id: int = 0,
        shape: Shape = (),
        holders: Sequence[int] = (),
    ) -> None:
        """Gives up what there was, and forms a new generation with the others that call this.

        `store`: "host:port/prefix", or a store of torch; the prefix is of this generation alone, the same for all members. `quorum_id`:
        the generation's name for `interrupt`, larger than those before; 0: it has none. `shape`: what all members must have alike; the
        job's is that of most of `holders`, or of all where there are none. Returns when the group stands. Raises RendezvousFailed (its
        `absent` names ranks that did not come) when it did not within rendezvous_s, or was interrupted or abandoned from another thread,
        or where somebody is a stranger; MustExit when too many old generations have not ended; ValueError for what can never be.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: must be from 0 to {size - 1}")
        if isinstance(store, str):
            parse(store)
        self.abandon("configured anew")
        self.reaper.check(self.rendezvous_s)  # on a busy machine an end takes its time
        group_init = GroupInit(
            f"{rank}", lambda it: self._build(it, store, rank, size), self.prepare, shape=shape, holders=holders
        )
        with self._state:
            self._forming, self._rank, self._size, self._quorum_id = group_init, rank, size, quorum_id
            wanted = quorum_id == 0 or quorum_id != self._interrupted
        if not wanted:
            group_init.give_up("no longer wanted")
        group_init.start()
        try:
            generation = Generation(group_init.wait(self.rendezvous_s + GRACE_S), self.timeout_s)
        except RendezvousFailed as error:
            self._why_none = error
            self._drop_group_init(group_init)
            raise
        with self._state:
            self._forming, stands = None, not group_init.given_up.is_set()
            if stands:
                self._generation = generation
        if not stands:  # abandoned in the last moment
            generation.give_up("abandoned while it formed", self.reaper, None)
            raise RendezvousFailed("abandoned while it formed")

    def abandon(self, reason: str = "abandoned", then: Callable[[], None] | None = None) -> None:
        """Wakes every wait on this group, to form or to finish, with the reason; peers that wait for it see a closed connection.
        Returns at once, from any thread. `then` is called, in another one, when no operation of it touches a tensor any more."""
        with self._state:
            group_init, generation, self._generation = self._forming, self._generation, None
            if generation is not None:
                self._why_none = generation.error or Abandoned(reason)
        if group_init is not None:
            group_init.give_up(reason)
        if generation is not None:
            generation.give_up(reason, self.reaper, then)
        elif then is not None:
            then()

    def interrupt(self, reason: str, quorum_id: int | None = None) -> None:
        """Wakes who waits, as `abandon` does, but leaves the generation to its owner, who knows what its buffers are good for and is to
        abandon it. Sums that are complete stay so. Returns at once, from any thread. `quorum_id`: of that generation alone, whether it
        is still to be configured or long gone; None: whatever there is."""
        with self._state:
            group_init, generation = self._forming, self._generation
            if quorum_id is not None:
                self._interrupted = max(self._interrupted, quorum_id)
                if quorum_id != self._quorum_id:
                    return
        if group_init is not None:
            group_init.give_up(reason)
        if generation is not None:
            generation.interrupt(reason)

    def errored(self) -> Exception | None:
        """Why operations would fail: the first failure, or that there is no generation. None: it is of use."""
        with self._state:
            return self._generation.error if self._generation is not None else self._why_none

    def launch(self, operation: Operation) -> dist.Work:
        with self._state:
            generation, error = self._generation, self._why_none
        if generation is not None:
            return generation.start(operation)
        work = GroupWork(operation)
        work.end(error)
        return work

    @property
    def waits_since_s(self) -> float | None:
        """time.monotonic() at which the wait for other members began that goes on now: to form, or for the oldest operation under way; None
        where there is none."""
        with self._state:
            if self._forming is not None:
                return self._forming.began_s
            return self._generation.waits_since_s if self._generation is not None else None

    def pending(self) -> int:
        """Operations under way."""
        with self._state:
            return self._generation.pending if self._generation is not None else 0

    def shutdown(self, limit_s: float = 30.0) -> None:
        """Abandons it, and waits until all generations have ended, at most limit_s. Raises MustExit when some have not."""
        self.abandon("shut down")
        if not self.reaper.wait(limit_s):
            raise MustExit(f"{self.reaper.pending} generations have not ended after {limit_s:g} s")

    def abort(self) -> None:
        self.abandon("aborted")

    def _build(self, group_init: GroupInit, store: Store | str, rank: int, size: int) -> Engine:
        """Meets the others and connects; in a thread. Whatever it may block on is named to group_init.at_giving_up before."""
        raise NotImplementedError

    def _drop_group_init(self, group_init: GroupInit) -> None:
        with self._state:
            self._forming = None
        group_init.give_up("it failed")
        self.reaper.take(group_init.end, f"did not form: {self._why_none}")

    # ------------------------------------------------------------------------------------------------ torch's face

    def register(self, name: str) -> ProcessGroup:
        """Makes torch know this group under a name of its own, as a group of this process alone: its size changes with every generation,
        and torch's may not. Needs the default group. dist.all_reduce, functional collectives and DeviceMesh.from_group then take it."""
        self._registered = f"{self.KIND}_{name}"
        dist.Backend.register_backend(self._registered, lambda *_: self, devices=["cpu", "cuda"])
        dist.new_group(
            [dist.get_rank()], backend=self._registered, group_desc=self._registered, use_local_synchronization=True
        )
        return self

    def unregister(self) -> None:
        """Torch forgets it."""
        if self._registered:
            dist.destroy_process_group(self)
            self._registered = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return self._registered or self.KIND

    _get_backend_name = getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802 (torch keeps names in backends, which this has none of)
        self._torch_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._torch_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._torch_text = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._torch_text

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self._rank} of {self._size})"
