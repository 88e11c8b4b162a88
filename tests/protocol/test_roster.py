"""Who is who, and who may go on: names and their one live id, succession, and what it costs to count them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.protocol import messages as m
from ft.protocol.lighthouse import Lighthouse, LighthouseConfig
from ft.protocol.messages import Member
from ft.protocol.roster import LOST_KEPT, Roster
from ft.protocol.rules import decide
from tests.protocol.talk import Talk, formed, notices, refusals

# ------------------------------------------------------------------------------------------------ one name, one id


def test_two_groups_with_one_id():
    talk = formed("ab")
    assert refusals(talk.call("a", 0.5, id_=2)) == [
        ("ALREADY_EXISTS", 'two groups with one id: "a" is a:1, seen 0.5 s ago')
    ]
    assert refusals(talk.call("a", 1.5, id_=2))  # a beat may be late
    assert notices(talk.call("a", 2.5, id_=2))[0] == ("MemberLost", ("b:1",))  # that is silence: superseded
    assert refusals(talk.say(m.Beat("a:1"))) == [("LOST", "a:2 took its name")]


def test_a_lost_group_returns_under_a_new_id_with_its_state():
    talk = formed("ab")
    talk.say(m.StreamClosed("b:1"))
    talk.say(m.StreamClosed("a:1"))
    talk.call("a", step=7, id_="1.1", known=1, failed=True)  # type: ignore[arg-type]
    assert talk.quorum == (2, "a")
    assert talk.machine.quorum and talk.machine.quorum.reference[0] == 7


def test_a_group_that_is_lost_twice_still_is_who_it_was():
    """Found by simulation: the id that it was lost under the second time had never been in a quorum."""
    talk = formed("ab")
    talk.say(m.StreamClosed("a:1"))
    talk.say(m.StreamOpened("a:1.1"))
    talk.say(m.StreamClosed("a:1.1"))
    talk.call("a", step=7, id_="1.2", known=1, failed=True)  # type: ignore[arg-type]
    talk.call("b", known=1, failed=True)
    assert talk.quorum == (2, "ab") and talk.machine.quorum and talk.machine.quorum.reference[0] == 7


# ------------------------------------------------------------------------------------------------ rule 0: succession


def test_a_lone_newcomer_does_not_take_the_job_over():
    talk = formed("ab")
    talk.say(m.StreamClosed("a:1"), 1)
    talk.say(m.StreamClosed("b:1"), 1)
    assert talk.call("c", 2) == []
    assert talk.reason.endswith("none was in the previous quorum with a state, of which 2 may come back")
    talk.beats("c", 29.9)
    assert talk.quorum == (1, "ab")
    talk.beats("c", 31)  # a and b were last heard of at 0
    assert talk.quorum == (2, "c")


def test_takeover_never_but_by_an_operators_word():
    talk = formed("a", times=m.Times(takeover_s=None))
    talk.say(m.StreamClosed("a:1"))
    talk.call("c")
    talk.beats("c", 100)
    assert talk.quorum == (1, "a")
    talk.say(m.TakeOver())
    assert talk.quorum == (2, "c")


@pytest.mark.parametrize(("takeover_s", "holds_s"), [(None, 60.0), (20.0, 20.0)])
def test_an_operators_word_does_not_wait_for_whoever_comes_hours_later(takeover_s: float | None, holds_s: float):
    """It holds for a while, and for as long as somebody waits."""
    talk = formed("a", times=m.Times(takeover_s=takeover_s))
    talk.say(m.TakeOver())
    talk.beats("a", holds_s + 0.1)
    talk.say(m.StreamClosed("a:1"))
    talk.call("c")
    talk.beats("c", talk.now_s + 1.0)
    assert talk.quorum == (1, "a") and "may come back" in talk.reason
    talk.say(m.TakeOver())
    assert talk.quorum == (2, "c")
    few = formed("a", times=m.Times(takeover_s=None))
    few.machine.config = LighthouseConfig(min_replicas=2, times=m.Times(takeover_s=None))
    few.say(m.StreamClosed("a:1"))
    few.call("c")
    few.say(m.TakeOver())
    few.beats("c", 300.0)
    few.call("d")
    assert few.quorum == (2, "cd")


def test_an_operators_word_to_a_lighthouse_that_forgot_does_not_last_either():
    for pause_s, formed_then in ((59.0, (1, "c")), (61.0, (0, ""))):
        talk = Talk(fresh=False, times=m.Times(takeover_s=None))
        talk.say(m.TakeOver())
        talk.call("c", pause_s)
        assert talk.quorum[1] == formed_then[1]


GONE = {  # words by which a member's process is gone for certain
    "its kernel closes the connection": lambda name: m.StreamClosed(f"{name}:1"),
    "it says so": lambda name: m.Leave(f"{name}:1", clean=False),
    "an operator does": lambda name: m.Evict(f"{name}:1"),
}


@pytest.mark.parametrize("gone", GONE.values(), ids=GONE.keys())
def test_when_every_previous_member_is_gone_and_has_a_successor_they_go_on_at_once(gone: Any):
    talk = formed("ab", min_replicas=2)
    talk.say(gone("a"), 1)
    talk.say(gone("b"), 1)
    talk.call("a", id_=2)
    talk.call("b", id_=2)
    assert talk.quorum == (2, "ab")


def test_successors_of_members_that_are_only_silent_wait_until_those_hold_no_commit_any_more():
    """Two members were cut off from the lighthouse and trained on; two replacements, started elsewhere, formed a quorum within 3 s."""
    talk = formed("ab", min_replicas=2)
    talk.beats("", 3)
    talk.calls("ab", id_=2)
    talk.say(m.StreamOpened("a:2"))
    talk.say(m.StreamOpened("b:2"))
    while talk.now_s < 29.4:
        for name in "ab":
            talk.say(m.Report(f"{name}:2", 0))
        talk.tick(round(talk.now_s + 0.5, 1))
    assert talk.quorum == (1, "ab") and "of which 2 may come back" in talk.reason
    talk.tick(30.2)
    assert talk.quorum == (2, "ab")


def test_silence_and_a_restart_prove_nothing_of_a_member_without_an_operators_word():
    times = m.Times(takeover_s=None)
    talk = formed("a", times=times)
    talk.tick(6)
    talk.say(m.StreamClosed("a:1"), 90)  # long after it was lost: a timeout of the transport closes a connection, too
    talk.call("a", id_=2)
    assert talk.quorum == (1, "a")
    again = Talk(saved=talk.machine.saved, times=times)
    again.tick(6)
    again.call("a", id_=2)
    again.tick(100)
    assert again.quorum == (1, "a")
    again.call("a", id_=3)
    again.say(m.TakeOver())
    assert again.quorum == (2, "a")


def test_a_successor_may_call_before_its_predecessor_is_known_to_be_gone():
    talk = formed("a", times=m.Times(takeover_s=None))
    talk.tick(3)
    talk.call("a", id_=2)  # two beats were missed
    assert talk.quorum == (1, "a")
    talk.say(m.StreamClosed("a:1"), 3.1)
    assert talk.quorum == (2, "a")


def test_one_that_returns_has_its_claim_though_its_connection_broke():
    talk = formed("ab", times=m.Times(takeover_s=None))
    talk.say(m.StreamClosed("a:1"))
    talk.say(m.StreamClosed("b:1"))
    talk.call("b", id_=2)
    talk.say(m.StreamOpened("a:1.1"))
    talk.call("a", known=1, failed=True, replica_id="a:1.1", step=5, restored=None)
    assert talk.quorum == (2, "ab") and talk.machine.quorum and talk.machine.quorum.reference[0] == 5


def test_a_stranger_with_a_further_state_heals_like_everybody_else():
    talk = formed("a")
    talk.call("z", step=1_000_000)
    talk.call("a", known=1, step=3)
    assert talk.quorum == (2, "az")
    assert talk.machine.quorum and talk.machine.quorum.reference == (3, 1, "c3")


def test_void_members_are_no_heirs():
    talk = formed("ab")
    talk.say(m.StreamClosed("a:1"))
    assert talk.call("b", known=1, failed=True, step=m.VOID) == []
    assert "1 may come back" in talk.reason


def test_below_the_settled_step_only_by_restoring_on_purpose():
    talk = formed("ab")
    talk.calls("ab", known=1, step=100)  # chosen by a quorum: settled
    for name in "ab":
        talk.say(m.StreamClosed(f"{name}:1"), 1)
    talk.call("a", id_=2)
    [restore] = talk.call("b", id_=2)
    assert restore == m.MustRestore(("a:2", "b:2"), 100)
    assert talk.reason == "the furthest state here is of step 0, step 100 was settled: load a checkpoint"
    talk.call("a", id_=2, step=90, restored=90)
    talk.call("b", id_=2, step=0, restored=0)
    assert talk.quorum == (2, "ab") and talk.reason.endswith("restored from checkpoint 90")


def test_an_unsettled_step_may_go_to_the_grave_with_the_one_who_had_it():
    """a committed step 5 alone and died; b holds 4, which everybody had. b goes on, without a checkpoint."""
    talk = formed("ab")
    talk.say(m.Report("a:1", 5, commit_quorum_id=1))
    talk.say(m.StreamClosed("a:1"))
    talk.call("b", known=1, failed=True, step=4)
    assert talk.quorum == (2, "b")


# ------------------------------------------------------------------------------------------------ cost


IDS = ("a:1", "a:1.1", "a:2", "b:1", "c:1", "c:2")
one_id = st.sampled_from(IDS)
one_process = st.sampled_from(
    ["a:2", "b:1", "c:1", "c:2"]
)  # another id of a member's process counts once it has called
sayings = st.one_of(
    st.builds(
        m.Call,
        st.builds(Member, one_id, step=st.sampled_from([m.VOID, 0, 1]), shrink_only=st.booleans()),
        kind=st.sampled_from(["pharos", "pharos", "pharos", "torchft"]),
        known=st.integers(0, 3),
        failed=st.booleans(),
        blame=st.just(()) | st.tuples(one_id),
    ),
    st.builds(m.StreamOpened, one_process, st.none()),
    st.builds(m.StreamClosed, one_id),
    st.builds(m.CallCancelled, one_id),
    st.builds(m.Beat, one_process, st.sampled_from(["pharos", "torchft"])),
    st.builds(m.Leave, one_id, st.booleans()),
    st.just(m.Tick()),
)


@given(
    st.lists(st.tuples(sayings, st.sampled_from([0.0, 0.0, 0.3, 3.0, 6.0, 20.0])), min_size=20, max_size=60),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_what_the_rules_look_at_is_what_one_would_count_anew(said: list[tuple[m.Event, float]], least: int):
    """It is kept up to date one id at a time; here it is counted from what is known of each, after every event."""
    talk = Talk(min_replicas=least, join_timeout_s=2.0)
    for event, pause_s in said:
        talk.say(event, talk.now_s + pause_s)
        view = talk.machine._view(talk.now_s)
        sets = [set(x) for x in (view.previous, view.present, view.missing, view.up_to_date_candidates, view.shrinkers)]
        assert [view.candidates, *sets, view.healthy, view.reachable] == counted_anew(talk.machine)


def counted_anew(machine: Lighthouse) -> list[Any]:
    roster = machine.roster
    alive = {i: peer for i, peer in roster.peers.items() if i in roster._order and i not in roster.sitting}
    calls = {i: peer.call.member for i, peer in alive.items() if peer.call}
    previous = set(machine.quorum.ids if machine.quorum else ())
    of_them = {i for i in alive if m.process_of(i) in map(m.process_of, previous)}
    theirs = {i for i, peer in alive.items() if peer.kind == "torchft"}
    called = {i for i, peer in alive.items() if peer.called}
    healthy = {i for i in called | (alive.keys() & previous) | theirs if alive[i].kind == roster.kind}
    returning = [name for name in roster.returning if roster.live.get(name) not in healthy]
    return [
        calls,
        previous,
        calls.keys() & previous,
        previous - calls.keys() - roster.gone - roster.sitting.keys(),
        {i for i in calls.keys() & of_them if not calls[i].void},
        {i for i in calls.keys() & (previous | theirs) if calls[i].shrink_only},
        len(healthy) + len(returning),
        len(alive.keys() & previous),
    ]


def test_a_round_of_a_thousand_groups_looks_at_each_a_few_times(monkeypatch: pytest.MonkeyPatch):
    """Counted, not timed: how often an id is placed, and how many members the rules walk through."""
    names = [f"{i:04d}" for i in range(1000)]
    talk = Talk(min_replicas=1000)
    looks = {"placed": 0, "walked": 0}
    place = Roster.place

    def count_place(self: Roster, replica_id: str) -> None:
        looks["placed"] += 1
        place(self, replica_id)

    def count_decide(view: Any) -> Any:
        decision = decide(view)
        looks["walked"] += len(decision.members)
        return decision

    monkeypatch.setattr(Roster, "place", count_place)
    monkeypatch.setattr("ft.protocol.lighthouse.decide", count_decide)
    for name in names:
        talk.call(name)
    for name in names:
        talk.call(name, known=1, failed=True, step=1)
    assert talk.quorum[0] == 2
    assert looks["placed"] <= 10 * 2 * len(names) and looks["walked"] == 2 * len(names)


def test_memory_is_bounded_under_churn():
    talk = formed("a")
    for unique in range(2, LOST_KEPT + 500):
        talk.say(m.StreamOpened(f"b:{unique}"))
        talk.call("b", id_=unique)
        talk.say(m.StreamClosed(f"b:{unique}"))
    roster = talk.machine.roster
    assert len(roster.lost) <= LOST_KEPT + 1
    for kept in (roster.peers, roster._order, roster.live, roster._healthy, roster.candidates, roster._heirs):
        assert len(kept) == (0 if kept is roster.candidates or kept is roster._heirs else 1)
