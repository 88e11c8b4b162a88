"""What happens to a quorum once it stands: the lighthouse is started anew or stopped, members hold each other up, and failures repeat."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ft.protocol import messages as m
from ft.protocol.blame import smallest_cover
from tests.protocol.talk import Talk, formed, notices

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


def test_a_row_that_parted_nobody_is_over():
    """Later ones are explained by what was said in them."""
    talk = formed("abcd", min_replicas=3)
    blames = [{"a": "b:1", "c": "d:1"}] * 3 + [{"a": "b:1"}] * 3  # to part a from b and c from d would leave two
    for attempt, blamed in enumerate(blames, 1):
        assert talk.quorum == (attempt, "abcd")
        for name in "abcd":
            talk.call(name, known=attempt, failed=True, blame=(blamed[name],) if name in blamed else ())
    assert talk.quorum == (7, "acd")


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
