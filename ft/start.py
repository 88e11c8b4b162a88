"""The manager of a run, as its settings and its environment ask for it: a quorum of one, or this group's among others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.accounts import Accounts, Events, no_events
from ft.config import Environment, FaultTolerance
from ft.seam import Seam
from ft.solo import SoloManager

if TYPE_CHECKING:
    from ft.process_groups.base import ProcessGroup


def open_manager(
    settings: FaultTolerance,
    environment: Environment,
    *,
    slot_size: int,
    folder: Path,
    store: Any = None,
    shape: Sequence[tuple[str, str]] = (),
    restore: Callable[[], object] | None = None,
    accounts: Accounts | None = None,
    happened: Events = no_events,
) -> Seam:
    """`slot_size`: sequences of one group's batch. `folder`, `store`: the group's own. `shape`: what all groups must have alike, by name.
    `restore`: loads the newest valid checkpoint, and with it this manager's state. `accounts`, `happened`: see accounts.py.
    Raises ValueError for settings and for a token that the lighthouse does not take, ConnectionError where no lighthouse answers,
    RuntimeError where the group's server does not start."""
    if not settings.enable:
        return SoloManager(slot_size)
    # Not on the way of those who train alone: grpc, and threads.
    from ft.addresses import advertised
    from ft.diary import Diarist
    from ft.manager import Manager, Options
    from ft.membership import Wish
    from ft.rpc.access import Access

    slots_per_step = environment.slots_per_step(settings)
    wish = Wish(
        name=environment.name,
        group_rank=environment.group_rank,
        world_size=environment.world_size,
        lighthouse=environment.lighthouse,
        host=advertised(settings.interface, environment.lighthouse),
        access=Access(environment.token),
        times=settings.times,
        attempt=environment.restart_count,
        every_step=settings.quorum == "every_step",
        contact_s=float(environment.connect_timeout_s or Wish.contact_s),
    )
    options = Options(
        slot_size=slot_size,
        keep_gradients=settings.keep_gradients,
        slots_per_step=slots_per_step,
        deterministic_reduce=settings.deterministic_reduce,
        heal_backlog=settings.heal_backlog,
        heal_copy_bytes=settings.heal_copy_bytes,
        digest_interval=settings.digest_interval,
        leave_if_odd=settings.on_corruption == "leave",
        max_failures=None if settings.max_retries < 0 else settings.max_retries,
        init_sync=False,  # all groups initialise from the same seed, or load the same checkpoint
    )
    shape = (*shape, ("fault_tolerance.slots_per_step", str(slots_per_step)))
    manager: Callable[..., Manager] = partial(Diarist, folder) if environment.drill else Manager
    return manager(
        process_group(settings),
        wish,
        options,
        store=store,
        shape=shape,
        restore=restore,
        accounts=accounts,
        happened=happened,
    )


def process_group(settings: FaultTolerance) -> ProcessGroup:
    """To the other groups' ranks."""
    from ft.process_groups.baby import ProcessGroupBabyGloo, ProcessGroupBabyNCCL
    from ft.process_groups.inline import ProcessGroupGloo, ProcessGroupNCCL

    kinds = {
        "gloo": ProcessGroupGloo,
        "nccl": ProcessGroupNCCL,
        "baby_gloo": ProcessGroupBabyGloo,
        "baby_nccl": ProcessGroupBabyNCCL,
    }
    return kinds[settings.process_group](settings.collective_s, rendezvous_s=settings.rendezvous_s)
