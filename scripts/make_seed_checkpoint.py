"""Writes the initial weights of a run as a checkpoint: python scripts/make_seed_checkpoint.py CONFIG [--section.key value ...]

The checkpoint is step 0 of CONFIG's run, as with `checkpoint.create_seed_checkpoint`, but with one process on a CPU and one
tensor in memory at a time, so a model of any size takes the memory of its largest tensor. The run itself starts from it in any layout; a
different run does so with `--checkpoint.initial_load_path RUN/checkpoint/step-0`. Initial values do not depend on the layout, so comparing
runs does not require a seed checkpoint; it is for inspection and for other programs.

Exit code: 0 written; 2 bad input, or a checkpoint exists; 1 other errors: no space on the disk, or interrupted.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

if __name__ == "__main__":  # run by path, from any folder: not scripts/, whose files could shadow a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from configs.check import check_settings
from configs.load import load
from configs.saved import check_saved, fetch_saved, save
from configs.schema import RunConfig
from models.contract import Model, set_dtype
from models.init import draw
from training.checkpoint import Checkpointer, CheckpointFailed
from training.checkpoint_dcp import CHUNK_BYTES, StreamingPlanner
from training.checkpoint_files import list_steps
from training.durable_files import RunLock, cause_of
from training.log import Log
from training.progress import Bar, quantity
from training.states import ModelState
from training.tokenizer import build_tokenizer

Draw = Callable[[Model, torch.Tensor, int], torch.Tensor]


def main(argv: list[str], *, draw: Draw = draw) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0 if argv else 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: removes incomplete output
    place = argv[0]
    try:
        config = fetch_saved(load([*argv, "--checkpoint.create_seed_checkpoint=true"]))
        place = str(config.run_folder)
        check_settings(config.for_any_machine(), world_size=1)
        check_saved(config, config.run_folder)
        try:
            make_seed(config, Log(colour=not config.metrics.disable_color_printing), draw=draw)
        except ValueError as error:
            raise ValueError(config.origin.explain(str(error))) from None
    except (ValueError, CheckpointFailed, OSError) as error:
        said = cause_of(error, place) if isinstance(error, OSError) else error
        print(f"make_seed_checkpoint: {said}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("make_seed_checkpoint: interrupted", file=sys.stderr)
        return 1
    return 0


def make_seed(config: RunConfig, log: Log, *, chunk_bytes: int = CHUNK_BYTES, draw: Draw = draw) -> None:
    """Writes the seed checkpoint. Raises ValueError if the run has begun, OSError or CheckpointFailed if writing fails."""
    model = config.meta_model(config.model.vocab_size or build_tokenizer(config.model.tokenizer_path).vocab_size)
    set_dtype(model, getattr(torch, config.training.dtype))
    tensors = model.state_dict(keep_vars=True)
    total = sum(tensor.nbytes for tensor in tensors.values())
    bar = Bar(total, "seed", log=log)
    planner = StreamingPlanner(
        lambda name: draw(model, tensors[name.removeprefix("model.")], config.training.seed),
        written=bar.update,
        chunk_bytes=chunk_bytes,
    )
    states = {"model": ModelState([model])}
    with (
        closing(bar),
        closing(RunLock(config.run_folder, log=log.warning)),
        closing(Checkpointer(config.checkpoint, config.run_folder, states, log=log)) as checkpointer,
    ):
        checkpointer.load()  # raises if the run has begun; removes leftovers of a killed process
        if list_steps(checkpointer.folder):
            raise ValueError(f"job.name: {checkpointer.location}/step-0 exists; remove it, or set a different job.name")
        check_room(checkpointer.folder, total)
        save(config, config.run_folder)
        weights = sum(parameter.numel() for parameter in model.parameters())
        log.info("seed      %s, %s parameters in %d tensors", config.model.name, f"{weights:,}", len(tensors))
        checkpointer.save_seed(planner)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raises OSError if the disk has too little free space, before hours of writing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise OSError(f"{folder}: {quantity(needed_bytes)}B are needed and {quantity(free_bytes)}B are free")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
