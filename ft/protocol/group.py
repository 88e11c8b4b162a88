"""The state machine of a replica group's server (torchft: ManagerServer): joins the quorum requests of the group's ranks into one request
to the lighthouse, turns the answer into each rank's QuorumResult (torchft: compute_quorum_results), and decides on commits, heals and
process groups by the ranks' votes, so that all ranks enter the same collective next. Imports no torch.

Design choices:
- A verdict `failed` decides at once. `retry` waits for all votes, since any of them may be `failed`.
- If the ranks of one group report different states, that is a fault which healing must not hide: the group ends and is restarted.
- When the lighthouse cannot be reached and no retries are left, the requests of all waiting ranks fail. By default retries have no limit:
  a restart of the lighthouse ends no group. A rank whose quorum_s is set gives up by itself (RankCancelled).
- A commit is held back while the lighthouse is silent for too long, and fails when a notice says that the others continued without this
  group.
- A group waits for other groups when all its ranks have requested a quorum, or have voted on a commit that is held back, or have entered an
  all-reduce that some are still in; it then tells its ranks so each second. If a rank is then asked to leave, the group ends the wait once
  it has lasted for LEAVE_BEATS heartbeats, and releases all ranks at their next quorum request, when they have the same state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ft.protocol import messages as m
from ft.protocol.messages import Effect, Event, Notice, Outcome, Quorum, QuorumResult, RankCall, Source, Vote, VoteKey

OUTCOMES_KEPT = 16  # newest outcomes that are remembered; a rank repeats only votes on the newest few
WAITS_EVERY_S = 1.0  # longest interval between two Waits; to a rank one is valid for three seconds (rpc/clients.py)
LEAVE_BEATS = 3  # least length of a wait for other groups, in heartbeats, before a request to leave ends it
_SEVERITY = {"yes": 0, "retry": 1, "failed": 2}  # the highest of the ranks' verdicts decides


@dataclass(frozen=True)
class GroupConfig:
    """Identity and settings of a replica group, for its server."""

    replica_id: str
    world_size: int
    address: str = ""
    store_address: str = ""
    times: m.Timeouts = field(default_factory=m.Timeouts)
    # Retries of a failed request to the lighthouse; -1: as long as a rank waits; None: the default, which is -1 here, and in
    # TorchftGroup (compat/group.py) 0, as in torchft.
    quorum_retries: int | None = None
    retry_s: float = 1.0
    max_active_groups: int | None = None  # most groups that are assigned slots, the others are spares; None: all


class GroupMachine:
    """Takes the events that `handle` lists. Effects: CallLighthouse, OpenStream, CloseStream, AnswerRank, FailRank, AnswerVote, NotifyRank,
    Waits, EndGroup. The driver opens the first stream itself, and sends no heartbeat while a trainer process on its host is stopped
    (SIGSTOP); a stopped one on a different host is noticed as a stall."""

    def __init__(self, config: GroupConfig, now_s: float) -> None:
        self.config = config
        self.replica_id = config.replica_id  # a different one after this group was lost and has returned
        self.quorum: Quorum | None = None
        self.reason = "no rank has requested a quorum"
        self._rejoin_count = 0
        self._is_lost = False  # True: the id is lost, and no stream is open until all ranks request a quorum
        self._takeover_s = config.times.takeover_s  # the lighthouse's, once it has answered
        # when the newest request to the lighthouse was first sent, and when the newest answered heartbeat was sent
        self._called_at_s = self._answered_at_s = now_s
        self._last_tick_s = self._told_waits_s = now_s
        self._newest: dict[int, int] = {}  # rank -> number of its newest request
        self.checkpoint_metadata: dict[int, str] = {}  # rank -> address at which it serves its state
        self.waiting: dict[int, RankCall] = {}  # rank -> its waiting quorum request
        self._joining_since_s: float | None = None  # start of a wait for ranks that have not requested a quorum
        self._asks_since_s: float | None = None  # start of the wait for the lighthouse's answer
        self._joined_calls: dict[int, RankCall] = {}  # the ranks' requests that _calling stands for
        self._calling: m.Call | None = None  # request to the lighthouse that is not answered yet
        self._number = 0  # number of the newest request to the lighthouse
        self._tries = 0
        self._lighthouse_says = ""  # reason of this group's wait, as the lighthouse reports it
        self._answered_calls: dict[int, RankCall] = {}  # requests that were answered last
        self._answer: m.RestoreRequired | m.Released | None = None  # answer to these calls; None: self.quorum
        self._answered_as = ""  # this group's id in self.quorum
        self._released = False  # True: asked to leave while it waited; the next requests are answered with Released
        self._votes: dict[VoteKey, dict[int, Vote]] = {}  # votes without an outcome, by rank
        self._outcomes: OrderedDict[VoteKey, Outcome] = OrderedDict()
        self._decided = 0, 0  # step and attempt of the newest outcome in this generation
        self._healed = False  # True: all ranks have fetched the state that this quorum heals them with
        self._pending_commit: Outcome | None = None  # outcome "yes" held back because the lighthouse is silent
        self._pending_since_s = 0.0
        self._sums_since_s: float | None = None  # start of a wait of all ranks in the all-reduce of a step
        self._wants_to_leave = False
        self._streams: set[int] = set()
        self._notices: list[Notice] = []  # notices of the current generation
        self._early: list[Notice] = []  # notices of a newer generation, whose answer has not arrived
        self._out: list[Effect] = []

    def handle(self, event: Event, now_s: float) -> m.Out:
        self._out = []
        match event:
            case RankCall():
                self._on_call(event, now_s)
            case Vote():
                self._on_vote(event, now_s)
            case m.RankStream(rank, open=True):
                self._streams.add(rank)
                self._out += [m.NotifyRank(rank, notice) for notice in self._notices]
            case m.RankStream(rank):
                self._end(f"rank {rank} is gone")
            case m.RankCancelled(rank):
                self.waiting.pop(rank, None)
                self._calling = self._calling if self.waiting else None
            case m.ReductionAwaited(awaited):
                self._sums_since_s = now_s if awaited else None
            case m.WantsToLeave():
                self._wants_to_leave, self.reason = True, "a rank was asked to leave"
            case m.BeatAnswered(sent_s):
                self._answered_at_s = max(self._answered_at_s, sent_s)
                if self._pending_commit and not self._lighthouse_is_silent(now_s):
                    self._decide(self._pending_commit)
            case m.LighthouseAnswered():
                self._on_answered(event)
            case m.LighthouseRefused(replica_id) if replica_id != self.replica_id:
                self.reason = f"{replica_id} was refused; this group is {self.replica_id} by now"
            case m.LighthouseRefused(_, "LOST", reason):
                self._rejoin_under_new_id(reason, now_s)
            case m.LighthouseRefused(_, code, reason):
                self._refused("ALREADY_EXISTS" if code == "ALREADY_EXISTS" else "INVALID_ARGUMENT", reason)
            case m.LighthouseFailed(why) if self._calling:
                self._tries += 1
                if self.config.quorum_retries in (None, -1) or self._tries <= self.config.quorum_retries:
                    self.reason = f"the lighthouse did not answer ({why}); try {self._tries + 1}"
                    self._out.append(m.CallLighthouse(self._calling, self.config.retry_s))
                else:
                    self._fail_waiting("UNAVAILABLE", f"the lighthouse did not answer in {self._tries} tries: {why}")
            case m.LighthouseRequiresRestore(settled) if self._calling:
                self._answer_ranks(m.RestoreRequired(settled))
                self.reason = m.JOB_BEGINS
                if settled:
                    self.reason = f"a checkpoint has to be loaded: step {m.describe_step(settled)} was settled"
            case m.LighthouseWaits(reason) if self._calling:
                self._lighthouse_says = self.reason = reason
            case Notice():
                self._on_notice(event)
            case m.Tick():
                self._on_tick(now_s)
        return m.Out(tuple(self._out), self.reason)

    @property
    def absent(self) -> list[int]:
        """Returns the ranks that have not requested a quorum, while others wait for them."""
        joining = self._calling is None and self.waiting
        return [rank for rank in range(self.config.world_size) if rank not in self.waiting] if joining else []

    # ---- one request for all ranks

    def _on_call(self, event: RankCall, now_s: float) -> None:
        rank, size = event.group_rank, self.config.world_size
        if not 0 <= rank < size:
            self._out.append(m.FailRank(rank, "INVALID_ARGUMENT", f"rank {rank}: this group has ranks 0 to {size - 1}"))
            return
        if event.number < self._newest.get(rank, 0):
            self.reason = f"rank {rank}: a late copy of an older request"
            return
        self._newest[rank] = event.number
        self.checkpoint_metadata[rank] = event.checkpoint_metadata
        if self._answered_calls.get(rank) == event:
            self.reason = f"rank {rank} repeated its request: its answer got lost"
            self._answer_rank(rank)
            return
        self.waiting[rank] = event
        if self._calling:
            self.reason = f"rank {rank} repeated its request; the lighthouse has not answered yet"
            return
        self._joining_since_s = now_s if self._joining_since_s is None else self._joining_since_s
        self.reason = f"{len(self.waiting)} of {size} ranks have requested a quorum"
        if len(self.waiting) == size:
            self._call_lighthouse(now_s)

    def _call_lighthouse(self, now_s: float) -> None:
        self._joining_since_s = None
        self._joined_calls = dict(self.waiting)
        if self._released:
            self._release_ranks()
            return
        calls = [self._joined_calls[rank] for rank in sorted(self._joined_calls)]
        if len({(call.member.state, call.member.restored) for call in calls}) > 1:
            found = ", ".join(
                f"rank {c.group_rank}: step {m.describe_step(c.member.step)} {c.member.commit_id[:8]}" for c in calls
            )
            self._end(f"the ranks of this group hold different states ({found})")
            return
        member = replace(
            calls[0].member,
            replica_id=self.replica_id,
            address=self.config.address,
            store_address=self.config.store_address,
            world_size=self.config.world_size,
            shrink_only=any(c.member.shrink_only for c in calls),
            writes_checkpoint=any(c.member.writes_checkpoint for c in calls),
            commit_failures=max(c.member.commit_failures for c in calls),
            reconfigure_handles=tuple(h for c in calls for h in c.member.reconfigure_handles),
        )
        blame = tuple(sorted({other for c in calls for other in c.blame}))
        known, failed = max(c.known for c in calls), any(c.failed for c in calls)
        self._number += 1
        epoch = self.quorum.epoch if self.quorum else ""
        self._calling = m.Call(member, "pharos", known, failed, blame, calls[0].fingerprint, self._number, epoch)
        self._tries, self._called_at_s = 0, now_s
        self._asks_since_s = now_s if self._asks_since_s is None else self._asks_since_s
        self.reason = "all ranks have requested a quorum: the request is sent to the lighthouse"
        if self._is_lost:
            self._is_lost = False
            self._out.append(m.OpenStream(self.replica_id))
        self._out.append(m.CallLighthouse(self._calling))

    def _on_answered(self, event: m.LighthouseAnswered) -> None:
        quorum = event.quorum
        if event.times and (incompatible_timeouts := self.config.times.incompatible_timeouts(event.times)):
            why = "; ".join(incompatible_timeouts)
            self._refused("INVALID_ARGUMENT", f"its timeouts are incompatible with the lighthouse's: {why}")
            return
        if theirs := event.limits or event.times:
            self._takeover_s = theirs.takeover_s
        if self.quorum and quorum.quorum_id < self.quorum.quorum_id:
            self.reason = f"quorum {quorum.quorum_id} is over, the newest is {self.quorum.quorum_id}"
            return
        if self._calling is None or self.replica_id not in quorum.ids:
            self.reason = f"quorum {quorum.quorum_id} does not contain this group, or no rank has requested it"
            self._overtaken(quorum.quorum_id)
            return
        if self._calling.failed and quorum.quorum_id <= self._calling.known:
            self.reason = f"quorum {quorum.quorum_id} has failed, so it does not answer the request for the next one"
            return
        if not self._calling.member.continues_as(quorum.members[quorum.ids.index(self.replica_id)]):
            self._number += 1  # sent again, as this answer may have been given to the newest request, too
            self._calling = replace(self._calling, number=self._number)
            self._out.append(m.CallLighthouse(self._calling))
            self.reason = f"quorum {quorum.quorum_id} answers an older request of this group"
            return
        if self.quorum is None or quorum.quorum_id != self.quorum.quorum_id:
            self._notices, self._votes, self._decided = [], {}, (0, 0)
        self._notices = [n for n in self._notices if not isinstance(n, m.ChangeAnnounced)]
        self.quorum, self._answered_as, self._healed = quorum, self.replica_id, False
        self._answered_at_s = max(self._answered_at_s, self._called_at_s)  # it has answered the request sent then
        self._answer_ranks(None)
        early, self._early = [n for n in self._early if n.quorum_id == quorum.quorum_id], []
        for notice in early:
            self._notify_ranks(notice)
        self.reason = f"quorum {quorum.quorum_id} of {len(quorum.members)} groups"

    def _answer_ranks(self, answer: m.RestoreRequired | m.Released | None) -> None:
        """Answers all ranks whose requests were joined; a rank that is between two tries gets the answer when it repeats its request."""
        self._answered_calls, self._answer = self._joined_calls, answer
        self._clear_calls()
        for rank in sorted(self._answered_calls):
            self._answer_rank(rank)

    def _answer_rank(self, rank: int) -> None:
        answer: QuorumResult | m.RestoreRequired | m.Released | None = self._answer
        if answer is None:
            quorum, most = self.quorum, self.config.max_active_groups
            assert quorum is not None
            same = all(c.known == quorum.quorum_id and not c.failed for c in self._answered_calls.values())
            answer = plan(quorum, self._answered_as, rank, max_active_groups=most, same_generation=same)
        self._out.append(m.AnswerRank(rank, answer))

    def _refused(self, code: Literal["ALREADY_EXISTS", "INVALID_ARGUMENT"], reason: str) -> None:
        """Fails the requests of a newcomer, since the user has to correct its settings. A former member has a state and tries again, since
        the error may be the lighthouse's (of a different job, with different timeouts or token, or one that began anew)."""
        if self.quorum is None:
            self._fail_waiting(code, reason)
        elif self._calling:
            self._lighthouse_says = f"the lighthouse refuses this group: {reason}"
            self.reason = f"{self._lighthouse_says}; retrying, since this group was a member"
            self._out.append(m.CallLighthouse(self._calling, self.config.retry_s))

    def _rejoin_under_new_id(self, why: str, now_s: float) -> None:
        """Continues under a new replica_id, with its state, after the old one was lost. The stream opens only when all ranks have requested
        a quorum: so a rank that hangs delays no other group, and a restarted group can take the name."""
        self._rejoin_count += 1
        self.replica_id = f"{self.config.replica_id}.{self._rejoin_count}"
        self.reason = f"lost ({why}): returning as {self.replica_id}"
        self._is_lost = self._calling is None
        self._out.append(m.CloseStream() if self._is_lost else m.OpenStream(self.replica_id))
        if self._pending_commit:
            self._fail_pending_commit(f"lost before the commit: {why}")
        elif self.quorum:
            self._notify_ranks(m.GenerationAborted(self.quorum.quorum_id, self.reason))
        if self._calling:
            member = replace(self._calling.member, replica_id=self.replica_id)
            self._calling, self._called_at_s = replace(self._calling, member=member), now_s
            self._out.append(m.CallLighthouse(self._calling))

    def _fail_waiting(self, code: Any, reason: str) -> None:
        for rank in sorted(self.waiting):
            self._out.append(m.FailRank(rank, code, reason))
        self._clear_calls()
        self.reason = reason

    def _clear_calls(self) -> None:
        """Forgets the requests that were answered: the next one starts a new joint request."""
        self.waiting, self._calling, self._joining_since_s = {}, None, None
        self._asks_since_s, self._lighthouse_says = None, ""

    # ---- votes

    def _on_vote(self, vote: Vote, now_s: float) -> None:
        key = vote.key
        done = self._outcomes.get(key)
        if done and self._pending_commit is not done:
            self._out.append(m.AnswerVote(vote.group_rank, done))
            return
        if stale := self._stale(vote):
            self.reason = stale
            self._out.append(m.FailRank(vote.group_rank, "STALE", stale, key))
            return
        votes = self._votes.setdefault(key, {})
        before = votes.get(vote.group_rank)
        if before is None or _SEVERITY[vote.verdict] >= _SEVERITY[before.verdict]:
            votes[vote.group_rank] = vote
        all_have = vote.joint or len(votes) == self.config.world_size
        self.reason = f"{'all' if all_have else len(votes)} of the {self.config.world_size} ranks voted on {vote.kind}"
        if done is None and (vote.verdict == "failed" or all_have):
            self._tally_votes(key, now_s)

    def _stale(self, vote: Vote) -> str:
        current = self.quorum.quorum_id if self.quorum else 0
        if vote.quorum_id != current:
            return f"a vote for quorum {vote.quorum_id}; this group is in {current}"
        if vote.kind != "healed" and (vote.step, vote.attempt) < self._decided:
            at = f"step {m.describe_step(self._decided[0])}, attempt {self._decided[1]}"
            return f"a vote for step {m.describe_step(vote.step)}, attempt {vote.attempt}: the group is at {at}"
        if not 0 <= vote.group_rank < self.config.world_size:
            return f"rank {vote.group_rank}: this group has ranks 0 to {self.config.world_size - 1}"
        return ""

    def _tally_votes(self, key: VoteKey, now_s: float) -> None:
        votes = [self._votes[key][rank] for rank in sorted(self._votes[key])]
        worst = max(votes, key=lambda vote: _SEVERITY[vote.verdict])
        outcome = Outcome(
            kind=worst.kind,
            quorum_id=worst.quorum_id,
            attempt=worst.attempt,
            step=worst.step,
            verdict=worst.verdict,
            change=any(vote.change for vote in votes),
            reason=f"rank {worst.group_rank}: {worst.reason}" if worst.verdict != "yes" else "all ranks voted yes",
            divergent=tuple(sorted({other for vote in votes for other in vote.divergent})),
        )
        if not (outcome.kind == "commit" and outcome.verdict == "yes" and self._lighthouse_is_silent(now_s)):
            self._decide(outcome)
        elif self._is_lost:  # no heartbeat is answered before all ranks have requested a quorum again
            self._decide(replace(outcome, verdict="failed", reason="this group was lost before the commit"))
        else:
            self._pending_commit = self._outcomes[key] = outcome
            self._pending_since_s = now_s
            self.reason = f"the commit waits: no answer from the lighthouse for {now_s - self._answered_at_s:.0f} s"

    def _fail_pending_commit(self, reason: str) -> None:
        if self._pending_commit:
            self._decide(replace(self._pending_commit, verdict="failed", reason=reason))

    def _decide(self, outcome: Outcome) -> None:
        key = outcome.key
        if outcome.kind == "healed":  # a commit that is held back stays so
            self._healed = outcome.verdict == "yes"
        else:
            self._pending_commit = None
            outcome = replace(outcome, healed=True) if self._healed else outcome
            self._decided = max(self._decided, (outcome.step, outcome.attempt))
        self._outcomes[key] = outcome
        while len(self._outcomes) > OUTCOMES_KEPT:
            self._outcomes.popitem(last=False)
        asking = sorted(self._votes.pop(key, {}))
        self._out += [m.AnswerVote(rank, outcome) for rank in asking]
        if outcome.verdict == "failed" and outcome.kind != "healed":
            self._notify_ranks(m.GenerationAborted(outcome.quorum_id, outcome.reason), asking)
        self.reason = f"{outcome.kind}: {outcome.verdict} ({outcome.reason})"

    def _lighthouse_is_silent(self, now_s: float) -> bool:
        """True when the lighthouse was silent for takeover_s / 2: others may soon continue without this group, and lack this commit."""
        return self._takeover_s is not None and now_s - self._answered_at_s > self._takeover_s / 2

    # ---- notices

    def _on_notice(self, notice: Notice) -> None:
        current = self.quorum.quorum_id if self.quorum else 0
        if notice.quorum_id != current:
            self.reason = f"a notice for quorum {notice.quorum_id}; this group is in {current}"
            if notice.quorum_id > current:  # it may have arrived before the answer with that quorum
                self._early = [n for n in self._early if n.quorum_id == notice.quorum_id and n != notice] + [notice]
                self._overtaken(notice.quorum_id)
            return
        if isinstance(notice, m.GenerationAborted):
            self._fail_pending_commit(f"the generation ended before the commit: {notice.reason}")
        self._notify_ranks(notice)
        self.reason = f"{type(notice).__name__} in quorum {current}"

    def _overtaken(self, quorum_id: int) -> None:
        """Ends the ranks' waits on the current quorum if a newer one was formed."""
        if self.quorum and quorum_id > self.quorum.quorum_id:
            self._notify_ranks(m.GenerationAborted(self.quorum.quorum_id, f"quorum {quorum_id} was formed"))

    def _notify_ranks(self, notice: Notice, except_ranks: Collection[int] = ()) -> None:
        """Sends each notice once; a rank whose stream opens later gets it then."""
        if notice not in self._notices:
            self._notices.append(notice)
            self._out += [m.NotifyRank(rank, notice) for rank in sorted(self._streams.difference(except_ranks))]

    # ---- waits

    def waits(self, now_s: float) -> tuple[str, float] | None:
        """Returns the reason and the start of this group's wait for others; None if it waits for none, or for a rank of its own."""
        if self._pending_commit:
            return f"the commit waits: {self._last_answer(now_s)}", self._pending_since_s
        if self._calling and self._asks_since_s is not None:
            is_silent = now_s - self._answered_at_s > self.config.times.heartbeat_timeout_s or not self._lighthouse_says
            says = [self._last_answer(now_s)] * is_silent + [self._lighthouse_says] * bool(self._lighthouse_says)
            return f"no quorum: {'; before that: '.join(says)}", self._asks_since_s
        if self._sums_since_s is not None and now_s - self._sums_since_s <= self.config.times.collective_s:
            return "other groups, in the all-reduce of a step", self._sums_since_s
        return None

    def _last_answer(self, now_s: float) -> str:
        return f"the lighthouse last answered {now_s - self._answered_at_s:.0f} s ago"

    def _release_ranks(self) -> None:
        self._answer_ranks(m.Released())
        self.reason = "asked to leave while it waited: all ranks are released"

    def _on_tick(self, now_s: float) -> None:
        """Ends the group if a rank keeps the others waiting for stall_s: it hangs, or died before it opened its stream. Reports waits."""
        gap_s, self._last_tick_s = now_s - self._last_tick_s, now_s
        if self._joining_since_s is not None and gap_s > self.config.times.heartbeat_timeout_s / 2:
            self._joining_since_s += gap_s  # this process was stopped, or the host asleep, and the ranks with it
        stall_s, joining_s = self.config.times.stall_s, self._joining_since_s
        if joining_s is not None and self._calling is None and now_s - joining_s >= stall_s:
            self._joining_since_s = None
            if self.waiting:  # else all that waited have given up
                self._end(f"ranks {self.absent} have not requested a quorum within {stall_s:g} s of the others")
        if waits := self.waits(now_s):
            (reason, since_s), beat_s = waits, self.config.times.beat_s
            if now_s - self._told_waits_s >= min(beat_s, WAITS_EVERY_S):
                self._told_waits_s = now_s
                self._out.append(m.Waits(reason, now_s - since_s))
            if self._wants_to_leave and not self._released and now_s - since_s >= LEAVE_BEATS * beat_s:
                # The wait ends: all ranks request a quorum, and are released with the same state.
                self._released, why = True, "this group was asked to leave while it waited"
                if self._pending_commit:
                    self._fail_pending_commit(why)
                elif self._calling:
                    self._release_ranks()
                elif self.quorum:
                    self._notify_ranks(m.GenerationAborted(self.quorum.quorum_id, why))

    def _end(self, why: str) -> None:
        self._fail_waiting("FAILED_PRECONDITION", why)
        self._out.append(m.EndGroup(why))


# ---- the QuorumResult of each rank: pure functions of the quorum, so that all groups get consistent plans


def recover_src_replica_ranks(quorum: Quorum) -> dict[int, tuple[int, ...]]:
    """Returns the replica rank of each group that must heal, with those of its sources: at most two, assigned round-robin. A member heals
    if its state is not the reference state, even at an equal or higher step. At step 0 with init_sync, initial states differ although they
    have the same (empty) commit_id: then all but the first reference member heal."""
    holders, members = quorum.holders, quorum.members
    if quorum.reference[0] == 0 and any(x.init_sync for x in members):
        holders = holders[:1]
    free = [rank for rank in holders if not members[rank].writes_checkpoint] or holders  # the writer is busy enough
    healing = sorted(set(range(len(members))).difference(holders))
    return {
        rank: tuple(free[(place + offset) % len(free)] for offset in range(min(2, len(free))))
        for place, rank in enumerate(healing)
    }


def plan(
    quorum: Quorum,
    replica_id: str,
    group_rank: int,
    *,
    max_active_groups: int | None = None,
    same_generation: bool = False,
) -> QuorumResult:
    """Returns the QuorumResult of one rank of a Pharos member. `max_active_groups`: most groups that are assigned slots; the others are
    spares, which contribute zeros. Only store_address (to spread the load) and `handles` depend on group_rank, so all ranks of a group heal
    from the same groups, or none does."""
    me, members = quorum.ids.index(replica_id), quorum.members
    holders = [members[rank] for rank in quorum.holders]
    sources_of = recover_src_replica_ranks(quorum)
    return QuorumResult(
        quorum_id=quorum.quorum_id,
        epoch=quorum.epoch,
        replica_id=replica_id,
        replica_rank=me,
        members=quorum.ids,
        store_address=holders[(group_rank + quorum.quorum_id) % len(holders)].store_address,
        reference=quorum.reference,
        heal=me in sources_of,
        sources=tuple(Source(rank, members[rank].address) for rank in sources_of.get(me, ())),
        recover_dst_replica_ranks=tuple(rank for rank, from_ranks in sources_of.items() if me in from_ranks),
        participants=tuple(id for rank, id in enumerate(quorum.ids) if rank not in sources_of)[:max_active_groups],
        assigned=holders[0].assigned if len({x.assignment_id for x in holders}) == 1 else 0,
        same_generation=same_generation,
        handles=tuple(
            x.reconfigure_handles[group_rank] if len(x.reconfigure_handles) == x.world_size > group_rank else ""
            for x in members
        ),
    )
