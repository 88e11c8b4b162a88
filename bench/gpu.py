"""Runs measurements that require a GPU, in three parts of at most ten minutes each, without a network.

    python bench/gpu.py --part 1|2|3 [--minutes 9.5] [--only PATTERN] [--again] [--write docs/gpu.md]
    python bench/gpu.py --part 1 --device cpu --sizes tiny --write FILE      the same code without a GPU

Part 1: versions; tests/gpu with and without expandable segments; 15 steps of train.py and its exit, eager and compiled. Part 2: tokens per
second, MFU and peak memory of Llama 1B and 8B, alternating with other frameworks. Part 3: two replica groups on one GPU (NCCL_HOSTID makes
NCCL take them for two machines), killed inside all-reduces; steady steps; healing; the stall of a checkpoint.

A part is a list of turns, each a process with a time limit. The result of a turn is appended to outputs/gpu/<device>-<sizes>/results.jsonl
at once, and the page is rewritten; the next call runs the missing turns (--again: also those that failed). A framework that is not
installed has a row with the reason.

Workers are processes of this file: `--worker versions|kill|healing|stall JSON`, which answers with JSON, and `--worker train ARGUMENTS`,
which runs train.py with weights initialized on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import date
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.job import ROOT, EventLine, JobSide, LighthouseProcess, RecoveryJob, ReplicaGroup, our_lighthouse
from bench.pairs import Failed, Worker, in_turns, parser, ratio, table
from bench.step import draw_on_device, our_model, start

WORKER = (__file__, "--worker")
KILL_STEPS, KILL_LIMIT_S = 6, 100.0  # steps of both groups before the kill; timeout of an event
SIZES = {
    "8b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256, "batch": 1, "seq": 8192},
    "1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocab": 128256, "batch": 2, "seq": 8192},
    "tiny": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 192, "vocab": 512, "batch": 1, "seq": 64},
}  # fmt: skip
# bf16 for weights and optimizer state, too, so that 8B fits for every framework. The bounds compare BEST, in PAIRS rounds; for 1B both
# processes run through all rounds. For 8B, and for MORE_SIDES, each turn has its own process.
BEST = {"pharos": "bf16 weights chunked=8192 compile", "torchtitan": "bf16 weights compile"}
MORE_SIDES = {
    "1b": (
        ("pharos", "bf16 weights checkpoint chunked=8192 compile"),
        ("torchtitan", "bf16 weights checkpoint compile"),
        ("pharos", "bf16 chunked=8192 compile"),
        ("torchtitan", "bf16 autocast compile"),
        ("pharos", "bf16 weights chunked=8192"),
        ("transformers", "bf16 weights"),
    ),
    "8b": (("pharos", "bf16 weights chunked=2048 compile"), ("pharos", "bf16 weights chunked=8192 compile float8")),
}
MORE_SIDES["tiny"], PAIRS = MORE_SIDES["1b"], {"1b": 5, "8b": 3, "tiny": 1}
# Of torch.compile. On a CPU, inductor's C++ compilation takes 40 s more, and is not comparable with a GPU's
BACKENDS = {"cuda": "inductor", "cpu": "aot_eager"}
MODEL = {  # keys of [model] -> keys of SIZES
    "vocab_size": "vocab", "dim": "dim", "n_layers": "layers", "n_heads": "heads", "n_kv_heads": "kv_heads", "hidden_dim": "hidden"
}  # fmt: skip
ON_A_CPU = (
    " compile=aot_eager: torch.compile traces and differentiates as on a GPU, and eager kernels run the graphs. gloo replaces "
    "NCCL. Turns that a CPU cannot run are listed at the end."
)
NOT_RUN = "not run"
Figures = dict[str, Any]  # by the columns of the page
Rows = Mapping[str, Figures]  # by key


class GpuTurn(NamedTuple):
    key: str  # name in the results
    limit_s: float
    do: Callable[[float], Figures]  # gets its limit; raises Failed


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench/gpu.py: needs a CUDA device (--device cpu --sizes tiny shows that it runs)", file=sys.stderr)
        return 2
    default = ROOT / "outputs" / "gpu" / f"{options.device}-{'-'.join(options.sizes)}"
    options.folder = (options.folder or default).resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    turns = {1: part_1, 2: part_2, 3: part_3}[options.part](options)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    with patch.dict(os.environ, env):
        whole = run(turns, options.folder / "results.jsonl", options)
    print("all turns of this part are done" if whole else "out of time: repeat the command to continue", flush=True)
    return 0


def run(turns: Iterator[GpuTurn], results: Path, options: argparse.Namespace) -> bool:
    """Runs the turns that `results` lacks within the time. Returns True if none is missing now."""
    until_s = time.monotonic() + 60 * options.minutes
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if options.write and rows:
        options.write.write_text(page(rows, options.device))
    taken = {row["key"] for row in rows if "failed" not in row or not options.again}
    for turn in turns:
        if turn.key in taken or not fnmatch(turn.key, options.only):
            continue
        left_s = until_s - time.monotonic()
        if left_s < turn.limit_s / 4:
            return False
        row, began_s = Figures(key=turn.key, day=str(date.today())), time.monotonic()
        try:
            row |= turn.do(min(turn.limit_s, left_s))
        except Failed as failure:
            if time.monotonic() > until_s and left_s < turn.limit_s:
                return False  # its limit was shortened
            row["failed"] = str(failure)[:300]
        row["took_s"] = round(time.monotonic() - began_s, 1)
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        if options.write:
            options.write.write_text(page(rows, options.device))
    return True


def part_1(options: argparse.Namespace) -> Iterator[GpuTurn]:
    yield GpuTurn("1 versions", 120, partial(_worker, "versions", {"device": options.device}))
    files = sorted(ROOT.glob("tests/gpu/test_*.py")) if options.device == "cuda" else [ROOT / "tests" / "gpu"]
    for expandable in ("True", "False"):
        how = f"expandable_segments:{expandable}"
        for file in files:  # one process per file: an illegal address ends only one of them
            yield GpuTurn(f"1 tests {file.stem} {how}", 240, partial(_tests, file, how))
    eager = ("--activation_checkpoint.mode=selective",)
    compiled = (*eager, "--compile.enable=true", f"--compile.backend={BACKENDS[options.device]}")
    trace = ("--profiling.enable_profiling=true", "--profiling.profile_freq=8")
    for name, limit_s, settings in (("eager", 240, eager), ("compiled", 300, (*compiled, *trace))):
        yield GpuTurn(f"1 train {options.sizes[0]} {name}", limit_s, partial(_train, options, name, settings, steps=15))


def _tests(path: Path, allocation: str, limit_s: float) -> Figures:
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", str(path)]
    code, text = _output(command, limit_s, PYTORCH_CUDA_ALLOC_CONF=allocation)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text[-500:])}
    bad = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if not counts and code not in (0, 5):
        raise Failed(_last_line(text, code))
    return {"passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0), "failures": " ".join(bad) or "none"}


def _train(
    options: argparse.Namespace, name: str, settings: Sequence[str], limit_s: float, *, steps: int,
    program: Sequence[str] = ("train.py",), **env: str,
) -> Figures:  # fmt: skip
    """Runs train.py to its exit, including the sample. Returns medians of the second half of its steps."""
    sizes, folder = SIZES[options.sizes[0]], options.folder / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable, *program, "configs/llama.toml", f"--job.dump_folder={folder}", f"--training.steps={steps}",
        *(f"--model.{ours}={sizes[here]}" for ours, here in MODEL.items()),
        f"--training.seq_len={sizes['seq']}", f"--training.local_batch_size={sizes['batch']}", "--lr_scheduler.warmup_steps=2",
        "--validation.enable=false", "--checkpoint.enable=false", "--metrics.enable_tensorboard=false", "--metrics.log_freq=1",
        "--sample.tokens=8", *settings,
    ]  # fmt: skip
    code, text = _output(command, limit_s, **env)
    if code:
        raise Failed(_last_line(text, code))
    [metrics] = folder.glob("**/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    later = rows[len(rows) // 2 :]
    figures: Figures = {
        "steps": rows[-1]["step"],
        "loss": round(rows[-1]["loss"], 3),
        "ms per step": round(1e3 * statistics.median(row["step_s"] for row in later), 2),
        "tokens/s": round(statistics.median(row["tokens_per_s"] for row in later)),
        "GiB": round(max(row["memory_gib"] for row in rows), 2),
    }
    if traces := list(folder.glob("**/rank-0.json.gz")):
        figures["trace"] = str(traces[-1].relative_to(options.folder))
    return figures


def part_2(options: argparse.Namespace) -> Iterator[GpuTurn]:
    backend = f" compile={BACKENDS['cpu']}" if options.device == "cpu" else " compile"
    compared = [(size, tuple(BEST.items()), PAIRS[size]) for size in options.sizes]
    for size, sides, rounds in [*compared, *((size, MORE_SIDES[size], 1) for size in options.sizes)]:
        with ExitStack() as cleanup:
            workers = dict[str, Worker]() if rounds == 5 else None  # two processes of 8B would not fit
            for round_ in range(rounds):
                for side, setting in sides[:: -1 if round_ % 2 else 1]:
                    do = partial(_speed, options, size, side, setting.replace(" compile", backend), workers, cleanup)
                    yield GpuTurn(f"2 {size} {round_} {do.args[2]}: {do.args[3]}", 90 if size != "8b" else 180, do)


def _speed(
    options: argparse.Namespace, size: str, side: str, setting: str, workers: dict[str, Worker] | None, cleanup: ExitStack,
    limit_s: float,
) -> Figures:  # fmt: skip
    """Measures one turn. `workers`: processes that are kept for further turns, until `cleanup`; None: one process per turn."""
    sizes, name = SIZES[size], f"{side} {setting}"
    with ExitStack() as own:
        worker = (workers or {}).pop(name, None)  # put back below unless it fails
        if worker is None:
            limit_s = limit_s if workers is None else 60 * options.minutes
            worker = start(side, setting, sizes, options.device, peer_python=options.peer_python, limit_s=limit_s)
            (own if workers is None else cleanup).enter_context(closing(worker))
            worker.answer()
        worker.ask({"do": "run", "steps": 2})
        answer = worker.ask({"do": "run", "steps": options.steps})
        if workers is not None:
            workers[name] = worker
    tokens = options.steps * sizes["batch"] * sizes["seq"]
    return {"tokens_per_s": tokens / answer["seconds"], **{name: answer[name] for name in ("memory_mib", "graphs")}}


def part_3(options: argparse.Namespace) -> Iterator[GpuTurn]:
    cuda = options.device == "cuda"
    inline, child = ("nccl", "baby_nccl") if cuda else ("gloo", "baby_gloo")
    device, steps = {"device": options.device}, 15 if cuda else 6
    for kind, victim in ((child, "child"), (inline, "group"), (child, "group")):
        how = {"kind": kind, "victim": victim, "watch_s": 20.0 if cuda else 1.0, "megabytes": 1000 if cuda else 8}
        yield GpuTurn(f"3 kill {victim}, {kind}", 140, partial(_worker, "kill", {**device, **how}))
    how |= {"kind": inline, "watch_s": 180.0 if cuda else 1.0, "deaths": 1}
    yield GpuTurn(f"3 survivor, {inline}", 300, partial(_worker, "kill", {**device, **how}))
    for round_ in range(5 if cuda else 1):
        for kind in ("none", inline, child)[:: -1 if round_ % 2 else 1]:
            yield GpuTurn(f"3 steady {kind} {round_}", 120, partial(_steady, options, kind, steps))
    yield GpuTurn("3 healing", 120, partial(_worker, "healing", {**device, "gb": 4.0 if cuda else 0.05}))
    yield GpuTurn("3 stall", 120, partial(_worker, "stall", {**device, "megabytes": 4000 if cuda else 20}))


def _steady(options: argparse.Namespace, kind: str, steps: int, limit_s: float) -> Figures:
    """Measures a step of train.py without replica groups, or as the only group."""
    train = partial(_train, options, "steady", limit_s=limit_s, steps=steps, program=(*WORKER, "train"))
    if kind == "none":
        return train(())
    with closing(LighthouseProcess(our_lighthouse(1))) as lighthouse:
        settings = ("--fault_tolerance.enable=true", f"--fault_tolerance.process_group={kind}")
        address = f"http://{lighthouse.address}"
        return train(settings, TORCHFT_LIGHTHOUSE=address, REPLICA_GROUP_ID="0", NUM_REPLICA_GROUPS="1")


def _worker(what: str, arguments: Figures, limit_s: float) -> Figures:
    """Runs a measurement in a separate process. Returns its answer."""
    command = [sys.executable, *WORKER, what, json.dumps(arguments)]
    with closing(Worker(what, command, {"OMP_NUM_THREADS": "1"}, limit_s=limit_s)) as worker:
        return dict(worker.answer())


def _output(command: Sequence[str], limit_s: float, **env: str) -> tuple[int, str]:
    """Returns exit code and output (stdout and stderr). Raises Failed after `limit_s`; kills the command with its children."""
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        raise Failed(f"killed after {limit_s:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, text


def _last_line(text: str, code: int) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else f"exit code {code}")


def _options(argv: Sequence[str]) -> argparse.Namespace:
    flags = parser(
        __doc__,
        minutes=(9.5, "a turn that may not fit is left to the next call"),
        steps=(5, "measured steps per turn of part 2"),
        only=("*", "run only turns whose key matches this pattern, such as '2 1b *'"),
        again=(False, "repeat failed turns"),
        peer_python=(sys.executable, "interpreter that has the other frameworks"),
        folder=(Path, "folder of the results; default: outputs/gpu/<device>-<sizes>"),
        write=(Path, "page to write"),
    )
    flags.add_argument("--part", type=int, choices=(1, 2, 3), required=True)
    flags.add_argument("--sizes", nargs="+", default=["1b", "8b"], choices=SIZES, help="parts 1, 3 use the first")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return flags.parse_args(argv)


def page(rows: Sequence[Figures], device: str) -> str:
    """Returns the page in Markdown: values of each turn, and a verdict per bound. `rows`: of results.jsonl, the last of each key."""
    newest, about = {row["key"]: row for row in rows}, ("key", "day", "took_s")
    whole = {key: row for key, row in newest.items() if "failed" not in row}
    good = {key: {name: value for name, value in row.items() if name not in about} for key, row in whole.items()}
    versions = good.get("1 versions", {})
    days = sorted({row["day"] for row in newest.values()})
    where = versions.get("device", "a CPU: these values say nothing about a GPU" if device == "cpu" else "a GPU")
    speeds = _speeds(good, str(versions.get("device", "")))

    def columns(*begins: str) -> tuple[list[str], list[list[str]]]:
        taken = {key[2:]: row for key, row in good.items() if key.startswith(begins)}
        names = list(dict.fromkeys(name for row in taken.values() for name in row))
        return ["turn", *names], [[what, *(str(row.get(name, "")) for name in names)] for what, row in taken.items()]

    throughput = []
    for name, side in sorted(speeds.items()):
        median, low, high = (f"{of(side['by_round'].values()):,.0f}" for of in (statistics.median, min, max))
        mfu = f"{100 * side['mfu']:.1f} %" if side["mfu"] else "unknown"
        throughput.append((name, median, f"{low}-{high}", mfu, f"{side['memory']:,.0f}", str(side["graphs"])))
    others = [(f"{of}: {name}", str(x)) for of in ("healing", "stall") for name, x in good.get(f"3 {of}", {}).items()]
    failed = [(key, row["failed"].replace("|", "/")) for key, row in newest.items() if "failed" in row]
    measured = f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {where}, by `make gpu`; settings of a step: bench/step.py."
    how = "Ranges are over rounds or repetitions. MFU counts 6 flops per weight and token, and attention in full without a causal discount."
    blocks = ["# One GPU", f"{measured} {how}{ON_A_CPU if device == 'cpu' else ''}"]
    for title, header, found in (
        ("Bounds", ("bound", "measured", "verdict"), verdicts(good, speeds, device)),
        ("Versions", ("component", "version"), [(name, str(x)) for name, x in versions.items()]),
        ("Tests", *columns("1 tests")),
        ("train.py to its end", *columns("1 train", "3 steady")),
        ("Throughput", ("size, side: setting", "tokens/s", "range", "MFU", "peak MiB", "graphs"), throughput),
        ("Two members on one device", *columns("3 kill", "3 survivor")),
        ("Healing and checkpoints", ("measurement", "GB/s of healing, s of stall"), others),
        ("Failed turns", ("turn", "why"), failed),
    ):
        empty = "none." if title == "Failed turns" else f"{NOT_RUN}."
        blocks.append(f"## {title}\n\n" + (f"```\n{table(header, found)}\n```" if found else empty))
    return "\n\n".join(blocks) + "\n"


def verdicts(good: Rows, speeds: Mapping[str, Figures], device: str) -> list[tuple[str, str, str]]:
    """Returns per bound: name, measured value, verdict. A bound within the range is not reached. A CPU gets no verdict."""
    found: list[tuple[str, str, str]] = []

    def bound(name: str, seen: Any, holds: Callable[[Any], bool], form: Callable[[Any], str] = str) -> None:
        """Adds a bound. `seen`: the value; None if a turn is missing."""
        verdict = "no verdict" if device == "cpu" else "reached" if seen is not None and holds(seen) else "not reached"
        found.append((name, "", NOT_RUN) if seen is None else (name, form(seen), verdict))

    def pairs_of(rounds: Sequence[Any]) -> Callable[[Any], str]:
        return lambda pair: f"{pair}, {len(rounds)} pairs"

    for size in ("1b", "8b"):
        ours, theirs = (speeds.get(f"{size} {side}: {setting}") for side, setting in BEST.items())
        rounds = sorted(ours["by_round"].keys() & theirs["by_round"].keys()) if ours and theirs else []
        pair = ratio(*([side["by_round"][r] for r in rounds] for side in (ours, theirs) if side)) if rounds else None
        bound(f"{size}: at least 1.05x torchtitan's tokens/s", pair, lambda pair: pair.low >= 1.05, pairs_of(rounds))
        memory = ours["memory"] / theirs["memory"] if ours and theirs else None
        bound(f"{size}: no more memory than torchtitan", memory, lambda memory: memory <= 1, "{:.4f}x".format)
    percent = 100 * speeds.get(f"8b pharos: {BEST['pharos']}", {}).get("mfu", 0) or None
    bound("8b: at least 45 % MFU", percent, lambda percent: percent >= 45, "{:.1f} %".format)
    for kind, limit in (("nccl", 1.02), ("baby_nccl", 1.05)):
        names = (kind, kind.replace("nccl", "gloo"))  # on a CPU gloo replaces NCCL
        both = [(good.get(f"3 steady {name} {n}"), good.get(f"3 steady none {n}")) for name in names for n in range(9)]
        pairs = [(one["ms per step"], none["ms per step"]) for one, none in both if one and none]
        step = ratio(*zip(*pairs, strict=True)) if pairs else None
        name = f"a step with a replica group over {kind}: at most {limit}x one without"
        bound(name, step, lambda step: step.high <= limit, pairs_of(pairs))  # noqa: B023 (called at once)
    kills = {key: row for key, row in good.items() if key.startswith("3 kill")}
    for name, figure, most in (
        ("the next commit within 1 s of a kill", "next step s", 1),
        ("no step lost", "steps lost", 0),
        ("equal bits", "bits equal", None),
        ("no memory lost (64 MiB of slack), MiB", "MiB lost", 64),
    ):
        seen = [row[figure] for row in kills.values()]
        holds = all(seen) if most is None else all(x <= most for x in seen)
        bound(name, ", ".join(map(str, seen)) if len(seen) == 3 else None, lambda _: holds)  # noqa: B023 (called at once)
    lived_s = [good[key]["watched s"] for key in ("3 survivor, nccl", "3 survivor, gloo") if key in good]
    bound("the survivor trains on for 3 minutes", lived_s[0] if lived_s else None, lambda s: s >= 180, "{} s".format)
    healed, stalled = (ratio(*good[of].values()) if of in good else None for of in ("3 healing", "3 stall"))
    bound("healing: at least 0.8x a raw socket into pinned memory", healed, lambda pair: pair.low >= 0.8)
    bound("stall of an async checkpoint: at most 1.1x a copy of the state", stalled, lambda pair: pair.high <= 1.1)
    return found


def _speeds(good: Rows, device: str) -> dict[str, Figures]:
    """Returns, by "size side: setting": tokens/s by round, peak memory in MiB, and MFU (0: unknown device peak). MFU counts 6 flops
    per weight and token and 12 * layers * width * length for attention (PaLM, arXiv 2204.02311, appendix B), for every side."""
    from training.metrics import known_peak_tflops

    sides: dict[str, dict[int, Figures]] = {}
    for _, size, round_, what in (key.split(" ", 3) for key in good if key.startswith("2 ")):
        sides.setdefault(f"{size} {what}", {})[int(round_)] = good[f"2 {size} {round_} {what}"]
    found, peak = dict[str, Figures](), known_peak_tflops(device) if device else None
    for name, rows in sides.items():
        shape, speeds = SIZES[name.partition(" ")[0]], {number: row["tokens_per_s"] for number, row in rows.items()}
        memory, graphs = (max(row.get(figure, 0) for row in rows.values()) for figure in ("memory_mib", "graphs"))
        flops = our_model(dict(shape)).flops_per_token(shape["seq"]) if peak else 0
        mfu = flops * statistics.median(speeds.values()) / peak / 1e12 if peak else 0.0
        found[name] = {"by_round": speeds, "memory": memory, "graphs": graphs, "mfu": mfu}
    return found


def versions(device: str) -> Figures:
    """Returns the versions that results may depend on, and the operator that attention uses."""
    from models import ops

    found = Figures(python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda or "none")
    installed = {each.name.lower(): each.version for each in distributions() if each.name}
    packages = ("protobuf", "grpcio", "transformers", "torchtitan", "torchao")
    found |= {package: installed.get(package, "not installed") for package in packages}
    q, k, v = (torch.randn(1, 256, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with torch.profiler.profile() as profile:
        ops.causal_attention(q, k, v)
    found["attention"] = " ".join(sorted({x.key for x in profile.key_averages() if "attention" in x.key}))
    found |= dict.fromkeys(("device", "driver", "NCCL", "cuDNN", "memory_gib"), "no GPU")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    found["ptrace scope"] = scope.read_text().strip() if scope.exists() else "no Yama"
    if device == "cuda":
        driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().split()
        found |= {"device": torch.cuda.get_device_name(), "driver": driver[0] if driver else "unknown"}
        found |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "cuDNN": torch.backends.cudnn.version()}
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


def kill(device: str, kind: str, victim: str, watch_s: float, megabytes: int, deaths: int = 2) -> Figures:
    """Runs replica groups on one device and kills one inside an all-reduce. `victim`: "group", or "child" (the process of its process
    group). "MiB lost": after the first of two deaths, since a process's first all-reduce loads NCCL's kernels, which stay in memory."""
    count = 2 if victim == "child" else 1 + deaths
    with RecoveryJob(JobSide("ours"), count, megabytes=megabytes, step_ms=20, kind=kind, device=device) as job:
        a, *others = job.groups
        nccl = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30"}

        def seen(group: ReplicaGroup, event: str, count: int = 1, of: int = 0, after_s: float = 0.0) -> EventLine:
            """Waits for the count-th such line after `after_s`, with `of` contributors (0: any)."""

            def matching() -> list[EventLine]:
                found = [line for line in group.since(after_s, event) if of in (0, line.contributors)]
                return found[count - 1 : count]

            limit_s = KILL_LIMIT_S + max(0.0, after_s - time.monotonic())
            return job.until(f"{event} of group {group.name}", matching, limit_s, lives=[a])[0]

        a.start(NCCL_HOSTID=a.name, **nccl)
        seen(a, "commit", 5, of=1)
        living, next_step_s, killed_s = ([a, *others] if victim == "child" else [a]), list[float](), 0.0
        for b in others * (deaths if victim == "child" else 1):
            if b not in living or not killed_s:
                b.start(NCCL_HOSTID=b.name, **nccl)
            seen(a, "commit", KILL_STEPS, of=2, after_s=killed_s)
            b.tell(kill=victim)
            killed_s = seen(b, "kill", after_s=killed_s).at_s
            next_step_s.append(round(seen(a, "commit", after_s=killed_s).at_s - killed_s, 3))
            if len(next_step_s) == 1:
                reference = seen(a, "commit", of=len(living), after_s=killed_s + 3.0)
        last = seen(a, "commit", of=len(living), after_s=killed_s + watch_s)
        ends = job.finish(living)
        sums = [line.sum_s for line in a.since(0.0, "commit") if line.contributors == 2 and line.at_s < killed_s]
        right = all(end.weight == -end.step / 1024 for end in ends) and len({end.state for end in ends}) == 1
        return {
            "next step s": max(next_step_s),
            "steps lost": len(a.since(0.0, "abort")),
            "bits equal": right,
            **({"MiB lost": round((reference.free - last.free) / 2**20, 1)} if deaths > 1 else {}),
            "watched s": round(last.at_s - killed_s, 1),
            "all-reduce ms": round(1e3 * statistics.median(sums), 1),
        }


def healing(device: str, gb: float) -> Figures:
    """Measures GB/s of a joiner that heals over HTTP, and of a bare socket into (pinned) memory and on to the device."""
    from bench.healing import measure

    figures = measure(("raw", "http"), 5, gb, device)
    return {kind: [round(turn["speed"], 2) for turn in figures[kind]] for kind in ("http", "raw")}


def stall(device: str, megabytes: int) -> Figures:
    """Measures the seconds that an async checkpoint stalls training, and those of a copy of the state into (pinned) host memory."""
    from bench.checkpoint import Bench

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), megabytes, device)
        seconds = in_turns({what.__name__: partial(bench.turn, what) for what in (bench.stall, bench.copy)}, 5, warm=1)
        bench.background.wait()
    return {name: [round(s, 4) for s in spent] for name, spent in seconds.items()}


def train(*argv: str) -> None:
    """Runs train.py with weights initialized on the device. By default they are drawn on the CPU, which takes a minute for 1B per run."""
    sys.argv = ["train.py", *argv]
    with patch("models.llama.normal_", draw_on_device):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def worker(what: str, *arguments: str) -> None:
    if what == "train":
        return train(*arguments)
    try:
        answer: Any = {"versions": versions, "kill": kill, "healing": healing, "stall": stall}[what]
        return print(json.dumps(answer(**json.loads(arguments[0]))), flush=True)
    except Failed as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
