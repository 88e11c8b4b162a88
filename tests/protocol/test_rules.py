"""Tests besides the transcripts: tables of cases, properties by hypothesis, and counts of operations."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.protocol import messages as m
from ft.protocol.compare import as_sent, find_divergent
from ft.protocol.lighthouse import LighthouseMachine
from ft.protocol.messages import Member
from ft.protocol.roster import LOST_KEPT, Roster, pairs_among
from ft.protocol.rules import Decision, choose_excluded, fingerprint_mismatches, minimum_vertex_cover, reference_state
from tests.counting import counting
from tests.protocol.play import GroupPlayer, LighthousePlayer, RankPlayer, formed, unhealed

# ------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("fingerprints", "holders", "found"),
    [
        ("aaa", (), {}),
        ("aab", (), {2: ["lr"]}),
        ("baa", (), {0: ["lr"]}),
        ("baa", (0,), {1: ["lr"], 2: ["lr"]}),  # two newcomers are no majority against the group that has the state
        ("abba", (1, 3), {0: ["lr"], 3: ["lr"]}),  # of equally many the lowest rank's
        ("a a", (), {}),  # a group without the key does not differ in it
    ],
)
def test_fingerprint_mismatches(fingerprints: str, holders: tuple[int, ...], found: dict[int, list[str]]):
    said = [(("layout", "1"), *([("lr", lr)] if lr != " " else [])) for lr in fingerprints]
    assert fingerprint_mismatches(said, holders) == found


def test_a_state_file_without_a_layout_gets_the_first_members():
    """The state file is of an earlier version."""
    ours, other = (("layout", "1"), ("lr", "1")), (("layout", "2"), ("lr", "1"))
    data = asdict(formed("ab", fingerprint=ours).machine.saved)
    del data["quorum"]["fingerprint"]
    again = LighthousePlayer(saved=m.PersistentState.from_dict(data))
    again.call("d", fingerprint=other)
    again.effects = []
    again.call("a", known=1, fingerprint=ours)
    assert m.Refuse("d:1", "FAILED_PRECONDITION", "d:1 differs from the job in layout") in again.effects


def test_a_state_file_holds_all_that_is_saved_also_under_the_names_of_an_earlier_version():
    saved = formed("abc", fingerprint=(("layout", "1"),)).machine.saved
    data = json.loads(json.dumps(asdict(saved)))
    assert m.PersistentState.from_dict(data) == saved
    data["quorum"]["shape"] = data["quorum"].pop("fingerprint")
    for member in data["quorum"]["members"]:
        member["dealt"], member["deal_id"] = member.pop("assigned"), member.pop("assignment_id")
    assert m.PersistentState.from_dict(data) == saved


# ------------------------------------------------------------------------------------------------ restarts


def test_members_that_stay_keep_their_id_over_a_restart_that_leaves_some_out():
    """The last of those that the file stands for: given to them it would be given again by the next start from the same file."""
    before = formed("ab").machine.saved
    for told in (before, None):  # by the file, or by members
        again = LighthousePlayer(saved=replace(before, last_id=before.last_id + 1000, quorum=told and told.quorum))
        again.running = before.quorum
        again.command("StreamOpened a:1 quorum=running")
        again.command("StreamOpened b:1 quorum=running")
        again.call("a", "b", known=1, step=1)
        assert (again.machine.quorum.quorum_id, again.machine.quorum.ids) == (1, ("a:1", "b:1"))
        again.call("a", "b", known=1, step=1, failed=True)
        assert (again.machine.quorum.quorum_id, again.machine.quorum.ids) == (1002, ("a:1", "b:1"))


def test_whoever_reports_an_older_quorum_than_another_does_is_told_that_it_is_over():
    """The group waits in the older quorum, and its own members are in the newer (seed 5034)."""
    older = formed("abc").machine.quorum
    newer = replace(older, quorum_id=older.quorum_id + 1, members=older.members[:2])
    again = LighthousePlayer(recover=True)
    assert again.say(m.StreamOpened("c:1", older)) == []
    told = [effect for effect in again.say(m.StreamOpened("a:1", newer)) if isinstance(effect, m.Notify)]
    over = m.GenerationAborted(older.quorum_id, f"quorum {newer.quorum_id} was formed without this group")
    assert [effect.notice for effect in told if "c:1" in effect.replica_ids] == [over]


def test_of_two_epochs_that_are_reported_the_further_one_is_continued():
    """A newcomer of a job that a lighthouse had begun anew reports it, first or second."""
    begun, running = formed("c").machine.quorum, replace(formed("ab").machine.quorum, quorum_id=9, epoch="running")
    for reports in ([(begun, 3), (running, 499)], [(running, 499), (begun, 3)]):
        again = LighthousePlayer(recover=True)
        for quorum, settled in reports:
            again.say(m.StreamOpened(quorum.ids[0], quorum, settled))
        assert (again.machine.quorum, again.machine.saved.settled) == (running, 499)


def test_what_a_healing_group_had_settled_sends_nobody_back_to_a_checkpoint():
    """The job was restored from step 90; b, of the history before, heals; and the lighthouse that knew is started anew."""
    a = Member("a:1", step=92, commit_id="c92", commit_quorum_id=6)
    b = Member("b:1", step=100, commit_id="old", commit_quorum_id=5)
    saved = m.PersistentState("job", 7, 92, "pharos", m.Quorum(7, (a, b), (92, 6, "c92"), "job"), m.JobLimits())
    player = LighthousePlayer(saved=saved)
    player.say(m.Report("b:1", m.VOID, 5, settled=99))
    player.say(m.Report("a:1", 93, 7, settled=92))
    player.say(m.Call(replace(a, step=93, commit_id="c93", commit_quorum_id=7), known=7, number=1))
    said = player.say(m.Call(Member("b:1", step=m.VOID), known=7, number=1))
    assert not [effect for effect in said if isinstance(effect, m.MustRestore)]
    assert player.machine.quorum.ids == ("a:1", "b:1") and player.machine.saved.settled == 93


def test_a_request_names_the_epoch_of_the_newest_quorum():
    group = GroupPlayer(1)
    group.ask(0)
    group.say(m.LighthouseAnswered(m.Quorum(1, (Member("a:1"),), epoch="job")))
    group.ask(0, known=1, number=1)
    assert [x.call.epoch for x in group.effects if isinstance(x, m.CallLighthouse)] == ["", "job"]


# ------------------------------------------------------------------------------------------------ timeouts


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"heartbeat_timeout_s": 0.5}, "beat_s = 1 must be below heartbeat_timeout_s = 0.5"),
        ({"rendezvous_s": 40.0}, "rendezvous_s = 40 must be below heal_grace_s = 30"),
        ({"takeover_s": 20.0}, "heal_grace_s = 30 must not exceed takeover_s = 20"),
        ({"takeover_s": None, "heal_grace_s": 700.0}, "heal_grace_s = 700 must not exceed collective_s = 600"),
        ({"beat_s": 3.0}, "beat_s = 3 must not exceed 2"),
    ],
)
def test_the_order_of_timeouts(times: dict[str, Any], words: str):
    assert m.Timeouts().incompatible_timeouts(m.Timeouts()) == []
    assert m.Timeouts(**times).incompatible_timeouts(m.Timeouts(**times)) == [words]


def test_a_group_that_cannot_heal_sits_out_for_longer_each_time():
    player = unhealed(2)
    for times, sits_s in enumerate((30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0)):
        start_s, known = player.now_s, player.machine.quorum.quorum_id
        player.call("a", "b", known=known, step=1)
        player.call("c", known=known, step=m.VOID)
        assert player.machine.quorum.ids == ("a:1", "b:1")
        words = f"its last {3 + times} heals failed: the others continue without it for {sits_s:g} s"
        assert player.command("sits_out c:1")[0] == words
        assert player.command(f"tick until={start_s + sits_s - 0.2} links=abc") == []
        [told, *_] = player.command(f"tick until={start_s + sits_s + 1.2} links=abc")
        assert "ChangeAnnounced" in told and player.command("sits_out c:1")[0] == "no"
        player.call("a", "b", known=player.machine.quorum.quorum_id, step=1)
        assert player.machine.quorum.ids == ("a:1", "b:1", "c:1")


# ------------------------------------------------------------------------------------------------ who sits out for a cut


@pytest.mark.parametrize(("pairs", "cover"), [("ab", "b"), ("ab ac ad", "a"), ("ab cd", "bd"), ("ab bc cd de", "bd")])
def test_smallest_cover(pairs: str, cover: str):
    assert minimum_vertex_cover(frozenset(map(frozenset, pairs.split()))) == set(cover)


def test_one_holder_remains_even_if_no_two_holders_can_work_together():
    holders = [m.Member(f"{name}:1", step=5) for name in "ab"]
    decision = Decision((*holders, m.Member("c:1", step=m.VOID), m.Member("d:1", step=m.VOID)), holders[0].state)
    pairs = frozenset(frozenset(f"{name}:1" for name in pair) for pair in ("ab", "ac", "ad", "bc", "bd"))
    assert choose_excluded(decision, pairs, 1) == {"b:1", "c:1", "d:1"} and choose_excluded(decision, pairs, 2) == set()


def test_smallest_cover_of_many_pairs_covers_them():
    pairs = [frozenset((f"x{i}", f"x{i + 1}")) for i in range(200)]
    cover = minimum_vertex_cover(frozenset(pairs))
    assert all(pair & cover for pair in pairs) and len(cover) <= 134


@given(st.sets(st.frozensets(st.sampled_from("abcdefg"), min_size=2, max_size=2), min_size=1, max_size=12), st.data())
def test_smallest_cover_is_the_first_of_the_smallest_ones(pairs: set[frozenset[str]], data: st.DataObject):
    spare = data.draw(st.sets(st.sampled_from("abcdefg")))
    blamed = Counter(replica_id for pair in pairs for replica_id in pair)
    order = sorted(sorted(blamed, reverse=True), key=lambda i: (i in spare, -blamed[i]))
    covers = (set(x) for n in (1, 2, 3) for x in combinations(order, n) if all(pair & set(x) for pair in pairs))
    assert (first := next(covers, None)) is None or minimum_vertex_cover(frozenset(pairs), frozenset(spare)) == first


def halves(count: int) -> tuple[list[str], list[str]]:
    names = [f"g{i:03d}:1" for i in range(count)]
    return names[: count // 2], names[count // 2 :]


def test_a_cut_between_halves_is_covered_in_one_look_at_each_pair():
    """Counted, not timed: what took half a minute with 256 groups, while nobody else was heard."""
    left, right = halves(66)
    pairs = [frozenset((one, other)) for one in left for other in right]
    with counting() as calls:
        cover = minimum_vertex_cover(frozenset(pairs))
    assert len(cover) == 33 and calls[""] < 10 * len(pairs)


def test_while_nobody_may_sit_out_a_cut_is_not_counted_anew_at_each_event():
    left, right = halves(20)
    player = LighthousePlayer(min_replicas=20)
    for replica_id in left + right:
        player.say(m.Call(Member(replica_id), number=1))
    player.config(min_replicas=15)
    for half, other in ((left, right), (right, left)):
        for replica_id in half:
            member = Member(replica_id, step=1, commit_failures=1)
            player.say(m.Call(member, known=1, failed=True, blame=tuple(other), number=2))
    assert "fewer than min_replicas = 15 would be left" in player.machine.reason
    with counting(pairs_among) as calls:
        for replica_id in left:
            player.say(m.Report(replica_id, 1, blame=tuple(right)))
            player.command(f"Tick at={player.now_s + 0.1}")
        assert not calls["pairs_among"]
        player.say(m.Report(left[0], 1, blame=tuple(right[1:])))
    assert calls["pairs_among"] == 1, "a word that is another one counts"


# ------------------------------------------------------------------------------------------------ tails


@pytest.mark.parametrize("place", [0, 1, 3, 4])  # tokens, ok, change
@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_in_a_tail_are_a_failed_attempt(place: int, figure: float):
    """One damaged word of one group's bucket reaches all ranks of all groups: none may end by it."""
    rank = RankPlayer()
    rank.enter()
    rank.compute()
    tail = [10.0, 10.0, 50.0, 2.0, 0.0]
    tail[place] = figure
    rank.effects = []
    rank.reduced(*tail)
    [cast] = rank.effects
    assert isinstance(cast, m.CastVote) and (cast.vote.kind, cast.vote.verdict) == ("commit", "failed")
    assert "not finite" in cast.vote.reason
    rank.effects = []
    rank.outcome("commit", "failed")
    assert [type(effect) for effect in rank.effects] == [m.AbandonGeneration, m.AskQuorum]


@pytest.mark.parametrize("state", [None, [], "state", 3, {}])
def test_a_fetched_state_of_another_form_is_not_taken(state: Any):
    """A value from the wire that is out of range ends no process."""
    rank = RankPlayer()
    rank.enter(2, heal=True, step=5)
    [cast] = rank.say(m.HealEnded(2, True, state))
    assert isinstance(cast, m.CastVote) and cast.vote.verdict == "failed"


W, X, Z, NOTHING = (7.0, 8.0), (7.0, 9.0), (4.0, 8.0), (0.0, 0.0)  # right, wrong and wrong in another way, of a witness
C, Y = (-7.0, -8.0), (-7.0, -9.0)  # the same, of a copy


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([], ""),
        ([W], ""),
        ([W, W, W], ""),
        ([W, X, W], "b"),
        ([X, W, W], "a"),
        ([W, X, Z, W, W], "bc"),
        ([W, X], "all"),
        ([W, X, Z], "all"),
        ([W, W, X, X], "all"),
        ([W, NOTHING, W], ""),
        ([NOTHING, X, W], "all"),
        ([W, NOTHING, X, W], "c"),
        ([NOTHING, NOTHING], ""),
        ([W, W, C], ""),
        ([C, C, C], ""),
        ([W, X, Y], "all"),  # b was wrong before c healed from it,
        ([X, W, C], "all"),  # or a went wrong, and b and c are right: who can tell
        ([W, W, Y], "c"),
        ([W, W, Y, Y, Y], "cde"),  # one that was wrong before it gave its state to three others
        ([W, W, X, Y, Y], "cde"),
        ([W, W, X, C], "c"),
        ([W, W, X, X, Y], "all"),
        ([W, C, Y], "c"),  # a alone is a witness: it gave to both, and one of them went wrong since,
        ([X, C, C], "all"),  # or it did itself
        ([W, Y], "all"),
        ([C, C, Y], "all"),
        ([W, NOTHING, Y], "all"),
        ([W, NOTHING, C], ""),
    ],
)
def test_find_divergent(digests: list[tuple[float, float]], odd: str):
    members = "abcde"[: len(digests)]
    found = find_divergent(tuple(figure for digest in digests for figure in digest), tuple(members))
    assert "".join(found) == (members if odd == "all" else odd)


def test_a_figure_of_zero_is_a_copys_as_well():
    assert find_divergent((*as_sent((0.0, 5.0), copied=True), 0.0, 5.0, 0.0, 5.0), ("a", "b", "c")) == ()
    assert find_divergent((*as_sent((0.0, 5.0), copied=True), 0.0, 6.0, 0.0, 6.0), ("a", "b", "c")) == ("a",)


# ------------------------------------------------------------------------------------------------ cost


IDS = ("a:1", "a:1.1", "a:2", "b:1", "c:1", "c:2")
one_id = st.sampled_from(IDS)
# another id of a member's process counts once it has called
one_process = st.sampled_from(["a:2", "b:1", "c:1", "c:2"])
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
@settings(max_examples=100)
def test_the_counts_that_the_rules_look_at_are_those_of_a_count_anew(said: list[tuple[m.Event, float]], least: int):
    """The counts are updated one id at a time; here all are computed anew after every event, and compared."""
    player = LighthousePlayer(min_replicas=least, join_timeout_s=2.0)
    for event, pause_s in said:
        player.now_s += pause_s
        player.say(event)
        roster = player.machine.roster
        sets = [
            set(x) for x in (roster.previous, roster.present, roster.missing, roster.previous_holders, roster.shrinkers)
        ]
        assert [roster.candidates, *sets, roster.healthy_count(), len(roster.healthy_members)] == counted_anew(
            player.machine
        )


def counted_anew(machine: LighthouseMachine) -> list[Any]:
    roster = machine.roster
    alive = {i: peer for i, peer in roster.peers.items() if i in roster.by_last_message and i not in roster.sitting}
    calls = {i: peer.call.member for i, peer in alive.items() if peer.call}
    previous = set(machine.quorum.ids if machine.quorum else ())
    of_them = {i for i in alive if m.incarnation_of(i) in map(m.incarnation_of, previous)}
    theirs = {i for i, peer in alive.items() if peer.kind == "torchft"}
    called = {i for i, peer in alive.items() if peer.called}
    healthy = {i for i in called | (alive.keys() & previous) | theirs if alive[i].kind == roster.kind}
    returning = [name for name in roster.returning if roster.live.get(name) not in healthy]
    return [
        calls,
        previous,
        calls.keys() & previous,
        previous - calls.keys() - roster.left_cleanly - roster.sitting.keys(),
        {i for i in calls.keys() & of_them if not calls[i].void},
        {i for i in calls.keys() & (previous | theirs) if calls[i].shrink_only},
        len(healthy) + len(returning),
        len(alive.keys() & previous),
    ]


def test_a_round_of_a_thousand_groups_looks_at_each_a_few_times():
    """Counted, not timed: how often an id is placed, and how often the rules, which walk through all members, are asked for more than a
    reason to wait."""
    names = [f"{i:04d}" for i in range(1000)]
    player = LighthousePlayer(min_replicas=1000)
    with counting(Roster.update_sets, reference_state) as calls:
        player.call(*names)
        player.call(*names, known=1, failed=True, step=1)
    assert player.machine.quorum.quorum_id == 2
    assert calls["update_sets"] <= 10 * 2 * len(names) and calls["reference_state"] == 2


def test_memory_is_bounded_under_churn():
    player = formed("a")
    for unique in range(2, LOST_KEPT + 500):
        player.say(m.StreamOpened(f"b:{unique}"))
        player.call("b", id=unique)
        player.say(m.StreamClosed(f"b:{unique}"))
        player.beat("b", id=unique)  # is refused
    roster, of_lost = player.machine.roster, ("lost", "refused_as_lost")
    assert [len(getattr(roster, name)) for name in of_lost] == [LOST_KEPT + 1] * 2
    kept = {
        name: len(of) for name, of in vars(roster).items() if isinstance(of, set | dict | list) and name not in of_lost
    }
    assert max(kept.values()) == 1 and len(kept) > 8, kept


def test_torchfts_callers_that_gave_up_are_forgotten():
    """Its own lighthouse counts them on, and its map grows."""
    player = formed("ab", "torchft")
    player.call("c")
    player.say(m.CallCancelled("c:1"))
    player.call("a", "b")
    assert (player.machine.quorum.quorum_id, player.machine.quorum.ids) == (1, ("a:1", "b:1"))
    for unique in range(300):
        player.call("x", id=unique)
        player.say(m.CallCancelled(f"x:{unique}"))
    player.command("tick until=6")
    assert not player.machine.roster.peers


def test_one_vote_for_all_ranks_costs_the_same_however_many_they_are():
    """Counted: the calls that are made inside the machine."""

    def calls_of_a_step(size: int) -> int:
        machine = GroupPlayer(size, joined=True).machine
        with counting() as calls:
            machine.handle(m.Vote(0, "commit", 1, 0, 0, "yes", joint=True), 0.0)
        return calls[""]

    assert calls_of_a_step(2) == calls_of_a_step(64)
