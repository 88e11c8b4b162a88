"""Measures the cost of checkpoints: digests while saving, verification while loading, and the stall of training by an async save.

    python bench/checkpoint.py [--megabytes 300] [--rounds 7]      in the system's temporary folder (TMPDIR)

One process with one thread, a model with AdamW. The sides of a comparison alternate, and ratios are computed per round. "without digests"
is the writer of training/ without digests; "DCP alone" is torch.distributed.checkpoint.save, which has no digests and no manifest, but
computes the zip format's CRC-32, which the writer of training/ omits as no reader checks it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.pairs import in_turns, parser, ratio, table
from ft.optim_state import init_optim_state
from training.checkpoint import Checkpointer
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import Digest
from training.log import Log
from training.states import ModelState, OptimizerState

COMPARED = (
    ("saving with digests / without", "save", "save without digests"),
    ("saving with digests / DCP alone", "save", "DCP alone"),
    ("loading verified / not verified", "load, verified", "load, not verified"),
    ("stall of an async save / copy", "stall of an async save", "copy of the state"),
)


def main() -> None:
    options = parser(__doc__, megabytes=(300, "size of the state"), rounds=(7, "per side")).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as folder:
        bench, sides = Bench(Path(folder), options.megabytes), dict[str, list[float]]()
        saves = {"save": bench.save, "save without digests": bench.save_without_digests, "DCP alone": bench.dcp_alone}
        loads = {"load, verified": partial(bench.load, True), "load, not verified": partial(bench.load, False)}
        for compared in (saves, loads, {"stall of an async save": bench.stall, "copy of the state": bench.copy}):
            turns = {name: partial(bench.turn, call) for name, call in compared.items()}
            sides |= in_turns(turns, options.rounds, warm=1)
    medians = {name: statistics.median(seconds) for name, seconds in sides.items()}
    print(table(("", "s", "GB/s"), [(name, f"{s:.3f}", f"{bench.bytes / s / 1e9:.2f}") for name, s in medians.items()]))
    print(f"\nstate of {bench.bytes / 1e6:.0f} MB, {options.rounds} rounds, {folder}")
    for what, figures, other in COMPARED:
        print(f"{what}: {ratio(sides[figures], sides[other])}")


class Bench:
    """A model with AdamW, and the measured operations, which return seconds and are called by `turn`."""

    def __init__(self, folder: Path, megabytes: int, device: str = "cpu") -> None:
        """Copies on "cuda" are all into pinned memory, including the checkpoint's."""
        self.folder = folder
        width = 4096 if device == "cuda" else 1024
        layers = max(1, round(megabytes * 1e6 / 3 / 4 / width**2))  # weights and two moments, four bytes each
        self.model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        init_optim_state(self.optimizer)
        optimizer = OptimizerState([self.model], self.optimizer)
        self.states: dict[str, Any] = {"model": ModelState([self.model]), "optimizer": optimizer}
        values = [value for state in self.states.values() for value in state.state_dict().values()]
        self.tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.buffers = [torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in self.tensors]
        self.background = self.checkpointer(async_mode="async_with_pinned_mem" if device == "cuda" else "async")
        self.background.load()
        self.step = 0

    def checkpointer(self, **settings: Any) -> Checkpointer:
        log = Log(global_rank=1)  # a rank other than 0 does not print
        return Checkpointer(CheckpointConfig(**settings), self.folder / "run", self.states, log=log)

    def turn(self, call: Callable[[], float]) -> float:
        """Calls an operation, and removes its files outside the measured time."""
        os.sync()
        seconds = call()
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        return seconds

    def save(self) -> float:
        checkpointer = self.checkpointer()
        began = time.perf_counter()
        checkpointer.save(1)
        return time.perf_counter() - began

    def save_without_digests(self) -> float:
        with patch.object(Digest, "update", lambda self, data: None):
            return self.save()

    def dcp_alone(self) -> float:
        began = time.perf_counter()
        dcp_save(dict(self.states), checkpoint_id=self.folder / "run" / "plain", no_dist=True)
        return time.perf_counter() - began

    def load(self, verify: bool) -> float:
        self.save()
        checkpointer = self.checkpointer(verify_digests=verify)
        began = time.perf_counter()
        assert checkpointer.load() == 1
        return time.perf_counter() - began

    def stall(self) -> float:
        self.step += 1
        began = time.perf_counter()
        self.background.save(self.step)
        seconds = time.perf_counter() - began
        self.background.wait()
        return seconds

    def copy(self) -> float:
        began = time.perf_counter()
        for buffer, tensor in zip(self.buffers, self.tensors, strict=True):
            buffer.copy_(tensor)
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
