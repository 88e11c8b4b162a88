"""The prediction of what a run takes and does, before anything is started: its flags and settings; report.py writes the text.

    python train.py CONFIG --explain [--ranks N] [--device cpu|cuda] [--section.key value ...]

N: --ranks; else the launcher's environment; else the product of the degrees in [parallelism]. The device: --device; else a GPU where this
machine has one, or where the model is too large for anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from configs.check import check_settings, gradients_lie_on
from configs.load import load
from configs.schema import Config, model_module
from ft.config import Environment
from ft.memory import memory
from parallelisms.device import Device
from parallelisms.layout import choose_precision
from parallelisms.mesh import ParallelismConfig, degrees
from tools.explain.memory import DeviceType
from tools.explain.rank import ExplainedJob, RankProfile, without_devices
from tools.explain.report import explain
from training.optimizer import build_optimizer
from training.tokenizer import build_tokenizer

LARGE = 1 << 28  # parameters that nobody trains on a CPU


def main(argv: Sequence[str]) -> int:
    """Prints the text; 0, or 2 for bad input."""
    try:
        argv, ranks, device = _options(argv)
        config = load(argv)
        world_size = ranks or ranks_asked(config.parallelism)
        anywhere = replace(  # less what a start asks of the devices that it finds: the run will be on others
            config,
            parallelism=without_devices(config.parallelism),
            training=replace(config.training, enable_cpu_offload=False),
            fault_tolerance=replace(config.fault_tolerance, process_group="auto"),
            float8=type(config.float8)(),
        )
        check_settings(anywhere, world_size=world_size)
        job = job_of(config, world_size=world_size, device=device)
        beside = fault_tolerance(config, job) if config.fault_tolerance.enable else None
    except ValueError as error:
        print(f"pharos: {error}", file=sys.stderr)
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of how it is used: the run itself will say them
        text = explain(job, beside)
    print(text, end="")
    return 0


def _options(argv: Sequence[str]) -> tuple[list[str], int, str]:
    """Splits the arguments into those of the configuration, --ranks (0: not given) and --device ("": not given). Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--explain", action="store_true")
    for flag in ("--ranks", "--device"):
        parser.add_argument(flag, nargs="?", default="", const="")
    given, rest = parser.parse_known_args(argv)
    if given.ranks and not (given.ranks.isdecimal() and int(given.ranks) > 0):
        raise ValueError(f"--ranks {given.ranks}: must be a whole number from 1")
    if given.device not in ("", "cpu", "cuda"):
        raise ValueError(f"--device {given.device}: must be cpu or cuda")
    return rest, int(given.ranks or 0), given.device


def ranks_asked(config: ParallelismConfig) -> int:
    """WORLD_SIZE, or NPROC (or NGPU) times NNODES, where one is set; else as many as the degrees multiply to."""
    nproc = os.environ.get("NPROC", os.environ.get("NGPU", ""))
    for asked, nnodes in ((os.environ.get("WORLD_SIZE", ""), "1"), (nproc, os.environ.get("NNODES", "1"))):
        if asked.isdecimal() and int(asked):
            return int(asked) * int(nnodes if nnodes.isdecimal() else "1")
    shards, replicas = max(1, config.data_parallel_shard_degree), config.data_parallel_replicate_degree
    others = (config.pipeline_parallel_degree, config.context_parallel_degree, config.tensor_parallel_degree)
    return shards * replicas * prod(others)


def fault_tolerance(config: Config, job: ExplainedJob) -> Callable[[RankProfile], dict[str, int]]:
    """Memory of a rank that groups take. Raises ValueError where the environment says nothing of the groups, or the process group is of
    another device."""
    settings = config.fault_tolerance
    slots = Environment.read(os.environ).slots_per_step(settings) if settings.deterministic_reduce else 0
    in_child = settings.group_kind(gradients_lie_on(config, job.device_type)).startswith("baby")

    def beside(rank: RankProfile) -> dict[str, int]:
        kinds = [kind for stage in rank.stages for kind in stage.kinds for _ in range(kind.layers)]
        dtype = job.layout.precision.master
        return memory(
            [torch.empty(kind.local_shape, dtype=dtype, device="meta") for kind in kinds],
            keep_gradients=settings.keep_gradients,
            in_child=in_child,
            slots=slots,
            heal_backlog=settings.heal_backlog,
            heal_copy_bytes=settings.heal_copy_bytes,
            fragments=0 if settings.semi_sync_method == "none" else settings.num_fragments,
            momentum=settings.semi_sync_method == "diloco" and settings.outer_momentum > 0,
            quantized=settings.should_quantize,
        )

    return beside


def job_of(config: Config, *, world_size: int, device: str) -> ExplainedJob:
    """As train.py puts the same parts together. Raises ValueError: no such tokenizer, where nothing else says the vocabulary."""
    training, model = config.training, config.model
    vocab_size = model.vocab_size or build_tokenizer(model.tokenizer_path).vocab_size
    whole = partial(model_module(model.name).build, model, vocab_size=vocab_size, max_seq_len=training.seq_len)
    with torch.device("meta"):
        size = sum(p.numel() for p in whole().parameters())
    device_type: DeviceType = "cpu"
    if device == "cuda" or (not device and (torch.cuda.is_available() or size >= LARGE)):
        device_type = "cuda"
    device_found = Device(torch.device(device_type))
    dtypes = (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    precision = choose_precision(*dtypes, device_found)
    sizes = degrees(config.parallelism, world_size)
    at_once = training.local_batch_size * sizes.data_parallel
    return ExplainedJob(
        title=Path(config.origin.file).name if config.origin.file else config.job.name,
        build=whole,
        optimizer=partial(build_optimizer, config.optimizer),
        layout=config.layout(precision, vocab_size=vocab_size, device_type=device_type),
        degrees=sizes,
        device_type=device_type,
        local_batch_size=training.local_batch_size,
        passes=max(1, training.global_batch_size // at_once),
        seq_len=training.seq_len,
    )
