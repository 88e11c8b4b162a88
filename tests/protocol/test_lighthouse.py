"""Transcripts of the lighthouse: what is said to it, what it answers and why.

The first part is what torchft's own tests ask of a lighthouse (its lighthouse.rs and lighthouse_test.py), played by both kinds of
members where both have the rule; the second part is ours alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.protocol import messages as m
from ft.protocol.lighthouse import LOST_KEPT, Lighthouse, LighthouseConfig
from ft.protocol.messages import Kind, Member
from ft.protocol.rules import decide, smallest_cover

KINDS = pytest.mark.parametrize("kind", ["pharos", "torchft"])


class Talk:
    """A lighthouse and what it said last. Groups are named by letters; "a" is a:1."""

    def __init__(self, kind: Kind = "pharos", **config: Any) -> None:
        saved, fresh = config.pop("saved", None), config.pop("fresh", True)
        self.machine = Lighthouse(LighthouseConfig(**config), 0.0, epoch="job", saved=saved, fresh=fresh)
        self.kind, self.now_s = kind, 0.0
        self.asked: dict[str, int] = {}  # the number of each group's newest question

    def say(self, event: m.Event, at: float | None = None) -> list[m.Effect]:
        self.now_s = self.now_s if at is None else at
        return list(self.machine.handle(event, self.now_s).effects)

    def call(self, name: str, at: float | None = None, *, step: int = 0, id_: int = 1, **more: Any) -> list[m.Effect]:
        fields = {
            key: more.pop(key) for key in list(more) if key not in ("known", "failed", "blame", "shape", "number")
        }
        commit = {"commit_id": f"c{step}", "commit_quorum_id": max(0, min(step, 1))} if self.kind == "pharos" else {}
        member = Member(**{"replica_id": f"{name}:{id_}", "step": step, **commit, **fields})
        if self.kind == "pharos":
            more.setdefault("number", self.asked.get(name, 0) + 1)
            self.asked[name] = more["number"]
        return self.say(m.Call(member, self.kind, **more), at)

    def calls(self, names: str, at: float | None = None, **more: Any) -> list[m.Effect]:
        return [effect for name in names for effect in self.call(name, at, **more)]

    def tick(self, at: float) -> list[m.Effect]:
        """As a driver does: every 0.1 s. Returns what the last one brought."""
        effects: list[m.Effect] = []
        while self.now_s < at - 1e-9:
            effects = self.say(m.Tick(), round(self.now_s + 0.1, 3))
        return effects

    def beats(self, names: str, until: float) -> list[m.Effect]:
        said: list[m.Effect] = []
        while self.now_s < until - 1e-9:
            at = round(self.now_s + 0.1, 3)
            said += [effect for name in names for effect in self.say(m.Beat(f"{name}:1", self.kind), at)]
            said += self.say(m.Tick(), at)
        return said

    @property
    def quorum(self) -> tuple[int, str]:
        """(quorum_id, names)"""
        q = self.machine.quorum
        return (q.quorum_id, "".join(member.name for member in q.members)) if q else (0, "")

    @property
    def reason(self) -> str:
        return self.machine.reason


def notices(effects: list[m.Effect]) -> list[tuple[str, tuple[str, ...]]]:
    return [(type(e.notice).__name__, e.replica_ids) for e in effects if isinstance(e, m.Notify)]


def refusals(effects: list[m.Effect]) -> list[tuple[str, str]]:
    return [(e.code, e.reason) for e in effects if isinstance(e, m.Refuse)]


def formed(names: str, kind: Kind = "pharos", **config: Any) -> Talk:
    """A job whose members are `names`, all at step 0 of one quorum."""
    talk = Talk(kind, **{**config, "min_replicas": len(names)})
    talk.calls(names)
    assert talk.quorum == (1, names)
    talk.machine.config = LighthouseConfig(**{"min_replicas": 1, **config})
    return talk


# ------------------------------------------------------------------------------------------------ the peer's behaviours


def test_peer_join_timeout():
    """Who beats but does not call is waited for, from the first call on, for the join timeout."""
    talk = Talk("torchft", min_replicas=1, join_timeout_s=60)
    for name in "abc":
        talk.say(m.Beat(f"{name}:1", "torchft"))
    assert talk.calls("ab") == []
    assert talk.reason == "2 of 3 healthy groups have called; the first has waited 0.0 of 60 s for the others"
    talk.beats("abc", 59.9)
    assert talk.quorum == (0, "")
    talk.beats("abc", 60.1)
    assert talk.quorum == (1, "ab") and talk.reason.endswith("which is enough")


@KINDS
def test_peer_all_who_are_healthy_have_called(kind: Kind):
    talk = Talk(kind, min_replicas=2)
    assert talk.call("a") == [] and "min_replicas is 2" in talk.reason
    effects = talk.call("b")
    assert [type(effect) for effect in effects] == [m.Persist, m.Answer]
    assert talk.quorum == (1, "ab")


def test_peer_heartbeats_expire():
    """A caller whose beats stop is no candidate; when it beats again it is one again. (Ours would be lost for good.)"""
    talk = Talk("torchft", min_replicas=2)
    talk.call("a")
    talk.tick(5.1)
    assert talk.call("b") == [] and "1 of 1 healthy" in talk.reason
    talk.say(m.Beat("a:1", "torchft"))
    assert talk.quorum == (1, "ab")


@KINDS
def test_peer_fast_quorum_of_the_previous_members(kind: Kind):
    """All previous members have called: no waiting for others who are merely alive; newcomers who have called come along."""
    talk = formed("ab", kind)
    if kind == "torchft":
        talk.say(m.Beat("d:1", "torchft"))
    talk.call("c", 1)
    assert talk.quorum == (1, "ab")
    talk.calls("ab", known=1)
    assert talk.quorum == (2, "abc") and talk.reason == "all previous members have called"


@KINDS
def test_peer_shrink_only(kind: Kind):
    talk = formed("ab", kind)
    talk.call("c")
    talk.call("a", known=1, shrink_only=True)
    talk.call("b", known=1)
    assert talk.quorum == (1, "ab")  # the same members: nothing to build anew


@KINDS
def test_peer_join_during_shrink(kind: Kind):
    """Who came while the others shrank waits on, and is in the next quorum without calling again."""
    talk = formed("ab", kind)
    talk.call("c", 1)
    talk.calls("ab", known=1, shrink_only=True)
    talk.calls("ab", known=1, step=1)
    assert talk.quorum == (2, "abc")


@KINDS
def test_peer_split_brain(kind: Kind):
    """Half of the healthy is not enough, however long it waits."""
    talk = formed("abcd", kind)
    talk.calls("ab", known=1)
    talk.beats("abcd", 70)
    assert talk.quorum == (1, "abcd") and "more than half is needed" in talk.reason
    talk.call("c", known=1)
    assert talk.quorum == (2, "abc")


@KINDS
def test_peer_quorum_changes_by_ids_only(kind: Kind):
    talk = formed("ab", kind)
    talk.calls("ab", known=1, step=3, address="http://elsewhere:1")
    assert talk.quorum == (1, "ab")
    talk.calls("ac", 1, known=1, step=3)
    assert talk.quorum[0] == 1
    talk.call("b", known=1, step=3)
    assert talk.quorum == (2, "abc")


def test_peer_commit_failures_make_a_new_generation():
    talk = formed("ab", "torchft")
    talk.calls("ab", commit_failures=1)
    assert talk.quorum == (2, "ab")
    talk.calls("ab", commit_failures=0)
    assert talk.quorum == (2, "ab")


def test_peer_members_are_returned_as_they_described_themselves():
    talk = Talk("torchft", min_replicas=1)
    [_, answer] = talk.call("a", data='{"k": 1}', address="", world_size=0, step=10, reconfigure_handles=("h",))
    assert isinstance(answer, m.Answer)
    [member] = answer.quorum.members
    assert (member.data, member.world_size, member.reconfigure_handles) == ('{"k": 1}', 0, ("h",))
    assert answer.quorum.reference[0] == 10


def test_the_peers_fault_of_an_empty_shrink_is_not_repeated():
    """Its shrink with no previous member alive issued an empty quorum, after which anybody was admitted alone."""
    talk = formed("ab", "torchft")
    talk.tick(6)
    assert talk.call("c", shrink_only=True) == []
    assert talk.reason.endswith("a shrink is asked for, and none of the previous members has called")


def test_the_peers_ghosts_and_its_growing_map_are_not_repeated():
    talk = formed("ab", "torchft")
    talk.call("c")
    talk.say(m.CallCancelled("c:1"))
    talk.calls("ab")
    assert talk.quorum == (1, "ab")
    for unique in range(300):
        talk.call("x", id_=unique)
        talk.say(m.CallCancelled(f"x:{unique}"))
    talk.tick(6)
    assert not talk.machine._peers


# ------------------------------------------------------------------------------------------------ who counts


def test_a_group_that_only_imports_blocks_nobody():
    """Its server beats, its trainer has not called: not healthy in the sense of the rules."""
    talk = Talk(min_replicas=2)
    talk.say(m.StreamOpened("c:1"))
    talk.calls("ab")
    assert talk.quorum == (1, "ab")


def test_a_newcomer_waits_and_the_members_are_told_to_finish_their_step():
    talk = formed("ab")
    assert notices(talk.call("c")) == [("ChangeAnnounced", ("a:1", "b:1"))]
    assert talk.call("d") == []  # once in a generation
    assert notices(talk.say(m.StreamOpened("a:1", talk.machine.quorum))) == [("ChangeAnnounced", ("a:1",))]


def test_who_has_waited_long_during_a_step_does_not_part_the_members():
    """They commit, and call within milliseconds of each other: the join time runs from the first of *their* calls."""
    talk = formed("abcd", join_timeout_s=2)
    talk.call("e", 1.0)
    talk.beats("abcde", until=9.0)
    talk.calls("abc", 9.0, step=1, known=1)
    assert talk.quorum == (1, "abcd")
    talk.call("d", 9.01, step=1, known=1)
    assert talk.quorum == (2, "abcde")


def test_a_member_that_does_not_call_is_waited_for_no_longer_than_the_join_time():
    talk = formed("abcd", join_timeout_s=2)
    talk.call("e", 1.0)
    talk.beats("abcde", until=9.0)
    talk.calls("abc", 9.0, step=1, known=1)
    talk.beats("abcde", until=10.9)
    assert talk.quorum == (1, "abcd")
    talk.beats("abcde", until=11.1)
    assert talk.quorum == (2, "abce")


def test_a_broken_stream_is_a_loss_now_and_final():
    talk = formed("abc")
    assert notices(talk.say(m.StreamClosed("c:1"))) == [("MemberLost", ("a:1", "b:1"))]
    assert talk.say(m.StreamClosed("c:1")) == []
    assert refusals(talk.call("c", known=1)) == [("LOST", "its connection broke")]
    assert refusals(talk.say(m.Beat("c:1"))) == [("LOST", "its connection broke")]
    talk.calls("ab", known=1, failed=True)
    assert talk.quorum == (1, "abc") and talk.reason.startswith("2 of 3 healthy groups")  # it lives, and will return
    talk.beats("ab", 2.1)
    assert talk.quorum == (2, "ab")


def test_those_who_come_back_together_are_counted_before_they_have_called():
    """Found by simulation: a cut was over, all had been lost, and the first three of seven went on alone with new ids."""
    talk = formed("abcde")
    for name in "abcde":
        talk.say(m.StreamOpened(f"{name}:1"))
    talk.tick(5.1)
    for name in "abcde":
        assert refusals(talk.say(m.Report(f"{name}:1", 0))) == [("LOST", "silent for 5 s")]
    for name in "ab":
        talk.say(m.StreamOpened(f"{name}:1.1"))
        talk.call(name, known=1, failed=True, replica_id=f"{name}:1.1")
    assert talk.quorum == (1, "abcde") and talk.reason.startswith("2 of 5 healthy groups have called; more than half")
    talk.say(m.StreamOpened("c:1.1"))  # no longer awaited, but there: a previous member, though it has not called
    talk.tick(7.2)
    assert talk.reason.startswith("2 of 3 healthy groups have called")
    talk.call("c", known=1, failed=True, replica_id="c:1.1")
    assert talk.quorum == (2, "abc")


def test_a_late_copy_of_an_older_question_is_nobodys():
    """Found by simulation: b was put in as it had been before, and never heard of it."""
    talk = formed("ab")
    talk.call("b", known=1, number=2)
    assert talk.call("b", number=1) == [] and talk.call("a", known=1, failed=True, number=2) != []
    assert talk.machine.quorum is not None and talk.quorum == (2, "ab")


def test_going_back_to_a_checkpoint_is_a_generation_of_its_own():
    """Found by simulation: under the same quorum id, the votes on the steps after the checkpoint had been counted before."""
    talk = formed("ab")
    talk.calls("ab", step=11, known=1)
    assert talk.quorum == (1, "ab") and talk.machine.saved.settled == 11
    effects = talk.calls("ab", known=1)
    assert [e.replica_ids for e in effects if isinstance(e, m.MustRestore)] == [("a:1", "b:1")]
    talk.calls("ab", known=1, restored=0)
    assert talk.quorum == (2, "ab") and talk.machine.saved.settled == 0
    talk.say(m.Report("a:1", 11, commit_quorum_id=1, settled=11))  # sent before it went back
    talk.say(m.StreamOpened("b:1", m.Quorum(1, ()), settled=11))
    assert talk.machine.saved.settled == 0
    talk.say(m.Report("a:1", 3, commit_quorum_id=2, settled=2))
    assert talk.machine.saved.settled == 2


def test_silence_is_a_loss_after_the_heartbeat_timeout():
    talk = formed("abc")
    said = talk.beats("ab", 4.9)
    assert notices(said) == []
    assert notices(talk.beats("ab", 5.1)) == [("MemberLost", ("a:1", "b:1"))]


def test_a_failed_generation_is_told_once_and_gets_a_new_id():
    talk = formed("abc")
    assert notices(talk.call("a", known=1, failed=True)) == [("Abandoned", ("b:1", "c:1"))]
    assert talk.call("b", known=1, failed=True) == []
    talk.call("c", known=1)
    assert talk.quorum == (2, "abc")


def test_an_answer_that_got_lost_is_repeated():
    talk = formed("ab")
    [answer] = talk.call("a", known=0)
    assert isinstance(answer, m.Answer) and answer.quorum.quorum_id == 1
    talk.calls("ab", known=1, step=1)  # the same members: issued again under the same id
    [answer] = talk.call("a", known=1, step=1, number=talk.asked["a"])
    assert isinstance(answer, m.Answer) and answer.quorum.reference[0] == 1
    assert talk.call("a", known=1, step=1) == []  # a new question, for it knows of a change: it asks for the next


def test_leaving_costs_no_failed_step():
    talk = formed("abc")
    assert notices(talk.say(m.Leave("c:1"))) == [("ChangeAnnounced", ("a:1", "b:1"))]
    talk.calls("ab", known=1, step=1)
    assert talk.quorum == (2, "ab") and talk.reason == "all previous members have called"
    assert notices(talk.say(m.Leave("b:1", clean=False))) == [("MemberLost", ("a:1",))]


def test_who_leaves_because_it_fails_makes_no_fast_quorum():
    """Found by simulation: one of two crashed, the other went on at once, without the one that had been waiting to come in."""
    talk = formed("ab")
    talk.call("c")
    talk.say(m.Leave("b:1", clean=False))
    talk.call("a", known=1, failed=True, number=1)
    assert talk.quorum == (2, "ac")  # both, for both have called
    talk.say(m.Leave("a:1", clean=False))
    talk.call("d")
    assert talk.quorum == (2, "ac") and talk.reason.startswith("1 of 2 healthy groups have called; more than half")


def test_when_all_have_left_nobody_is_admitted_by_the_fast_rule():
    talk = formed("ab")
    talk.say(m.Leave("a:1"))
    talk.say(m.Leave("b:1"))
    talk.machine.config = LighthouseConfig(min_replicas=2)
    assert talk.call("c") == [] and "min_replicas is 2" in talk.reason


def test_never_fewer_than_min_replicas_after_a_shrink():
    talk = formed("ab", min_replicas=2)
    talk.call("c")
    assert talk.call("a", known=1, shrink_only=True) == []
    assert "1 would take part, min_replicas is 2" in talk.reason  # b is alive, and waited for
    talk.say(m.StreamClosed("b:1"))
    assert talk.quorum == (2, "ac")  # a alone would be too few for ever: the shrink is not honoured


def test_a_newcomer_that_asks_for_a_shrink_does_not_bar_itself():
    talk = formed("ab")
    talk.call("c", shrink_only=True)
    talk.calls("ab", known=1)
    assert talk.quorum == (2, "abc")


def test_peer_counts_before_it_shrinks():
    talk = formed("ab", "torchft", min_replicas=2)
    talk.tick(4)
    talk.calls("ac", 4, shrink_only=True)
    talk.beats("ac", 5.1)
    assert talk.quorum == (2, "a")


def test_a_caller_with_a_stream_is_wanted_when_its_call_ends():
    talk = Talk(min_replicas=2)
    talk.say(m.StreamOpened("a:1"))
    talk.call("a")
    talk.say(m.CallCancelled("a:1"))
    talk.call("b")
    assert talk.quorum == (1, "ab")


def test_who_was_left_out_is_told():
    talk = formed("abc", join_timeout_s=10)
    talk.calls("ab", known=1)
    said = talk.beats("abc", 10.2)
    assert talk.quorum == (2, "ab")
    assert ("Abandoned", ("c:1",)) in notices(said)


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


def test_when_every_previous_member_has_a_successor_they_go_on_at_once():
    talk = formed("ab")
    talk.say(m.StreamClosed("a:1"), 1)
    talk.say(m.StreamClosed("b:1"), 1)
    assert talk.call("a", id_=2) == []
    talk.call("b", id_=2)
    assert talk.quorum == (2, "ab")


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


# ------------------------------------------------------------------------------------------------ restart, pause, stall


def test_a_restart_from_the_state_file_stops_nobody_and_repeats_no_id():
    talk = formed("abc")
    saved = m.Saved.from_dict(json.loads(json.dumps(talk.machine.saved.to_dict())))
    assert saved == talk.machine.saved
    again = Talk(saved=saved)
    said = again.beats("abc", 20)
    assert said == [] and again.quorum == (1, "abc")
    assert again.call("d") and again.quorum == (1, "abc")  # announced, not admitted
    again.calls("abc", known=1)
    assert again.quorum == (2, "abcd")


def test_after_a_restart_members_are_lost_when_silent_for_a_whole_timeout():
    again = Talk(saved=formed("abc").machine.saved)
    assert notices(again.beats("ab", 4.9)) == []
    assert notices(again.beats("ab", 5.1)) == [("MemberLost", ("a:1", "b:1"))]


def test_without_a_state_file_the_members_reports_count():
    running = formed("ab").machine.quorum
    again = Talk(fresh=False)
    assert again.call("z", 0.1) == [] and "just started without a state file" in again.reason
    again.say(m.StreamOpened("a:1", running, settled=12))
    assert again.quorum == (1, "ab")
    assert again.machine.saved.settled == 12 and again.machine.saved.epoch == "job"


def test_whoever_reports_an_older_quorum_than_another_does_is_told_that_it_is_over():
    """It waits in that one, and its own members are in the newer (seed 5034)."""
    older = formed("abc").machine.quorum
    assert older is not None
    newer = replace(older, quorum_id=older.quorum_id + 1, members=older.members[:2])
    again = Talk(fresh=False)
    assert notices(again.say(m.StreamOpened("c:1", older))) == []
    said = again.say(m.StreamOpened("a:1", newer))
    [told] = [effect for effect in said if isinstance(effect, m.Notify) and "c:1" in effect.replica_ids]
    assert told.notice == m.Abandoned(older.quorum_id, f"quorum {newer.quorum_id} was formed without this group")


def test_a_paused_lighthouse_blames_nobody():
    """It was stopped for a minute; the beats that came meanwhile may not even have been read."""
    talk = formed("ab")
    talk.beats("ab", 3)
    assert talk.say(m.Tick(), 63) == []
    assert notices(talk.beats("a", 70)) == [("MemberLost", ("a:1",))]


def test_a_group_that_alone_holds_all_others_up_is_lost():
    talk = formed("abc")
    for name in "ab":
        talk.say(m.Report(f"{name}:1", 1, 1, waiting=True, median_step_s=20))
    assert notices(talk.beats("abc", 99)) == []
    said = talk.beats("abc", 101)
    [lost] = [e.notice for e in said if isinstance(e, m.Notify)]
    assert isinstance(lost, m.MemberLost) and lost.reason == "all others waited 100 s for it"


def test_members_that_ask_and_members_that_wait_for_them_are_freed():
    """Found by simulation: a late copy of a's call completed the quorum; then a asked, b was in the collective, and neither wait ended."""
    talk = formed("ab")
    talk.call("a", step=1, known=1)
    talk.say(m.Report("b:1", 1, 1, waiting=True))
    said = talk.beats("ab", 5)
    assert ("Abandoned", ("b:1",)) in notices(said)
    talk.call("b", step=1, known=1, failed=True)
    assert talk.quorum == (2, "ab")


def test_a_change_is_announced_for_as_long_as_somebody_waits():
    """Found by simulation: a notice came to a member that was just asking, which takes no notice of changes then."""
    talk = formed("ab")
    assert notices(talk.call("c")) == [("ChangeAnnounced", ("a:1", "b:1"))]
    assert notices(talk.beats("abc", 1.9)) == []
    assert notices(talk.beats("abc", 2.1)) == [("ChangeAnnounced", ("a:1", "b:1"))]
    talk.calls("ab", known=1)
    assert talk.quorum == (2, "abc") and notices(talk.beats("abc", 9)) == []


def test_members_that_wait_for_one_that_has_left_are_freed():
    talk = formed("abc")
    talk.say(m.Leave("c:1"))
    for name in "ab":
        talk.say(m.Report(f"{name}:1", 1, 1, waiting=True))
    said = talk.beats("ab", 1.9)
    assert notices(said) == []
    assert ("Abandoned", ("a:1", "b:1")) in notices(talk.beats("ab", 2.3))


def test_a_member_that_has_gone_on_since_it_was_put_in_is_put_in_anew():
    """Found by simulation: it got the answer again, which said to go on from a state that was no longer its own, without healing."""
    talk = formed("ab")
    said = talk.call("a", step=1)
    assert notices(said) == [("Abandoned", ("b:1",))]
    talk.call("b", known=1, failed=True)
    assert talk.quorum == (2, "ab") and talk.machine.quorum is not None
    assert talk.machine.quorum.reference == (1, 1, "c1")


# ------------------------------------------------------------------------------------------------ blame


def test_three_failures_in_a_row_part_those_who_cannot_work_together():
    talk = formed("abcd", min_replicas=3)
    for attempt in (1, 2, 3):
        for name, blame in (("a", "b"), ("b", "a"), ("c", "b"), ("d", "")):
            talk.call(name, known=attempt, failed=True, blame=tuple(f"{other}:1" for other in blame))
    assert talk.quorum == (4, "acd")  # b explains (a, b) and (b, c)
    assert talk.reason.endswith("b:1 sit out: they explain all 2 pairs that could not work together")
    said = talk.beats("abcd", 10.2)
    assert ("ChangeAnnounced", ("a:1", "c:1", "d:1")) in notices(said)
    talk.calls("acd", known=4)
    assert talk.quorum == (5, "abcd")


def test_nobody_sits_out_when_too_few_would_remain():
    talk = formed("ab", min_replicas=2)
    for attempt in (1, 2, 3):
        talk.call("a", known=attempt, failed=True, blame=("b:1",))
        talk.call("b", known=attempt, failed=True, blame=("a:1",))
    assert talk.quorum == (4, "ab")


def test_a_commit_in_between_is_no_row():
    talk = formed("abc")
    for attempt in range(1, 8):
        talk.calls("abc", known=attempt, failed=True, blame=("b:1",), step=attempt)
    assert talk.quorum == (8, "abc")


@pytest.mark.parametrize(
    ("pairs", "cover"),
    [
        (["ab"], "b"),
        (["ab", "ac", "ad"], "a"),
        (["ab", "cd"], "bd"),
        (["ab", "bc", "cd", "de"], "bd"),
    ],
)
def test_smallest_cover(pairs: list[str], cover: str):
    assert smallest_cover([frozenset(pair) for pair in pairs]) == set(cover)


def test_smallest_cover_of_many_pairs_covers_them():
    pairs = [frozenset((f"x{i}", f"x{i + 1}")) for i in range(200)]
    cover = smallest_cover(pairs)
    assert all(pair & cover for pair in pairs) and len(cover) <= 134


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"step": 1 << 50}, "step"),
        ({"step": -2}, "step"),
        ({"world_size": 0}, "world size 0: legal is 1"),
        ({"world_size": 1 << 30}, "world size"),
        ({"address": "http://" + "x" * 600}, "longer than 512"),
        ({"store_address": "host:1\n"}, "not printable"),
        ({"replica_id": ""}, "empty"),
    ],
)
def test_absurd_claims_are_refused(claim: dict[str, Any], words: str):
    talk = Talk()
    [(code, reason)] = refusals(talk.call("a", **claim))
    assert code == "INVALID_ARGUMENT" and words in reason and talk.quorum == (0, "")


def test_a_quorum_holds_one_kind_of_members():
    talk = formed("ab")
    [refusal] = refusals(talk.say(m.Call(Member("z:1"), "torchft")))
    assert refusal == ("FAILED_PRECONDITION", "this job's quorums hold members of pharos; torchft cannot join them")


@pytest.mark.parametrize(("job", "stranger"), [("pharos", "torchft"), ("torchft", "pharos")])
def test_whoever_is_of_the_other_kind_is_refused_and_not_remembered(job: Kind, stranger: Kind):
    """Not by its beats either: a heartbeat alone makes a member of torchft healthy, and the majority would be counted with it."""
    talk = formed("ab", job)
    reason = f"this job's quorums hold members of {job}; {stranger} cannot join them"
    words: list[m.Event] = [m.Call(Member("z:1"), stranger), m.Beat("z:1", stranger), m.Beat("a:1", stranger)]
    if stranger == "pharos":
        known = m.Quorum(9, (Member("z:1"),), (0, 0, ""), "another job")
        words += [m.StreamOpened("z:1", known), m.Report("z:1", 3)]
    for word in words:
        assert refusals(talk.say(word)) == [("FAILED_PRECONDITION", reason)], word
    assert talk.quorum == (1, "ab") and talk.machine.saved.epoch == "job"
    if stranger == "pharos":  # nor is it mourned
        assert talk.say(m.Leave("a:1", clean=True, reason="done")) == talk.say(m.StreamClosed("z:1")) == []
        assert refusals(talk.say(m.Beat("a:1", "torchft"))) == [], "no word of ours loses a member of theirs"
    effects = talk.calls("ab", 1, step=1)
    assert isinstance(effects[-1], m.Answer) and talk.quorum[1] == "ab", "nobody waits for z"


def test_who_beats_before_the_first_call_counts_for_a_job_of_its_kind_alone():
    beats = [m.Beat(f"{name}:1", "torchft") for name in "xyz"]
    ours = Talk("pharos")
    assert [ours.say(beat) for beat in beats] == [[], [], []], "it may become theirs"
    ours.call("a")
    assert ours.quorum == (1, "a") and ours.reason.startswith("1 of 1 healthy groups have called")
    theirs = Talk("torchft")
    for beat in beats:
        theirs.say(beat)
    assert theirs.call("x") == [] and theirs.reason.startswith("1 of 3 healthy groups have called")


def test_another_layout_is_refused_by_name():
    talk = Talk(min_replicas=2)
    talk.call("a", shape=(("layout", "1"), ("dtypes", "1")))
    [refusal] = refusals(talk.call("b", shape=(("layout", "2"), ("dtypes", "1"))))
    assert refusal == ("FAILED_PRECONDITION", "b:1 has another layout than the job")


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
        sets = [set(x) for x in (view.previous, view.present, view.missing, view.heirs, view.shrinkers)]
        assert [view.candidates, *sets, view.healthy, view.reachable] == counted_anew(talk.machine)


def counted_anew(machine: Lighthouse) -> list[Any]:
    alive = {i: peer for i, peer in machine._peers.items() if i in machine._order and i not in machine._sitting}
    calls = {i: peer.call.member for i, peer in alive.items() if peer.call}
    previous = set(machine.quorum.ids if machine.quorum else ())
    of_them = {i for i in alive if m.process_of(i) in map(m.process_of, previous)}
    theirs = {i for i, peer in alive.items() if peer.kind == "torchft"}
    called = {i for i, peer in alive.items() if peer.called}
    healthy = {i for i in called | of_them | theirs if alive[i].kind == machine._kind}
    returning = [name for name in machine._returning if machine._live.get(name) not in healthy]
    return [
        calls,
        previous,
        calls.keys() & previous,
        previous - calls.keys() - machine._gone - machine._sitting.keys(),
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
    place = Lighthouse._place

    def count_place(self: Lighthouse, replica_id: str) -> None:
        looks["placed"] += 1
        place(self, replica_id)

    def count_decide(view: Any) -> Any:
        decision = decide(view)
        looks["walked"] += len(decision.members)
        return decision

    monkeypatch.setattr(Lighthouse, "_place", count_place)
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
    machine = talk.machine
    assert len(machine._lost) <= LOST_KEPT + 1
    for kept in (machine._peers, machine._order, machine._live, machine._healthy, machine._candidates, machine._heirs):
        assert len(kept) == (0 if kept is machine._candidates or kept is machine._heirs else 1)
