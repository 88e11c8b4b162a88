"""torchft's Manager: its names and arguments over the Manager of ft/manager.py.

    manager.start_quorum()            # Optimizer.zero_grad does it
    loss = model(batch); loss.backward()            # DistributedDataParallel: afterwards .grad is the mean over those who contribute
    manager.allreduce(tensor).wait()                # or whatever else is to be averaged
    if manager.should_commit():                     # Optimizer.step does it
        optimizer.step()

The *body* of a step lies between start_quorum and should_commit. Every group runs it for every step: a group that contributes nothing (a
spare, one that has just healed) sends zeros, takes the others' mean, clips and steps as they do, so all stay equal. A group whose state is
arriving waits for it in start_quorum.

The step is decided when the sums are there: with DistributedDataParallel at the end of the backward, else in should_commit. Sums that fail
are done again in the next generation, with the same gradients. The step is dropped in all groups, as torchft does, only where tensors were
changed after they had been averaged, and in groups of several ranks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from enum import Enum
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.futures import Future

from ft import manager as core
from ft.addresses import advertised
from ft.buckets import BufferPool, to_local
from ft.config import Environment, group_name
from ft.gradients import Gradients
from ft.healing.transport import Transport
from ft.membership import ReplicaGroupConfig
from ft.process_groups.base import GroupWork, ProcessGroup, reduction
from ft.protocol import messages as m
from ft.protocol.step import Phase
from ft.quantized import ErrorFeedback
from ft.rpc.access import Access
from ft.rpc.driver import Observer
from ft.seam import Commit
from ft.user_sums import ManagedAllreduce

T = TypeVar("T")
CHANGE_NOTHING = {  # arguments of torchft's, and why
    "use_async_quorum": "a quorum is asked for only when something has changed, and before the body, whose batch depends on it",
    "connect_timeout": "the lighthouse is waited for in start_quorum, so quorum_timeout counts",
    "enable_error_bus": "every group is told at once of a death, always",
}
log = logging.getLogger("pharos.torchft")


class WorldSizeMode(Enum):
    """DYNAMIC: all groups that are there train. FIXED_WITH_SPARES: min_replica_size of them; the others follow, and step in."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class Manager:
    """torchft's Manager. `core`: the Manager of ft/manager.py that does the work.

    `pg`: the process group to other groups; configured and closed here. `load_state_dict`, `state_dict`: what a group must receive to
    equal the others. `min_replica_size`: groups without which no step is committed. `replica_id`: this group's name, by default
    REPLICA_GROUP_ID. `rank`, `world_size`, `store_addr`, `store_port`: of this group, by default the launcher's. `lighthouse_addr`:
    by default TORCHFT_LIGHTHOUSE. `max_retries`: steps in a row that may fail. `init_sync`: at step 0 all take the state of one.
    `checkpoint_transport`: of ft.healing.transport's face; HTTP by default.

    `quorum_timeout`: what start_quorum waits at most; by default for as long as it takes. `timeout`: what a sum may take at most. It is a
    backstop, as `pg`'s own is: a death is noticed at once, and a group that heals is waited for, so less than a minute means a minute.

    Not of torchft: `interface` (addresses.advertised), `every_step` (ask for a quorum before each step, as torchft's own lighthouse needs),
    `insecure` (serve others without a token), `dies_with_group` and `observer` (as ft/manager.py).

    Raises ValueError for arguments and variables, RuntimeError where the group's server does not start. start_quorum, backward and
    should_commit raise Stopped and GroupEnded (seam.py); everything else that fails makes should_commit False.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        use_async_quorum: bool | None = None,
        timeout: timedelta = timedelta(seconds=60),
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta | None = None,
        checkpoint_transport: Transport | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int | None = None,
        enable_error_bus: bool | None = None,
        *,
        interface: str = "",
        every_step: bool = False,
        insecure: bool = False,
        dies_with_group: bool = True,
        observer: Observer | None = None,
    ) -> None:
        environment = Environment.read(os.environ)
        lighthouse = lighthouse_addr or environment.lighthouse
        if not lighthouse:
            raise ValueError(
                "TORCHFT_LIGHTHOUSE is not set, and there is no lighthouse_addr: such as http://localhost:29510"
            )
        if min_replica_size < 1:
            raise ValueError(f"min_replica_size = {min_replica_size}: must be at least 1")
        times = m.Timeouts() if heartbeat_interval is None else m.Timeouts(beat_s=heartbeat_interval.total_seconds())
        if times.check_timeout_order():
            raise ValueError(
                f"heartbeat_interval = {times.beat_s:g} s: must be below {times.heartbeat_timeout_s:g} s, after which silence is a loss"
            )
        config = ReplicaGroupConfig(
            name=group_name(replica_id or environment.replica_group_id or f"group-{secrets.token_hex(4)}"),
            group_rank=environment.group_rank if rank is None else rank,
            world_size=environment.world_size if world_size is None else world_size,
            lighthouse=lighthouse if "://" in lighthouse else f"http://{lighthouse}",
            host=_number_of(hostname) if hostname else advertised(interface, lighthouse),
            access=Access(environment.token, insecure),
            times=times,
            restart_count=environment.restart_count,
            every_step=every_step,
            max_active_groups=min_replica_size if world_size_mode is WorldSizeMode.FIXED_WITH_SPARES else None,
            retries=environment.quorum_retries if quorum_retries is None else quorum_retries,
            port=next((given for given in (environment.manager_port, port) if given is not None), 0),
        )
        options = core.ManagerOptions(
            keep_gradients=config.world_size == 1,  # an error that one rank reports must drop the step in all of them
            max_retries=max_retries,
            skip_unable=True,  # slots mean nothing here: the data is the user's
            init_sync=init_sync,
            zeros_wait=True,
            quorum_s=_seconds(environment.quorum_timeout_s, quorum_timeout),
            dies_with_group=dies_with_group,
        )
        pg.timeout_s = max(pg.timeout_s, _seconds(environment.timeout_s, timeout) or 0.0, times.stall_s)
        self.core = core.Manager(
            pg,
            config,
            options,
            store=_store(config, store_addr or environment.master_addr, store_port or environment.master_port),
            transport=checkpoint_transport,
            gradients=Gradients(shared=pg.IN_CHILD, device="cuda" if "nccl" in pg.KIND else "cpu"),
            observer=observer,
        )
        given = dict(
            use_async_quorum=use_async_quorum, connect_timeout=connect_timeout, enable_error_bus=enable_error_bus
        )
        for name, value in given.items():
            if value is not None:
                say_once(f"Manager({name}={value}) changes nothing: {CHANGE_NOTHING[name]}")
        self._pg, self._world_size, self._min_replica_size = pg, config.world_size, min_replica_size
        self._parameters: list[nn.Parameter] = []
        self._batches = 0  # that are in the weights
        self._error: Exception | None = None  # reported since the step began
        self._body = False  # start_quorum has returned, should_commit was not called
        self._used = False  # the body has sent something
        self._over = True  # the step was decided, one way or the other
        self._decided: Commit | None = None
        self._slots = 0  # that this body is for; with none it sends zeros
        self._pass = ExitStack()  # holds the backward that sends gradients, while it is under way
        self._user: Any = None  # how its state is loaded, and taken
        self._late = BufferPool(shared=pg.IN_CHILD)
        self.core.register_state("batches_committed", lambda: self._batches, partial(setattr, self, "_batches"))
        if load_state_dict is not None and state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Returns when this group has a place in a quorum and its state is whole. The lighthouse is asked only if something has changed."""
        if not allow_heal:
            say_once(
                "start_quorum(allow_heal=False) changes nothing: a group that is behind cannot go on without healing"
            )
        if self._body and not self._over and not self._used:
            return  # nothing has happened since
        if self._body:  # should_commit was not called
            self._pass.close()
            # What others sent in this generation may never be met by ours.
            self._decide("the body was left before its end")
            if self._decided is not None:
                log.warning(
                    "step %d holds, but should_commit was not asked: was the optimizer's step left out?", self.core.step
                )
            self._decided = None
        self._error, self.core.shrink_only = None, shrink_only
        limit_s = self.core.quorum_s
        if timeout is not None:
            self.core.quorum_s = timeout.total_seconds()
        try:
            self._slots = len(self.core.begin_step().slots)
        finally:  # the next call has its own
            self.core.quorum_s = limit_s
        self._body, self._used, self._over = True, False, False

    def wait_quorum(self) -> None:
        """Does nothing: start_quorum has waited."""

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """True where the step is committed: the caller steps its optimizer. False: nothing has changed: go on with start_quorum."""
        if timeout is not None:
            say_once("should_commit(timeout=...) changes nothing: who is missing is noticed, and not waited for")
        if not self._body:
            raise RuntimeError("should_commit without start_quorum")
        self._decide()
        decided, self._decided, self._body = self._decided, None, False
        return decided is not None

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: Any = dist.ReduceOp.AVG,
        *,
        feedback: ErrorFeedback | None = None,
    ) -> dist.Work:
        """The mean (or the sum) over the groups that contribute, written into the tensor when the work ends. The work never fails: where a
        sum does, the tensor keeps its values until the step is tried again, or should_commit is False. Each group's body calls it for the
        same tensors in the same order. `should_quantize`: in eight bits (quantized.py); what rounding leaves out is lost, unless `feedback`
        gives it to the next sum. Raises ValueError for other reductions, and for means of whole numbers."""
        op = reduction(reduce_op)
        if op not in ("AVG", "SUM"):
            raise ValueError(f"allreduce: reduce_op = {op}: must be AVG or SUM, because absent groups contribute zeros")
        if not self._body:
            raise RuntimeError("allreduce without start_quorum")
        if self._over and self._decided is None:  # the others may be in the next body already, with sums of other sizes
            work = GroupWork("AllReduce", [tensor])
            work.end(None)
        elif self._over:
            work = self._sum_late(tensor, mean=op == "AVG")
        else:
            self._used = True
            work = self.core.gradients.all_reduce(
                tensor, mean=op == "AVG", quantized=should_quantize, feedback=feedback
            )
        work.on_timeout = self.report_error
        return work

    @property
    def replica_id(self) -> str:
        """Id of the process that this group is now: its name, and a part that no other process has."""
        return self.core.replica_id

    def current_step(self) -> int:
        """Steps that hold. It moves in should_commit."""
        return self.core.step - (self._decided is not None)

    def batches_committed(self) -> int:
        """Batches that are in the weights: one for each group that contributed, in each step."""
        return self._batches

    def num_participants(self) -> int:
        """Groups that contribute to this step."""
        return len(self.core.quorum.participants) if self.core.quorum else 0

    def participating_rank(self) -> int | None:
        """This group's place among them. None: it gives zeros."""
        quorum = self.core.quorum
        if quorum is None or (not self._over and not self._slots) or quorum.replica_id not in quorum.participants:
            return None
        return quorum.participants.index(quorum.replica_id)

    def is_participating(self) -> bool:
        return self.participating_rank() is not None

    def report_error(self, e: Exception) -> None:
        """This group cannot give anything in this step. The others take the step without it, and so does it: should_commit is True and
        .grad has their mean. If it is alone, or has several ranks, the step is dropped. Too late once the step is decided."""
        if self._over:
            log.warning("the step was decided before: %s", e)
        self._error = self._error or e

    def errored(self) -> Exception | None:
        """Error that was reported since start_quorum."""
        return self._error

    def wrap_future(self, fut: Future[T], default: T, timeout: timedelta | None = None) -> Future[T]:
        """A future that never fails: with `default`, and the error reported, where `fut` does, or takes longer than `timeout`."""
        wrapped: Future[T] = Future()
        claim = threading.Lock()

        def end(ended: Future[T] | None) -> None:
            if not claim.acquire(blocking=False):
                return
            try:
                if ended is None:
                    raise TimeoutError(f"the future has no value after {timeout}")
                result = ended.value()
            except Exception as error:  # noqa: BLE001 (any failure of the user's future)
                self.report_error(error)
                result = default
            wrapped.set_result(result)

        if timeout is not None:
            timer = threading.Timer(timeout.total_seconds(), end, (None,))
            timer.daemon = True
            timer.start()
            fut.add_done_callback(lambda _: timer.cancel())
        fut.add_done_callback(end)
        return wrapped

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Adds a piece of state, under a name that is used once. Before the first quorum."""
        self.core.register_state(key, state_dict, load_state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """The state that the constructor could have been given; it may be set again."""
        if self._user is None:
            self.core.register_state("default", lambda: self._user[1](), lambda state: self._user[0](state))
        self._user = (load_state_dict, state_dict)

    def heal_from_one(self) -> None:
        """Fetches state from one source alone, for what groups register is not the same in all of them (local_sgd.py). Not of torchft."""
        self.core.healer.one_source = True

    def disallow_state_dict_read(self) -> None:
        """The state is about to change between two steps that are counted (LocalSGD): who reads it is waited for, or served a copy."""
        self.core.healer.fence()

    def allow_state_dict_read(self) -> None:
        """The state is read at the beginning of a step alone, so there is nothing to allow."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON. To be taken between should_commit and start_quorum."""
        return {**self.core.state_dict(), "batches_committed": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes torchft's, too: step and batches_committed alone. Before the first quorum."""
        self._batches = int(state_dict["batches_committed"])
        if "ledger" not in state_dict:
            ledger = json.dumps({"position": self._batches})
            state_dict = {**state_dict, "commit_id": "", "commit_quorum_id": 0, "ledger": ledger}
        self.core.load_state_dict(state_dict)

    def leave(self) -> None:
        """Leaves after this group's next step, which tells the others. All its ranks call it before the same step. Not of torchft."""
        self.core.leave()

    def shutdown(self, wait: bool = True) -> None:
        """Leaves the job. May be called twice. Between two steps, it does not disturb the one that others may be about to finish: all may
        stop at the same step. If they are to go on, `leave()` before the last step spares them a retry."""
        if self._over and self.core.machine.phase is Phase.BOUNDARY and not self.core.machine.void:
            self.core.may_exit = True  # whatever the others wait for, this group has sent
        self.core.gradients.close()
        self.core.close()

    def attach(self, model_parts: Sequence[nn.Module]) -> None:
        """For DistributedDataParallel: their gradients are summed with those of other groups. Before the first quorum."""
        self.core.attach(model_parts)
        self._parameters += [parameter for part in model_parts for parameter in part.parameters()]

    def backward_begins(self) -> None:
        """Called by DistributedDataParallel for the last one of the step, in whatever thread autograd says so."""
        if self._over:
            raise RuntimeError(
                "the gradients of this step are summed already: all backwards but the last belong in no_sync()"
            )
        self._used = True
        if self._slots:
            self._pass.enter_context(self.core.last_backward())

    def backward_ended(self) -> None:
        """Returns when .grad is the mean, or the step is dropped. Nobody else is at work: the caller of backward waits."""
        self._pass.close()
        self._decide()

    def _decide(self, failure: str = "") -> None:
        """Sums and votes, if need be again; .grad has the mean if the step is committed. `failure`: why it cannot in this generation."""
        if self._over:
            return
        self._over = True
        # A body is one batch, however many slots it is for.
        failure, tokens = failure or self._why_it_fails(), (1.0,) + (0.0,) * (self._slots - 1)
        kept = not failure and self.core.gradients.can_repeat
        totals = self.core.reduce(tokens, 0.0, self._error is None, kept=kept, failure=failure)
        self._decided = self.core.commit(totals)
        if self._decided is not None:
            self._batches += len(self._decided.contributors)
            gradients = [to_local(p.grad) for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, self._decided.divisor)

    def _why_it_fails(self) -> str:
        """The reason for which this step cannot hold in this generation, if there is one."""
        quorum = self.core.quorum
        if not self._slots or quorum is None:
            return ""
        if len(quorum.members) < self._min_replica_size:
            return f"{len(quorum.members)} groups are there, min_replica_size asks for {self._min_replica_size}"
        if self._error is not None and (len(quorum.members) == 1 or self._world_size > 1):
            return f"reported: {self._error}"
        return ""

    def _sum_late(self, tensor: Tensor, *, mean: bool) -> GroupWork:
        """After the step was decided, so whether it comes about changes nothing but the tensor. As it is: the attempt's lane is gone."""
        user = ManagedAllreduce(tensor, self._late, mean=mean, keep=False, after_buckets=True)
        user.launch(self._pg, self.num_participants(), contributes=self.is_participating())
        user.work.get_future().add_done_callback(lambda _: user.forget())
        return user.work


def _seconds(variable_s: int | None, given: timedelta | None) -> float | None:
    """The variable stands above the argument, as in torchft."""
    if variable_s is not None:
        return float(variable_s)
    return None if given is None else given.total_seconds()


def _number_of(hostname: str) -> str:
    try:
        return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError):
        raise ValueError(
            f"hostname = {hostname}: there is no such host; without it, `interface` says which address"
        ) from None


def _store(config: ReplicaGroupConfig, address: str, port: int | None) -> Store | None:
    """The group's store. None where it has one rank, which needs none."""
    if config.world_size == 1:
        return None
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if not address or not port:
        raise ValueError("MASTER_ADDR and MASTER_PORT are not set: the ranks of a group find each other by its store")
    return TCPStore(address, port, None, False, wait_for_workers=False)


@lru_cache(None)  # once a process
def say_once(what: str) -> None:
    log.warning("%s", what)
