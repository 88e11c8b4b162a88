"""`--explain`: predicts memory, collectives and schedule of a run, and starts nothing.

    python train.py CONFIG --explain [--ranks N] [--device cpu|cuda] [--section.key value ...]

Ranks, if --ranks is not given: from the launcher's environment, else the product of the degrees in [parallelism]. Device, if --device is
not given: cuda if this machine has a GPU or the model has LARGE parameters or more, else cpu.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import chain, groupby, product
from math import prod
from pathlib import Path
from textwrap import wrap

import torch

from configs.check import check_model, check_settings, gradient_device_type
from configs.load import load
from configs.schema import RunConfig, model_module
from ft.config import Environment
from ft.memory import memory
from models.contract import ModelFault, model_error, model_line
from parallelisms.device import DEVICE_TRAITS, Device
from parallelisms.execution import choose_precision
from parallelisms.mesh import AXES, DP_SHARD_CP, EFSDP, EP, ParallelDims, ParallelismConfig, degrees
from parallelisms.pipeline_plan import schedule_of
from tools.explain.picture import bubble, picture
from tools.explain.rank import DeviceType, ExplainedJob, RankProfile, effective_axis, ranks, without_devices
from training.optimizer import build_optimizer
from training.tokenizer import build_tokenizer

LARGE = 1 << 28  # parameters; a model this large is not trained on CPUs
WIDTH = 110
ExtraMemory = Callable[[RankProfile], Mapping[str, int]]  # bytes that fault tolerance takes of a rank, by purpose
_MAX_ROWS = 17  # of a shortened table, with its header
_AXES = {
    "pp": "layers: each rank has some of them",
    "dp_replicate": "sequences: each rank, or group of shards, has its own, and all parameters",
    "dp_shard": "sequences, and parameters, gradients and optimizer state: each rank has its own",
    "cp": "tokens of a sequence; parameters are sharded over it, too",
    "tp": "matrices: each rank has some rows or columns; between matrices, tokens",
}
# Bytes that each of n ranks sends in a ring, in units of (n - 1) / n of the unsharded size
_SENT = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}
_CARDS = {24: "RTX 4090", 40: "A100 40", 80: "A100, H100", 141: "H200", 180: "B200"}  # GB
_USED_ELSEWHERE = 4 << 30  # of a GPU: CUDA's context, NCCL's buffers, workspaces, gaps between blocks


def main(argv: Sequence[str]) -> int:
    """Prints the report. Returns the exit code: 0, or 2 for bad input."""
    try:
        argv, n_ranks, device = _options(argv)
        config = load(argv)
        world_size = n_ranks or requested_ranks(config.parallelism)
        portable = replace(config.for_any_machine(), parallelism=without_devices(config.parallelism))
        check_settings(portable, world_size=world_size)
        job = job_of(config, world_size=world_size, device=device)
        extra_memory = fault_tolerance(config, job) if config.fault_tolerance.enable else None
    except ValueError as error:
        print(f"pharos: {error}", file=sys.stderr)
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch; the run itself shows them
        try:
            report = explain(job, extra_memory)
        except Exception as error:
            if not isinstance(error, ModelFault) and not model_line(error):
                raise
            problem = model_error(error, config.model.name, "a simulated step")
            print(f"pharos: {config.origin.explain(str(problem))}", file=sys.stderr)
            return 2
    print(report, end="")
    return 0


def _options(argv: Sequence[str]) -> tuple[list[str], int, str]:
    """Splits the arguments into those of the configuration, --ranks (0: not given) and --device ("": not given). Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--explain", action="store_true")
    for flag in ("--ranks", "--device"):
        parser.add_argument(flag, nargs="?", const="without a value")
    given, rest = parser.parse_known_args(argv)
    if given.ranks is not None and not (given.ranks.isdecimal() and int(given.ranks) > 0):
        raise ValueError(f"--ranks {given.ranks}: must be a whole number from 1")
    if given.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device {given.device}: must be cpu or cuda")
    return rest, int(given.ranks or 0), given.device or ""


def requested_ranks(config: ParallelismConfig) -> int:
    """Returns WORLD_SIZE, or NPROC (or NGPU) times NNODES, if set; else the product of the degrees."""
    nproc = os.environ.get("NPROC", os.environ.get("NGPU", ""))
    for n_ranks, nnodes in ((os.environ.get("WORLD_SIZE", ""), "1"), (nproc, os.environ.get("NNODES", "1"))):
        if n_ranks.isdecimal() and int(n_ranks):
            return int(n_ranks) * int(nnodes if nnodes.isdecimal() else "1")
    shards, replicas = max(1, config.data_parallel_shard_degree), config.data_parallel_replicate_degree
    others = (config.pipeline_parallel_degree, config.context_parallel_degree, config.tensor_parallel_degree)
    return shards * replicas * prod(others)


def fault_tolerance(config: RunConfig, job: ExplainedJob) -> ExtraMemory:
    """Returns the memory that fault tolerance takes, as a function of a rank. Raises ValueError: the number of replica groups is not in the
    environment, or the process group is for a different device."""
    settings = config.fault_tolerance
    slots = Environment.read(os.environ).slots_per_step(settings) if settings.deterministic_reduce else 0
    in_child = settings.process_group_kind(gradient_device_type(config, job.device_type)).startswith("baby")

    def extra_memory(rank: RankProfile) -> dict[str, int]:
        kinds = [kind for stage in rank.stages for kind in stage.kinds for _ in range(kind.trained)]
        tensors = [torch.empty(kind.local_shape, dtype=job.execution.precision.master, device="meta") for kind in kinds]
        return memory(tensors, settings, in_child=in_child, slots=slots)

    return extra_memory


def job_of(config: RunConfig, *, world_size: int, device: str) -> ExplainedJob:
    """Builds the job as train.py does. Raises ValueError: model.vocab_size is not set and there is no tokenizer to take it from, or the
    model lacks a part, or cannot be built or initialised."""
    training, model = config.training, config.model
    vocab_size = model.vocab_size or build_tokenizer(model.tokenizer_path).vocab_size
    build = partial(model_module(model.name).build, model, vocab_size=vocab_size, max_seq_len=training.seq_len)
    try:
        whole = config.meta_model(vocab_size)
    except ValueError as error:
        raise ValueError(config.origin.explain(str(error))) from error
    check_model(config, whole, world_size=world_size)
    try:  # the simulation leaves out the values: here the names are visited
        with torch.no_grad():
            whole.init_weights(training.seed)
    except Exception as error:
        raise ValueError(config.origin.explain(str(model_error(error, model.name, "init_weights")))) from error
    size = sum(p.numel() for p in whole.parameters())
    device_type: DeviceType = "cpu"
    if device == "cuda" or (not device and (torch.cuda.is_available() or size >= LARGE)):
        device_type = "cuda"
    dtypes = (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    precision = choose_precision(*dtypes, Device(torch.device(device_type)))
    sizes = degrees(config.parallelism, world_size)
    return ExplainedJob(
        title=Path(config.origin.file).name if config.origin.file else config.job.name,
        build=build,
        optimizer=partial(build_optimizer, config.optimizer, compute=precision.compute),
        execution=config.execution_config(precision, vocab_size=vocab_size, device_type=device_type),
        degrees=sizes,
        device_type=device_type,
        local_batch_size=training.local_batch_size,
        passes=max(1, training.global_batch_size // (training.local_batch_size * sizes.data_parallel)),
        seq_len=training.seq_len,
        ema_decay=config.optimizer.ema_decay,
        document_mask=training.document_mask,
    )


def explain(job: ExplainedJob, extra_memory: ExtraMemory | None = None) -> str:
    """Returns the report: at most WIDTH columns, ends in a newline. `extra_memory`: for fault tolerance."""
    profiles, n, where = ranks(job), job.degrees.world_size, DEVICE_TRAITS[job.device_type].location
    layout = f"{n} ranks {where}, {job.degrees}" if n > 1 else f"1 rank {where.removesuffix(' each')}"
    head = (
        f"{job.title}: {layout}. Nothing was started: ranks were simulated with fake tensors. Numbers are for one rank and one step "
        "unless stated otherwise; with uneven sharding the last ranks have less."
    )
    sections: list[tuple[str, Iterable[str]]] = [
        ("", _wrapped(head)),
        ("BATCH AND FLOPS", _batch(job)),
        ("DTYPES", _dtypes(job)),
        ("MESH", _mesh(job.degrees)),
        ("RANKS", _ranks(job)),
        ("MODULES", _modules(profiles)),
        ("PARAMETERS of the first rank, by kind", _parameters(job, profiles)),
        ("DEVICE MEMORY of a rank, in one step", _memory(job, profiles, extra_memory)),
        ("FAULT TOLERANCE, additional memory of a rank", _fault_tolerance_memory(profiles, extra_memory)),
        ("COMMUNICATION of a rank, in one step", _communication(job, profiles)),
        ("FSDP", _fsdp(job, profiles[0])),
        ("PIPELINE", _pipeline(job, profiles)),
        ("WARNINGS", chain(*(_wrapped(f"- {warning}", "  ") for warning in _warnings(job, profiles)))),
    ]
    lines = []
    for title, body in sections:
        if rows := list(body):
            lines += ([title] if title else []) + ["  " * bool(title) + row for row in rows] + [""]
    return "\n".join(line.rstrip() for line in lines)


def _batch(job: ExplainedJob) -> Iterator[str]:
    d, seq_len = job.degrees, job.seq_len
    sequences = job.local_batch_size * d.data_parallel * job.passes
    model = job.model()
    per_token = model.flops_per_token(seq_len)
    step = per_token * sequences * seq_len
    yield f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(model.layers)} blocks"
    yield (
        f"{sequences * seq_len:,} tokens a step: {sequences} sequences of {seq_len:,}; each rank computes {job.passes} "
        f"pass{'es' * (job.passes > 1)} over {job.local_batch_size} sequence{'s' * (job.local_batch_size > 1)}"
    )
    yield f"{per_token:.3e} flops a token, {step:.3e} a step, {step / d.world_size:.3e} a step and rank; forward and backward"
    mode = job.execution.activation_checkpoint.mode
    if mode != "none":
        share = {"full": "a third more", "selective": "up to a third more", "memory_budget": "some more"}[mode]
        yield f"activation checkpointing ({mode}) computes {share}, which these numbers and MFU do not count"


def _dtypes(job: ExplainedJob) -> Iterator[str]:
    precision = job.execution.precision
    rows = {
        "parameters in the optimizer, its state, gradients": precision.master,
        "gathered weights, matmuls, activations, communication of tp, cp and pp": precision.compute,
        "inside norms, rotary embedding, softmax and loss": torch.float32,
        "reduction of gradients over ranks": precision.reduce,
    }
    yield from _table((what, str(dtype).removeprefix("torch.")) for what, dtype in rows.items())


def _mesh(degrees: ParallelDims) -> Iterator[str]:
    rows, stride = [("axis", "ranks", "first group", "divided among its ranks")], degrees.world_size
    for axis, size in zip(AXES, degrees, strict=True):
        stride //= size
        if size > 1:
            group = [str(place * stride) for place in range(size)]
            rows.append((axis, str(size), " ".join(_shortened(group, 4)), _AXES[axis]))
    yield from _table(rows) if len(rows) > 1 else ["one rank: nothing is divided"]


def _ranks(job: ExplainedJob) -> Iterator[str]:
    degrees = job.degrees
    if degrees.world_size == 1:
        return
    n, rows = job.local_batch_size * job.passes, []
    shown = [axis for axis, size in enumerate(degrees) if size > 1]
    for rank, place in enumerate(product(*map(range, degrees))):
        dp_rank = degrees.coordinate(rank).dp_rank
        sequences = f"{dp_rank * n} to {(dp_rank + 1) * n - 1}" if n > 1 else str(dp_rank)
        rows.append((str(rank), *(str(place[axis]) for axis in shown), sequences))
    head = ("rank", *(AXES[axis] for axis in shown), "sequences of the step, if assigned in order")
    yield from _table([head, *rows], shorten=True)


def _modules(profiles: Sequence[RankProfile]) -> Iterator[str]:
    rows = []
    for rank, stage in ((profile, stage) for profile in profiles for stage in profile.stages):
        blocks = [name for name in stage.modules if name.startswith("layers.")]
        names = [name for name in stage.modules if name not in blocks[1:]]
        if len(blocks) > 1:  # consecutive blocks as a range: layers.0 to 7
            names[names.index(blocks[0])] += f" to {blocks[-1].removeprefix('layers.')}"
        rows.append((_label(rank, profiles), ", ".join(names)))
    yield from _table(rows)


def _label(rank: RankProfile, profiles: Sequence[RankProfile]) -> str:
    return f"rank {rank.pp_rank} of pp" if len(profiles) > 1 else "every rank"


def _parameters(job: ExplainedJob, profiles: Sequence[RankProfile]) -> Iterator[str]:
    d, rows = job.degrees, {"name": ("name", "shape", "sharded", "local shape")}
    for kind in (kind for rank in profiles for stage in rank.stages for kind in stage.kinds):
        shardings = []
        for dim, what in enumerate(("rows", "columns")):
            axes = [effective_axis(axis, dp_shard=d.dp_shard, cp=d.cp) for axis, at in kind.shardings if at == dim]
            shardings += [f"{what}: {', '.join(axes)}"] if axes else []
        whole, own = (" x ".join(f"{n:,}" for n in shape) for shape in (kind.shape, kind.local_shape))
        rows.setdefault(kind.name, (kind.name, whole, "; ".join(shardings) or "no", own))
    yield from _table(rows.values())


def _memory(job: ExplainedJob, profiles: Sequence[RankProfile], extra_memory: ExtraMemory | None) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", "parameters", "gradients", "optimizer", "activations", "peak")]
    rows += [(_label(p, profiles), *map(_size, (*astuple(p.resident), p.activations, p.peak))) for p in profiles]
    yield from _table(rows, right=range(1, 6))
    yield from _wrapped(
        "activations: peak of activations, gathered weights, unreduced gradients and buffers together; peak: of all memory, which may be "
        "less than the sum of the columns, as their peaks are at different times"
    )
    if job.execution.cpu_offload:
        yield "training.enable_cpu_offload: parameters, gradients and optimizer state are in host memory; the table counts them here"
    elif job.device_type == "cuda":
        sums = [rank.peak + sum(extra_memory(rank).values() if extra_memory else ()) for rank in profiles]
        most = max(sums) + _USED_ELSEWHERE
        fits = [f"{gb} GB ({name})" for gb, name in _CARDS.items() if gb * 10**9 >= most]
        more = "the memory of fault tolerance below, and 4 GiB" if extra_memory else "4 GiB more"
        verdict = f"fits on {fits[0]}" if fits else "fits on no GPU known here"
        yield f"with {more} for CUDA, NCCL and fragmentation: {verdict}"


def _fault_tolerance_memory(profiles: Sequence[RankProfile], extra_memory: ExtraMemory | None) -> Iterator[str]:
    if extra_memory is not None:
        most = max((extra_memory(rank) for rank in profiles), key=lambda sizes: sum(sizes.values()))
        yield from _table([(what, _size(size)) for what, size in most.items() if size], right=[1])
        yield "gradients are kept only until the step is committed; the table above counts them"


def _communication(job: ExplainedJob, profiles: Sequence[RankProfile]) -> Iterator[str]:
    def sent(rank: RankProfile) -> float:
        return sum(_sent(c.kind, c.bytes, _ranks_of(c.group, job)) * n for c, n in rank.collectives.items())

    rank = max(profiles, key=sent)
    if not rank.collectives:
        return
    rows: list[tuple[str, ...]] = [("axis", "kind", "times", "largest", "total", "sent")]
    sizes_of: dict[tuple[str, str], list[int]] = {}
    for c, n in rank.collectives.items():
        row = sizes_of.setdefault((c.group, c.kind), [0, 0, 0])
        row[:] = row[0] + n, max(row[1], c.bytes), row[2] + c.bytes * n
    for axis, kind in sorted(sizes_of, key=lambda key: ([*AXES, DP_SHARD_CP, EFSDP, EP].index(key[0]), key[1])):
        times, largest, total = sizes_of[axis, kind]
        sizes = (largest, total, _sent(kind, total, _ranks_of(axis, job)))
        rows.append((axis, kind, f"{times:,}", *map(_size, sizes)))
    if len(profiles) > 1:
        yield f"rank {rank.pp_rank} of pp, which sends the most:"
    yield from _table(rows, right=range(2, 6))
    yield from _wrapped(
        "sizes are unsharded: the output of an all-gather, the input of a reduce-scatter; sent: by this rank in a ring. Not listed: two "
        "all-reduces of a few numbers, for the step's counts and the gradient norm"
    )


def _sent(kind: str, size: int, n: int) -> int:
    return {"send": size, "receive": 0, "broadcast": size}.get(kind, _SENT.get(kind, 0) * size * (n - 1) // max(1, n))


def _ranks_of(axis: str, job: ExplainedJob) -> int:
    sizes, ep = job.degrees, job.execution.parallelism.expert_parallel_degree
    several = {DP_SHARD_CP: sizes.dp_shard * sizes.cp, EP: ep, EFSDP: sizes.dp_shard * sizes.cp * sizes.tp // ep}
    return several[axis] if axis in several else getattr(sizes, axis)


def _fsdp(job: ExplainedJob, rank: RankProfile) -> Iterator[str]:
    replicas, stage = job.degrees.dp_replicate, rank.stages[0]
    sharded = [group for group in stage.groups if group.shards > 1]
    if sharded:
        rows: list[tuple[str, ...]] = [("group", "shards", "gathers", "reduces")]
        for (shards, gathers, reduces), same in groupby(sharded, key=lambda g: (g.shards, g.gathers, g.reduces)):
            first, *others = (group.names for group in same)
            names = f"{first} ... {others[-1]} ({1 + len(others)} groups)" if others else first
            rows.append((names, str(shards), _size(gathers), _size(reduces)))
        yield "one collective per group; its buffer, for all shards:"
        yield from _table(rows, right=(1, 2, 3), shorten=True)
    if len(sharded) < len(stage.groups):
        casts = "FSDP casts the weights once per step and sends nothing"
        sends = "one all-reduce of gradients per group" if replicas > 1 else casts
        yield f"{'the other groups are not' if sharded else 'nothing is'} sharded: {sends}"
    if not sharded and replicas == 1:
        return
    forward, backward = _order(stage.step.labels)
    yield "order in which the CPU issues work: G all-gather, F forward, B backward, R reduction of gradients"
    for name, order in (("forward ", forward), ("backward", backward)):
        yield from _wrapped(f"{name} {' '.join(_shortened(order, 20))}", " " * 9)


def _order(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the work that FSDP issued in the first forward and backward, by its profiler labels."""
    letters = {"all_gather": "G", "post_forward": "F", "post_backward_accumulate": "B", "post_backward_reduce": "R"}
    forward, backward = list[str](), list[str]()
    now = forward
    for label in labels:
        what, _, name = label.removeprefix("FSDP::").partition(" (")
        if what == "root_pre_forward" and backward:
            break
        if what == "pre_backward":
            now = backward
        if what in letters:
            # a pipeline gathers before the first forward, when FSDP's groups have no names yet
            short = name.rstrip(")") or "all"
            for long, brief in (("layers.", ""), ("tok_embeddings", "emb"), ("norm, output", "head"), (", ", "+")):
                short = short.replace(long, brief)
            now.append(f"{letters[what]}:{short}")
    return list(dict.fromkeys(forward)), list(dict.fromkeys(backward))  # without the repetitions of later microbatches


def _pipeline(job: ExplainedJob, profiles: Sequence[RankProfile]) -> Iterator[str]:
    if job.degrees.pp > 1:
        schedule, n_stages = schedule_of(job.execution.parallelism), sum(len(rank.stages) for rank in profiles)
        for line in picture(schedule, job.degrees.pp, n_stages, job.microbatches, columns=WIDTH - 2):
            yield from [line] if line.startswith("rank ") else _wrapped(line)


def _warnings(job: ExplainedJob, profiles: Sequence[RankProfile]) -> Iterator[str]:
    d, execution, config, on_cuda = job.degrees, job.execution, job.execution.parallelism, job.device_type == "cuda"
    stages = [stage for rank in profiles for stage in rank.stages]
    if d.pp > 1:
        share = bubble(schedule_of(config), d.pp, len(stages), job.microbatches)
        blocks, peaks = [len(stage.modules) for stage in stages], [rank.peak for rank in profiles]
        if job.microbatches < len(stages):
            yield (
                f"{job.microbatches} microbatches for {len(stages)} stages: the pipeline is never full; raise training.local_batch_size or "
                "lower parallelism.pipeline_parallel_microbatch_size"
            )
        if share > 0.25:
            yield f"the bubble is {share:.0%} of the ranks' time; more microbatches make it smaller"
        if max(blocks) - min(blocks) > 1:
            yield f"stages have {min(blocks)} to {max(blocks)} modules: the largest stage sets the pace"
        if max(peaks) > 1.25 * min(peaks):
            yield f"peak memory differs between pipeline ranks: {_size(min(peaks))} to {_size(max(peaks))}"
    uneven = [
        f"{name} ({size:,})"
        for name, kind in {kind.name: kind for stage in stages for kind in stage.kinds}.items()
        for dim, size in enumerate(kind.shape)
        if kind.local_shape[dim] * prod(_ranks_of(axis, job) for axis, at in kind.shardings if at == dim) > size
    ]
    if uneven:
        yield f"unevenly sharded, so the last ranks have less: {', '.join(uneven)}"
    if d.tp > 8:
        yield f"parallelism.tensor_parallel_degree = {d.tp}: its collectives lie between matmuls and cross nodes of 8 GPUs"
    if d.pp > 1 and config.fsdp_reshard_after_forward == "always":
        yield 'parallelism.fsdp_reshard_after_forward = "always" with a pipeline gathers all weights for every microbatch'
    if on_cuda and d.world_size > 1 and job.local_batch_size * job.seq_len // (d.cp * d.tp) < 1024:
        yield "fewer than 1,024 tokens per rank and pass: the GPU waits for communication and for the CPU"
    if d.cp > 1 and config.context_parallel_rotate_method == "ring":
        yield "parallelism.context_parallel_rotate_method: numbers are for allgather, which gathers all keys and values at once"
    if (ep := config.expert_parallel_degree) > 1:
        yield f"experts: rows are counted as evenly divided; at worst one rank receives the rows of all {ep} ranks of ep"
    if execution.compile.enable:
        yield "compile.enable: compiled blocks save less than these numbers, which are for eager mode"
    if execution.float8.enable:
        yield "float8.enable: these numbers are without float8"
    if execution.activation_checkpoint.mode == "memory_budget":
        yield "activation_checkpoint.memory_budget: the compiler chooses; these numbers are without checkpointing"
    if on_cuda and execution.precision.compute.itemsize == 4:
        yield "training.mixed_precision_param: float32 reaches a small part of the peak that MFU is relative to"
    if on_cuda:
        yield (
            "MFU counts attention without a discount for the causal mask, and no recomputation; for a device of unknown peak it needs "
            "metrics.peak_tflops"
        )


def _table(rows: Iterable[Sequence[str]], right: Container[int] = (), *, shorten: bool = False) -> Iterator[str]:
    """Columns as wide as their widest cell; the last one is wrapped. `shorten`: leaves out the middle of a long table."""
    rows = list(rows)
    if shorten and len(rows) > _MAX_ROWS:
        rows[_MAX_ROWS - 4 : -3] = [("..", *([""] * (len(rows[0]) - 1)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = " " * (sum(widths[:-1]) + 2 * len(widths[:-1]))
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        line = "  ".join(cells).rstrip()
        yield from [line] if len(line) <= WIDTH - 2 else _wrapped(line, indent)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return wrap(text, WIDTH - 2, subsequent_indent=indent)


def _shortened(words: Sequence[str], most: int) -> list[str]:
    """Returns `words`; only the beginning and the end if there are more than `most`."""
    return list(words) if len(words) <= most else [*words[: most - most // 3], "..", *words[-(most // 3) :]]


def _size(size: float) -> str:
    """Formats bytes with three digits, as "1.25 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.{1 if size >= 10 else 2}f} {unit}"
