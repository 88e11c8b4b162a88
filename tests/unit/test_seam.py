"""The contract between every manager and the training loop. Each kind of manager is an entry of MANAGERS."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from torch.distributed import HashStore, Store

from ft import LighthouseServer, Seam, SoloManager
from ft.config import Environment, FaultTolerance
from ft.manager import Manager, ManagerOptions
from ft.membership import ReplicaGroupConfig, join
from ft.process_groups.gloo import ProcessGroupGloo
from ft.protocol.messages import Timeouts
from ft.rpc.access import Access
from ft.rpc.clients import GroupClient
from ft.seam import Stopped
from ft.start import open_manager


def group_of_one(lighthouse: str, slot_size: int) -> Seam:
    """A replica group that is alone in its job."""
    config = ReplicaGroupConfig("only", 0, 1, lighthouse, "127.0.0.1", Access(), Timeouts())
    return Manager(ProcessGroupGloo(), config, ManagerOptions(slot_size=slot_size, dies_with_group=False))


MANAGERS: dict[str, Callable[[str, int], Seam]] = {
    "solo": lambda lighthouse, slot_size: SoloManager(slot_size),
    "replicas": group_of_one,
}
Make = Callable[[int], Seam]


@pytest.fixture(params=MANAGERS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes managers, one after the other: each has its own job."""
    with ExitStack() as stack:

        def one(slot_size: int) -> Seam:
            lighthouse = LighthouseServer("127.0.0.1:0", 1)
            stack.callback(lighthouse.shutdown)
            return stack.enter_context(closing(MANAGERS[request.param](lighthouse.address(), slot_size)))

        yield one


@pytest.fixture
def manager(make: Make) -> Seam:
    return make(8)


def committed(manager: Seam, tokens: float = 100.0, loss_sum: float = 250.0):
    manager.begin_step()
    return manager.commit(manager.reduce([tokens], loss_sum, True))


def test_a_commit_divides_by_the_tokens_that_went_in(manager: Seam):
    commit = committed(manager)
    assert commit is not None
    assert (commit.divisor, commit.mean_loss, commit.contributors, commit.quorum_size) == (100.0, 2.5, (0,), 1)


def test_a_commit_says_what_went_in_and_whose(manager: Seam):
    for slot in (0, 8):
        commit = committed(manager)
        assert commit is not None
        [(named, owner)] = commit.slots
        assert named == slot and owner == getattr(manager, "replica_id", "solo") and commit.holes == ()


def test_step_and_data_move_on_commit_only(manager: Seam):
    first = manager.begin_step()
    assert manager.begin_step() == first and manager.step == 0
    sums = manager.reduce([100.0], 250.0, True)
    assert (*sums.tokens_per_slot, sums.loss_sum, sums.ok) == (100.0, 250.0, True)
    assert manager.step == 0
    manager.commit(sums)
    assert manager.step == 1
    assert manager.begin_step().slots == (first.slots[0] + 8,)


def test_a_step_that_cannot_hold_changes_nothing(manager: Seam):
    manager.begin_step()
    state = manager.state_dict()
    with pytest.raises(Stopped) as stopped:
        manager.commit(manager.reduce([100.0], float("nan"), False))
    assert stopped.value.slots == (0,)
    assert manager.step == 0 and manager.state_dict() == state


def test_a_step_without_a_target_is_no_step(manager: Seam):
    manager.begin_step()
    with pytest.raises(Stopped, match="none of"):
        manager.commit(manager.reduce([0.0], 0.0, True))


@pytest.mark.parametrize("slot_size", [8, 4])
def test_the_ledger_survives_a_restart(manager: Seam, make: Make, slot_size: int):
    """A resumed job continues at the same sequence, also with a different batch size."""
    for _ in range(3):
        committed(manager)
    state = manager.state_dict()
    resumed = make(slot_size)
    resumed.load_state_dict(state)
    assert resumed.step == 3 and resumed.begin_step().slots == (24,)


def test_a_step_that_is_not_applied_is_skipped_in_the_ledger(manager: Seam, make: Make):
    manager.attach([])
    committed(manager)
    commit = committed(manager, loss_sum=math.nan)  # summed, as the trainer says that it may be
    assert commit is not None and commit.slots[0][0] == 8 and math.isnan(commit.mean_loss)
    manager.skip([slot for slot, _ in commit.slots])
    assert committed(manager).slots[0][0] == 16
    state = manager.state_dict()
    assert json.loads(state["ledger"])["skipped"] == [8] and state["step"] == 3
    resumed = make(8)
    resumed.load_state_dict(state)
    assert resumed.begin_step().slots == (24,)
    assert json.loads(resumed.state_dict()["ledger"])["skipped"] == [8]


def test_a_run_goes_on_under_another_manager(make: Make):
    """A checkpoint made with fault tolerance resumes without it, and vice versa."""
    alone = SoloManager(8)
    first = make(8)
    for one, other in ((alone, first), (first, SoloManager(8))):
        committed(one)
        other.load_state_dict(one.state_dict())
        assert other.step == one.step and other.begin_step().slots == one.begin_step().slots


def test_a_name_is_registered_once(manager: Seam):
    manager.register_state("model", dict, lambda state: None)
    with pytest.raises(ValueError, match="state model is registered already"):
        manager.register_state("model", dict, lambda state: None)


def test_leaving_ends_with_a_step_at_the_latest(manager: Seam):
    manager.attach([])
    committed(manager)
    manager.leave()
    if not manager.may_exit:
        committed(manager)
    assert manager.may_exit


def test_the_last_step_is_the_one_that_the_trainer_named(manager: Seam):
    manager.attach([])
    for step in range(3):
        assert not manager.may_exit, f"it left with step {step}"
        manager.begin_step(until=3)
        assert manager.commit(manager.reduce([100.0], 250.0, True))
    assert manager.may_exit


def test_closing_twice_is_harmless(manager: Seam):
    with manager.last_backward(0):
        pass
    manager.close()
    manager.close()


def test_a_rewind_begins_a_branch_at_a_checkpoint_and_passes_over_the_data_since(manager: Seam, make: Make):
    manager.attach([])
    committed(manager)
    checkpoint = manager.state_dict()
    for _ in range(3):
        committed(manager)
    manager.rewind("loss nan", lambda: manager.load_state_dict(checkpoint))
    [rewound] = manager.rewinds
    assert rewound == (1, 4, "loss nan", ((8, 32),)) and manager.step == 1 and not manager.may_exit
    commit = committed(manager)
    assert commit and commit.slots[0][0] == 32 and commit.rewound == rewound and manager.step == 2
    commit = committed(manager)
    assert commit and commit.slots[0][0] == 40 and commit.rewound is None

    state = manager.state_dict()
    assert state["step"] == 3 and json.loads(state["ledger"])["rewinds"] == [[1, 4, "loss nan", [[8, 32]]]]
    resumed = make(8)
    resumed.load_state_dict(state)
    assert resumed.step == 3 and resumed.rewinds == manager.rewinds and resumed.begin_step().slots == (48,)

    # further back, to before the first rewind: all since then is left out
    manager.rewind("loss inf", lambda: manager.load_state_dict(checkpoint))
    assert manager.rewinds[1:] == [(1, 3, "loss inf", ((8, 48),))] and manager.begin_step().slots == (48,)


def test_a_rewind_without_a_checkpoint_begins_anew_behind_the_data(manager: Seam):
    manager.attach([])
    assert manager.begin_step(until=2).steps_before == 0
    manager.commit(manager.reduce([100.0], 250.0, True))
    manager.begin_step(until=2)
    manager.commit(manager.reduce([100.0], 250.0, True))
    assert manager.may_exit, "it was the last step"
    manager.rewind("loss nan", lambda: None)
    assert not manager.may_exit and (manager.step, manager.begin_step(until=2).slots) == (0, (16,))
    assert manager.rewinds[0] == (0, 2, "loss nan", ((0, 16),))


def test_a_rewind_does_not_revoke_a_leave(manager: Seam):
    manager.attach([])
    committed(manager)
    manager.leave()
    committed(manager)
    assert manager.may_exit
    manager.rewind("loss nan", lambda: None)
    assert manager.may_exit


@pytest.mark.parametrize("group_rank", [0, 1])
def test_several_ranks_without_a_store_are_refused(group_rank: int):
    """Rank 0 is refused, too: the others would wait for its address, which it cannot publish."""
    config = ReplicaGroupConfig(
        "a", group_rank, 2, "http://127.0.0.1:1", "127.0.0.1", Access(), Timeouts(), contact_s=0
    )
    with pytest.raises(RuntimeError, match=f"rank {group_rank} of 2 has no store"):
        join(config, None)


def test_a_manager_that_cannot_be_made_leaves_no_server_behind():
    """The server's heartbeats would continue, and the next Manager of that name would be refused."""
    addresses = []

    def refuse(address: str, group_rank: int, access: Access) -> GroupClient:
        addresses.append(address)
        raise OSError("no descriptors left")

    lighthouse = LighthouseServer("127.0.0.1:0", 1)
    config = ReplicaGroupConfig("only", 0, 1, lighthouse.address(), "127.0.0.1", Access(), Timeouts())
    with pytest.raises(OSError, match="no descriptors left"):
        Manager(ProcessGroupGloo(), config, ManagerOptions(dies_with_group=False), connect=refuse)
    lighthouse.shutdown()
    [address] = addresses
    host, _, port = address.removeprefix("http://").rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=30)


def test_a_store_that_fails_leaves_no_server_behind():
    told = []

    class Fails(Store):
        def set(self, key: str, value: str) -> None:
            told.append(json.loads(value)["address"])
            raise RuntimeError("the store is gone")

    lighthouse = LighthouseServer("127.0.0.1:0", 1)
    config = ReplicaGroupConfig("only", 0, 2, lighthouse.address(), "127.0.0.1", Access(), Timeouts())
    with pytest.raises(RuntimeError, match="the store is gone") as raised:
        join(config, Fails())
    lighthouse.shutdown()
    assert raised.tb is not None, "which keeps what `join` has made"
    host, _, port = told[0].removeprefix("http://").rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=30)


def test_the_groups_of_a_program_may_begin_with_different_states():
    """train.py's do not: it says so (ft/start.py)."""
    assert ManagerOptions().init_sync


def test_ranks_of_nodes_that_count_their_restarts_differently_join_one_group(tmp_path: Path):
    """torchelastic does not count a node's restart that is due to failed ranks of another node."""
    settings, store = FaultTolerance(enable=True, min_replica_size=1, process_group="gloo"), HashStore()
    with ExitStack() as stack:
        lighthouse = LighthouseServer("127.0.0.1:0", 1)
        stack.callback(lighthouse.shutdown)
        environment = Environment(lighthouse=lighthouse.address(), world_size=2, connect_timeout_s=1)
        ids = set[str]()
        for rank, restarts in enumerate((1, 0)):
            launched = replace(environment, group_rank=rank, restart_count=restarts)
            manager = open_manager(settings, launched, slot_size=1, folder=tmp_path, store=store)
            ids.add(cast(Manager, stack.enter_context(closing(manager))).replica_id)
    assert len(ids) == 1
