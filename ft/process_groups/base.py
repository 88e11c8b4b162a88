"""Process groups between replica groups: what the Manager and torch call, the operations, their works, and the life of a generation.

Flow: Collectives makes an Operation of torch's call, ProcessGroup.launch a GroupWork of it, and the generation's engine (gloo.py, nccl.py,
or baby.py, whose child uses these two) starts it on torch's own group. A subclass builds the engine (`_build`). A group is also
torch's ProcessGroup: dist.all_reduce and its like, functional collectives and DeviceMesh take it after `register`.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs have several signatures for each collective; ours take all of them.

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map

from ft.process_groups.errors import Abandoned, MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Engine, Rendezvous
from ft.process_groups.store import parse
from ft.protocol.messages import Fingerprint

# torch's own timeouts are off: no thread waits for them, and a pending operation ends when its sockets are shut or its process is killed.
NEVER = timedelta(days=365)
GRACE_S = 0.5  # past rendezvous_s, so that the thread that forms can report what is missing
MAX_ENDING = 4  # abandoned generations that are still shutting down
log = logging.getLogger(__name__)


class Signature(NamedTuple):
    """A collective of torch's: `name` in errors; `options`: their type, if it takes any; positions of arguments read and written."""

    name: str
    options: type[Any] | None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


SIGNATURES = {
    "allreduce": Signature("AllReduce", c10d.AllreduceOptions, (0,), (0,)),
    "allreduce_coalesced": Signature("AllReduceCoalesced", c10d.AllreduceCoalescedOptions, (0,), (0,)),
    "broadcast": Signature("Broadcast", c10d.BroadcastOptions, (0,), (0,)),
    "reduce": Signature("Reduce", c10d.ReduceOptions, (0,), (0,)),
    "allgather": Signature("AllGather", c10d.AllgatherOptions, (1,), (0,)),
    "allgather_coalesced": Signature("AllGatherCoalesced", c10d.AllgatherOptions, (1,), (0,)),
    "_allgather_base": Signature("AllGatherSingle", c10d.AllgatherOptions, (1,), (0,)),
    "allgather_into_tensor_coalesced": Signature("AllGatherSingle", c10d.AllgatherOptions, (1,), (0,)),
    "gather": Signature("Gather", c10d.GatherOptions, (1,), (0,)),
    "scatter": Signature("Scatter", c10d.ScatterOptions, (1,), (0,)),
    "reduce_scatter": Signature("ReduceScatter", c10d.ReduceScatterOptions, (1,), (0,)),
    "_reduce_scatter_base": Signature("ReduceScatterSingle", c10d.ReduceScatterOptions, (1,), (0,)),
    "reduce_scatter_tensor_coalesced": Signature("ReduceScatterSingle", c10d.ReduceScatterOptions, (1,), (0,)),
    "alltoall": Signature("AllToAll", c10d.AllToAllOptions, (1,), (0,)),
    "alltoall_base": Signature("AllToAllSingle", c10d.AllToAllOptions, (1,), (0,)),
    "barrier": Signature("Barrier", c10d.BarrierOptions),
    "send": Signature("Send", None, (0,)),
    "recv": Signature("Receive", None, (), (0,)),
    "recv_anysource": Signature("Receive", None, (), (0,)),
}


@dataclass(frozen=True)
class Operation:
    """A call of torch's `method`: its arguments less the options (tensors, lists of them, lists of lists, or plain), and `settings` of the
    options. It crosses a pipe, where baby.py sends it to a child: tensors are replaced (`each`), and a reduce op is a name."""

    method: str
    arguments: tuple[Any, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        """On a group of torch's own."""
        kind, arguments = SIGNATURES[self.method].options, self.arguments
        if kind is not None:
            options = kind()
            for name, value in self.settings.items():
                setattr(options, name, getattr(dist.ReduceOp, value) if name == "reduceOp" else value)
            arguments = (*arguments, options)
        return getattr(group, self.method)(*arguments)

    def inputs(self) -> list[Tensor]:
        return tree_leaves([self.arguments[at] for at in SIGNATURES[self.method].reads])

    def outputs(self) -> list[Tensor]:
        return tree_leaves([self.arguments[at] for at in SIGNATURES[self.method].writes])

    def map_tensors(self, change: Callable[[Any, bool, bool], Any]) -> Operation:
        """A copy with `change(tensor, is read, is written)` in place of every tensor."""
        arguments, (_, _, reads, writes) = list(self.arguments), SIGNATURES[self.method]
        for at in {*reads, *writes}:
            arguments[at] = tree_map(lambda it, at=at: change(it, at in reads, at in writes), arguments[at])
        return replace(self, arguments=tuple(arguments))


def reduction(op: Any) -> str:
    """The name of a ReduceOp ("SUM", "AVG", ...), or of that in torch's options; of None it is SUM. Raises ValueError."""
    op = getattr(op, "reduceOp", op)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        if op is None or op == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"reduce op {op}: must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR")


class Collectives(dist.ProcessGroup):
    """torch's names for what a group does, each turned into an Operation for `launch`. torch calls some by an older and a newer name."""

    def launch(self, operation: Operation) -> dist.Work:
        raise NotImplementedError

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(Operation("allreduce", (tree_leaves(tensors),), {"reduceOp": reduction(opts)}))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.launch(Operation("allreduce_coalesced", (list(tensors),), {"reduceOp": reduction(opts)}))

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None) -> dist.Work:
        """`opts`: torch's BroadcastOptions, or the rank of the root."""
        start = root if root is not None else opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        settings = {"rootRank": start, "rootTensor": getattr(opts, "rootTensor", 0)}
        return self.launch(Operation("broadcast", (tree_leaves(tensors),), settings))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        settings = {"reduceOp": reduction(opts), "rootRank": getattr(opts, "rootRank", 0)}
        return self.launch(Operation("reduce", (tree_leaves(tensors),), settings))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(Operation("allgather", ([list(out) for out in output_tensors], tree_leaves(input_tensors))))

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> dist.Work:
        """outputs[rank][i] is rank's inputs[i]."""
        return self.launch(Operation("allgather_coalesced", ([list(out) for out in output_lists], list(input_list))))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Each output is the inputs of all ranks, one after the other."""
        outputs, inputs = tree_leaves(outputs), tree_leaves(inputs)
        if len(inputs) == 1:
            return self.launch(Operation("_allgather_base", (outputs[0], inputs[0])))
        return self.launch(Operation("allgather_into_tensor_coalesced", (outputs, inputs)))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        """Outputs are empty but at the root."""
        outputs, settings = [list(out) for out in output_tensors], {"rootRank": getattr(opts, "rootRank", 0)}
        return self.launch(Operation("gather", (outputs, tree_leaves(input_tensors)), settings))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        """Inputs are empty but at the root."""
        inputs, settings = [list(part) for part in input_tensors], {"rootRank": getattr(opts, "rootRank", 0)}
        return self.launch(Operation("scatter", (tree_leaves(output_tensors), inputs), settings))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        inputs, settings = [list(part) for part in input_tensors], {"reduceOp": reduction(opts)}
        return self.launch(Operation("reduce_scatter", (tree_leaves(output_tensors), inputs), settings))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Each rank's output is its part of the sum of the inputs."""
        outputs, inputs, settings = tree_leaves(outputs), tree_leaves(inputs), {"reduceOp": reduction(opts)}
        if len(inputs) == 1:
            return self.launch(Operation("_reduce_scatter_base", (outputs[0], inputs[0]), settings))
        return self.launch(Operation("reduce_scatter_tensor_coalesced", (outputs, inputs), settings))

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(Operation("alltoall", (list(output_tensors), list(input_tensors))))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (), opts: Any = None
    ) -> dist.Work:
        """Splits: rows from and to each rank; empty: equal parts."""
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        return self.launch(Operation("alltoall_base", (output, input, *splits)))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self.launch(Operation("barrier"))

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 (torch's name)
        return self.launch(Operation("send", (tree_leaves(tensors), dstRank, tag)))

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        return self.launch(Operation("recv", (tree_leaves(tensors), srcRank, tag)))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self.launch(Operation("recv_anysource", (tree_leaves(tensors), tag)))

    _allgather_base = all_gather_single = all_gather_single_coalesced = allgather_into_tensor_coalesced
    _reduce_scatter_base = reduce_scatter_single = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


class GroupWork(dist.Work):
    """Ends once: with the operation (when its tensors are complete in memory, on a GPU too), with its failure, or when the group is given
    up. `wait` blocks the calling thread and no stream, so whoever waits can be woken. `outputs`: the tensors that hold the result.
    `on_timeout` gets the error of a wait that takes longer than its caller allows, which is raised otherwise."""

    on_timeout: Callable[[Exception], None] | None = None

    def __init__(self, name: str, outputs: list[Tensor]) -> None:
        super().__init__()
        self.name, self.started_s = name, time.monotonic()
        self._outputs = outputs
        self._future: Future[Any] = Future(devices=sorted({x.device for x in outputs if x.is_cuda}, key=str))
        self._claim = threading.Lock()
        self._ended = ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())  # the first of its callbacks: others may call wait
        self._error: Exception | None = None
        self._source = -1

    def end(self, error: Exception | None, source: int = -1) -> bool:
        """Ends the work; False if it had ended before."""
        if not self._claim.acquire(blocking=False):
            return False
        self._error, self._source = error, source
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True at the end. Raises ProcessGroupError with the cause, or TimeoutError after `timeout` (0: the group's limit). False: reported."""
        limit_s = timeout.total_seconds()
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            late = TimeoutError(f"{self.name} did not complete within {limit_s:g} s")
            if self.on_timeout is None:
                raise late
            self.on_timeout(late)
            return False
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future[Any]:
        """A future of the output tensors, set when they are complete in memory: a read after that, on any stream, sees the result."""
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        """The sender of a received message; -1 for every other operation."""
        return self._source

    _source_rank = source_rank


class Generation:
    """One life of a process group, from the moment it has formed until it is abandoned, and its works under way, the oldest first. The
    first failure is the generation's: what is asked afterwards fails at once with it. What is under way may still complete, for a complete
    sum counts. torch's timeouts are off; `limit_s` is kept here."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self.lock = threading.RLock()  # the end of a work may ask for the next operation
        self.engine: Engine | None = engine  # until it is abandoned
        self.error: Exception | None = None
        self.works: dict[GroupWork, None] = {}
        self.first_work = threading.Condition(self.lock)
        self._limit_s = limit_s
        self._watch = threading.Thread(target=self._keep_limit, name="ft-group-limit", daemon=True)
        self._watch.start()

    def ended(self, work: GroupWork, error: Exception | None, source: int = -1) -> None:
        if error is not None and not isinstance(error, ProcessGroupError):
            error = ProcessGroupError(
                f"{work.name}: {error}"
            )  # without the traceback, which would keep the group alive
        with self.lock:
            self.works.pop(work, None)
            self.error = self.error or error
        work.end(error, source)

    def interrupt(self, error: Exception) -> None:
        """Wakes everybody. What is under way ends, and nothing can be started; the engine, which may be at work on tensors yet, stays."""
        with self.lock:
            engine, self.error = self.engine, self.error or error
            works, self.works = list(self.works), {}
        for work in works:
            work.end(error)
        if engine is not None:
            engine.interrupt()

    def abandon(self, reason: str, reaper: Reaper, then: Callable[[], None] | None) -> None:
        """Wakes everybody, and hands the engine to the reaper. To be called once."""
        self.interrupt(Abandoned(reason))
        with self.lock:
            engine, self.engine = self.engine, None
            self.first_work.notify()
        assert engine is not None
        reaper.take(partial(_end, [engine], self._watch, then), f"abandoned: {reason}")

    def _keep_limit(self) -> None:
        while True:
            with self.lock:
                if self.engine is None:
                    return
                oldest = next(iter(self.works), None)
                left_s = None if oldest is None else oldest.started_s + self._limit_s - time.monotonic()
                if oldest is None or left_s is None or left_s > 0:
                    self.first_work.wait(left_s)
                    continue
            # The engine is woken, too: this process may wait for it itself, as a child that is stopped takes no more commands.
            self.interrupt(ProcessGroupError(f"{oldest.name} did not complete within {self._limit_s:g} s"))
            del oldest


def _end(last_reference: list[Engine], watch: threading.Thread, then: Callable[[], None] | None) -> None:
    last_reference[0].end()
    last_reference.clear()  # drops the engine
    watch.join()
    if then is not None:
        try:
            then()
        except Exception:
            log.exception("giving back the buffers of a generation that has ended failed")


class Reaper:
    """Ends generations that were abandoned, off the thread that abandoned them: torch's threads may still write into their buffers, and a
    thread that drops a group waits for them. Each is ended in a thread of its own. An end that does not come (a driver that hangs) is
    counted: past `most`, the process has to exit, since neither memory nor sockets come back."""

    def __init__(self, most: int = MAX_ENDING) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._pending: dict[threading.Thread, str] = {}

    def take(self, end: Callable[[], object], what: str) -> None:
        """Calls `end` in a thread, and returns at once. `what` names it in errors. That thread is to drop the last reference to a group."""
        thread = threading.Thread(target=self._end, args=(end,), name="ft-reaper", daemon=True)
        with self._changed:
            self._pending[thread] = what
        thread.start()

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._pending)

    def check(self, limit_s: float = 0.0) -> None:
        """Raises MustExit when more than `most` generations have not ended, nor do within the limit."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._pending) <= self._most, limit_s):
                raise MustExit(
                    f"{len(self._pending)} generations were abandoned and have not ended, more than {self._most}: this process must "
                    f"exit ({'; '.join(self._pending.values())})"
                )

    def wait(self, limit_s: float) -> bool:
        """Waits until all have ended; False: some have not within the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, limit_s)

    def _end(self, end: Callable[[], object]) -> None:
        this = threading.current_thread()
        try:
            end()
        except Exception:
            # It stays pending: what it still uses is unknown.
            log.exception("the end of a generation failed: %s", self._pending[this])
            return
        with self._changed:
            del self._pending[this]
            self._changed.notify_all()


class ProcessGroup(Collectives):
    """The group of one rank with its peers in the other replica groups, formed anew for each quorum by `configure`. `timeout`: seconds (or
    a timedelta) for an operation, the backstop behind the notices; `rendezvous_s`: for forming."""

    KIND = "ft"
    IN_CHILD = False  # operations are another process's: tensors in its memory (shared.empty) are spared a copy

    def __init__(self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # missing in the stubs
        self.timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        self.rendezvous_s = rendezvous_s
        self.reaper = Reaper()
        self._lock = threading.Lock()
        self._forming: Rendezvous | None = None
        self._generation: Generation | None = None
        self._quorum_id = self._interrupted = 0  # of the newest generation; the newest that `interrupt` named
        self._why_none: Exception = ProcessGroupError("the group was never configured")
        self._rank, self._size = 0, 1
        self._registered = self._torch_name = self._torch_text = ""

    def prepare(self) -> None:
        """Waits for what forming needs of this machine alone, such as an import of torch in a child process. `configure` does so itself,
        and not on the time of rendezvous_s; but others may wait by then, so call it before anybody counts on this member."""

    def configure(
        self,
        store: str,
        rank: int,
        size: int,
        *,
        quorum_id: int = 0,
        fingerprint: Fingerprint = (),
        holders: Sequence[int] = (),
    ) -> None:
        """Gives up what there was, and forms a new generation with the others that call this.

        `store`: "host:port/prefix"; the prefix is of this generation alone, the same for all members. `quorum_id`:
        the generation's name for `interrupt`, larger than those before; 0: it has none. `fingerprint`: digests that must be equal in all
        members; the job's are those of most `holders`, ranks that have the state, or of all members if there are none. Returns when the
        group has formed. Raises RendezvousFailed (its `absent` names ranks that did not come) when it did not within rendezvous_s, or was
        interrupted or abandoned from another thread, or where a member's fingerprint is another; MustExit when too many old generations
        have not ended; ValueError for what can never be."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: must be from 0 to {size - 1}")
        parse(store)
        self.abandon("configured anew")
        self.reaper.check(self.rendezvous_s)  # on a busy machine an end takes its time
        forming = Rendezvous(
            self._build, store, rank, size, self.rendezvous_s, fingerprint, holders, prepare=self.prepare
        )
        with self._lock:
            self._forming, self._rank, self._size, self._quorum_id = forming, rank, size, quorum_id
            wanted = quorum_id == 0 or quorum_id != self._interrupted
        if not wanted:
            forming.cancel("no longer wanted")
        forming.start()
        try:
            forming.wait(self.rendezvous_s + GRACE_S)
            with self._lock:  # and again, for it may have been cancelled at this moment
                self._generation, self._forming = Generation(forming.wait(0.0), self.timeout_s), None
        except RendezvousFailed as error:
            with self._lock:
                self._forming, self._why_none = None, error
            forming.cancel("it failed")
            self.reaper.take(forming.end, f"did not form: {error}")
            raise

    def _build(self, rendezvous: Rendezvous) -> Engine:
        """Meets the others and connects; in a thread. Whatever it may block on is named to rendezvous.on_cancel before."""
        raise NotImplementedError

    def abandon(self, reason: str = "abandoned", then: Callable[[], None] | None = None) -> None:
        """Wakes every wait on this group, to form or to finish, with the reason; peers that wait for it see a closed connection.
        Returns at once, from any thread. `then` is called, in another one, when no operation of it touches a tensor any more."""
        with self._lock:
            forming, generation, self._generation = self._forming, self._generation, None
            if generation is not None:
                self._why_none = generation.error or Abandoned(reason)
        if forming is not None:
            forming.cancel(reason)
        if generation is not None:
            generation.abandon(reason, self.reaper, then)
        elif then is not None:
            then()

    def interrupt(self, reason: str, quorum_id: int | None = None) -> None:
        """Wakes all waits, as `abandon` does, but keeps the generation: its owner, which knows the use of its buffers, must still call
        `abandon`. Sums that are complete stay so. Returns at once, from any thread. `quorum_id`: of that generation alone, whether it
        is still to be configured or long gone; None: whatever there is."""
        with self._lock:
            forming, generation = self._forming, self._generation
            if quorum_id is not None:
                self._interrupted = max(self._interrupted, quorum_id)
                if quorum_id != self._quorum_id:
                    return
        if forming is not None:
            forming.cancel(reason)
        if generation is not None:
            generation.interrupt(Abandoned(reason))

    def errored(self) -> Exception | None:
        """Why operations would fail: the first failure, or that there is no generation. None: it is of use."""
        with self._lock:
            return self._generation.error if self._generation is not None else self._why_none

    def launch(self, operation: Operation) -> dist.Work:
        """Never raises, and never waits for a peer: a failure is the work's."""
        work = GroupWork(SIGNATURES[operation.method].name, operation.outputs())
        with self._lock:
            generation, why_none = self._generation, self._why_none
        if generation is None:
            work.end(why_none)
            return work
        with generation.lock:
            engine, error = generation.engine, generation.error
            if engine is not None and error is None:
                generation.works[work] = None
                if len(generation.works) == 1:
                    generation.first_work.notify()
        if engine is None or error is not None:
            work.end(error or Abandoned("the group was abandoned"))
            return work
        try:
            engine.start(operation, partial(generation.ended, work))
        except Exception as failure:  # noqa: BLE001 (torch raises what it likes; the cause goes to the work)
            generation.ended(work, failure)
        return work

    @property
    def waits_since_s(self) -> float | None:
        """time.monotonic() at which the present wait for members began: to form, or for the oldest operation under way; None: none."""
        with self._lock:
            forming, generation = self._forming, self._generation
        if forming is not None:
            return forming.began_s
        if generation is None:
            return None
        with generation.lock:
            return min((work.started_s for work in generation.works), default=None)

    def shutdown(self, limit_s: float = 30.0) -> None:
        """Abandons it, and waits until all generations have ended, at most limit_s. Raises MustExit when some have not."""
        self.abandon("shut down")
        if not self.reaper.wait(limit_s):
            raise MustExit(f"{self.reaper.pending} generations have not ended after {limit_s:g} s")

    def abort(self) -> None:
        self.abandon("aborted")

    # ------------------------------------------------------------------------------------------------ torch's interface

    def register(self, name: str) -> ProcessGroup:
        """Makes torch know this group under a name of its own, as a group of this process alone: its size changes with every generation,
        and torch's may not. Needs the default group. dist.all_reduce, functional collectives and DeviceMesh.from_group then take it."""
        name = self._registered = f"{self.KIND}_{name}"
        dist.Backend.register_backend(name, lambda *_: self, devices=["cpu", "cuda"])
        dist.new_group([dist.get_rank()], backend=name, group_desc=name, use_local_synchronization=True)
        return self

    def unregister(self) -> None:
        if self._registered:
            dist.destroy_process_group(self)
            self._registered = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return self._registered or self.KIND

    # torch keeps these texts in a backend, which a ProcessGroup has none of.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._torch_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._torch_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._torch_text = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._torch_text

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self._rank} of {self._size})"

    _get_backend_name, _set_group_name, _set_group_desc = getBackendName, setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)


def failure_of(wait: Callable[[], Any]) -> Exception | None:
    """Returns the error without its traceback, whose frames refer to the group, without the source line in front, and without the advice
    and the stack of C++ behind; None where there is none."""
    try:
        wait()
    except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to the work)
        message = str(error).split("\nException raised from", 1)[0].split(" This is typically caused", 1)[0]
        return ProcessGroupError(re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", message))
    return None


def source_of(work: dist.Work, operation: Operation) -> int:
    return work._source_rank() if operation.method == "recv_anysource" else -1


def group_of(backend: Any, name: str, device: str, rank: int, size: int) -> dist.ProcessGroup:
    """torch's ProcessGroup around one backend: it knows all the names that collectives have."""
    group = dist.ProcessGroup(c10d.HashStore(), rank, size)
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
