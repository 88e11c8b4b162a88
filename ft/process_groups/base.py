"""Process groups between replica groups: the interface to the Manager and torch, operations, their works, and *generations*: a process
group forms a new generation for each quorum, and abandons the one before.

Flow: Collectives turns torch's call into an Operation, ProcessGroup.launch creates its GroupWork, and the generation's engine (gloo.py,
nccl.py, or baby.py, whose child uses these two) starts it on a native process group of torch. A subclass builds the engine (`_build`).
ProcessGroup is also torch's: after `register` dist.all_reduce and its like, functional collectives and DeviceMesh accept it.

A new kind of process group is added here:
- its engine, with the guarantees of forming.Engine, and its subclass (`KIND`, `DEVICE`, `NOT_REDUCED`, `_build`), in a module beside
  gloo.py and nccl.py; in a child also baby.py: the subclass with `NATIVE`, and ChildGroup.form;
- its name in ft/config.py: the setting process_group, ProcessGroupKind, and _KINDS: for each device of the gradients one kind in this
  process and one in a child, of which the error of process_group_kind names the nearest; then `make docs`;
- its class in start.make_process_group; environment variables that it requires in nccl.process_settings;
- its public name, if programs written for torchft use it: ft/__init__.py, ft/process_group.py, docs/torchft.md;
- in tests/multiproc `KINDS` of test_process_groups.py and test_process_group_deaths.py, the classes of `make` in the former, and those of
  `Member.prepare` in group_member.py; with a public name also MODULES of tests/unit/test_torchft_names.py.
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
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map

from ft.descriptors import raise_limit
from ft.process_groups.errors import Abandoned, MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Engine, Rendezvous
from ft.process_groups.store import parse
from ft.protocol.messages import Fingerprint

# torch's timeout for operations that are ended by other means: their sockets are shut down, their communicator is aborted or their process
# is killed. gloo in this process has a backstop instead (gloo.form_gloo).
NEVER = timedelta(days=365)
ABSENT_REPORT_S = 0.5  # wait after rendezvous_s, in which the forming thread can report which members are absent
MAX_ENDING = 4  # most abandoned generations that are still shutting down
log = logging.getLogger(__name__)


class Signature(NamedTuple):
    """A collective of torch: its `name` in errors, the type of its `options`, and the positions of arguments that it reads and writes."""

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


UNSUPPORTED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})  # by gloo and by NCCL


@dataclass(frozen=True)
class Operation:
    """A call of torch's `method`: its arguments without the options (tensors, lists of them, lists of lists, or plain values), and fields
    of the options (`settings`). baby.py sends it to a child, with tensors replaced (`map_tensors`); a reduce op is a string."""

    method: str
    arguments: tuple[Any, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        """Starts the operation on a native process group of torch."""
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
        """Returns a copy in which each tensor is replaced by `change(tensor, is read, is written)`."""
        arguments, (_, _, reads, writes) = list(self.arguments), SIGNATURES[self.method]
        for at in {*reads, *writes}:
            arguments[at] = tree_map(lambda it, at=at: change(it, at in reads, at in writes), arguments[at])
        return replace(self, arguments=tuple(arguments))


def reduction(op: Any) -> str:
    """Returns the name ("SUM", "AVG", ...) of a ReduceOp or of that in torch's options; SUM for None. Raises ValueError."""
    op = getattr(op, "reduceOp", op)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        if op is None or op == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"reduce op {op}: must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR")


class Collectives(dist.ProcessGroup):
    """The methods of torch's ProcessGroup, each of which passes an Operation to `launch`. Some have two names in torch."""

    def launch(self, operation: Operation) -> dist.Work:
        raise NotImplementedError

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(Operation("allreduce", (tree_leaves(tensors),), {"reduceOp": reduction(opts)}))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.launch(Operation("allreduce_coalesced", (list(tensors),), {"reduceOp": reduction(opts)}))

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None) -> dist.Work:
        """Broadcasts from one rank. `opts`: torch's BroadcastOptions, or that rank."""
        start = root if root is not None else opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        settings = {"rootRank": start, "rootTensor": getattr(opts, "rootTensor", 0)}
        return self.launch(Operation("broadcast", (tree_leaves(tensors),), settings))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        settings = {"reduceOp": reduction(opts), "rootRank": getattr(opts, "rootRank", 0)}
        return self.launch(Operation("reduce", (tree_leaves(tensors),), settings))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(Operation("allgather", ([list(out) for out in output_tensors], tree_leaves(input_tensors))))

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> dist.Work:
        """Sets output_lists[rank][i] to that rank's input_list[i]."""
        return self.launch(Operation("allgather_coalesced", ([list(out) for out in output_lists], list(input_list))))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Sets each output to the concatenated inputs of all ranks."""
        outputs, inputs = tree_leaves(outputs), tree_leaves(inputs)
        if len(inputs) == 1:
            return self.launch(Operation("_allgather_base", (outputs[0], inputs[0])))
        return self.launch(Operation("allgather_into_tensor_coalesced", (outputs, inputs)))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        """Gathers to the root; on all other ranks output_tensors must be empty."""
        outputs, settings = [list(out) for out in output_tensors], {"rootRank": getattr(opts, "rootRank", 0)}
        return self.launch(Operation("gather", (outputs, tree_leaves(input_tensors)), settings))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        """Scatters from the root; on all other ranks input_tensors must be empty."""
        inputs, settings = [list(part) for part in input_tensors], {"rootRank": getattr(opts, "rootRank", 0)}
        return self.launch(Operation("scatter", (tree_leaves(output_tensors), inputs), settings))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        inputs, settings = [list(part) for part in input_tensors], {"reduceOp": reduction(opts)}
        return self.launch(Operation("reduce_scatter", (tree_leaves(output_tensors), inputs), settings))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Sets each rank's output to its part of the sum of the inputs."""
        outputs, inputs, settings = tree_leaves(outputs), tree_leaves(inputs), {"reduceOp": reduction(opts)}
        if len(inputs) == 1:
            return self.launch(Operation("_reduce_scatter_base", (outputs[0], inputs[0]), settings))
        return self.launch(Operation("reduce_scatter_tensor_coalesced", (outputs, inputs), settings))

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> dist.Work:
        return self.launch(Operation("alltoall", (list(output_tensors), list(input_tensors))))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (), opts: Any = None
    ) -> dist.Work:
        """Exchanges rows: the split sizes are rows from and to each rank; empty: equal parts."""
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

    def broadcast_one(self, tensor: Tensor, root: int) -> dist.Work:
        """Broadcasts one tensor: torchft's name and arguments."""
        return self.broadcast([tensor], root=root)


class GroupWork(dist.Work):
    """The work of one operation. It ends once: when the operation is complete (its tensors are then complete in memory, also on a GPU), has
    failed, or its generation is interrupted. `wait` blocks the calling thread and no stream, so it can be interrupted. `outputs`: the
    tensors with the result. `on_timeout` receives the error of a wait beyond the caller's timeout; without it the error is raised."""

    on_timeout: Callable[[Exception], None] | None = None

    def __init__(self, name: str, outputs: list[Tensor]) -> None:
        super().__init__()
        self.name, self.started_s = name, time.monotonic()
        self._outputs = outputs
        self._future: Future[Any] = Future(devices=sorted({x.device for x in outputs if x.is_cuda}, key=str))
        self._once = threading.Lock()
        self._ended = ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())  # the first of its callbacks: others may call wait
        self._error: Exception | None = None
        self._sender = -1

    def end(self, error: Exception | None, sender: int = -1) -> None:
        """Ends the work, unless it has ended before."""
        if not self._once.acquire(blocking=False):
            return
        self._error, self._sender = error, sender
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when the work has succeeded; raises its ProcessGroupError if it has failed. After `timeout` (0: none but the
        group's) raises TimeoutError, or passes it to `on_timeout` and returns False."""
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

    synchronize = block_current_stream = wait

    def get_future(self) -> Future[Any]:
        """Returns a future of the output tensors, set when they are complete in memory and may be read on any stream."""
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
        """Returns the sender of a message from recv_anysource; -1 for every other operation."""
        return self._sender

    _source_rank = source_rank


class Generation:
    """One generation of a process group, from its forming until it is abandoned, with its pending works, the oldest first. The first
    failure is the generation's: later operations fail at once with that error, but pending ones may still complete and then count. If the
    oldest work takes longer than `limit_s`, the generation is interrupted (torch's own timeouts are longer)."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self.lock = threading.RLock()  # the callback of a work may launch the next operation
        self.engine: Engine | None = engine  # None: abandoned
        self.error: Exception | None = None
        self.works: dict[GroupWork, None] = {}
        self.first_work = threading.Condition(self.lock)
        self._limit_s = limit_s
        self._watch = threading.Thread(target=self._keep_limit, name="ft-group-limit", daemon=True)
        self._watch.start()

    def ended(self, work: GroupWork, error: Exception | None, sender: int = -1) -> None:
        if error is not None and not isinstance(error, ProcessGroupError):
            error = ProcessGroupError(f"{work.name}: {error}")  # without traceback, which keeps the group alive
        with self.lock:
            self.works.pop(work, None)
            self.error = self.error or error
        work.end(error, sender)

    def interrupt(self, error: Exception) -> None:
        """Ends all pending works with `error`; no operation can start any more. The engine is kept, as it may still use tensors."""
        with self.lock:
            engine, self.error = self.engine, self.error or error
            works, self.works = list(self.works), {}
        for work in works:
            work.end(error)
        if engine is not None:
            engine.interrupt()

    def abandon(self, reason: str, reaper: Reaper, then: Callable[[], None] | None) -> None:
        """Interrupts the generation, and passes its engine to the reaper. To be called once."""
        self.interrupt(Abandoned(reason))
        with self.lock:
            engine, self.engine = self.engine, None
            self.first_work.notify()
        assert engine is not None
        reaper.take(partial(_end_engine, engine, self._watch, then), f"abandoned: {reason}")

    def _keep_limit(self) -> None:
        while True:
            with self.lock:
                if self.engine is None:
                    return
                oldest = next(iter(self.works), None)
                left_s = None if oldest is None else oldest.started_s + self._limit_s - time.monotonic()
                if oldest is None or left_s is None or left_s > 0:
                    oldest = None  # its tensors may be freed while this thread waits
                    self.first_work.wait(left_s)
                    continue
            # this interrupts the engine, too: a child process that is suspended would accept no further command
            self.interrupt(ProcessGroupError(f"{oldest.name} did not complete within {self._limit_s:g} s"))
            del oldest


def _end_engine(engine: Engine, watch: threading.Thread, then: Callable[[], None] | None) -> None:
    engine.end()
    watch.join()
    if then is not None:
        try:
            then()
        except Exception:
            log.exception("cannot release the buffers of a generation that has ended")


class Reaper:
    """Ends abandoned generations, each in a thread of its own: torch's threads may still write into their buffers, and whatever drops a
    native group waits for them. A generation that stays keeps memory and sockets: with more than MAX_ENDING the process must exit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: dict[threading.Thread, str] = {}

    def take(self, end: Callable[[], object], what: str) -> None:
        """Calls `end` in a thread, and returns at once. `what`: name in errors."""
        thread = threading.Thread(target=self._run, args=(end,), name="ft-reaper", daemon=True)
        with self._changed:
            self._pending[thread] = what
        thread.start()

    def check(self, limit_s: float = 0.0, *, most: int = MAX_ENDING) -> None:
        """Raises MustExit if more than `most` generations have not ended within limit_s."""
        with self._changed:
            if not self.wait(limit_s, most=most):
                raise MustExit(
                    f"{len(self._pending)} generations were abandoned and have not ended, more than {most}: this process must exit "
                    f"({'; '.join(self._pending.values())})"
                )

    def wait(self, limit_s: float, *, most: int = 0) -> bool:
        """Waits until at most `most` generations are still ending. Returns False if more are after limit_s."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._pending) <= most, limit_s)

    def _run(self, end: Callable[[], object]) -> None:
        this = threading.current_thread()
        try:
            end()
        except Exception:
            # it stays pending, as it may still use resources
            log.exception("cannot end a generation: %s", self._pending[this])
            return
        with self._changed:
            del self._pending[this]
            self._changed.notify_all()


class ProcessGroup(Collectives):
    """The process group of one rank with its peers in the other replica groups; `configure` forms a new generation for each quorum.
    `timeout`: seconds (or a timedelta) for an operation, which notices normally interrupt earlier; `rendezvous_s`: timeout of forming."""

    KIND = "ft"
    DEVICE: Literal["cpu", "cuda", ""] = "cpu"  # type of device whose tensors it reduces; "": any
    NOT_REDUCED: frozenset[torch.dtype] = frozenset()  # dtypes that its backend refuses
    IN_CHILD = False  # True: operations run in a child process, which uses tensors from shared.empty without a copy

    def __init__(self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # missing in the stubs
        # gloo has a connection to each member, and the store of rank 0 one to each rank that forms by it: to those of all groups, where
        # only this group has the state
        raise_limit()
        self.timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        self.rendezvous_s = rendezvous_s
        self.reaper = Reaper()
        self._lock = threading.Lock()
        self._forming: Rendezvous | None = None
        self._generation: Generation | None = None
        self._quorum_id = self._interrupted = 0  # of the newest generation; highest one passed to `interrupt`
        self._why_none: Exception = ProcessGroupError("the process group was never configured")
        self._rank, self._size = 0, 1
        self._registered = self._torch_name = self._torch_desc = ""

    def prepare(self) -> None:
        """Makes the local preparations of forming, such as the import of torch in a child process. `configure` makes them, too, but other
        members may wait by then: so call `prepare` before this member is in a quorum."""

    def configure(
        self,
        store: str,
        rank: int,
        size: int,
        *,
        quorum_id: int = 0,
        fingerprint: Fingerprint = (),
        holders: Sequence[int] = (),
        wait: bool = True,
    ) -> None:
        """Abandons the current generation, and forms a new one with all members that call this. Returns when it has formed; with
        `wait=False` at once, and `wait_formed` must be called before an operation is launched.

        `store`: "host:port/prefix" with a prefix for this generation only, the same on all members. `quorum_id`: names the generation for
        `interrupt`, larger than those before; 0: none. `fingerprint`: digests that must be equal on all members; the job's fingerprint is
        that of most `holders`, the ranks that have the state, or of most members if there are no holders. Raises as `wait_formed` does;
        MustExit if too many old generations have not ended; ProcessGroupError if a preparation fails; ValueError for invalid arguments."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: must be from 0 to {size - 1}")
        parse(store)
        self.abandon("configured anew")
        self.reaper.check(self.rendezvous_s)  # on a busy machine a generation ends slowly
        self.prepare()
        forming = Rendezvous(self._build, store, rank, size, self.rendezvous_s, fingerprint, holders)
        with self._lock:
            self._forming, self._rank, self._size, self._quorum_id = forming, rank, size, quorum_id
            if quorum_id and quorum_id == self._interrupted:
                forming.cancel("no longer wanted")
            forming.start()  # before `abandon` can wait for the end of its thread
        if wait:
            self.wait_formed()

    def wait_formed(self) -> None:
        """Returns when the generation of the last `configure` has formed. Raises RendezvousFailed if it does not form within rendezvous_s
        (its `absent` has the missing ranks), is interrupted or abandoned, or a fingerprint differs."""
        with self._lock:
            forming, why_none = self._forming, self._why_none
        if forming is None:  # abandoned
            raise RendezvousFailed(str(why_none))
        try:
            forming.wait(self.rendezvous_s + ABSENT_REPORT_S)
            with self._lock:  # a second time, as it may have been cancelled meanwhile
                engine = forming.wait(0.0)
                self._generation, self._forming = Generation(engine, self.timeout_s), None
        except RendezvousFailed as error:
            with self._lock:
                if self._forming is forming:  # else it was abandoned
                    self._forming, self._why_none = None, error
                    forming.cancel("it failed")
                    self.reaper.take(forming.end, f"did not form: {error}")
            raise

    def _build(self, rendezvous: Rendezvous) -> Engine:
        """Joins the rendezvous and connects, in a thread. Before it blocks it passes rendezvous.on_cancel a function to interrupt it."""
        raise NotImplementedError

    def abandon(self, reason: str = "abandoned", then: Callable[[], None] | None = None) -> None:
        """Ends forming and all works with the reason; peers that wait for this member see a closed connection. Returns at once, from any
        thread. `then` is called, in a different thread, when no operation of the generation touches a tensor any more."""
        with self._lock:
            forming, generation = self._forming, self._generation
            self._forming = self._generation = None
            if forming is not None:
                self._why_none = Abandoned(reason)
                forming.cancel(reason)
                self.reaper.take(forming.end, f"did not form: {reason}")
            if generation is not None:
                self._why_none = generation.error or Abandoned(reason)
        if generation is not None:
            generation.abandon(reason, self.reaper, then)
        elif then is not None:
            then()

    def interrupt(self, reason: str, quorum_id: int | None = None) -> None:
        """Ends all waits, as `abandon` does, but keeps the generation: its owner, which knows how its buffers are used, must still call
        `abandon`. Complete works stay complete. Returns at once, from any thread. `quorum_id`: only that quorum's, formed or not."""
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
        """Returns the error that operations would fail with: the generation's first failure, or why it is missing; None: it is usable."""
        with self._lock:
            return self._generation.error if self._generation is not None else self._why_none

    def launch(self, operation: Operation) -> dist.Work:
        """Starts an operation. Never raises, and never waits for a peer: the work has the error."""
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
            work.end(error or Abandoned("the process group was abandoned"))
            return work
        try:
            engine.start(operation, partial(generation.ended, work))
        except Exception as failure:  # noqa: BLE001 (torch raises any type; the work has the error)
            generation.ended(work, failure)
        return work

    @property
    def waits_since_s(self) -> float | None:
        """time.monotonic() at the start of the current wait for members: in forming, or in the oldest pending operation; None: no wait."""
        with self._lock:
            forming, generation = self._forming, self._generation
        if forming is not None:
            return forming.began_s if forming.is_awaited else None
        if generation is None:
            return None
        with generation.lock:
            return min((work.started_s for work in generation.works), default=None)

    def shutdown(self, limit_s: float = 30.0) -> None:
        """Abandons the generation, and waits until all have ended. Raises MustExit if some have not within limit_s."""
        self.abandon("shut down")
        self.reaper.check(limit_s, most=0)

    def abort(self) -> None:
        self.abandon("aborted")

    # ------------------------------------------------------------------------------------------------ torch's interface

    def register(self, name: str) -> ProcessGroup:
        """Registers this group with torch, for dist.all_reduce, functional collectives and DeviceMesh.from_group. torch knows it as a group
        of this process only, as the size of a torch group cannot change. Requires the default process group."""
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

    # torch keeps name and description in a backend, and this ProcessGroup has none

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._torch_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._torch_name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._torch_desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._torch_desc

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self._rank} of {self._size})"

    _get_backend_name, _set_group_name, _set_group_desc = getBackendName, setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)


def failure_of(wait: Callable[[], Any]) -> Exception | None:
    """Returns the error of `wait` without source line, advice, C++ stack and traceback (which would keep the group alive), or None."""
    try:
        wait()
    except Exception as error:  # noqa: BLE001 (torch raises any type; the work has the error)
        message = str(error).split("\nException raised from", 1)[0].split(" This is typically caused", 1)[0]
        return ProcessGroupError(re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", message))
    return None


def source_of(work: dist.Work, operation: Operation) -> int:
    return work._source_rank() if operation.method == "recv_anysource" else -1


def group_of(backend: Any, name: str, device: str, rank: int, size: int) -> dist.ProcessGroup:
    """Returns a native ProcessGroup of torch with one backend, as only a ProcessGroup has all methods of the collectives."""
    group = dist.ProcessGroup(c10d.HashStore(), rank, size)
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
