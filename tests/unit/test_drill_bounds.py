"""The maximum delay that a fault may cause: each bound can be missed, and the verdict then says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.drill_faults import BOUNDS, HARMS, Incident, in_time
from bench.job import EventLine, EventLog
from ft.config import FaultTolerance
from tests.unit.test_drill_rules import FAULT, commit, event_logs

SETTINGS = FaultTolerance(min_replica_size=2)
STEADY_S = 0.5


def made(gap_s: float, *, others: str = "01", until: int = 60) -> dict[str, EventLog]:
    """Returns logs with a step each half second, but none of `others` for `gap_s` from 10 s. Group 2 is away from 10 s to 50 s."""
    found = event_logs()
    for name in others:
        steps = [commit(n, at_s=n * STEADY_S + (gap_s if n > 20 else 0.0)) for n in range(1, 2 * until)]
        found[name].ranks[0] = [line for line in steps if line.at_s <= until + gap_s]
    found["2"].ranks[0] = [*(commit(n, at_s=n * STEADY_S) for n in range(1, 21)), EventLine("start", 50.0, 2, 0)]
    found["2"].ranks[0] += [commit(n, at_s=n * STEADY_S, pid=2) for n in range(104, 120)]
    return found


def fault(kind: str, **changed: object) -> Incident:
    return replace(FAULT, kind=kind, at_s=10.2, repaired_s=45.0, back_s=55.0, **changed)  # type: ignore[arg-type]


def test_the_bounds_are_those_of_faults_that_there_are():
    assert BOUNDS.keys() <= HARMS.keys()


@pytest.mark.parametrize(("kind", "kept_s", "missed_s"), [("hang", 14.0, 16.0), ("pair, in a sum", 19.0, 21.0)])
def test_who_waits_too_long(kind: str, kept_s: float, missed_s: float):
    """Checks times within and beyond the bound. With three groups, a hung one delays the others by ten seconds and a rendezvous, a cut pair
    by the heartbeat timeout and a rendezvous."""
    assert in_time(made(kept_s), [fault(kind)], SETTINGS).holds
    verdict = in_time(made(missed_s), [fault(kind)], SETTINGS)
    assert not verdict.holds and f"NOT {kind}: seconds without a step" in verdict.words


def test_two_groups_wait_longer_for_one_that_hangs():
    two = fault("hang", live=frozenset("02"), survivors=frozenset("0"))
    assert in_time(made(34.0), [two], SETTINGS).holds


def test_of_a_cut_pair_one_sits_out_and_is_back_within_a_minute():
    late = replace(fault("pair, in a sum"), back_s=110.0)
    assert "NOT pair, in a sum: seconds from the repair" in in_time(made(0.0), [late], SETTINGS).words
    both = made(0.0)
    both["1"].ranks[0] = [line for line in both["1"].ranks[0] if not 11.0 < line.at_s < 46.0]
    assert "NOT pair, in a sum: excluded groups 2.00" in in_time(both, [fault("pair, in a sum")], SETTINGS).words


def test_a_lighthouse_that_is_away_stops_nobody_where_nobody_may_take_over():
    away, stopped = fault("lighthouse away", hit=frozenset()), made(34.0)
    never, after_30_s = replace(SETTINGS, takeover_s=0), SETTINGS
    assert in_time(stopped, [away], after_30_s).holds, "steps waited, and went on at its return"
    assert not in_time(stopped, [away], never).holds
    assert in_time(made(0.0), [away], never).holds
    assert not in_time(made(50.0), [away], after_30_s).holds


def test_a_survivor_goes_on_when_enough_are_there():
    assert in_time(made(42.0, others="0"), [fault("capacity", survivors=frozenset("0"))], SETTINGS).holds
    assert not in_time(made(46.0, others="0"), [fault("capacity", survivors=frozenset("0"))], SETTINGS).holds


def test_a_group_that_dies_as_it_heals_costs_the_others_two_steps():
    slow = made(0.0)
    slow["0"].ranks[0] = [line for line in slow["0"].ranks[0] if not 51.0 < line.at_s < 53.5]
    assert in_time(made(0.0), [fault("joiner")], SETTINGS).holds
    assert not in_time(slow, [fault("joiner")], SETTINGS).holds
