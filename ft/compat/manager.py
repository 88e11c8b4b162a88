"""torchft's Manager: its names and arguments on top of the Manager of ft/manager.py.

    manager.start_quorum()                          # called by Optimizer.zero_grad
    loss = model(batch); loss.backward()            # with DistributedDataParallel .grad is then the mean over the participants
    manager.allreduce(tensor).wait()                # averages any other tensor
    if manager.should_commit():                     # called by Optimizer.step
        optimizer.step()

The *body* of a step is between start_quorum and should_commit. Each replica group runs it in each step: a group that contributes nothing (a
spare, one that has just healed) sends zeros, receives the others' mean, and steps as they do, so all stay equal. A group waits for an
arriving state in start_quorum.

The step is decided when all reductions are complete: with DistributedDataParallel at the end of the backward, else in should_commit. Failed
reductions are repeated in the next generation, with the same gradients. In three cases the step is dropped in all groups instead, as in
torchft: a tensor was changed after it had been averaged, or may have been copied (`repeat`), or the groups have several ranks.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.futures import Future

from ft import manager as core
from ft.addresses import address_of, advertised
from ft.buckets import BufferPool, to_local
from ft.compat.transports import HTTPTransport, PGTransport
from ft.config import Environment, group_name
from ft.device import future_devices
from ft.digest import persistent_buffers
from ft.gradients import Gradients
from ft.healing.transport import Transport
from ft.membership import ReplicaGroupConfig
from ft.process_groups.base import GroupWork, ProcessGroup, reduction
from ft.protocol import messages as m
from ft.protocol.step import Phase
from ft.quantized import ErrorFeedback
from ft.rpc.access import Access, check_scheme
from ft.rpc.driver import Observer
from ft.seam import Commit
from ft.user_allreduce import UserAllreduce

T = TypeVar("T")
IGNORED = {  # arguments of torchft without effect here, with the reason
    "use_async_quorum": "a quorum is requested only after a change, and before the body, whose batch depends on it",
    "enable_error_bus": "the lighthouse always notifies the other groups of a loss or error at once (docs/torchft.md)",
}
log = logging.getLogger("pharos.torchft")


class WorldSizeMode(Enum):
    """DYNAMIC: all groups of the quorum train. FIXED_WITH_SPARES: min_replica_size of them do; spares replace lost ones."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class Manager:
    """torchft's Manager. `core`: the underlying Manager of ft/manager.py.

    `pg`: process group to the other replica groups; configured and closed here. `load_state_dict`, `state_dict`: load and return the state
    that a joining group receives. `min_replica_size`: fewest groups of a quorum that commits a step, healing ones and spares included.
    `replica_id`: this group's name, by default REPLICA_GROUP_ID. `rank`, `world_size`, `store_addr`, `store_port`: those of this group, by
    default the launcher's. `lighthouse_addr`: by default TORCHFT_LIGHTHOUSE. `max_retries`: attempts in a row that may fail.
    `init_sync`: at step 0 all take the state of one.
    `connect_timeout`: wait for a lighthouse that does not answer, and for the group's server; by default 60 s. `hostname`, `port`: address
    that this host advertises, and port of the group's server, by default TORCHFT_MANAGER_PORT, else any free one. `heartbeat_interval`:
    overrides `times.beat_s`. `quorum_retries`: calls of the lighthouse that are repeated after a failure, unless TORCHFT_QUORUM_RETRIES
    gives their number; None, -1: no limit.
    `world_size_mode`: which groups train.
    `checkpoint_transport`: an HTTPTransport (the default) or PGTransport, equal in all groups, or a healing.transport.Transport.

    `quorum_timeout`: longest wait of start_quorum; None: no limit. `timeout`: longest reduction, at least `pg`'s own, stall_s (60 s), and
    heal_grace_s with heartbeat_timeout_s, as groups wait for one that heals; a backstop, as losses are notified at once. Also the default
    of wrap_future, without minimum.

    Not in torchft: `interface` (addresses.advertised), `every_step` (request a quorum before each step, which torchft's lighthouse
    requires), `insecure` (serve other machines without a token), `times` (heartbeat_timeout_s and heal_grace_s are the lighthouse's),
    `dies_with_group` and `observer` (see ft/manager.py).

    Raises ValueError (arguments, variables), OSError (no lighthouse, no group server). start_quorum, backward and should_commit raise
    Stopped, GroupEnded, GroupReleased and BadInput (seam.py), backward and should_commit also RuntimeError for gradients that cannot be
    reduced; after any other failure should_commit returns False.
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
        checkpoint_transport: HTTPTransport | PGTransport | Transport | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int | None = None,
        enable_error_bus: bool | None = None,
        *,
        interface: str = "",
        every_step: bool = False,
        insecure: bool = False,
        times: m.Timeouts | None = None,
        dies_with_group: bool = True,
        observer: Observer | None = None,
    ) -> None:
        environment = Environment.read(os.environ)
        lighthouse = lighthouse_addr or environment.lighthouse
        if not lighthouse:
            raise ValueError(
                "TORCHFT_LIGHTHOUSE is not set, nor is lighthouse_addr: set one of them, such as to http://localhost:29510"
            )
        check_scheme(lighthouse, environment.tls)
        if min_replica_size < 1:
            raise ValueError(f"min_replica_size = {min_replica_size}: must be at least 1")
        times = times or m.Timeouts()
        if heartbeat_interval is not None:
            times = replace(times, beat_s=heartbeat_interval.total_seconds())
        if bad := times.incompatible_timeouts(times):
            raise ValueError(f"heartbeat_interval or times: {'; '.join(bad)}")
        contact_s = _seconds(environment.connect_timeout_s, connect_timeout) or ReplicaGroupConfig.contact_s
        config = ReplicaGroupConfig(
            name=group_name(replica_id or environment.replica_group_id or f"group-{secrets.token_hex(4)}"),
            group_rank=environment.group_rank if rank is None else rank,
            world_size=environment.world_size if world_size is None else world_size,
            lighthouse=lighthouse if "://" in lighthouse else f"http://{lighthouse}",
            host=address_of(hostname, "hostname", _resolve, contact_s)
            if hostname
            else advertised(interface, lighthouse, patience_s=contact_s),
            access=Access(environment.token, insecure, environment.tls),
            times=times,
            restart_count=environment.restart_count,  # torchrun's store outlives restarts
            contact_s=contact_s,
            every_step=every_step,
            max_active_groups=min_replica_size if world_size_mode is WorldSizeMode.FIXED_WITH_SPARES else None,
            quorum_retries=quorum_retries if environment.quorum_retries is None else environment.quorum_retries,
            port=(environment.manager_port or 0) if port is None else port,
        )
        transport: Transport | None = None
        heal_transport: Literal["http", "pg"] = "http"
        if isinstance(checkpoint_transport, HTTPTransport | PGTransport):
            heal_transport = checkpoint_transport.KIND
        else:
            transport = checkpoint_transport
        options = core.ManagerOptions(
            heal_transport=heal_transport,
            keep_gradients=config.world_size == 1,  # an error that one rank reports must drop the step on all ranks
            max_retries=max_retries,
            skip_unable=True,  # slots have no meaning here, as the user chooses the data
            init_sync=init_sync,
            zeros_wait=True,
            quorum_s=_seconds(environment.quorum_timeout_s, quorum_timeout),
            dies_with_group=dies_with_group,
        )
        self._timeout_s = _seconds(environment.timeout_s, timeout) or 0.0
        # the others wait in their reductions for a group that heals, which the lighthouse ends after heal_grace_s
        heals_s = times.heal_grace_s + times.heartbeat_timeout_s
        pg.timeout_s = max(pg.timeout_s, self._timeout_s, times.stall_s, heals_s)
        self.core = core.Manager(
            pg,
            config,
            options,
            store=_store(config, environment, store_addr, store_port),
            transport=transport,
            fingerprint=(
                ("checkpoint_transport", heal_transport),
                # groups with different spares would send tails of different sizes
                ("world_size_mode and min_replica_size", str(config.max_active_groups)),
            ),
            gradients=Gradients(shared=pg.IN_CHILD, device=pg.DEVICE or "cpu"),
            observer=observer,
        )
        for name, value in dict(use_async_quorum=use_async_quorum, enable_error_bus=enable_error_bus).items():
            if value is not None:
                say_once(f"Manager({name}={value}) has no effect: {IGNORED[name]}")
        self._pg, self._world_size, self._min_replica_size = pg, config.world_size, min_replica_size
        self._parameters: list[nn.Parameter] = []
        self._batches = 0  # number of batches that are in the weights
        self._error: Exception | None = None  # error that was reported since the step began
        self._body = False  # True: between start_quorum and should_commit
        self._used = False  # True: the body has sent something
        self._is_decided = True
        self._commit: Commit | None = None  # of a decided step, until the next begins
        self._slots = 0  # number of slots that this body computes; with none it sends zeros
        self._backward = ExitStack()  # has the context of core.last_backward during the backward
        self._user: Any = None  # functions that load and return the user's state
        self._late = BufferPool(shared=pg.IN_CHILD)  # buffers of all-reduces after the step was decided
        self.core.register_state("batches_committed", lambda: self._batches, partial(setattr, self, "_batches"))
        if load_state_dict is not None and state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)
        self._pid = os.getpid()  # a fork inherits what is registered
        # programs for torchft may end without `shutdown`; then the group's server would kill the other ranks
        atexit.register(self.shutdown, at_exit=True)

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Returns when this group is in a quorum and its state is complete. Requests a quorum only if something has changed."""
        if not allow_heal:
            say_once(
                "start_quorum(allow_heal=False) has no effect: a group that is behind cannot continue without healing"
            )
        if self._body and not self._is_decided and not self._used:
            return  # called twice
        if self._body:  # should_commit was not called
            self._backward.close()
            # this generation must fail, as our part of the others' reductions may be missing
            self._decide("the body was left before its end")
            if self._commit is not None:
                log.warning(
                    "step %d is committed, but should_commit was not called: was the optimizer's step left out?",
                    self.core.step,
                )
        self._error, self._commit, self.core.shrink_only = None, None, shrink_only
        limit_s = self.core.quorum_s
        if timeout is not None:
            self.core.quorum_s = timeout.total_seconds()
        try:
            self._slots = len(self.core.begin_step().slots)
        finally:  # the timeout is only for this call
            self.core.quorum_s = limit_s
        self._body, self._used, self._is_decided = True, False, False
        self._late.step_done()

    def wait_quorum(self) -> None:
        """Does nothing: start_quorum has waited."""

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Returns True if the step is committed: the caller then steps its optimizer. False: no state has changed; call start_quorum."""
        if timeout is not None:
            say_once("should_commit(timeout=...) has no effect: a missing rank or group is noticed, and not waited for")
        if not self._body:
            raise RuntimeError("should_commit without start_quorum")
        self._backward.close()  # still open if the last backward has raised
        self._decide()
        self._body = False
        return self._commit is not None

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: Any = dist.ReduceOp.AVG,
        *,
        feedback: ErrorFeedback | None = None,
        repeat: bool = True,
    ) -> dist.Work:
        """Writes the mean (or the sum) over the contributing groups into the tensor when the work ends. The work never fails: if the
        reduction does, the tensor keeps its values until the step is retried, or should_commit returns False. Each group calls it
        for the same tensors in the same order, between two start_quorum. `should_quantize`: reduce in int8 (quantized.py); rounding errors
        are lost, unless `feedback` adds them to the next reduction. `repeat`: False if the result is copied, where a retry would not write:
        a failure then drops the step in all groups. Once the step is decided a failure affects only the tensor, and `reduce_op` may be any:
        other reductions than AVG and SUM are over all groups. Before that, raises ValueError for such an operation; always for means of
        integers, and for a tensor on a device or of a dtype that the process group cannot reduce."""
        op = reduction(reduce_op)
        if op not in ("AVG", "SUM") and not self._is_decided:
            raise ValueError(f"allreduce: reduce_op = {op}: must be AVG or SUM, because absent groups contribute zeros")
        if self.core.quorum is None:
            raise RuntimeError("allreduce without start_quorum")
        _check_reducible(self._pg, tensor, quantized=should_quantize)
        if self._is_decided and self._commit is None:  # others may be in the next body, with different reductions
            work = GroupWork("AllReduce", [tensor])
            work.end(None)
        elif self._is_decided:
            work = self._reduce_late(tensor, op)
        else:
            self._used = True
            work = self.core.gradients.all_reduce(
                tensor, mean=op == "AVG", repeat=repeat, quantized=should_quantize, feedback=feedback
            )
        work.on_timeout = self.report_error
        return work

    @property
    def replica_id(self) -> str:
        """This group's replica ID: its name, and a part that differs after each restart."""
        return self.core.replica_id

    def current_step(self) -> int:
        """Returns the number of committed steps. It changes in should_commit."""
        return self.core.step - (self._body and self._commit is not None)

    def batches_committed(self) -> int:
        """Returns the number of batches that are in the weights: in each step one for each group that contributed."""
        return self._batches

    def num_participants(self) -> int:
        """Returns the number of participants: the groups that may contribute to this step."""
        return len(self.core.quorum.participants) if self.core.quorum else 0

    def participating_rank(self) -> int | None:
        """Returns this group's rank among the participants. None: it sends zeros."""
        quorum = self.core.quorum
        if quorum is None or (not self._is_decided and not self._slots) or quorum.replica_id not in quorum.participants:
            return None
        return quorum.participants.index(quorum.replica_id)

    def is_participating(self) -> bool:
        return self.participating_rank() is not None

    def report_error(self, e: Exception) -> None:
        """Excludes this group's contribution from the step, if it is not decided yet. The step is committed with those of the others:
        should_commit returns True, and .grad is their mean. If there are no others, or this group has several ranks, the step is dropped;
        it is dropped in all groups, too, if one of the others has changed a result, or reduces with repeat=False (ManagedProcessGroup)."""
        if self._is_decided:
            log.warning("an error was reported after the step was decided: %s", e)
        self._error = self._error or e

    def errored(self) -> Exception | None:
        """Returns the error that was reported since start_quorum."""
        return self._error

    def wrap_future(self, fut: Future[T], default: T, timeout: timedelta | None = None) -> Future[T]:
        """Returns a future that never fails: if `fut` fails or takes longer than `timeout` (by default the Manager's), it has `default`,
        and the error is reported. CUDA tensors of a pending `fut` must be on the current device, or on one of `default`'s."""

        def result_of(ended: Future[T]) -> T:
            try:
                return ended.value()
            except Exception as error:  # noqa: BLE001 (any failure of the user's future)
                self.report_error(error)
                return default

        if fut.done():
            # `then` keeps the devices: a future of NCCL is done once its kernel is queued, and whoever waits for it waits on a stream
            return fut.then(result_of)
        wrapped: Future[T] = Future(devices=future_devices(default))
        claim = threading.Lock()

        def end(ended: Future[T]) -> None:
            if claim.acquire(blocking=False):
                timer.cancel()
                wrapped.set_result(result_of(ended))

        def late() -> None:
            if claim.acquire(blocking=False):
                self.report_error(TimeoutError(f"the future has no value after {limit_s:g} s"))
                wrapped.set_result(default)

        limit_s = timeout.total_seconds() if timeout else self._timeout_s or self._pg.timeout_s
        timer = threading.Timer(limit_s, late)
        timer.daemon = True
        timer.start()
        fut.add_done_callback(end)
        return wrapped

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Registers further state under a new name. To be called before the first quorum."""
        self.core.register_state(key, state_dict, load_state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Sets the functions for the user's state, as the constructor does; may be called again. `state_dict` returns tensors, floats,
        integers, strings, bool and None, in lists, tuples and dicts with strings or integers as keys; the tensors are the same ones at
        each call, as a heal writes into them. With other values no group can heal from this one: an error is logged after the first
        step."""
        if self._user is None:
            self.core.register_state("default", lambda: self._user[1](), lambda state: self._user[0](state))
        self._user = (load_state_dict, state_dict)

    def heal_from_one(self) -> None:
        """Makes heals use a single source, as groups also have state that differs between them (local_sgd.py, `attach`). Not in torchft."""
        self.core.healer.one_source = True

    def disallow_state_dict_read(self) -> None:
        """Returns when the state may change between two counted steps (LocalSGD): joiners have it or its copy, or heal again."""
        self.core.healer.transport.fence()

    def allow_state_dict_read(self) -> None:
        """Does nothing: the state is only read when a step begins."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: numbers and strings. To be called between should_commit and start_quorum."""
        return {**self.core.state_dict(), "batches_committed": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict, or torchft's, which has only step and batches_committed. To be called before the first quorum."""
        self._batches = int(state_dict["batches_committed"])
        if "ledger" not in state_dict:
            ledger = json.dumps({"position": self._batches})
            state_dict = {**state_dict, "commit_id": "", "commit_quorum_id": 0, "ledger": ledger}
        self.core.load_state_dict(state_dict)

    def want_to_leave(self) -> None:
        """Ends this group's wait for other groups, or the next one that lasts: start_quorum, backward or should_commit raises GroupReleased
        in all its ranks. For any thread, such as one that is woken by a signal (docs/torchft.md). Not in torchft."""
        self.core.want_to_leave()

    def leave(self) -> None:
        """Leaves after this group's next step, in which it tells the others. All its ranks call it before the same step. Not in torchft."""
        self.core.leave()

    def shutdown(self, wait: bool = True, *, at_exit: bool = False) -> None:
        """Leaves the job. May be called twice. Between two steps it does not fail a step that others are completing, so all groups may stop
        at the same step. If the others continue, `leave()` before the last step saves them a retry. `wait` has no effect: shutdown waits.
        `at_exit`: only announces the leave, as at the program's end."""
        atexit.unregister(self.shutdown)
        # inside a step, or after an error, other ranks may wait for this one until the server kills them; a fork is not the program
        if at_exit and (self._body or hasattr(sys, "last_type") or os.getpid() != self._pid):
            return
        if self._is_decided and self.core.machine.phase is Phase.BOUNDARY and not self.core.machine.void:
            self.core.may_exit = True  # this group has sent everything that others may wait for
        self.core.gradients.close()
        self.core.close(at_exit=at_exit)

    def attach(self, model_parts: Sequence[nn.Module]) -> None:
        """Registers modules whose gradients are reduced (DistributedDataParallel). To be called before the first quorum. Raises ValueError
        for a parameter that the process group cannot reduce."""
        for part in model_parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    _check_reducible(self._pg, parameter)
        self.core.attach(model_parts)
        if any([*persistent_buffers(part)] for part in model_parts):
            self.heal_from_one()  # a forward may write to persistent buffers, so that they differ between groups
        parameters = [parameter for part in model_parts for parameter in part.parameters()]
        self._parameters = [*dict.fromkeys([*self._parameters, *parameters])]  # modules may share some

    def backward_begins(self) -> None:
        """Begins to send gradients: called by DistributedDataParallel in the last backward of the step, in a thread of autograd."""
        if self._is_decided:
            raise RuntimeError(
                "no step has begun (start_quorum), or its gradients are reduced already: wrap all backwards except for the "
                "last in no_sync()"
            )
        self._used = True
        if self._slots:
            self._backward.enter_context(self.core.last_backward())

    def backward_ended(self) -> None:
        """Returns when .grad is the mean, or the step is dropped. The trainer's thread is inside backward meanwhile."""
        self._backward.close()
        self._decide()

    def _decide(self, failure: str = "") -> None:
        """Reduces and votes, repeatedly if needed; .grad is the mean if the step is committed. `failure`: why this attempt must fail."""
        if self._is_decided:
            return
        self._is_decided = True
        # a body has one batch, whatever its number of slots
        failure, tokens = failure or self._why_not(), (1.0,) + (0.0,) * (self._slots - 1)
        kept = not failure and self.core.gradients.can_repeat
        totals = self.core.reduce(tokens, 0.0, self._error is None, kept=kept, failure=failure)
        self._commit = self.core.commit(totals)
        if self._commit is not None:
            self._batches += len(self._commit.contributors)
            gradients = [to_local(p.grad) for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, self._commit.divisor)

    def _why_not(self) -> str:
        """Returns why this step cannot be committed in this generation; "": it can."""
        quorum = self.core.quorum
        if not self._slots or quorum is None:
            return ""
        if len(quorum.members) < self._min_replica_size:
            return f"the quorum has {len(quorum.members)} groups, and min_replica_size = {self._min_replica_size}"
        if self._error is not None and (len(quorum.members) == 1 or self._world_size > 1):
            return f"reported: {self._error}"
        return ""

    def _reduce_late(self, tensor: Tensor, op: str) -> GroupWork:
        """Reduces a tensor after the step was decided, without quantization: a failure affects only the tensor."""
        user = UserAllreduce(tensor, self._late, mean=op == "AVG", keep=False, after_buckets=True)
        other = [] if op in ("AVG", "SUM") else [getattr(dist.ReduceOp, op)]
        contributes = bool(other) or self.is_participating()  # zeros would be wrong in a maximum
        reduction = user.launch(self._pg, self.num_participants(), contributes=contributes, opts=other)

        def give_back(_: object) -> None:
            if reduction.exception() is None:
                user.forget()
            else:
                user.abandon()  # its engine may still write to the buffer, so that no pool may have it

        user.work.get_future().add_done_callback(give_back)
        return user.work


def _seconds(variable_s: int | None, given: timedelta | None) -> float | None:
    """Returns a timeout in seconds: the environment variable takes precedence over the argument, as in torchft."""
    if variable_s is not None:
        return float(variable_s)
    return None if given is None else given.total_seconds()


def _check_reducible(pg: ProcessGroup, tensor: Tensor, *, quantized: bool = False) -> None:
    """Raises ValueError for a tensor that the process group can never reduce: its failure would be repeated for ever, as a peer's is."""
    device, needed = to_local(tensor.detach()).device, pg.DEVICE
    if needed and device.type != needed:
        nearest = "ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo"
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {device}: {type(pg).__name__} reduces tensors on {needed}; nearest: {nearest}"
        )
    if tensor.dtype in pg.NOT_REDUCED and not quantized:
        raise ValueError(
            f"a tensor of {tensor.dtype}: {type(pg).__name__} cannot reduce it; pass a copy of another dtype"
        )


def _resolve(hostname: str) -> str:
    return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])


def _store(config: ReplicaGroupConfig, environment: Environment, address: str | None, port: int | None) -> Store | None:
    """Returns the group's store: the one at the given address, by default that of the default process group, else the launcher's. None for
    a group of one rank, which needs none."""
    if config.world_size == 1:
        return None
    if not (address or port) and dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    address, port = address or environment.master_addr, port or environment.master_port
    if not address or not port:
        raise ValueError("MASTER_ADDR and MASTER_PORT are not set: a group of several ranks requires its store")
    return TCPStore(address, port, None, False, wait_for_workers=False)


@lru_cache(None)  # once per process
def say_once(message: str) -> None:
    log.warning("%s", message)
