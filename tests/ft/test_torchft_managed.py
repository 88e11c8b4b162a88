"""ManagedProcessGroup in whole groups: a result that was copied is committed only if its reduction was complete; and how a group heals is
what the program has chosen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ft import ManagedProcessGroup, ProcessGroupGloo, WorldSizeMode
from ft.checkpointing import HTTPTransport, PGTransport
from ft.healing.pg_transport import PgTransport
from ft.seam import BadInput, GroupEnded
from tests.ft.torchft_groups import Group, job, moves
from tests.waiting import in_time

A, B, C = 4.0, 16.0, 64.0  # gradients; all means of them differ
FOR_EVER = 1 << 30
PG = {"checkpoint_transport": PGTransport(ProcessGroupGloo(), timedelta(seconds=10), torch.device("cpu"))}
HTTP = {"checkpoint_transport": HTTPTransport(timedelta(seconds=10), 0)}


def test_a_copied_result_is_never_that_of_a_failed_reduction():
    """c dies between two reductions. The others have copied what they had, so the step is dropped, and its body runs again."""
    died_at: list[int] = []

    def body(group: Group) -> None:
        managed = ManagedProcessGroup(group.manager)
        assert managed.size() == group.manager.num_participants()
        group.backward()
        for parameter in group.model.parameters():
            assert parameter.grad is not None
            reduced = parameter.grad.clone()
            dist.all_reduce(reduced, op=dist.ReduceOp.AVG, group=managed)
            parameter.grad = reduced.clone()
            if group.name == "c" and managed.size() == 3:
                died_at.append(group.manager.current_step() + 1)
                a.steps = b.steps = died_at[0] + 3
                return group.kill(a, b)

    with job(min_replicas=2) as made:
        more: dict[str, Any] = {"wrap": False, "body": body, "arguments": {"init_sync": False}}
        a, b = made.group("a", A, FOR_EVER, **more), made.group("b", B, FOR_EVER, **more)
        made.group("c", C, FOR_EVER, **more)
        made.join()
        for group in (a, b):
            assert group.refused == died_at and moves(group)[died_at[0]] == (A + B) / 2


def test_losses_are_reduced_between_two_steps():
    """The trainer of torchtitan does so after the optimizer's step. c dies where the others reduce, which costs neither of them a step."""
    logged: dict[str, dict[int, list[float]]] = {"a": {}, "b": {}, "c": {}}
    died_at: list[int] = []

    def at(group: Group) -> None:
        managed, step = ManagedProcessGroup(group.manager), group.manager.current_step()
        if step == 0:
            return None
        if group.name == "c" and managed.size() == 3:
            died_at.append(step)
            a.steps = b.steps = step + 3
            return group.kill(a, b)
        values = [torch.tensor([group.value]) for _ in range(3)]
        for value, op in zip(values, (dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            dist.all_reduce(value, op=op, group=managed)
        logged[group.name][step] = [value.item() for value in values]

    with job(min_replicas=2) as made:
        more: dict[str, Any] = {"at": at, "arguments": {"init_sync": False}}
        a, b = made.group("a", A, FOR_EVER, **more), made.group("b", B, FOR_EVER, **more)
        c = made.group("c", C, FOR_EVER, **more)
        made.join()
        [step] = died_at
        assert isinstance(c.error, GroupEnded) and a.refused == b.refused == []
        assert logged["a"][step] == [A] * 3 and logged["b"][step] == [B] * 3, "each keeps its own"
        assert logged["a"][step + 2] == logged["b"][step + 2] == [(A + B) / 2, A + B, B]


def test_groups_heal_as_their_program_says():
    """b takes the initial state of a. A group that heals in another way is refused."""
    with job(min_replicas=2) as made:
        a, b = (made.group(name, value, FOR_EVER, initial=value, arguments=PG) for name, value in (("a", A), ("b", B)))
        assert in_time(lambda: len(a.weights) > 1 and len(b.weights) > 1)
        spare = {**PG, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}  # with tails of another length
        for arguments, name in ((HTTP, "checkpoint_transport"), (spare, "world_size_mode and min_replica_size")):
            other = Group("c", C, FOR_EVER, made.lighthouse, arguments=arguments).start().join()
            assert isinstance(other.error, BadInput) and name in str(other.error)
        a.steps = b.steps = a.manager.current_step() + 3
        made.join()
        assert all(isinstance(group.core.healer.transport, PgTransport) for group in (a, b))
        assert a.weights[1][0] == b.weights[1][0] == 0.0 and a.core.healer.received_bytes + b.core.healer.received_bytes
