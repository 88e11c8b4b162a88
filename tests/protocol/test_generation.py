"""What happens to a quorum once it stands: the lighthouse is started anew or stopped, members hold each other up, and failures repeat."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft.protocol import messages as m
from ft.protocol.lighthouse import Lighthouse, LighthouseConfig
from ft.protocol.rules import pairs_among, smallest_cover
from tests.protocol.talk import Talk, formed, notices, refusals

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


def test_members_that_stay_keep_their_id_over_a_restart_that_leaves_some_out():
    """The last of those that the file stands for: given to them it would be given again by the next start from the same file."""
    before = formed("ab").machine.saved
    for told in (before, None):  # by the file, or by members
        saved = replace(before, last_id=before.last_id + 1000, quorum=told and told.quorum)
        again = Talk(saved=saved)
        again.say(m.StreamOpened("a:1", before.quorum))
        again.say(m.StreamOpened("b:1", before.quorum))
        again.calls("ab", known=1, step=1)
        assert again.quorum == (1, "ab")
        again.calls("ab", known=1, step=1, failed=True)
        assert again.quorum == (1002, "ab")


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


def test_after_a_lost_state_file_no_id_comes_again():
    """The newest quorums may be known to nobody who reports: their members are dead, or stopped and yet to wake (seed 4512). Nor after
    another restart, before there was a quorum."""
    running = formed("ab").machine.quorum
    for restarts in (0, 1):
        again = Talk(fresh=False)
        again.say(m.StreamOpened("a:1", running))
        again.say(m.StreamOpened("b:1", running))
        if restarts:
            again = Talk(saved=again.machine.saved)
            again.beats("ab", 1)
        again.call("c")
        again.calls("ab", known=1)
        assert again.quorum == (1_000_002, "abc")
        again.call("d")
        again.calls("abc", known=1_000_002)
        assert again.quorum == (1_000_003, "abcd")


def test_whoever_reports_an_older_quorum_than_another_does_is_told_that_it_is_over():
    """It waits in that one, and its own members are in the newer (seed 5034)."""
    older = formed("abc").machine.quorum
    assert older is not None
    newer = replace(older, quorum_id=older.quorum_id + 1, members=older.members[:2])
    again = Talk(fresh=False)
    assert notices(again.say(m.StreamOpened("c:1", older))) == []
    said = again.say(m.StreamOpened("a:1", newer))
    [told] = [effect for effect in said if isinstance(effect, m.Notify) and "c:1" in effect.replica_ids]
    assert told.notice == m.GenerationAborted(
        older.quorum_id, f"quorum {newer.quorum_id} was formed without this group"
    )


OURS, OTHER = (("layout", "1"), ("lr", "1")), (("layout", "2"), ("lr", "1"))
ODD = [("FAILED_PRECONDITION", "d:1 has another layout than the job")]


def test_a_restart_forgets_no_layout():
    """It did, for the state file did not have it: one wrong group then brought bytes of another length into every collective."""
    saved = formed("ab", shape=OURS).machine.saved
    again = Talk(saved=m.Saved.from_dict(json.loads(json.dumps(saved.to_dict()))))
    assert again.call("d", 0.1, shape=OTHER) == []
    assert again.reason == "d:1 has another layout than the job, whose members may come back"
    assert refusals(again.say(m.StreamOpened("a:1"))) == ODD
    assert refusals(again.call("d", shape=OTHER)) == ODD
    assert notices(again.call("c", shape=OURS)) == [("ChangeAnnounced", ("a:1", "b:1"))]


def test_without_a_state_file_the_layout_comes_from_the_members_reports():
    running = formed("ab", shape=OURS).machine.quorum
    again = Talk(fresh=False)
    again.say(m.StreamOpened("a:1", running))
    assert refusals(again.call("d", shape=OTHER)) == ODD


def test_the_layout_is_the_members_whoever_came_first():
    """A wrong group has called before the members of the running job were heard of: it is refused when they are."""
    running = formed("ab", shape=OURS).machine.quorum
    again = Talk(fresh=False)
    assert again.call("d", 0.1, shape=OTHER) == []
    assert refusals(again.say(m.StreamOpened("a:1", running))) == ODD
    again.calls("ab", known=1, shape=OURS)
    assert again.quorum[1] == "ab"


def test_a_state_file_without_a_layout_gets_the_first_members():
    """Of an earlier version."""
    data = formed("ab", shape=OURS).machine.saved.to_dict()
    del data["quorum"]["shape"]
    again = Talk(saved=m.Saved.from_dict(data))
    again.call("d", shape=OTHER)
    assert refusals(again.call("a", known=1, shape=OURS)) == ODD


def test_a_job_of_another_layout_may_begin_when_the_old_one_may_be_taken_over():
    """All were killed, and are started anew with another learning rate: whoever starts again and again must not be refused for ever."""
    again = Talk(saved=formed("ab", shape=OURS).machine.saved, min_replicas=2)
    again.calls("de", 1, shape=OTHER)
    again.call("f", 2, shape=OURS)  # of the old job: it goes on without its members when they may be taken over
    again.beats("def", 29.9)
    assert again.quorum == (1, "ab")
    said = again.beats("def", 30.2)
    assert again.quorum == (1, "ab") and "1 would take part, min_replicas is 2" in again.reason
    again.say(m.StreamClosed("f:1"))
    said = again.beats("de", 30.5)
    assert again.quorum == (2, "de") and refusals(said) == []


def test_a_job_that_is_over_binds_nobody():
    """All its groups have left: the next one on this state file may be another, with another layout and lower terms."""
    talk = formed("ab", shape=OURS)
    talk.say(m.Leave("a:1"))
    [*_, persisted] = [e for e in talk.say(m.Leave("b:1", clean=False)) if isinstance(e, m.Persist)]
    saved = m.Saved.from_dict(json.loads(json.dumps(persisted.saved.to_dict())))
    assert (saved.quorum, saved.terms, saved.last_id) == (None, None, 1)
    again = Talk(saved=saved)
    again.call("c", shape=OTHER)
    assert again.quorum == (2, "c")


def test_no_restart_lowers_the_terms_but_by_an_operators_word():
    """Members of a job that must not go on with one of two rely on it, and on what may happen while they hear nothing."""
    high = {"min_replicas": 2, "times": m.Times(takeover_s=None), "num_replica_groups": 3}
    saved = m.Saved.from_dict(json.loads(json.dumps(formed("ab", **high).machine.saved.to_dict())))
    assert saved.terms == m.Terms(2, None, 3)
    kept = Talk(saved=saved, min_replicas=1, times=m.Times(takeover_s=30.0))
    assert kept.machine.config.terms == saved.terms == kept.machine.saved.terms
    lowered = Lighthouse(LighthouseConfig(), 0.0, epoch="e", saved=saved, lower_terms=True)
    assert lowered.config.terms == m.Terms(1, 30.0, 0)
    raised = Talk(saved=saved, min_replicas=5, num_replica_groups=7)
    assert raised.machine.config.terms == m.Terms(5, None, 7)
    assert m.Terms(1, 20.0, 0).at_least(m.Terms(1, 40.0, 0)).takeover_s == 40.0


def test_a_lighthouse_that_was_stopped_puts_nobody_into_a_quorum_who_does_not_listen():
    """Found by simulation: what came meanwhile is heard at once; a asked, gave the question up, and ended."""
    talk = formed("ab")
    for name in "ab":
        talk.say(m.StreamOpened(f"{name}:1"))
    talk.beats("ab", 1)
    talk.call("a", 40, known=1, failed=True)
    talk.say(m.CallCancelled("a:1"), 40)
    talk.say(m.StreamClosed("a:1"), 40)
    talk.call("b", 40, known=1, failed=True)
    assert talk.quorum == (1, "ab")
    talk.beats("b", 46)
    assert talk.quorum == (2, "b")


def test_a_lighthouse_that_was_stopped_loses_nobody_whose_connection_was_given_up_meanwhile():
    """The groups' keepalive ends after 15 s without an answer, and they connect again."""
    talk = formed("ab")
    for name in "ab":
        talk.say(m.StreamOpened(f"{name}:1"))
    talk.beats("ab", 3)
    assert talk.say(m.StreamClosed("a:1"), 63) == talk.say(m.StreamClosed("b:1"), 63) == []
    assert talk.say(m.StreamOpened("a:1"), 63) == talk.say(m.Tick(), 63.1) == []
    assert notices(talk.beats("a", 68.4)) == [("MemberLost", ("a:1",))]  # b did not


def test_a_paused_lighthouse_blames_nobody():
    """It was stopped for a minute; the beats that came meanwhile may not even have been read."""
    talk = formed("ab")
    talk.beats("ab", 3)
    assert talk.say(m.Tick(), 63) == []
    assert notices(talk.beats("a", 70)) == [("MemberLost", ("a:1",))]


# ------------------------------------------------------------------------------------------------ trainers that hang, and servers that beat


def report(name: str, launched: int = 1, *, waits: bool = True, median_s: float = 1.0, **more: Any) -> m.Report:
    """Of the step that follows step 1."""
    return m.Report(f"{name}:1", 1, 1, waits, median_s, launched=launched, **more)


def lost_at(talk: Talk, names: str, until: float, **more: Any) -> dict[str, float]:
    """Each member that was lost, and when, while `names` report each second."""
    found: dict[str, float] = {}
    while talk.now_s < until:
        for name in names:
            talk.say(report(name, **more))
        talk.tick(round(talk.now_s + 1))
        for replica_id in talk.machine.roster.lost:
            found.setdefault(replica_id[0], talk.now_s)
    return found


@pytest.mark.parametrize(
    ("members", "waiting", "limit_s"),
    [
        ("ab", "a", 60),  # one of two is no majority
        ("abc", "ab", 10),
        ("abc", "a", 60),
        ("abcdef", "abcde", 10),
        ("abcdef", "abcd", 10),
        ("abcdef", "abc", 60),
        ("abcdef", "a", 60),
    ],
)
def test_all_who_hang_are_lost_at_once(members: str, waiting: str, limit_s: int):
    """Two of six that hung were never noticed, for only one that hung alone was looked for."""
    talk = formed(members)
    others = [name for name in members if name not in waiting]
    found: dict[str, float] = {}
    while not found and talk.now_s < 70:
        for name in members:
            talk.say(report(name, waits=name in waiting))
        talk.tick(round(talk.now_s + 0.5, 1))
        found = dict.fromkeys((i[0] for i in talk.machine.roster.lost), talk.now_s)
    assert found == dict.fromkeys(others, pytest.approx(limit_s, abs=1))


def test_who_hangs_in_the_vote_or_in_a_sum_that_is_long_over_is_behind():
    """Its last word was that it waits; but the others have summed since then, and wait in the next reduction."""
    talk = formed("abc")
    for name in "abc":
        talk.say(report(name, launched=1))
    talk.tick(1)
    lost = {}
    while talk.now_s < 20 and not lost:
        talk.say(report("c", launched=1))
        lost = lost_at(talk, "ab", talk.now_s + 1, launched=2)
    assert lost == {"c": 11}


@pytest.mark.parametrize("asking", ["a", "ab"])
def test_who_hangs_before_it_asks_is_lost_as_one_that_hangs_in_the_step(asking: str):
    talk = formed("abc", join_timeout_s=600)
    talk.calls(asking, 0, known=1, failed=True)
    lost: dict[str, float] = {}
    while talk.now_s < 70 and not lost:
        for name in set("abc") - set(asking):
            talk.say(report(name, waits=False))
        lost = lost_at(talk, "", talk.now_s + 1) or {i[0]: talk.now_s for i in talk.machine.roster.lost}
        for name in asking:
            talk.say(m.Beat(f"{name}:1"))
    assert lost == ({"c": 10} if asking == "ab" else {"b": 60, "c": 60})


def test_who_stays_in_a_reduction_that_is_over_hangs_there():
    """Found by simulation: of two members one asked for a quorum, the other one hung in the sums, and its last word was that it waits."""
    talk = formed("ab")
    talk.call("b", known=1, failed=True)
    lost: dict[str, float] = {}
    while talk.now_s < 70 and not lost:
        talk.say(m.Beat("b:1"))
        lost = lost_at(talk, "a", talk.now_s + 1)
    assert lost == {"a": 60}


def test_newcomers_wait_no_longer_than_members_for_one_that_hangs():
    """Found by simulation: the only member that was left hung, and those who came had nobody to wait with."""
    talk = formed("ab")
    talk.say(m.StreamClosed("b:1"))
    talk.call("c")
    lost: dict[str, float] = {}
    while talk.now_s < 70 and not lost:
        talk.say(m.Beat("c:1"))
        lost = lost_at(talk, "", talk.now_s) or lost_at(talk, "a", talk.now_s + 1, waits=False)
        lost.pop("b", None)
    assert lost == {"a": 60}


@pytest.mark.parametrize(("names", "breaks_s", "limit_s"), [("ab", 40, 60), ("abc", 6, 10)])
def test_a_connection_that_breaks_begins_no_wait_anew(names: str, breaks_s: float, limit_s: float):
    """Found by simulation: the last one hangs, and the first, which waits for it, is lost and comes back meanwhile, twice."""
    talk = formed(names, join_timeout_s=600)
    last, others = names[-1], names[1:-1]
    lost: dict[str, float] = {}
    number = 0
    while talk.now_s < 90 and last not in lost:
        if talk.now_s in (breaks_s, breaks_s + 2):
            talk.say(m.StreamClosed(f"a:1.{number}" if number else "a:1"))
            talk.say(m.StreamOpened(f"a:1.{number + 1}"))
            number += 1
            talk.call("a", known=1, failed=True, replica_id=f"a:1.{number}", at=talk.now_s + 0.5)
            talk.calls(others, known=1, failed=True)  # they are told
            talk.now_s -= 0.5
        talk.say(report(last, waits=False))
        for name in others if number else "":
            talk.say(m.Beat(f"{name}:1"))
        if number:
            talk.say(m.Beat(f"a:1.{number}"))
        lost = lost_at(talk, "" if number else "a" + others, talk.now_s + 1)
    assert lost.get(last) == pytest.approx(limit_s, abs=1.5), lost


def test_who_went_on_while_another_returned_is_waited_for_from_then_on():
    talk = formed("ab", join_timeout_s=600)
    for at_s in range(40):
        talk.say(report("b", waits=False))
        assert not lost_at(talk, "a", at_s + 1.0)
    talk.say(m.StreamClosed("a:1"))
    talk.say(m.StreamOpened("a:1.1"))
    talk.say(report("b", waits=False, launched=7))
    talk.call("a", known=1, failed=True, replica_id="a:1.1")
    lost: dict[str, float] = {}
    while talk.now_s < 120 and "b" not in lost:
        talk.say(m.Beat("a:1.1"))
        talk.say(report("b", waits=False, launched=7))
        lost = lost_at(talk, "", talk.now_s + 1)
    assert lost.get("b") == pytest.approx(100, abs=1.5), lost


def test_who_hangs_while_the_others_go_on_without_it_gives_its_name_back():
    """Its server beat on: it was of no generation in which anybody waits for it, so nobody ever told that it hangs."""
    talk = formed("abc", join_timeout_s=2)
    talk.calls("ab", 1, known=1, failed=True)
    talk.beats("abc", 4)
    assert talk.quorum == (2, "ab")
    assert [code for code, _ in refusals(talk.call("c", id_=2))] == ["ALREADY_EXISTS"]
    talk.beats("abc", 64)
    assert "for 60 s it has not called" in talk.machine.roster.lost["c:1"]
    assert refusals(talk.call("c", id_=2)) == []


def test_who_was_left_out_before_a_restart_gives_its_name_back_too():
    """Found by simulation: the lighthouse that knew since when the others went on without it was gone."""
    before = formed("abc", join_timeout_s=2)
    first = before.machine.quorum
    before.calls("ab", 1, known=1, failed=True)
    before.beats("abc", 4)
    again = Talk(saved=before.machine.saved)
    assert notices(again.say(m.StreamOpened("c:1", first))) == [("GenerationAborted", ("c:1",))]
    again.beats("abc", 59)
    assert [code for code, _ in refusals(again.call("c", id_=2))] == ["ALREADY_EXISTS"]
    again.beats("abc", 61)
    assert "for 60 s it has not called" in again.machine.roster.lost["c:1"]
    assert refusals(again.call("c", id_=2)) == []


def test_the_loss_of_another_begins_no_wait_anew():
    """Found by simulation: b and c hang, a waits for both in a sum; c's connection breaks, so a gives the sum up, and asks."""
    talk = formed("abc", join_timeout_s=600)
    for at_s in range(30):
        talk.say(report("b", waits=False))
        talk.say(report("c", waits=False))
        assert not lost_at(talk, "a", at_s + 1.0)
    talk.say(m.StreamClosed("c:1"))
    talk.call("a", known=1, failed=True)
    talk.say(report("a", waits=False))
    while talk.now_s < 100 and "b:1" not in talk.machine.roster.lost:
        talk.say(report("b", waits=False))
        talk.beats("ab", round(talk.now_s + 1))
    assert talk.now_s == pytest.approx(60, abs=1.5)


def test_long_phases_are_no_hangs_within_their_limits():
    """A first step of 120 s, and a save of 30 s."""
    for limit_s, median_s, takes_s in ((1800, 0.0, 120), (600, 1.0, 30)):
        talk = formed("abc")
        while talk.now_s < takes_s:
            talk.say(report("c", waits=False, median_s=median_s, phase_limit_s=limit_s))
            assert not lost_at(talk, "ab", talk.now_s + 1, median_s=median_s)
    talk = formed("abc")
    while talk.now_s < 99:  # the same words for ever, and no step: its server repeats what nobody says any more
        talk.say(report("c", waits=False, phase_limit_s=40))
        if lost_at(talk, "ab", talk.now_s + 1):
            break
    assert talk.now_s == pytest.approx(41, abs=1)


def test_five_of_six_in_a_stall_of_their_storage_are_not_lost():
    talk = formed("abcdef")
    while talk.now_s < 20:
        for name in "bcdef":
            talk.say(report(name, waits=False))
        assert not lost_at(talk, "a", talk.now_s + 1)


@pytest.mark.parametrize(("median_s", "limit_s"), [(0.1, 10), (1.9, 10), (20, 100)])
def test_others_wait_for_some_of_their_own_steps(median_s: float, limit_s: float):
    talk = formed("abc")
    lost: dict[str, float] = {}
    while talk.now_s < 120 and not lost:
        talk.say(report("c", waits=False, median_s=median_s))
        lost = lost_at(talk, "ab", talk.now_s + 1, median_s=median_s)
    assert lost == {"c": pytest.approx(limit_s, abs=1)}


def test_one_that_hung_is_missed_by_nobody_and_its_successor_comes_in():
    """Its server came back under a new id and counted as healthy: of two groups the other one then waited for a majority for ever."""
    talk = formed("ab")
    talk.say(m.StreamOpened("b:1"))
    while talk.quorum[0] == 1 and talk.now_s < 90:
        for name in "ab":
            talk.say(report(name, waits=name == "a"))
        talk.tick(round(talk.now_s + 0.5, 1))
        if "b:1" in talk.machine.roster.lost and talk.asked["a"] == 1:
            talk.call("a", known=1, failed=True, step=1)
    assert talk.quorum == (2, "a") and talk.now_s <= 65
    talk.call("b", id_=2)
    talk.call("a", known=2, step=1)
    assert talk.quorum == (3, "ab")


def test_one_that_wakes_after_it_was_lost_heals():
    talk = formed("ab")
    talk.say(m.Evict("b:1"))
    talk.call("a", known=1, failed=True, step=1)
    assert talk.quorum == (2, "a")
    talk.call("b", known=1, failed=True, replica_id="b:1.1")
    talk.call("a", known=2, step=1)
    assert talk.quorum == (3, "ab") and talk.machine.quorum and talk.machine.quorum.holders == (0,)


def test_members_that_ask_and_members_that_wait_for_them_are_freed():
    """Found by simulation: a late copy of a's call completed the quorum; then a asked, b was in the collective, and neither wait ended."""
    talk = formed("ab")
    talk.call("a", step=1, known=1)
    talk.say(m.Report("b:1", 1, 1, waiting=True))
    said = talk.beats("ab", 5)
    assert ("GenerationAborted", ("b:1",)) in notices(said)
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
    assert ("GenerationAborted", ("a:1", "b:1")) in notices(talk.beats("ab", 2.3))


def test_a_member_that_has_gone_on_since_it_was_put_in_is_put_in_anew():
    """Found by simulation: it got the answer again, which said to go on from a state that was no longer its own, without healing."""
    talk = formed("ab")
    said = talk.call("a", step=1)
    assert notices(said) == [("GenerationAborted", ("b:1",))]
    talk.call("b", known=1, failed=True)
    assert talk.quorum == (2, "ab") and talk.machine.quorum is not None
    assert talk.machine.quorum.reference == (1, 1, "c1")


# ------------------------------------------------------------------------------------------------ blame


def fails(talk: Talk, names: str, cut: str, known: int = 1) -> list[m.Effect]:
    """All call, for the generation has failed. cut: "ab bc" are pairs of which both sides say so."""
    pairs = cut.split()
    blames = {name: tuple(f"{x}:1" for pair in pairs if name in pair for x in pair if x != name) for name in names}
    return [e for name in names for e in talk.call(name, known=known, failed=True, blame=blames[name])]


def reports(talk: Talk, cut: str, at: float, names: str = "abc") -> list[m.Effect]:
    """Each says whom it cannot reach now."""
    said: list[m.Effect] = []
    for name in names:
        blame = tuple(f"{x}:1" for pair in cut.split() if name in pair for x in pair if x != name)
        said += talk.say(m.Report(f"{name}:1", 0, blame=blame), at)
    return said


def for_a_while(talk: Talk, until: float, cut: str, names: str = "abc") -> list[tuple[str, tuple[str, ...]]]:
    """Reports and ticks; the notices that came."""
    said: list[m.Effect] = []
    while talk.now_s < until - 1e-9:
        at = round(talk.now_s + 0.1, 3)
        said += reports(talk, cut, at, names) + talk.say(m.Tick(), at)
    return notices(said)


def test_a_cut_pair_is_parted_after_the_first_failure():
    talk = formed("abcd", min_replicas=3)
    fails(talk, "abcd", "ab bc")
    assert talk.quorum == (2, "acd")  # b explains (a, b) and (b, c)
    assert "b:1 sit out: a:1 and b:1; b:1 and c:1 cannot work together" in talk.reason


def test_one_word_of_a_cut_is_enough():
    talk = formed("abc")
    talk.calls("ac", known=1, failed=True)
    talk.call("b", known=1, failed=True, blame=("a:1",))
    assert talk.quorum == (2, "ac")


def test_who_sits_out_comes_back_when_its_links_are_whole_and_costs_nothing_before():
    talk = formed("abc", min_replicas=2)
    fails(talk, "abc", "ab")
    assert talk.quorum == (2, "ac")
    assert for_a_while(talk, 100.0, "ab") == []  # long after its time is over: nobody is told to ask for a quorum
    assert ("ChangeAnnounced", ("a:1", "c:1")) in for_a_while(talk, 102.0, "")
    talk.calls("ac", known=2)
    assert talk.quorum == (3, "abc")


def test_who_has_sat_out_often_sits_out_longer_up_to_half_a_minute():
    talk = formed("abc", min_replicas=2)
    for times, sits_s in enumerate((10.0, 20.0, 30.0, 30.0)):
        known, now_s = 1 + 2 * times, talk.now_s
        fails(talk, "abc", "ab", known)
        assert talk.quorum == (known + 1, "ac")
        assert for_a_while(talk, now_s + sits_s - 0.2, "") == []  # whole again, for now
        assert ("ChangeAnnounced", ("a:1", "c:1")) in for_a_while(talk, now_s + sits_s + 1.2, "")
        talk.calls("ac", known=known + 1)
        assert talk.quorum == (known + 2, "abc")


def test_nobody_sits_out_when_too_few_would_remain():
    """All wait, and it is said for what; until the link is whole, at once."""
    talk = formed("abc", min_replicas=3)
    talk.machine.config = LighthouseConfig(min_replicas=3)
    fails(talk, "abc", "ab")
    assert talk.quorum == (1, "abc")
    assert talk.reason.startswith("a:1 and b:1 cannot work together")
    for_a_while(talk, 50.0, "ab")
    assert talk.quorum == (1, "abc")
    reports(talk, "", talk.now_s, "a")
    assert talk.quorum == (1, "abc")  # b still says so
    reports(talk, "", talk.now_s, "b")
    assert talk.quorum == (2, "abc")


def test_who_sits_out_is_called_back_where_the_others_are_too_few():
    talk = formed("abc", min_replicas=2)
    talk.machine.config = LighthouseConfig(min_replicas=2)
    fails(talk, "abc", "ab")
    assert talk.quorum == (2, "ac")
    reports(talk, "ab", 1.0)
    talk.say(m.StreamClosed("c:1"))
    talk.call("a", known=2, failed=True, blame=("b:1",))
    assert talk.quorum == (2, "ac") and "b:1 sit out: a:1 and b:1 cannot work together" in talk.reason
    reports(talk, "", 2.0, "ab")
    talk.tick(2.2)
    assert talk.quorum == (3, "ab")


def test_who_was_parted_from_one_that_is_gone_need_not_sit_out():
    talk = formed("abc")
    fails(talk, "abc", "ab")
    assert talk.quorum == (2, "ac")
    talk.say(m.StreamClosed("a:1"), 1.0)
    talk.tick(1.2)
    talk.call("c", known=2, failed=True)
    assert talk.quorum == (3, "bc")


def test_of_two_halves_the_smaller_sits_out():
    talk = formed("abcde", min_replicas=3)
    fails(talk, "abcde", "ac ad ae bc bd be")
    assert talk.quorum == (2, "cde")


def test_a_word_about_somebody_who_is_gone_parts_nobody():
    talk = formed("abc")
    talk.say(m.StreamClosed("b:1"), 0.5)
    talk.call("b", id_=2)
    talk.calls("ac", known=1, failed=True, blame=("b:1",))
    assert talk.quorum == (2, "abc")


def test_a_group_that_returns_under_another_id_has_the_same_links():
    talk = formed("abc")
    talk.say(m.StreamClosed("b:1"), 0.5)
    talk.say(m.Call(m.Member("b:1.1", commit_id="c0"), number=1))
    talk.calls("ac", known=1, failed=True, blame=("b:1",))
    assert talk.quorum == (2, "ac")


def test_a_holder_of_the_state_stays():
    """The one link that does not fail is that of the two which have to heal."""
    talk = formed("a")
    talk.call("a", known=1, step=1)
    talk.calls("bc")
    talk.call("a", known=2, step=1, failed=True, blame=("b:1", "c:1"))
    assert talk.quorum[1] == "a"


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


@given(st.sets(st.frozensets(st.sampled_from("abcdefg"), min_size=2, max_size=2), min_size=1, max_size=12), st.data())
def test_smallest_cover_is_the_first_of_the_smallest_ones(pairs: set[frozenset[str]], data: st.DataObject):
    spare = data.draw(st.sets(st.sampled_from("abcdefg")))
    blamed = Counter(replica_id for pair in pairs for replica_id in pair)
    order = sorted(sorted(blamed, reverse=True), key=lambda i: (i in spare, -blamed[i]))
    covers = (set(x) for n in (1, 2, 3) for x in combinations(order, n) if all(pair & set(x) for pair in pairs))
    assert (first := next(covers, None)) is None or smallest_cover(pairs, spare) == first


def halves(count: int) -> tuple[list[str], list[str]]:
    names = [f"g{i:03d}:1" for i in range(count)]
    return names[: count // 2], names[count // 2 :]


def test_a_cut_between_halves_is_covered_in_one_look_at_each_pair():
    """Counted, not timed: what took half a minute with 256 groups, while nobody else was heard."""
    left, right = halves(66)
    pairs = [frozenset((one, other)) for one in left for other in right]
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        cover = smallest_cover(pairs)
    finally:
        sys.setprofile(None)
    assert len(cover) == 33 and calls < 20 * len(pairs)


def test_while_nobody_may_sit_out_a_cut_is_not_counted_anew_at_each_event(monkeypatch: pytest.MonkeyPatch):
    left, right = halves(20)
    talk = Talk(min_replicas=20)
    for replica_id in left + right:
        talk.say(m.Call(m.Member(replica_id), number=1))
    talk.machine.config = LighthouseConfig(min_replicas=15)
    for half, other in ((left, right), (right, left)):
        for replica_id in half:
            member = m.Member(replica_id, step=1, commit_failures=1)
            talk.say(m.Call(member, known=1, failed=True, blame=tuple(other), number=2))
    assert "fewer than min_replicas = 15 would be left" in talk.reason
    counted: list[object] = []
    monkeypatch.setattr("ft.protocol.roster.pairs_among", lambda *what: counted.append(what) or pairs_among(*what))
    for replica_id in left:
        talk.say(m.Report(replica_id, 1, blame=tuple(right)))
        talk.say(m.Tick(), talk.now_s + 0.1)
    assert not counted
    talk.say(m.Report(left[0], 1, blame=tuple(right[1:])))
    assert len(counted) == 1, "a word that is another one counts"


def test_a_quorum_that_is_told_without_its_members_is_not_gone_on_from():
    talk = Talk()
    talk.say(m.StreamOpened("a:1", m.Quorum(7, ()), 5))
    assert talk.machine.quorum is None
    talk.call("a", known=7)
    quorum = talk.machine.quorum
    assert quorum and (quorum.quorum_id, quorum.epoch) == (8, "job")


def test_what_a_healing_group_had_settled_sends_nobody_back_to_a_checkpoint():
    """The job was restored from step 90; b, of the history before, heals; and the lighthouse that knew is started anew."""
    a = m.Member("a:1", step=92, commit_id="c92", commit_quorum_id=6)
    b = m.Member("b:1", step=100, commit_id="old", commit_quorum_id=5)
    saved = m.Saved("job", 7, 92, "pharos", m.Quorum(7, (a, b), (92, 6, "c92"), "job"), m.Terms())
    talk = Talk(saved=saved)
    talk.say(m.Report("b:1", m.VOID, 5, settled=99), 0.5)
    talk.say(m.Report("a:1", 93, 7, settled=92))
    talk.say(m.Call(replace(a, step=93, commit_id="c93", commit_quorum_id=7), known=7, number=1), 1.0)
    said = talk.say(m.Call(m.Member("b:1", step=m.VOID), known=7, number=1), 1.1)
    assert not [effect for effect in said if isinstance(effect, m.MustRestore)]
    assert talk.quorum[1] == "ab" and talk.machine.saved.settled == 93


def test_who_beats_on_under_a_lost_id_keeps_nobody_waiting():
    """It is awaited for a moment, once: told that it is lost, a group returns under another id, or never."""
    talk = formed("ab", join_timeout_s=5.0)
    talk.say(m.Evict("b:1"), 1.0)
    talk.say(m.Report("b:1", 0), 1.1)
    talk.call("a", 1.2, known=1, failed=True)
    assert talk.quorum == (1, "ab") and "more than half is needed" in talk.reason, "b may return"
    while talk.now_s < 4.0:
        for event in (m.Report("a:1", 0), m.Report("b:1", 0), m.Tick()):
            talk.say(event, round(talk.now_s + 0.1, 3))
    assert talk.quorum == (2, "a")


def test_who_finishes_tells_all_others_and_who_opens_a_stream_later():
    talk = Talk(min_replicas=3)
    talk.calls("abc")
    known = talk.machine.quorum
    assert known
    told = talk.say(m.Leave("a:1", reason="done", finished=True))
    later = talk.say(m.StreamOpened("b:1", known, 0))
    for effects, who in ((told, ("b:1", "c:1")), (later, ("b:1",))):
        notices = [e for e in effects if isinstance(e, m.Notify) and isinstance(e.notice, m.Finished)]
        assert [(e.replica_ids, e.notice) for e in notices] == [(who, m.Finished(known.quorum_id, "a:1"))]


# ------------------------------------------------------------------------------------------------ heals that fail


def asks_void(talk: Talk, known: int = 0, **more: Any) -> list[m.Effect]:
    """c asks, and has no state."""
    return talk.call("c", known=known, step=m.VOID, commit_id="", commit_quorum_id=0, **more)


def all_ask(talk: Talk, **more: Any) -> None:
    """For a change was announced; a and b have a state, and c has none."""
    known = talk.quorum[0]
    talk.calls("ab", known=known, step=1)
    asks_void(talk, known, **more)


def failed(times: int, **config: Any) -> Talk:
    """So many heals of c have failed."""
    talk = formed("ab", **config)
    asks_void(talk)
    talk.calls("ab", known=1, step=1)
    for _ in range(times):
        assert talk.quorum == (2, "abc")
        all_ask(talk)
    return talk


def test_who_cannot_heal_sits_out_for_longer_each_time():
    talk = failed(2)
    assert talk.quorum == (2, "abc")
    for times, sits_s in enumerate((30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0)):
        now_s = talk.now_s
        all_ask(talk)
        assert talk.quorum == (3 + 2 * times, "ab")
        words = f"its last {3 + times} heals failed, so the others go on without it for {sits_s:g} s"
        assert talk.machine.roster.why_it_sits_out("c:1") == words
        assert for_a_while(talk, now_s + sits_s - 0.2, "") == []
        assert ("ChangeAnnounced", ("a:1", "b:1")) in for_a_while(talk, now_s + sits_s + 1.2, "")
        assert talk.machine.roster.why_it_sits_out("c:1") == ""
        talk.calls("ab", known=talk.quorum[0], step=1)
        assert talk.quorum == (4 + 2 * times, "abc")


def test_a_question_that_waits_and_comes_again_is_not_answered_by_the_quorum_before():
    """Seed 2033: of a quorum that was issued again under its id, while its question of then was not the newest."""
    talk = failed(2)
    asks_void(talk, 2)
    again = asks_void(talk, 2, number=talk.asked["c"])
    assert not [effect for effect in again if isinstance(effect, m.Answer)] and talk.quorum == (2, "abc")


def test_who_gives_its_heal_up_returns_to_sit_out():
    talk = failed(2)
    talk.say(m.Leave("c:1", clean=False, reason="the state did not arrive within 30 s, and the others wait"))
    talk.calls("ab", known=2, step=1, failed=True)
    assert talk.quorum == (3, "ab")
    assert notices(asks_void(talk, id_="1.1")) == []
    assert talk.quorum == (3, "ab") and "heals failed" in talk.machine.roster.why_it_sits_out("c:1.1")


def test_a_heal_that_comes_through_ends_the_count():
    talk = failed(2)
    talk.calls("abc", known=2, step=1)
    assert talk.quorum == (2, "abc") and not talk.machine.roster.heals
    for _ in range(3):
        all_ask(talk)
    assert talk.quorum == (2, "abc")  # the first was a fall, and no heal


def test_a_heal_that_the_loss_of_another_ended_has_not_failed():
    talk = formed("ab")
    asks_void(talk)
    talk.calls("ab", known=1, step=1)
    for turn in range(1, 6):
        known = talk.quorum[0]
        assert talk.quorum == (known, "abc")
        talk.say(m.StreamClosed("b:1" if turn == 1 else f"b:1.{turn - 1}"))
        talk.call("b", id_=f"1.{turn}", known=known, step=1, failed=True)
        all_but_b = talk.call("a", known=known, step=1, failed=True) + asks_void(talk, known, failed=True)
        assert refusals(all_but_b) == []
    assert talk.machine.roster.heals["c"].failed == 0


def test_one_that_is_started_anew_begins_with_a_clean_slate():
    talk = failed(3)
    assert talk.quorum == (3, "ab")
    talk.say(m.StreamClosed("c:1"))
    asks_void(talk, id_=2)
    talk.calls("ab", known=3, step=1)
    assert talk.quorum == (4, "abc")


def test_nobody_sits_out_whom_the_others_need():
    talk = failed(3)
    talk.machine.config = LighthouseConfig(min_replicas=2, join_timeout_s=3.0)
    talk.calls("ab", known=3, step=1, failed=True)
    assert talk.quorum == (4, "ab")  # nor one whom they need until both have called
    talk.say(m.StreamClosed("b:1"))
    talk.call("a", known=4, step=1, failed=True)
    for_a_while(talk, 2.9, "", "ac")
    assert talk.quorum == (4, "ab")
    for_a_while(talk, 3.1, "", "ac")
    assert talk.quorum == (5, "ac")
    alone = failed(3)
    for name in "ab":
        alone.say(m.StreamClosed(f"{name}:1"))
    alone.say(m.Tick())
    assert alone.machine.roster.candidates.keys() == {"c:1"}
