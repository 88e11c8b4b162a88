"""Replica groups in the threads of one process: real lighthouse, real group servers, real gloo; a toy model whose weights tell which
samples went into them.

The gradient of a slot is its position + 1, and the optimizer takes the sums as they are: after any history, each weight is minus the sum
over all slots that were committed, to the last bit. Two groups that hold the same step hold the same bits.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from ft.agreement import Agreement
from ft.compat.lighthouse import LighthouseServer
from ft.healing.transport import Transport
from ft.manager import Manager, ManagerOptions
from ft.membership import ReplicaGroupConfig
from ft.process_groups.base import ProcessGroup
from ft.process_groups.errors import ProcessGroupError
from ft.process_groups.gloo import ProcessGroupGloo
from ft.protocol import messages as m
from ft.rpc.access import Access
from ft.seam import GroupEnded, Stopped, from_checkpoint
from tests.waiting import in_time
from training.progress import Progress

LIMIT_S = 60.0  # of any wait in a test; nothing is to take so long
SLOT = 4  # sequences


T = TypeVar("T", bound="Trained")
G = TypeVar("G", bound="Trained")
J = TypeVar("J", bound="GroupsOfJob[Any]")


class Trained:
    """A rank that a thread trains. `train` makes its manager."""

    name: str
    manager: Any
    error: BaseException | None = None

    def start(self: T) -> T:
        self.thread = threading.Thread(target=self.run, name=self.name, daemon=True)
        self.thread.start()
        return self

    def join(self: T) -> T:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), f"{self.thread.name} hangs at {self.where()}"
        return self

    @property
    def core(self) -> Manager:
        """The manager, behind torchft's names if it has them."""
        return getattr(self.manager, "core", self.manager)

    def where(self) -> str:
        """Returns the phase of this rank's protocol."""
        return str(self.core.machine.phase)

    def kill(self, *others: Trained) -> None:
        """Kills the group's server, and the group with it: its next call raises GroupEnded. First each of `others` has committed the
        last step of this group: one that had not all its sums would heal that step, as a collective is not atomic."""
        assert in_time(lambda: all(one.core.step >= self.core.step for one in others))
        server = self.core.membership.server
        assert server
        os.kill(server.pid, signal.SIGKILL)
        # Where the trainer waits for an answer of the server, it may close before the stream says that the server is gone.
        assert in_time(lambda: self.core.client.gone.is_set() or self.core.closed.is_set())

    def run(self) -> None:
        try:
            self.train()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.error = error
        finally:
            if hasattr(self, "manager"):
                self.stop()

    def stop(self) -> None:
        self.manager.close()

    def train(self) -> None:
        raise NotImplementedError


def finish(*trained: T) -> tuple[T, ...]:
    """Waits until all have ended; what one has raised is raised."""
    for one in trained:
        if error := one.join().error:
            raise error
    return trained


@dataclass
class Rank(Trained):
    """One rank of a group, trained by a thread. `at`: called in it at the boundary before a step, with (rank, step)."""

    name: str
    group_rank: int
    world_size: int
    lighthouse: str
    store: HashStore
    steps: int  # to commit, from the first one on to which so many groups contributed:
    together: int = 1
    at: Callable[[Rank, int], None] = lambda rank, step: None
    able: Callable[[Rank, tuple[int, ...]], bool] = lambda rank, slots: True  # False: the loss is not a number
    options: dict[str, Any] = field(default_factory=dict)
    group: Callable[[], ProcessGroup] = ProcessGroupGloo
    make: Callable[..., Manager] = Manager
    every_step: bool = False
    agrees: bool = False  # the ranks of the group among themselves (ft/agreement.py)
    agree: Callable[..., Agreement] = Agreement
    times: m.Timeouts = field(default_factory=m.Timeouts)
    host: str = "127.0.0.1"
    access: Access = field(default_factory=Access)

    manager: Manager = field(init=False)
    progress: Progress = field(init=False)
    model: torch.nn.Module = field(init=False)
    commits: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)  # step, quorum size, contributors
    computed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # step, slots that were computed
    weights: dict[int, torch.Tensor] = field(default_factory=dict)  # after that step
    seen: list[tuple[float, m.Event, m.Out]] = field(default_factory=list)
    told: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)  # events

    def where(self) -> str:
        last = (str((e, o.effects)) for _, e, o in self.seen[-12:] if not isinstance(e, m.Tick))
        return "\n".join([f"{super().where()} of rank {self.group_rank}", *last])

    @property
    def members(self) -> int:
        """Groups in its quorum."""
        return len(self.manager.quorum.members) if self.manager.quorum else 0

    def seen_of(self, kind: type[m.Effect]) -> list[m.Effect]:
        return [effect for _, _, out in self.seen for effect in out.effects if isinstance(effect, kind)]

    def train(self) -> None:
        self.progress = Progress()
        # float64: its sums are exact also after thousands of steps, which a group may make while another one starts
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)).double()
        names = ("group_rank", "world_size", "host", "access", "times", "every_step")
        config = group_config(self.name, self.lighthouse, **{name: getattr(self, name) for name in names})
        options = ManagerOptions(**{"slot_size": SLOT, "dies_with_group": False, "init_sync": False, **self.options})
        self.manager = self.make(
            self.group(),
            config,
            options,
            store=self.store,
            agreement=self.agreement() if self.agrees else None,
            phase_timer=self.progress,
            record_event=lambda event, step, **what: self.told.append((event, step, what)),
            observer=lambda *what: self.seen.append(what),
        )
        self.manager.register_state("model", self.model.state_dict, self.model.load_state_dict)
        self.manager.attach([self.model])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        while not self.manager.may_exit and (self.until is None or self.manager.step < self.until):
            self.at(self, self.manager.step)
            self.train_step()

    def agreement(self) -> Agreement:
        gloo = torch.distributed.ProcessGroupGloo  # type: ignore[attr-defined]
        store = PrefixStore("agreement", self.store)
        return self.agree(gloo(store, self.group_rank, self.world_size, timedelta(seconds=LIMIT_S)))

    @property
    def together_commits(self) -> list[int]:
        """Steps to which as many groups contributed as the test waits for."""
        return [step for step, _, who in self.commits if len(who) >= self.together]

    @property
    def until(self) -> int | None:
        """Its last step, once it is known."""
        steps = self.together_commits
        return steps[0] + self.steps - 1 if steps else None

    def made_without(self, dead: Rank, step: int) -> bool:
        """Returns whether this group made the last step of `dead` again, without it: a group may die with sums that no other group has."""
        mine, of_dead = ({at: groups for at, _, groups in rank.commits}[step] for rank in (self, dead))
        return isinstance(dead.error, GroupEnded) and step == max(dead.weights) and len(mine) < len(of_dead)

    def train_step(self) -> None:
        # Each ends as train.py does: who just went would break the last collective of those whose threads have not run yet.
        assignment = self.manager.begin_step(until=self.until)
        if assignment.slots:
            self.computed.append((assignment.steps_before, assignment.slots))
        for slot in assignment.slots:
            with self.progress.phase("compute"), self.manager.last_backward(slot):
                self.backward(float(slot + 1))
        able = self.able(self, assignment.slots)
        tokens = [1.0 if able else 0.0] * len(assignment.slots)
        commit = self.manager.commit(self.manager.reduce(tokens, float(len(assignment.slots)), able))
        if commit is None:
            self.model.zero_grad()
            return
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= parameter.grad
        self.model.zero_grad()
        self.progress.commit()
        step = self.manager.step
        self.commits.append((step, commit.quorum_size, commit.contributors))
        self.weights[step] = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).clone()

    def backward(self, value: float) -> None:
        sum((parameter * value).sum() for parameter in self.model.parameters()).backward()


def lose_the_sums(rank: Rank) -> None:
    """Makes this rank lose the sums of its coming step, which the others have: the connection breaks behind the others' last byte."""
    gradients = rank.manager.gradients
    wait = gradients.wait

    def torn() -> tuple[float, ...]:
        wait()
        gradients.wait = wait  # type: ignore[method-assign]
        raise ProcessGroupError("the connection broke behind the others' last byte")

    gradients.wait = torn  # type: ignore[method-assign]


class Wrapped:
    """A transport that does what another one does, but for what a subclass says."""

    def __init__(self, transport: Transport) -> None:
        self.inner = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class GroupsOfJob(Generic[G]):
    """Groups under the lighthouse at this address, each trained by a thread."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.groups: list[G] = []

    def start(self, group: G) -> G:
        self.groups.append(group)
        return group.start()

    def join(self) -> None:
        """Waits until all groups have ended, by themselves or killed."""
        for group in self.groups:
            group.join()
            assert group.error is None or isinstance(group.error, GroupEnded | Stopped), repr(group.error)

    def end(self) -> None:
        """Ends the job of a test that has not failed."""
        self.join()

    def close(self) -> None:
        for group in self.groups:
            if hasattr(group, "manager"):
                group.stop()


@contextmanager
def run_job(kind: Callable[[str], J], min_replicas: int, **more: Any) -> Iterator[J]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas, **more)
    made = kind(lighthouse.address())
    try:
        yield made
        made.end()
    finally:
        made.close()
        lighthouse.shutdown()


class Job(GroupsOfJob[Rank]):
    def group(self, name: str, *, size: int = 1, **more: Any) -> list[Rank]:
        """Starts the ranks of a group, and returns them."""
        store = HashStore()
        ranks = [Rank(name, rank, size, self.lighthouse, store, **more) for rank in range(size)]
        return [self.start(rank) for rank in ranks]

    def end(self) -> None:
        """Checks that equal steps have equal bits, and that the weights are those of the ledger, with each slot once."""
        for rank in self.groups:
            for other in self.groups:
                for step in rank.weights.keys() & other.weights.keys():
                    if not (rank.made_without(other, step) or other.made_without(rank, step)):
                        assert torch.equal(rank.weights[step], other.weights[step]), (rank.name, other.name, step)
        for rank in self.groups:
            if rank.error is None:
                ledger = from_checkpoint(rank.manager.state_dict())["ledger"]
                slots = set(range(0, ledger["position"], SLOT)) - set(ledger["holes"])
                total = sum(slot + 1 for slot in slots)
                last = rank.weights[max(rank.weights)]
                assert torch.equal(last, torch.full_like(last, -float(total))), (rank.name, last[0], total)


def job(min_replicas: int = 2, **more: Any) -> AbstractContextManager[Job]:
    return run_job(Job, min_replicas, **more)


def group_config(name: str, lighthouse: str, **more: Any) -> ReplicaGroupConfig:
    """Settings of a group, of one rank unless said otherwise."""
    alone = {"group_rank": 0, "world_size": 1, "host": "127.0.0.1", "access": Access(), "times": m.Timeouts()}
    return ReplicaGroupConfig(name=name, lighthouse=lighthouse, **{**alone, **more})
