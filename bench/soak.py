"""Makes thousands of membership changes in one job, and checks that no resource grows except the logs (LOGS).

    python bench/soak.py [--write docs/soak.md]      in outputs/soak; a repeated call continues

Three replica groups (a, b, c) train a tiny model over gloo, each in a process; those of a and b are never restarted. Events that form a new
quorum alternate: an operator evicts a or b, which rejoin; b leaves and joins; connections of a, b or c are cut; c gets SIGKILL and is
replaced by a fork of a process that has imported torch. After each event the program waits until all three have committed together. Every
new quorum counts as a change. Healing, changes of the writer, metrics and checkpoints are those of train.py.

Every SAMPLE changes the resources of the processes are counted. Exit code: 0 if after the first tenth counts are constant, memory grows by
less than a KB per change, files grow only by their rows, no group has failed, all groups have the same state, and metrics have each step
once. It may be interrupted and continues in the next call: counts are kept, and the bounds apply to each run of the program ("life").
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import FORKED_S, Forked, memory_bytes, obey, until
from bench.pairs import markdown, parser, renew

CHANGES, KILLS = 10_000, 250  # KILLS: of c, spread over all changes; each causes two or more
KINDS = {"cut": 20, "evict": 3, "leave": 1}  # relative frequencies of the other events
PRELOAD = ("ft.manager", "ft.process_groups.gloo", "training.checkpoint")
SAMPLE = 100  # changes between counts
SETTLE_S = 0.5  # before a count, for connections to be closed by the other end
ENDS = ("ft-gloo-", "ft-reaper")  # threads of process groups that have been shut down
SUM_S = 6.0  # timeout of an all-reduce, and lifetime of a thread that gloo leaves behind
# Of the C library and of torch, for all processes. Threads fragment malloc arenas, of which there may be 16. The flight recorder
# (comm.trace_buf_size of train.py) keeps the status of every process group.
SETTINGS = {"MALLOC_ARENA_MAX": "2", "TORCH_FR_BUFFER_SIZE": "0"}
LOGS = ("metrics.jsonl", "samples.jsonl", "soak.jsonl")  # grow by a row per step or count
FLAT = 2  # allowed difference between counts: a call in progress, a new connection
KB_PER_CHANGE = 1.0
LEAST = 8  # minimum number of counts of a life for a verdict


def lighthouse_process(folder: Path, talk: Any) -> None:
    """Runs in the process of the lighthouse."""
    from ft.compat.lighthouse import LighthouseServer

    lighthouse = LighthouseServer("127.0.0.1:0", 1, state=folder / "lighthouse.json")
    talk.send(lighthouse.address())
    obey(talk, {"look": held})


def group_process(name: str, lighthouse: str, folder: Path, talk: Any) -> None:
    """Runs a replica group in a thread of its process. Imports torch here, since the main process does not need it."""
    import torch
    from torch import nn

    from ft.healing.transport import HealConfig  # noqa: F401 (imported before the first count)
    from ft.manager import Manager, ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.process_groups import sockets
    from ft.process_groups.gloo import ProcessGroupGloo
    from ft.protocol import messages as m
    from ft.rpc.access import Access
    from ft.rpc.clients import channel
    from ft.rpc.generated import pharos_pb2
    from training.background_writer import BackgroundWriter
    from training.checkpoint import Checkpointer
    from training.checkpoint_config import CheckpointConfig
    from training.log import Log
    from training.metrics_writer import MetricsWriter
    from training.sinks import Sinks
    from training.states import ModelState
    from training.writer_lease import WriterLease

    torch.set_num_threads(1)
    model: Any = nn.Linear(16, 16)

    class Group:
        """A replica group over all its incarnations, trained by a thread."""

        def __init__(self) -> None:
            self.problem = ""
            self.commits: dict[int, str] = {}  # step -> commit id, of recent steps
            self.manager: Manager
            self.there = threading.Event()
            threading.Thread(target=self._run, name=f"train-{name}", daemon=True).start()
            self.there.wait(FORKED_S)

        def where(self) -> dict[str, Any]:
            quorum, writes = self.manager.quorum, self.manager.writer_quorum is not None
            told: Any = {"step": self.manager.step, "quorum": quorum.quorum_id if quorum else 0, "size": self.size}
            told["phase"] = self.manager.machine.phase.value
            return {**told, "writes": writes, "commits": dict(self.commits), "problem": self.problem}

        def held(self) -> dict[str, int]:
            """Counts the resources of the group's server, and the keys of its store."""
            mine = self.manager.membership
            if not mine.server or not mine.rendezvous_store:
                return {}
            return {**_of(mine.server.pid), "store keys": mine.rendezvous_store.num_keys()}

        def cut(self) -> int:
            """Breaks all connections to other groups, like a network failure. Returns how many."""
            generation = self.manager.process_group._generation
            engine: Any = generation and generation.engine
            return sockets.shutdown_matching(local=engine.local, remote=engine.remote) if engine else 0

        def _run(self) -> None:
            try:
                while True:
                    self._take_part()
            except BaseException as error:  # noqa: BLE001 (the main process reads it)
                self.problem = f"{type(error).__name__}: {error}"

        def _take_part(self) -> None:
            """Trains until the group leaves or is evicted."""
            with ExitStack() as cleanup:
                background_writer = cleanup.enter_context(closing(BackgroundWriter(lambda words: None)))
                relay = MetricsWriter(
                    folder,
                    lambda: manager.writer_quorum,
                    lambda first: Sinks(folder, kept_step=first),
                    background_writer,
                )
                cleanup.enter_context(closing(relay))
                config = ReplicaGroupConfig(name, 0, 1, lighthouse, "127.0.0.1", Access(), m.Timeouts())
                options = ManagerOptions(init_sync=False, dies_with_group=False)
                group = ProcessGroupGloo(SUM_S, rendezvous_s=m.Timeouts().rendezvous_s)
                manager = Manager(group, config, options, restore=lambda: checkpointer.load())
                states: dict[str, Any] = {"model": ModelState([model]), "ledger": manager, "figures": relay}
                manager.register_state("model", model.state_dict, self._heal)
                manager.register_state("figures", relay.state_dict, relay.load_state_dict)
                manager.attach([model])
                checkpoints = CheckpointConfig(interval=200, keep_latest_k=2)
                lease = WriterLease(folder, lambda: manager.writer_quorum)
                checkpointer = Checkpointer(checkpoints, folder, states, log=Log(global_rank=1), lease=lease)
                cleanup.enter_context(closing(checkpointer))
                cleanup.enter_context(closing(manager))
                self.manager, self.size = manager, 0
                self.there.set()
                self._train(manager, relay, checkpointer)

        def _train(self, manager: Manager, relay: MetricsWriter, checkpointer: Checkpointer) -> None:
            while not manager.may_exit:
                assignment = manager.begin_step()
                for slot in assignment.slots:
                    with manager.last_backward(slot):
                        ((model.weight.sum() + model.bias.sum()) * (slot % 1000)).backward()
                count = len(assignment.slots)
                commit = manager.commit(manager.reduce([1.0] * count, float(count), True))
                if commit is not None:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= parameter.grad * 1e-6
                    step, self.size = manager.step, commit.quorum_size
                    self.commits[step] = manager.commit_id
                    self.commits.pop(min(self.commits) if len(self.commits) > 64 else -1, None)
                    relay.write("metrics", step, {"loss": commit.mean_loss})
                    relay.write("samples", step, {"slots": [slot for slot, _ in commit.slots]})
                    if checkpointer.due(step):
                        checkpointer.save(step)
                model.zero_grad()

        def _heal(self, state: dict[str, Any]) -> None:
            """Loads the state, and drops the own last commit, which may differ from that of the other groups."""
            model.load_state_dict(state)
            self.commits.pop(max(self.commits, default=0), None)

    group = Group()
    operator = channel(lighthouse, Access(), aio=False).unary_unary("/pharos.Lighthouse/Evict")

    def evict() -> None:
        operator(pharos_pb2.Evict(replica_id=group.manager.replica_id).SerializeToString())

    orders = {"look": lambda: {"group": held(), "server": group.held()}, "leave": lambda: group.manager.leave()}
    obey(talk, {**orders, "where": group.where, "evict": evict, "cut": group.cut})


def held() -> dict[str, int]:
    """Counts the resources of this process, after threads that end by a timeout have ended."""
    until_s = time.monotonic() + 3 * SUM_S
    while any(thread.name.startswith(ENDS) for thread in threading.enumerate()) and time.monotonic() < until_s:
        time.sleep(0.1)
    time.sleep(SETTLE_S)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _of("self")


def _of(process: int | str) -> dict[str, int]:
    folder = Path("/proc", str(process))
    return {
        "descriptors": len(list(folder.glob("fd/*"))),
        "threads": len(list(folder.glob("task/*"))),
        "children": sum(len(path.read_text().split()) for path in folder.glob("task/*/children")),
        "KiB": memory_bytes("VmRSS", process) // 1024,
    }


@dataclass
class Done:
    """Totals so far, over all lives."""

    changes: int = 0
    seconds: float = 0.0
    lives: int = 0
    steps: int = 0
    writers: int = 0  # changes of the writer
    orders: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Done:
        return Done(**json.loads(path.read_text())) if path.exists() else Done()

    def write(self, path: Path) -> None:
        path.with_suffix(".new").write_text(json.dumps(asdict(self)))
        path.with_suffix(".new").replace(path)


class SoakJob:
    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, list[str]()
        self.lighthouse_process = Forked(PRELOAD, lighthouse_process, folder)
        self.lighthouse = self.lighthouse_process.hear()
        self.groups = {name: self.start(name) for name in "abc"}

    def start(self, name: str) -> Forked:
        return Forked(PRELOAD, group_process, name, self.lighthouse, self.folder)

    def where(self) -> dict[str, dict[str, Any]]:
        for one in self.groups.values():
            one.tell("where")
        found = {name: one.hear() for name, one in self.groups.items()}
        for name, group in found.items():
            if group["problem"]:
                raise RuntimeError(f"group {name} failed: {group['problem']}")
        return found

    def together(self, past: int) -> dict[str, dict[str, Any]]:
        """Waits until all groups have committed in one quorum after quorum `past`. Returns their states. Raises RuntimeError."""
        groups: dict[str, dict[str, Any]] = {}

        def holds() -> bool:
            groups.update(self.where())
            quorums = {group["quorum"] for group in groups.values()}
            return len(quorums) == 1 and min(quorums) > past and all(group["size"] == 3 for group in groups.values())

        def failure(what: str) -> RuntimeError:
            words = {name: {**group, "commits": len(group["commits"])} for name, group in groups.items()}
            return RuntimeError(f"{what}: {words}")

        until("together again", holds, FORKED_S, failure=failure, poll_s=0.02)
        return groups

    def compare(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Checks that the groups have the same commit of each step before the last common one."""
        last = min(group["step"] for group in groups.values())
        for step in set.intersection(*(set(group["commits"]) for group in groups.values())):
            ids = {group["commits"][step] for group in groups.values()}
            if len(ids) > 1 and step < last:
                self.problems.append(f"step {step} is not the same in all groups")

    def order(self, kind: str, dice: random.Random) -> None:
        if kind == "kill":
            self.groups["c"].kill()
            self.groups["c"] = self.start("c")
        else:
            name = dice.choice({"evict": "ab", "leave": "b", "cut": "abc"}[kind])
            while self.groups[name].ask(kind) == 0:  # nothing to cut, as a new quorum is forming
                time.sleep(0.02)

    def look(self) -> dict[str, int]:
        """Counts resources after a cut, so that threads of healing belong to incarnations that have ended."""
        for one in (self.lighthouse_process, self.groups["a"], self.groups["b"]):
            one.tell("look")
        found = {f"lighthouse: {what}": count for what, count in self.lighthouse_process.hear().items()}
        for name in "ab":
            heard = self.groups[name].hear()
            found |= {f"group {name}: {what}": count for what, count in heard["group"].items()}
            found |= {f"server of {name}: {what}": count for what, count in heard["server"].items()}
        found["shared memory: files"] = len(list(Path("/dev/shm").glob("*")))
        others = [path for path in self.folder.rglob("*") if path.is_file() and path.name not in LOGS]
        found["other files: KiB"] = sum(path.stat().st_size for path in others if path.exists()) // 1024
        found["other files: number"] = len(others)
        return found

    def close(self) -> None:
        for one in (*self.groups.values(), self.lighthouse_process):
            one.kill()


def soak(folder: Path, changes: int, kills: int, seed: int) -> list[str]:
    """Continues until there are `changes` changes in total. Returns descriptions of problems."""
    folder.mkdir(parents=True, exist_ok=True)
    done = Done.read(folder / "soak.json")
    done.lives += 1
    dice, began_s, before_s = random.Random(seed + done.lives), time.monotonic(), done.seconds
    job = SoakJob(folder)
    try:
        groups = job.together(0)
        quorum = first = groups["a"]["quorum"]
        looked, looks, before = done.changes, 0, ""
        while looked < changes:
            due = done.orders.get("kill", 0) < kills * (done.changes + 1) / changes
            looks_now = done.changes >= min(looked + SAMPLE, changes)
            kind = "cut" if looks_now else "kill" if due else dice.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                job.order(kind, dice)
                groups = job.together(quorum)
            except RuntimeError as error:
                return [*job.problems, f"after {done.changes} changes, the last of them {kind}: {error}"]
            job.compare(groups)
            now, writer = groups["a"]["quorum"], "".join(name for name, group in groups.items() if group["writes"])
            done.writers, before = done.writers + (writer != before), writer
            done.changes, quorum = done.changes + now - quorum, now
            done.orders[kind] = done.orders.get(kind, 0) + 1
            done.steps = max(group["step"] for group in groups.values())
            done.seconds = before_s + time.monotonic() - began_s
            done.write(folder / "soak.json")
            if looks_now:
                looked, looks = done.changes, looks + 1
                row = {"life": done.lives, "changes": done.changes, "here": now - first, "steps": done.steps}
                with (folder / "soak.jsonl").open("a") as file:
                    file.write(json.dumps(row | job.look()) + "\n")
                if looks % 10 == 0:
                    so_far = f"{done.changes} changes, {done.steps} steps, {done.seconds:.0f} s"
                    print(f"{so_far}: {done.orders}", flush=True)
        return job.problems
    finally:
        job.close()


class GrowthLine(NamedTuple):
    """The counts of one resource, and their bound."""

    what: str
    found: str
    bound: str
    holds: bool


def judge(rows: Sequence[Mapping[str, Any]]) -> list[GrowthLine]:
    """Compares the counts of one life without its first tenth: those of the last third with those of the first."""
    settled = rows[len(rows) // 10 :]
    third = max(1, len(settled) // 3)
    first, last = settled[:third], settled[-third:]

    def middle(part: Sequence[Mapping[str, Any]], what: str) -> float:
        found = [row[what] for row in part]
        # Keys of the current generation are in the store of one of its groups, which changes.
        return max(found) if what.endswith("store keys") else statistics.median(found)

    between = middle(last, "here") - middle(first, "here") or 1
    lines = []
    for what in rows[0]:
        if what in ("life", "changes", "here", "steps"):
            continue
        early, late = middle(first, what), middle(last, what)
        if what.endswith("KiB"):
            grown = (late - early) * 1.024 / between
            bound, holds = f"< {KB_PER_CHANGE:g} KB a change", grown < KB_PER_CHANGE
            lines.append(GrowthLine(what, f"{early:.0f} to {late:.0f}: {grown:+.3f} KB a change", bound, holds))
        else:
            lines.append(GrowthLine(what, f"{early:g} to {late:g}", f"at most {FLAT} more", late - early <= FLAT))
    return lines


def judge_logs(folder: Path) -> list[GrowthLine]:
    """Checks that each log has each step once, in order, and that rows do not grow by more than 20 bytes."""
    lines = []
    for name in LOGS[:2]:
        rows = (folder / name).read_bytes().splitlines(keepends=True)
        steps = [json.loads(row)["step"] for row in rows]
        once = steps == list(range(steps[0], steps[-1] + 1)) if steps else False
        lines.append(GrowthLine(f"{name}: steps", f"{len(steps)} rows", "each step once, in order", once))
        tenth = max(1, len(rows) // 10)
        early, late = (sum(map(len, part)) / len(part) for part in (rows[:tenth], rows[-tenth:]))
        grown = f"{early:.0f} to {late:.0f}"
        lines.append(GrowthLine(f"{name}: bytes a row", grown, "at most 20 more", late - early <= 20))
    return lines


def verdict(folder: Path) -> list[GrowthLine]:
    """Checks the life with the most counts, and the logs."""
    path = folder / "soak.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    longest, looks = next(iter(Counter(row["life"] for row in rows).most_common(1)), (0, 0))
    lines = judge([row for row in rows if row["life"] == longest]) if looks >= LEAST else []
    return [*lines, *judge_logs(folder)]


def report(done: Done, lines: Sequence[GrowthLine], problems: Sequence[str], target: int) -> str:
    orders = ", ".join(f"{count} {kind}" for kind, count in sorted(done.orders.items()))
    rows = [(it.what, it.found, it.bound, "yes" if it.holds else "NO") for it in lines]
    return f"""{done.changes} of {target} changes in {done.seconds:.0f} s and {done.lives} run(s) of the program; {done.steps} steps;
the writer changed {done.writers} times; events: {orders}.

What went wrong: {"; ".join(problems) if problems else "nothing"}.

{markdown(("what", "found", "bound", "holds"), rows)}"""


def main() -> int:
    write = parser((__doc__ or "").partition("\n")[0], write=(Path, "page to update")).parse_args().write
    os.environ.update(SETTINGS)
    folder = Path("outputs/soak")
    problems = soak(folder, CHANGES, KILLS, 1)
    lines = verdict(folder)
    text = report(Done.read(folder / "soak.json"), lines, problems, CHANGES)
    print(text)
    if write:
        settings = " and ".join(f"`{name}={value}`" for name, value in SETTINGS.items())
        renew(write, "The last soak", f"`make soak`, all processes with {settings}", text)
    return 0 if not problems and all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
