"""The pass rule of the drill: what must hold of a job that was harmed, each with its figure, and how long a fault may hold the others up.

Flow: drill.py hands over the diaries and the incidents when the job has ended. Pure, but for the run's files.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.drill_faults import PAIRS, QUIET_S, Incident
from bench.job import Diary, DiaryLine, gaps, longest_gap, rows
from ft.config import FaultTolerance
from scripts import samples

LOSS_NATS = 0.02  # from the twin, at most
EVENTS = ("start", "commit", "refused", "healed", "restored")


@dataclass(frozen=True)
class Verdict:
    name: str
    holds: bool
    words: str

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'NO '}  {self.name}: {self.words}"


Diaries = Mapping[str, Diary]
Trained = Mapping[int, set[str]]  # step -> the groups whose gradients are in it


def judge(run: Path, diaries: Diaries, incidents: Sequence[Incident], settings: FaultTolerance) -> list[Verdict]:
    """Verdicts that must hold for any job that was harmed."""
    rows = samples.read(run / samples.FILE_NAME)
    trained = {row.step: {owner.partition(":")[0] for owner in row.slots.values()} for row in rows}
    history = [survivors_went_on(diaries, incidents, trained), bitwise_equal(diaries, incidents)]
    return [*history, ledger_exact(run), in_time(diaries, incidents, settings)]


def survivors_went_on(diaries: Diaries, incidents: Sequence[Incident], trained: Trained) -> Verdict:
    """No survivor of a fault died, threw a step away, passed over one, or came to a halt. A collective may end in one survivor and break in
    another: this one then has the step from that one, with its own gradients in it, and nothing is lost."""
    problems, steps, taken = list[str](), list[int](), 0
    for incident in incidents:
        for name in sorted(incident.survivors):
            found = list(_lost(diaries[name], incident, trained))
            taken += found.count("")
            problems += [f"{incident.kind}: group {name} {what}" for what in found if what]
            steps.append(len(diaries[name].since(incident.at_s, "commit", to_s=incident.back_s)))
    words = f"{len(problems)} problems in {len(steps)} cases; {taken} steps from a survivor that had all sums; "
    words += f"at least {min(steps, default=0)} steps while a fault lasted and healed"
    return Verdict("survivors went on, 0 steps lost", not problems, "; ".join([words, *problems[:10]]))


def _lost(diary: Diary, incident: Incident, trained: Trained) -> Iterator[str]:
    """Lost steps in words; "" for a step that a survivor has from another group, with its own gradients."""
    lines = diary.since(incident.at_s, *EVENTS, to_s=incident.back_s)
    before = [line.step for line in diary.since(0.0, "commit") if line.at_s < incident.at_s]
    step = before[-1] if before else 0  # not the highest: when all had died, they went back to a checkpoint
    for line in lines:
        if line.event == "healed" and line.step == step + 1 and diary.name in trained.get(line.step, ()):
            yield ""
        elif line.event != "commit":
            yield f"{line.event} at step {line.step}, after {step}"
        elif line.step != step + 1:
            yield f"has no step between {step} and {line.step}"
        step = line.step
    if not any(line.event == "commit" for line in lines):
        yield "has committed nothing since"


def next_commit_s(diaries: Diaries, incident: Incident) -> float:
    """Seconds from the fault to the job's next commit: of a survivor, if there is one."""
    who, since_s = incident.survivors, incident.at_s
    if not who:
        who = incident.hit
        since_s = min(diaries[name].since(since_s, "start")[0].at_s for name in who)
    return min(diaries[name].since(since_s, "commit")[0].at_s for name in who) - incident.at_s


def longest_gap_s(diaries: Diaries, incident: Incident) -> float:
    """Seconds of the longest gap between two commits of a survivor, from the fault until all were back."""
    return longest_gap([diaries[n] for n in incident.survivors or incident.hit], incident.at_s, incident.back_s)


def bitwise_equal(diaries: Diaries, incidents: Sequence[Incident]) -> Verdict:
    """Checks that each rank has the same commit, the same weights; and of each step one commit that anybody went on from, until all state
    was lost."""
    problems, weights, compared = list[str](), dict[tuple[int, int, str], str](), 0
    gone_on: dict[tuple[int, int, int], str] = {}  # era, rank, step
    for name, diary in diaries.items():
        for rank in range(len(diary.ranks)):
            lines, eras = _trusted(diary, rank, incidents), _eras(diary, rank, incidents)
            for line in lines:
                compared += (state := (rank, line.step, line.commit_id)) in weights
                if weights.setdefault(state, line.digest) != line.digest:
                    problems.append(f"group {name}, rank {rank}, step {line.step}: other weights")
            for line, after in pairwise(lines):
                era = bisect(eras, line.at_s)
                went_on = after.step == line.step + 1 and after.pid == line.pid
                if went_on and gone_on.setdefault((era, rank, line.step), line.commit_id) != line.commit_id:
                    problems.append(f"group {name}, rank {rank} went on from another commit of step {line.step}")
    least = min((_steps_of_all(diaries, incident) for incident in incidents), default=0)
    if incidents and least == 0:
        problems.append("after a fault no step was everybody's")
    words = f"{compared} digests beside another group's, {len(problems)} problems; {least} or more steps of all groups after each fault"
    return Verdict("replicas bitwise equal", compared > 0 and not problems, "; ".join([words, *problems[:10]]))


def _eras(diary: Diary, rank: int, incidents: Sequence[Incident]) -> list[float]:
    """Times at which new histories began for this group: with its first life after all had been killed. Until it dies it goes on in the
    old one, however long that takes on a busy machine."""
    starts = (diary.since(incident.at_s, "start", rank=rank) for incident in incidents if incident.kind == "all")
    return [lives[0].at_s for lives in starts if lives]


def _trusted(diary: Diary, rank: int, incidents: Sequence[Incident]) -> list[DiaryLine]:
    """Commits of this group, but for those between a bit that was flipped on purpose and the heal or new life that mends it."""
    commits = diary.since(0.0, "commit", rank=rank)
    for incident in incidents:
        if incident.kind == "corrupt" and diary.name in incident.hit:
            flipped_s = max((line.at_s for line in commits if line.at_s < incident.at_s), default=0.0)  # told after it
            mended_s = diary.since(incident.at_s, "healed", "start", rank=rank)[0].at_s
            commits = [line for line in commits if not flipped_s <= line.at_s < mended_s]
    return commits


def _steps_of_all(diaries: Diaries, incident: Incident) -> int:
    """Number of steps that all live groups have in common until `back_s`, with equal weights, on the rank that has fewest."""
    seen: dict[tuple[int, int, str, str], set[str]] = defaultdict(set)
    ranks = range(len(next(iter(diaries.values())).ranks))
    for name in incident.live:
        for rank in ranks:
            for line in diaries[name].since(incident.at_s, "commit", rank=rank, to_s=incident.back_s):
                seen[rank, line.step, line.commit_id, line.digest].add(name)
    whole = [rank for (rank, *_), names in seen.items() if names == incident.live]
    return min(whole.count(rank) for rank in ranks)


def ledger_exact(run: Path) -> Verdict:
    """Checks that every sample below the highest was trained on once, but for the holes of the last step."""
    found = samples.prove(samples.read(run / samples.FILE_NAME))
    words = f"{found.sequences:,} sequences in {found.steps} steps; missing {samples.listed(found.missing) or 'none'}, "
    words += f"doubled {samples.listed(found.doubled) or 'none'}, open {samples.listed(found.open) or 'none'}"
    return Verdict("ledger exact", found.exact, "; ".join([words, *found.wrong[:10]]))


def figures_complete(run: Path) -> Verdict:
    """No step between the first and the last that the journal tells of is missing in it, and none is there twice."""
    steps = [int(row["step"]) for row in rows(run) if "loss" in row]
    problems = [f"{after} follows {before}" for before, after in pairwise(steps) if after - before != 1]
    words = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"
    return Verdict("figures complete", bool(steps) and not problems, "; ".join([words, *problems[:10]]))


def looks(run: Path) -> list[tuple[float, float]]:
    """Validations of a run: (tokens trained on, loss on held-out text in nats per token)."""
    tokens, found = 0.0, []
    for row in rows(run):
        tokens = row.get("tokens", tokens)
        if "validation_loss" in row:
            found.append((tokens, row["validation_loss"]))
    return found


def steps_for(run: Path, tokens: float, slots: int) -> int:
    """Steps after which a run with so many slots a step has seen as many tokens, by the tokens of the other run's sequences."""
    trained = samples.read(run / samples.FILE_NAME)
    seen = max(row.get("tokens", 0.0) for row in rows(run))
    a_sequence = seen / samples.prove(trained).sequences
    return math.ceil(tokens / (a_sequence * trained[-1].slot_size * slots))


AS_GOOD = f"validation loss within {LOSS_NATS} nats of the twin's"


def loss_of_twin(run: Path, twin: Path) -> Verdict:
    """The last look of the run beside the twin's after as many tokens: on the line between the looks before and after."""
    name, (tokens, loss) = AS_GOOD, looks(run)[-1]
    there = looks(twin)
    for (few, before), (many, after) in pairwise(there):
        if few <= tokens <= many:
            other = before + (after - before) * (tokens - few) / (many - few)
            words = f"{loss:.4f} after {tokens:,.0f} tokens, {other:.4f} without faults: {loss - other:+.4f}"
            return Verdict(name, abs(loss - other) <= LOSS_NATS, words)
    return Verdict(name, False, f"the twin has no looks around {tokens:,.0f} tokens, from {there[0]} to {there[-1]}")


SLACK_S = 5.0  # to come together, once it is known what to do
BACK_S = 60.0  # after a cable is whole again
STEADY_STEPS = 20
HUNG_LEAST_S, HUNG_ALONE_S = 10.0, 60.0  # that a majority, or any group, waits at least for one that hangs
HUNG_MEDIANS = 5
Figure = tuple[str, float, float]  # words, what it is, what it may be at most


def in_time(diaries: Diaries, incidents: Sequence[Incident], settings: FaultTolerance) -> Verdict:
    """Checks that every fault kept its bound, where it has one."""
    told, missed = list[str](), list[str]()
    for incident in incidents:
        bound = BOUNDS.get(incident.kind, lambda *_: ())
        for words, is_, at_most in bound(diaries, incident, settings):
            said = f"{incident.kind}: {words} {is_:.2f}, at most {at_most:.2f}"
            (told if is_ <= at_most else missed).append(said)
    words = "; ".join([*(f"NOT {miss}" for miss in missed), *told]) or "no fault that has a bound"
    return Verdict("in time", not missed, words)


def steady_s(diaries: Diaries, incident: Incident) -> float:
    """Seconds of a step of the survivors before the fault."""
    before = ([x for x in diaries[n].since(0.0, "commit") if x.at_s < incident.at_s] for n in incident.survivors)
    found = [gap for commits in before for gap in gaps(commits[-STEADY_STEPS:])]
    return median(found) if found else math.nan


def _next_s(diaries: Diaries, incident: Incident, since_s: float) -> float:
    """Seconds until the first commit of a survivor after that; inf: there is none."""
    commits = [line.at_s for name in incident.survivors for line in diaries[name].since(since_s, "commit")[:1]]
    return min(commits, default=math.inf) - since_s


def _hang(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    least_s = HUNG_LEAST_S if 2 * (len(incident.live) - 1) > len(incident.live) else HUNG_ALONE_S
    limit_s = max(least_s, HUNG_MEDIANS * steady_s(diaries, incident))
    yield "seconds without a step", longest_gap_s(diaries, incident), limit_s + SLACK_S


def _pair(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    mended_s, limit_s = incident.repaired_s, settings.heartbeat_timeout_s + settings.rendezvous_s + SLACK_S
    commits = sorted(line.at_s for diary in diaries.values() for line in diary.since(0.0, "commit"))
    while_s = [at_s for at_s in commits if incident.at_s <= at_s <= mended_s]
    before_s = [at_s for at_s in commits if at_s < incident.at_s][-1:]
    waits = [after - before for before, after in pairwise([*before_s, *while_s, mended_s])]
    yield "seconds without a step of anybody", max(waits), limit_s
    quiet = [name for name in incident.live if not diaries[name].since(mended_s - QUIET_S, "commit", to_s=mended_s)]
    yield "groups that sit out", len(quiet), 1
    yield "seconds from the repair until all are together", incident.back_s - mended_s, BACK_S


def _away(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Without a limit after which others may take the job over, nobody needs the lighthouse to commit: no step waits for it. A look at
    held-out text and a save are among the steps."""
    if settings.takeover_s == 0:
        limit_s = 2 * steady_s(diaries, incident) + SLACK_S
        yield "seconds without a step", longest_gap_s(diaries, incident), limit_s
    else:
        yield "seconds from its return to the next step", _next_s(diaries, incident, incident.repaired_s), 2 * SLACK_S


def _capacity(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    starts = sorted(x.at_s for name in incident.hit for x in diaries[name].since(incident.repaired_s, "start")[:1])
    enough = starts[settings.min_replica_size - 2]  # the survivor, and as many of these
    yield "seconds from the start of who was missing", _next_s(diaries, incident, enough), SLACK_S


def _joiner(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Its first death is that of a member; the bound is for those that follow."""
    [name] = incident.hit
    first_s = diaries[name].since(incident.at_s, "start")[0].at_s
    longest_s = longest_gap([diaries[other] for other in incident.survivors], first_s, incident.back_s)
    yield "seconds of the longest step", longest_s, 2 * steady_s(diaries, incident) + 1


BOUNDS: dict[str, Callable[[Diaries, Incident, FaultTolerance], Iterator[Figure]]] = {
    "hang": _hang,
    **dict.fromkeys(PAIRS, _pair),
    "lighthouse away": _away,
    "capacity": _capacity,
    "joiner": _joiner,
}
