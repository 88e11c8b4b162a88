"""The pass rule of the drill: what must hold of a job that was harmed, each with its figure.

Flow: drill.py hands over the diaries and the incidents when the job has ended. Pure, but for the run's files.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.drill_diary import Diary, DiaryLine
from bench.drill_faults import Incident
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


# ------------------------------------------------------------------------------------------------ survivors


Trained = Mapping[int, set[str]]  # step -> the groups whose gradients are in it


def survivors_went_on(diaries: Mapping[str, Diary], incidents: Sequence[Incident], trained: Trained) -> Verdict:
    """No survivor of a fault died, threw a step away, passed over one, or came to a halt. A collective may end in one survivor and break in
    another: this one then has the step from that one, with its own gradients in it, and nothing is lost."""
    problems, steps, taken = list[str](), list[int](), 0
    for incident in incidents:
        for name in sorted(incident.survivors):
            found = list(_lost(diaries[name], incident, trained))
            taken += found.count("")
            problems += [f"{incident.kind}: group {name} {what}" for what in found if what]
            steps.append(len(_commits(diaries[name], incident)))
    words = f"{len(problems)} problems in {len(steps)} cases; {taken} steps from a survivor that had all sums; "
    words += f"at least {min(steps, default=0)} steps while a fault lasted and healed"
    return Verdict("survivors went on, 0 steps lost", not problems, "; ".join([words, *problems[:10]]))


def _lost(diary: Diary, incident: Incident, trained: Trained) -> Iterator[str]:
    """In words; empty ones for a step that it has from another, with its own gradients."""
    lines = [line for line in diary.since(incident.at_s, *EVENTS) if line.at_s <= incident.back_s]
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


def trained_by(run: Path) -> Trained:
    return {
        row.step: {owner.partition(":")[0] for owner in row.slots.values()}
        for row in samples.read(run / samples.FILE_NAME)
    }


def _commits(diary: Diary, incident: Incident) -> list[DiaryLine]:
    return [line for line in diary.since(incident.at_s, "commit") if line.at_s <= incident.back_s]


def next_commit_s(diaries: Mapping[str, Diary], incident: Incident) -> float:
    """From the fault to the job's next commit: of a survivor, if there is one."""
    who = incident.survivors or incident.hit
    since_s = (
        incident.at_s if incident.survivors else min(diaries[n].since(incident.at_s, "start")[0].at_s for n in who)
    )
    return min(diaries[name].since(since_s, "commit")[0].at_s for name in who) - incident.at_s


def longest_gap_s(diaries: Mapping[str, Diary], incident: Incident) -> float:
    """Between two commits of a survivor that follow each other, from the fault until all were back."""
    who = incident.survivors or incident.hit
    gaps = [
        after.at_s - before.at_s
        for name in who
        for before, after in pairwise(diaries[name].since(0.0, "commit"))
        if incident.at_s <= after.at_s <= incident.back_s
    ]
    return max(gaps, default=float("nan"))


# ------------------------------------------------------------------------------------------------ weights


def bitwise_equal(diaries: Mapping[str, Diary], incidents: Sequence[Incident]) -> Verdict:
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
    """When each new history began for it: with its first life after all had been killed. Until it dies it goes on in the old one, however
    long that takes on a busy machine."""
    starts = (diary.since(incident.at_s, "start", rank=rank) for incident in incidents if incident.kind == "all")
    return [lives[0].at_s for lives in starts if lives]


def _trusted(diary: Diary, rank: int, incidents: Sequence[Incident]) -> list[DiaryLine]:
    """Its commits, but for those between a bit that was flipped on purpose and the heal or new life that mends it."""
    commits = diary.since(0.0, "commit", rank=rank)
    for incident in incidents:
        if incident.kind == "corrupt" and diary.name in incident.hit:
            flipped_s = max((line.at_s for line in commits if line.at_s < incident.at_s), default=0.0)  # told after it
            mended_s = diary.since(incident.at_s, "healed", "start", rank=rank)[0].at_s
            commits = [line for line in commits if not flipped_s <= line.at_s < mended_s]
    return commits


def _steps_of_all(diaries: Mapping[str, Diary], incident: Incident) -> int:
    """How many steps all groups that were to be there have in common, with equal weights on the rank that has fewest, until `back_s`."""
    seen: dict[tuple[int, int, str, str], set[str]] = defaultdict(set)
    ranks = range(len(next(iter(diaries.values())).ranks))
    for name in incident.live:
        for rank in ranks:
            for line in diaries[name].since(incident.at_s, "commit", rank=rank):
                if line.at_s <= incident.back_s:
                    seen[rank, line.step, line.commit_id, line.digest].add(name)
    whole = [rank for (rank, *_), names in seen.items() if names == incident.live]
    return min(whole.count(rank) for rank in ranks)


# ------------------------------------------------------------------------------------------------ data and loss


def ledger_exact(run: Path) -> Verdict:
    """Every sample below the highest was trained on once, but for the holes of the last step."""
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


def rows(run: Path) -> list[dict[str, float]]:
    """Reads the rows of metrics.jsonl; a line that is not whole yet, or never will be, is none."""
    journal = run / "metrics.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def looks(run: Path) -> list[tuple[float, float]]:
    """(tokens trained on, loss on held-out text), nats per token."""
    tokens, found = 0.0, []
    for row in rows(run):
        tokens = row.get("tokens", tokens)
        if "validation_loss" in row:
            found.append((tokens, row["validation_loss"]))
    return found


def steps_for(run: Path, tokens: float, slots: int) -> int:
    """After which a run whose steps have so many slots has seen as many tokens, by what a sequence of the other run has."""
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
