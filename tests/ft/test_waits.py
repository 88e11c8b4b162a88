"""What a newcomer may not let the others wait for."""

from __future__ import annotations

import pytest

from ft import scratch
from ft.protocol import messages as m
from ft.rpc.driver import now_s
from tests.ft.groups import job


def test_memory_is_touched_before_a_quorum_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """All of it: once it is in a quorum, whatever a group does first is everybody's next step."""
    made_s: list[float] = []
    make = scratch.Scratch.__init__

    def timed(self: scratch.Scratch, *what: object, **more: object) -> None:
        make(self, *what, **more)  # type: ignore[arg-type]
        made_s.append(now_s())

    monkeypatch.setattr(scratch.Scratch, "__init__", timed)
    with job(min_replicas=1) as made:
        rank = made.group("a", steps=5)[0].join()
        assert rank.error is None
    parts_s = [at_s for at_s, event, _ in rank.seen if isinstance(event, m.Part)]
    assert len(made_s) == scratch.READY and max(made_s) < parts_s[0]
