"""Transcripts of the lighthouse: what is said to it, what it answers and why.

The first part is what torchft's own tests ask of a lighthouse (its lighthouse.rs and lighthouse_test.py), played by both kinds of
members where both have the rule; the second part is ours alone. Who is heir, and whose name it is: test_roster.py; notices, restarts
and failures that repeat: test_generation.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.protocol.messages import Kind, Member
from ft.protocol.rules import strangers
from tests.protocol.talk import Talk, formed, notices, refusals

KINDS = pytest.mark.parametrize("kind", ["pharos", "torchft"])


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
    """Half of the healthy is not enough, however long it waits: ours until those that do not call are taken to hang."""
    talk = formed("abcd", kind, times=m.Times(stall_s=600))
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
    assert not talk.machine.roster.peers


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
    talk.say(m.StreamOpened("c:1.1"))  # awaited, until it has called: it may as well hang
    talk.tick(7)
    assert talk.quorum == (1, "abcde") and talk.reason.startswith("2 of 5 healthy groups have called")
    talk.call("c", known=1, failed=True, replica_id="c:1.1")
    talk.tick(7.2)
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
    assert notices(talk.call("a", known=1, failed=True)) == [("GenerationAborted", ("b:1", "c:1"))]
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
    assert ("GenerationAborted", ("c:1",)) in notices(said)


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


@pytest.mark.parametrize(
    ("shapes", "holders", "found"),
    [
        ("aaa", (), {}),
        ("aab", (), {2: ["lr"]}),
        ("baa", (), {0: ["lr"]}),
        ("baa", (0,), {1: ["lr"], 2: ["lr"]}),  # two newcomers are no majority against who has the state
        ("abba", (1, 3), {0: ["lr"], 3: ["lr"]}),  # of equally many the lowest rank's
        ("a a", (), {}),  # who says nothing differs in nothing
    ],
)
def test_strangers(shapes: str, holders: tuple[int, ...], found: dict[int, list[str]]):
    said = [(("layout", "1"), *([("lr", lr)] if lr != " " else [])) for lr in shapes]
    assert strangers(said, holders) == found


def test_another_layout_is_refused_by_name():
    talk = Talk(min_replicas=2)
    talk.call("a", shape=(("layout", "1"), ("dtypes", "1")))
    [refusal] = refusals(talk.call("b", shape=(("layout", "2"), ("dtypes", "1"))))
    assert refusal == ("FAILED_PRECONDITION", "b:1 has another layout than the job")
