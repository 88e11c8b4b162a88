"""Steps that are walked on a device that computes nothing: which configuration, which layout, and what is broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, get_args, get_type_hints

from configs.load import load
from parallelisms.mesh import AXES, ParallelDims, ParallelismConfig
from parallelisms.pipeline_schedule import SPLIT_BACKWARD

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEEP = ", all blocks"
SCHEDULES = set(get_args(get_type_hints(ParallelismConfig)["pipeline_parallel_schedule"]))


@dataclass(frozen=True)
class Case:
    """A step of one rank. `layers`: 0 for as many as the configuration has. `degrees`: (pp, dp_replicate, dp_shard, cp, tp)."""

    config: str
    degrees: tuple[int, ...]
    rank: int = 0
    layers: int = 2
    local_batch_size: int = 0  # 0: the configuration's
    schedule: str = ""  # "": the configuration's
    passes: int = 1  # forward and backward passes
    groups: bool = False  # with a lighthouse and a manager
    compile: bool = False
    documents: bool = False  # with training.document_mask
    plant: str = ""

    @property
    def sizes(self) -> ParallelDims:
        return ParallelDims(*self.degrees)

    @property
    def sharded(self) -> bool:
        return self.sizes.dp_shard * self.sizes.cp > 1


def shipped() -> dict[str, Case]:
    """Every configuration at its own width, with two blocks, and at its own depth (DEEP), which alone has enough blocks for a pipeline. Of
    a pipeline the first rank and the last, which has the loss, and two microbatches, which repeat each other."""
    cases = {}
    for path in sorted(CONFIGS.glob("*.toml")):
        config = load([str(path)])
        asked = [getattr(config.parallelism, key) for key in _DEGREES]
        degrees = tuple(max(1, degree) for degree in asked)
        pp, each = degrees[0], prod(degrees[1:])
        for stage in sorted({0, pp - 1}):
            case = Case(path.stem, degrees, stage * each, layers=0, local_batch_size=2 if pp > 1 else 0)
            if pp == 1:
                cases |= {path.stem: replace(case, layers=2), path.stem + DEEP: case}
            else:
                cases[f"{path.stem}, place {stage} of {pp}"] = case
    return cases


def layouts() -> dict[str, Case]:
    """Returns all layouts of 1, 2, 4 and 8 ranks, at full width: the last stage, which has the loss; of a pure pipeline the first, too."""
    cases = {}
    for ranks in (1, 2, 4, 8):
        for degrees in _factors(ranks, len(AXES)):
            pp, each = degrees[0], prod(degrees[1:])
            for stage in sorted({0, pp - 1} if each == 1 else {pp - 1}):
                name = str(ParallelDims(*degrees)) + ("" if pp == 1 else f", place {stage}")
                cases[name] = Case(
                    "llama3_8b",
                    degrees,
                    stage * each,
                    layers=max(2, pp),
                    local_batch_size=pp if pp > 1 else 0,
                    schedule="1F1B" if pp > 1 else "",
                )
    for schedule in sorted(SCHEDULES):
        cases[schedule] = Case("llama3_8b", (2, 1, 2, 1, 1), 2, layers=4, local_batch_size=4, schedule=schedule)
    cases["three passes"] = Case("llama3_8b", (1, 1, 2, 1, 1), passes=3)
    return cases


def _factors(number: int, places: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write `number` as a product of `places` factors, in order."""
    if places == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, places - 1))


_DEGREES = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)


def settings(case: Case) -> list[str]:
    """Returns the command-line settings of a case, which override the configuration's."""
    given: dict[str, Any] = {f"parallelism.{key}": degree for key, degree in zip(_DEGREES, case.degrees, strict=True)}
    given["compile.enable"] = str(case.compile).lower()
    if case.schedule:
        given["parallelism.pipeline_parallel_schedule"] = case.schedule
    if case.schedule in SPLIT_BACKWARD:
        given["activation_checkpoint.mode"] = "none"
    if case.local_batch_size:
        given["training.local_batch_size"] = case.local_batch_size
    if case.layers:
        given["model.n_layers"] = case.layers
    return [f"--{key}={value}" for key, value in given.items()]
