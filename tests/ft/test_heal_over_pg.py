"""Groups that heal over a process group (heal_transport = "pg") in place of HTTP."""

from __future__ import annotations

import pytest

from ft.healing.pg_transport import PgTransport
from ft.protocol import messages as m
from tests.ft.groups import finish, job
from tests.waiting import in_time

OPTIONS = {"heal_transport": "pg"}


@pytest.mark.parametrize(("holders", "size"), [("a", 1), ("a", 2), ("ab", 1)])
def test_a_newcomer_heals(holders: str, size: int):
    """Rank from rank; of two groups that hold the state it takes that of one. Job.end compares bits."""
    more = {"steps": 5, "together": len(holders) + 1, "options": OPTIONS}
    with job(min_replicas=len(holders)) as made:
        old = [rank for name in holders for rank in made.group(name, size=size, **more)]
        assert in_time(lambda: all(len(rank.commits) > 2 for rank in old))
        new = made.group("new", size=size, **more)
        finish(*old, *new)
        for rank in new:
            healer = rank.manager.healer
            assert isinstance(healer.transport, PgTransport) and rank.seen_of(m.LoadState)
            assert healer.received_bytes > 0 and rank.commits[0][0] > 2
        ended = [event for rank in new for _, event, _ in rank.seen if isinstance(event, m.HealEnded)]
        assert ended and all(event.ok for event in ended)
