"""Compares every layout with one process: loss, gradient norm, and the gradient of every parameter.

    python bench/parity.py                              1, 2 and 4 ranks: about ten minutes on two cores
    python bench/parity.py --ranks 8                    `make parity` runs both, and writes docs/parity*.md
    python bench/parity.py --ranks 4 --only '^pp.*SGD'  the cases whose layout and optimizer match
    python bench/parity.py configs/my.toml -- --model.dim 128      a different model, with its [model], [optimizer], seq_len and seed

docs/parity.md describes the comparison and its bounds. Prints a line per case, with the gradient that is closest to its bound. Exit code: 0
if all cases pass, 1 if not, 2 for bad input.

Cases are all factorizations of a number of ranks over the axes, crossed sparsely with the options. A layout with one axis is run with
defaults and with each option of that axis (HSDP's two axes count as one). A layout with several axes is run with defaults, and once with
one option of every axis, in rotation, so that options are combined. Each layout gives two cases, with SGD and with AdamW, that have
opposite choices of accumulation, vocabulary, chunks of the loss, and document masks; with Muon each layout is run with
defaults and with each degree of expert parallelism.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import cycle, islice, product
from math import inf, isfinite, prod
from operator import attrgetter
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch

from bench.job import ROOT
from bench.pairs import markdown, parser, renew
from bench.parity_worker import (
    STEPS,
    Compared,
    Key,
    OptimizerName,
    ParityCase,
    Seen,
    StepSeen,
    Task,
    alone,
    beside,
    build,
)
from configs.load import load
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.execution import ExecutionConfig
from parallelisms.expert import check_experts
from parallelisms.mesh import AXES, ParallelDims, ParallelismConfig
from parallelisms.pipeline_plan import check_pipeline, splits_backward
from parallelisms.tensor import check_plan
from tests.multiproc.pool import Pool, WorkerError

SEQUENCES = 32  # of a step: enough for 8 data-parallel ranks with 4 microbatches in 1 forward-backward, or 2 in 2
# Overrides of configs/llama.toml, if no CONFIG is given
TINY = """
--model.dim=64 --model.n_layers=8 --model.n_heads=8 --model.n_kv_heads=4 --model.hidden_dim=128 --training.seq_len=32
"""
MODEL_FACTS = ("name", "dim", "n_layers", "n_heads", "n_kv_heads", "n_experts", "experts_per_token")
CASE_TIMEOUT_S = 600.0  # the first case includes the import of torch in all workers

LOSS_BOUND: dict[OptimizerName, float] = {"SGD": 1e-5, "AdamW": 1e-4, "Muon": 1e-5}
NORM_BOUND = 1e-5
GRADIENT_BOUND = 1e-5  # from the same weights; a different order of rounding gives 1e-6
# With AdamW the sign of a rounding error determines a whole step of a weight whose gradient is near 0, after which weights differ.
# Observed: gradients differ by 1e-4, even if one process computes in a different order. So this wider bound is for the steps between the
# first and the last, which is repeated from the reference's weights, and for the total change of a weight.
ADAMW_BOUND = 1e-3
MUON_BOUND = 1e-5  # of the weights after all steps


class Deviation(NamedTuple):
    """Relative difference from the reference, and its bound."""

    what: str
    apart: float
    bound: float

    @property
    def share(self) -> float:
        return self.apart / self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.apart:.1e} apart, allowed {self.bound:.0e}"


class ParityVerdict(NamedTuple):
    case: ParityCase
    worst: Deviation  # the gradient closest to its bound, or the value farthest beyond
    problems: tuple[str, ...]  # empty: the case passes
    seconds: float = 0.0


def judge(case: ParityCase, truth: Sequence[StepSeen], seen: Sequence[Seen]) -> ParityVerdict:
    """Compares all ranks of a case with the reference. `truth`: by step; `seen`: by rank."""
    adamw, stages = case.optimizer == "AdamW", [rank.stage for rank in seen]
    names = [*(f"step {number + 1}" for number in range(len(truth))), *(["again"] if adamw else [])]
    assert len(seen) == case.world_size and all(len(rank.steps) == len(names) for rank in seen)
    drawn = {name for rank in seen for name in rank.drawn_differently}
    problems = [f"{name}: initial values are not those of one process" for name in sorted(drawn)]
    problems += [f"{name} chooses other experts" for name in sorted({name for rank in seen for name in rank.rerouted})]
    gradients, others = list[Deviation](), list[Deviation]()
    for number, when in enumerate(names):
        steps, expected = [rank.steps[number] for rank in seen], truth[min(number, len(truth) - 1)]
        bound = ADAMW_BOUND if adamw and 0 < number < len(truth) else GRADIENT_BOUND
        counts = {step.tokens for step in steps} - {expected.tokens}
        problems += [f"{when}: {count:.0f} targets, not {expected.tokens:.0f}" for count in counts]
        problems += _unmatched(when, stages, [step.gradients for step in steps], expected.gradients)
        for step in steps:
            others.append(Deviation(f"{when}: loss", _apart(step.loss, expected.loss), LOSS_BOUND[case.optimizer]))
            others.append(Deviation(f"{when}: gradient norm", _apart(step.norm, expected.norm), NORM_BOUND))
            gradients += [Deviation(f"{when}: {g.name}", g.deviation, bound) for g in step.gradients]
    if adamw:
        problems += _unmatched("moves", stages, [rank.moves for rank in seen], truth[0].gradients)
        others += [Deviation(f"move of {m.name}", m.deviation, ADAMW_BOUND) for rank in seen for m in rank.moves]
    if case.optimizer == "Muon":
        problems += _unmatched("weights", stages, [rank.weights for rank in seen], truth[0].gradients)
        gradients += [Deviation(f"weights: {w.name}", w.deviation, MUON_BOUND) for rank in seen for w in rank.weights]
    share = attrgetter("share")
    beyond = sorted({d for d in (*gradients, *others) if d.share > 1}, key=share, reverse=True)
    worst = max(beyond or gradients, key=share, default=Deviation("no gradient", inf, GRADIENT_BOUND))
    return ParityVerdict(case, worst, (*dict.fromkeys(problems), *map(str, beyond)))


def _apart(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected) if isfinite(value) else inf


def _unmatched(
    when: str, stages: Sequence[int], held: Sequence[Sequence[Compared]], truth: Sequence[Compared]
) -> Iterator[str]:
    """Checks that the ranks of a stage have the same parameters, and all stages together each parameter once. `stages`, `held`: by rank."""
    by_stage: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for stage, tensors in zip(stages, held, strict=True):
        here = [(tensor.name, tensor.shape) for tensor in tensors]
        if by_stage.setdefault(stage, here) != here:
            yield f"{when}: ranks of stage {stage} have different parameters"
    found = Counter(tensor for tensors in by_stage.values() for tensor in tensors)
    expected = Counter((tensor.name, tensor.shape) for tensor in truth)
    for kind, surplus in (("missing", expected - found), ("surplus", found - expected)):
        for name, shape in surplus:
            yield f"{when}: {kind}: {name} {list(shape)}"


class Proof:
    """References and worker processes, shared by all cases."""

    def __init__(self, task: Task, pool: Pool) -> None:
        self.task, self._pool = task, pool
        self._truths: dict[Key, tuple[StepSeen, ...]] = {}

    def truth(self, case: ParityCase) -> tuple[StepSeen, ...]:
        if case.key not in self._truths:
            [self._truths[case.key]] = self._pool.run(1, alone, self.task, case.key, timeout_s=CASE_TIMEOUT_S)
        return self._truths[case.key]

    def verdict(self, case: ParityCase) -> ParityVerdict:
        began = time.monotonic()
        try:
            truth = self.truth(case)
            seen = self._pool.run(case.world_size, beside, self.task, case, timeout_s=CASE_TIMEOUT_S)
            found = judge(case, truth, seen)
        except WorkerError as error:  # the ranks' errors, equal ones once
            texts = (part.strip() for part in re.split(r"^rank \d+ of \d+: ", str(error), flags=re.MULTILINE))
            problems = tuple(dict.fromkeys(filter(None, texts)))
            found = ParityVerdict(case, Deviation("no result", inf, GRADIENT_BOUND), problems)
        return found._replace(seconds=time.monotonic() - began)


VOCABULARIES = (259, 256)  # bytes with special tokens, which no number of ranks divides; only bytes
TRIES = 8  # to find options that are compatible
CHUNK_TOKENS = 11  # of the loss; divides no number of tokens
BACKWARDS_CSV = "backwards"  # placeholder for a file that is written when the number of microbatches is known


class Option(NamedTuple):
    """Settings that differ from the defaults, and a title."""

    title: str
    parallelism: dict[str, Any]
    activation_checkpoint: ActivationCheckpointConfig | None = None


GROUPING = (
    Option("2 blocks a group", {"fsdp_blocks_per_group": 2}),
    Option("prefetch 2", {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2}),
)
RESHARDING = tuple(Option(f"reshard {when}", {"fsdp_reshard_after_forward": when}) for when in ("never", "always"))
SCHEDULES = ("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
LESS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
OPTIONS = {  # by axis
    "pp": (
        *(Option(name, {"pipeline_parallel_schedule": name}) for name in SCHEDULES),
        Option("CSV file", {"pipeline_parallel_schedule_csv": BACKWARDS_CSV}),
        Option("ends count as 0 blocks", dict.fromkeys(LESS, 0)),
    ),
    "dp_replicate": GROUPING,
    "dp_shard": (*RESHARDING, *GROUPING),
    "cp": (
        Option("cp unbalanced", {"context_parallel_load_balancer": "none"}),
        Option("cp ring", {"context_parallel_rotate_method": "ring"}),  # on a CPU with documents only
    ),
    "tp": (Option("whole logits", {"disable_loss_parallel": True}),),
}
RECOMPUTATION = (
    Option("AC full", {}, ActivationCheckpointConfig("full")),
    Option("AC every 2nd", {}, ActivationCheckpointConfig("selective", "2")),
    Option("AC op", {}, ActivationCheckpointConfig("selective", "op")),
)


def cases(task: Task, world_size: int) -> list[ParityCase]:
    """Returns all cases for that number of ranks, in a fixed order: SGD first, whose bounds are narrower. Muon sees only how parameters are
    sharded: it takes each layout with its defaults, and with each degree of expert parallelism."""
    layouts = list(_layouts(task, world_size))
    return [
        _case(task, degrees, options, optimizer, index)
        for optimizer in STEPS
        for index, (degrees, options) in enumerate(layouts)
        if optimizer != "Muon" or all("expert_parallel_degree" in option.parallelism for option in options)
    ]


def _layouts(task: Task, world_size: int) -> Iterator[tuple[ParallelDims, tuple[Option, ...]]]:
    following = {axis: cycle(options) for axis, options in OPTIONS.items()}
    recomputation = cycle((*RECOMPUTATION, Option("", {})))
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    experts = getattr(task.model, "n_experts", 1)  # of 1: no mixture
    spread = [Option(f"ep {d}", {"expert_parallel_degree": d}) for d in divisors if 1 < d <= 4 and experts % d == 0]
    for degrees in (ParallelDims(*sizes) for sizes in product(divisors, repeat=len(AXES)) if prod(sizes) == world_size):
        if not _legal(task, degrees, ()):
            continue
        yield degrees, ()
        yield from ((degrees, (option,)) for option in spread if _legal(task, degrees, (option,)))
        axes = [axis for axis in OPTIONS if getattr(degrees, axis) > 1]
        if degrees.dp_shard > 1 and degrees.dp_replicate > 1:
            axes.remove("dp_replicate")  # HSDP is one wrapper with one set of options
        single = OPTIONS[axes[0]] if axes else RECOMPUTATION
        draws = ((*(next(following[axis]) for axis in axes), next(recomputation)) for _ in range(TRIES))
        choices = ((option,) for option in single) if len(axes) < 2 else draws
        legal = (options for options in choices if _legal(task, degrees, options))
        yield from ((degrees, options) for options in (legal if len(axes) < 2 else islice(legal, 1)))


def _legal(task: Task, degrees: ParallelDims, options: tuple[Option, ...]) -> bool:
    """Returns True if model and batch can be divided like that, by the checks of a run's settings."""
    pieces = degrees.tp * (2 * degrees.cp if degrees.cp > 1 else 1)
    if task.global_batch_size % (2 * degrees.data_parallel) or task.seq_len % pieces:
        return False
    try:
        task.model.check_tensor_parallel(degrees.tp)
        for case in (_case(task, degrees, options, optimizer, 0) for optimizer in STEPS):
            config, size = case.execution.parallelism, case.local_batch_size
            model = _meta_model(task, case.vocab_size)
            check_experts(model, degrees, config)
            if degrees.tp > 1:
                check_plan(model, degrees)
            check_pipeline(
                config, layers=list(model.layers), tied=model.tied, local_batch_size=size, compiled_blocks=False
            )
            if degrees.pp > 1 and splits_backward(config) and case.execution.activation_checkpoint.mode != "none":
                return False
    except ValueError:
        return False
    return True


@cache
def _meta_model(task: Task, vocab_size: int) -> Any:
    with torch.device("meta"):
        return build(task, vocab_size)


def _case(
    task: Task, degrees: ParallelDims, options: Sequence[Option], optimizer: OptimizerName, index: int
) -> ParityCase:
    """Returns a case with the `index`th choice of accumulation, vocabulary, loss chunks and documents for SGD, and the opposite choices for
    AdamW; with the ring, always documents."""
    halves, even, chunked, masked = (bool(index >> bit & 1) != (optimizer == "AdamW") for bit in range(4))
    microsteps = 2 if halves else 1
    local_batch_size = task.global_batch_size // (degrees.data_parallel * microsteps)
    # the largest number of stages, which DualPipeV requires
    microbatches = min(local_batch_size, 2 * degrees.pp)
    config = ParallelismConfig(
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
        pipeline_parallel_microbatch_size=local_batch_size // microbatches,
    )
    recomputation = ActivationCheckpointConfig()
    for option in options:
        config = replace(config, **option.parallelism)
        recomputation = option.activation_checkpoint or recomputation
    if config.pipeline_parallel_schedule_csv == BACKWARDS_CSV:
        # All forwards, then the backwards from the last microbatch to the first.
        path = task.folder / f"backwards-{degrees.pp}-{microbatches}.csv"
        orders = ("F", range(microbatches)), ("B", range(microbatches)[::-1])
        stages = (",".join(f"{stage}{kind}{m}" for kind, order in orders for m in order) for stage in range(degrees.pp))
        path.write_text("\n".join(stages) + "\n")
        config = replace(config, pipeline_parallel_schedule_csv=str(path))
    return ParityCase(
        title=", ".join([_title(degrees), *(option.title for option in options if option.title)]),
        execution=ExecutionConfig(config, recomputation, loss_chunk_tokens=CHUNK_TOKENS if chunked else 0),
        world_size=degrees.world_size,
        optimizer=optimizer,
        microsteps=microsteps,
        local_batch_size=local_batch_size,
        vocab_size=VOCABULARIES[even],
        document_mask=masked or config.context_parallel_rotate_method == "ring",
    )


def _title(degrees: ParallelDims) -> str:
    """Returns the techniques, outermost first, such as "pp 2 + fsdp 2"."""
    replicas, shards = degrees.dp_replicate, degrees.dp_shard
    ranks = {"pp": degrees.pp, "ddp": replicas, "fsdp": shards, "cp": degrees.cp, "tp": degrees.tp}
    text = " + ".join(f"{name} {count}" for name, count in ranks.items() if count > 1) or "one rank"
    return text.replace(f"ddp {replicas} + fsdp {shards}", f"hsdp {replicas}x{shards}")


HEAD = {  # columns of a line, and their widths
    "layout": 56, "optimizer": 9, "batches": 7, "vocabulary": 10, "loss": 12, "documents": 9, "differ": 7, "largest at": 38, "bound": 5,
    "s": 5, "result": 6,
}  # fmt: skip


def row(verdict: ParityVerdict) -> tuple[str, ...]:
    """Returns the cells under HEAD."""
    case, worst, chunk = verdict.case, verdict.worst, verdict.case.execution.loss_chunk_tokens
    loss, result = f"by {chunk} tokens" if chunk else "whole", "FAIL" if verdict.problems else "pass"
    documents = "masked" if case.document_mask else "-"
    settings = (case.title, case.optimizer, str(case.microsteps), str(case.vocab_size), loss, documents)
    return (*settings, f"{worst.apart:.1e}", worst.what, f"{worst.bound:.0e}", f"{verdict.seconds:.1f}", result)


def line(number: str, cells: Iterable[str]) -> str:
    padded = zip((f"{number:>8}", *cells), (8, *HEAD.values()), strict=True)
    return "  ".join(cell.ljust(width) for cell, width in padded).rstrip()


def main(argv: Sequence[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    options, began, verdicts = _options(argv[:cut]), time.monotonic(), list[ParityVerdict]()
    with tempfile.TemporaryDirectory(prefix="pharos-parity-") as folder:
        try:
            task = _task(options.config, argv[cut + 1 :], Path(folder))
            every = (case for ranks in options.ranks for case in cases(task, ranks))
            chosen = [case for case in every if options.only.search(f"{case.title}, {case.optimizer}")]
            if not chosen:
                raise ValueError(f'--only "{options.only.pattern}": matches no case of {options.ranks} ranks')
        except ValueError as error:
            print(f"parity: {error}", file=sys.stderr)
            return 2
        facts = _facts(task, options.ranks)
        print(facts, line("", HEAD), sep="\n", flush=True)
        with closing(Pool(max(options.ranks))) as pool:
            proof = Proof(task, pool)
            for number, case in enumerate(chosen, start=1):
                verdicts.append(proof.verdict(case))
                print(line(f"{number}/{len(chosen)}", row(verdicts[-1])), flush=True)
                failed = [verdict for verdict in verdicts if verdict.problems]
                left = f"; {len(chosen) - number} more were not reached" if number < len(chosen) else ""
                end = f"{number - len(failed)} of {number} cases hold, in {time.monotonic() - began:.0f} s{left}"
                if options.write:  # after each case, so that an interrupted run leaves its results
                    lines = ((str(verdict.case.world_size), *row(verdict)) for verdict in verdicts)
                    renew(options.write, options.section, f"{facts}. {end}", markdown(("ranks", *HEAD), lines))
    for verdict in failed:
        print("\n" + line("", row(verdict)), *verdict.problems, sep="\n  ")
    print(end)
    return 1 if failed else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    flags = parser(
        (__doc__ or "").splitlines()[0], write=(Path, "page whose table is updated"), section=("Cases", "of that page")
    )
    flags.epilog = "Overrides follow after --, such as: -- --model.dim 128"
    flags.add_argument("config", nargs="?", help="a TOML file; default: a tiny Llama with 8 layers")
    flags.add_argument("--ranks", type=_ranks, default="1,2,4", help="numbers of ranks; default: 1,2,4")
    flags.add_argument("--only", type=_pattern, default="", help="a regular expression over layout and optimizer")
    return flags.parse_args(argv)


def _ranks(text: str) -> list[int]:
    """Parses powers of two, so that batch and sequence can be divided."""
    legal = [2**power for power in range(SEQUENCES.bit_length() - 1)]
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f'"{text}": must be numbers of ranks, such as 1,2,4')
    ranks = [int(word) for word in text.split(",")]
    for number in ranks:
        if number not in legal:
            divided = f"must be among {legal}, which divide a step of {SEQUENCES} sequences"
            nearest = min(legal, key=lambda size: abs(size - number))
            raise argparse.ArgumentTypeError(f"{number}: {divided}; nearest: {nearest}")
    return ranks


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f'"{text}": {error}') from None


def _task(path: str | None, settings: Sequence[str], folder: Path) -> Task:
    """Raises ValueError."""
    tiny = [option for option in TINY.split() if option.partition("=")[0] not in settings]
    config = load([path, *settings] if path else [str(ROOT / "configs" / "llama.toml"), *tiny, *settings])
    config.model.check()
    training = config.training
    return Task(config.model, config.optimizer, training.seq_len, SEQUENCES, training.seed, folder)


def _facts(task: Task, ranks: Sequence[int]) -> str:
    """Returns what is needed to repeat the run."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed since", "--abbrev=12"]
    facts = {
        "commit": (which("git") and subprocess.run(git, capture_output=True, text=True).stdout.strip()) or "unknown",
        "seed": task.seed,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "ranks": list(ranks),
        "model": {key: getattr(task.model, key) for key in MODEL_FACTS if hasattr(task.model, key)},
        "sequences": task.global_batch_size,
        "seq_len": task.seq_len,
    }
    return "; ".join(f"{key} {value}" for key, value in facts.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
