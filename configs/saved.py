"""<run>/config.toml: all settings of a run, written when it starts and compared when it starts again.

A second start goes on from the checkpoints of the first. Another model, other data, another update rule or another seed would change
the run under the same name; they are refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from configs import document
from configs.errors import ConfigError, raise_problems
from configs.keys import to_text
from configs.load import section_types
from configs.schema import RunConfig
from parallelisms.mesh import degrees
from training.appended import replace_file

FILE_NAME = "config.toml"
BATCH = "training.global_batch_size"
# Another value of these would make another run. All else may change between two starts: length, layout, number of ranks, checkpoints, ...
_IDENTITY = (
    "model.",
    "optimizer.",
    "lr_scheduler.",
    "training.dataset",
    "training.seq_len",
    "training.global_batch_size",
    "training.max_norm",
    "training.seed",
    "training.dtype",
    "fault_tolerance.semi_sync_method",
    "fault_tolerance.sync_steps",
    "fault_tolerance.num_fragments",
    "fault_tolerance.fragment_",
    "fault_tolerance.outer_",
)
_MAY_CHANGE = (
    "optimizer.implementation",  # another kernel, the same rule
    "lr_scheduler.total_steps",  # grows with training.steps
)
_LAYOUT = ("parallelism.", "fault_tolerance.", "training.steps")  # may change between starts, but not between groups
# Differs by machine; and what ft/start.py adds to the fingerprint as a resolved number.
_OWN = ("fault_tolerance.interface", "fault_tolerance.slots_per_step")


def to_toml(config: RunConfig) -> str:
    """Every setting, defaults included, as TOML that loads back as an equal RunConfig. Lists of tables are written inline."""
    tables = dict[str, str]()
    for key, text in _texts(_tables(config)):
        table, _, name = key.rpartition(".")
        tables[table] = tables.get(table, f"[{table}]\n") + f"{name} = {text}\n"
    return "\n".join(tables.values())


def _tables(config: RunConfig) -> dict[str, dict[str, Any]]:
    return {name: asdict(getattr(config, name)) for name in section_types(type(config))}


def _texts(tables: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every setting: its whole key and its value as the saved file has it."""
    for name, value in tables.items():
        full = f"{path}{name}"
        yield from _texts(value, f"{full}.") if isinstance(value, dict) else [(full, to_text(value))]


def save(config: RunConfig, folder: Path, *, batch: int | None = None) -> None:
    """Writes <folder>/config.toml; a kill at any instant leaves the old file or the new one. `batch`: sequences of a step, saved in place
    of -1. An equal file is not written again, so a group that starts anew on a full disk needs no room. Raises OSError."""
    if batch is not None:
        config = replace(config, training=replace(config.training, global_batch_size=batch))
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / FILE_NAME, to_toml(config).encode()
    if not path.exists() or path.read_bytes() != content:
        replace_file(path, content)


def what_groups_share(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Settings that all replica groups of a job must have alike: each key with a digest of its value, ("optimizer.lr", "9f86d081...")."""
    return tuple(
        (key, hashlib.sha256(text.encode()).hexdigest()[:16])
        for key, text in _texts(_tables(config))
        if _matters(key, config) or (key.startswith(_LAYOUT) and key not in _OWN)
    )


def check_saved(config: RunConfig, folder: Path, *, world_size: int | None = None) -> None:
    """Raises ConfigError if `folder` holds a run that this config would alter rather than continue. `world_size`: ranks of this start;
    None: nothing is trained, and what a step is made of is not compared."""
    saved = folder / FILE_NAME
    if not saved.exists():
        return
    try:
        before, _ = document.read(str(saved))
    except ConfigError as error:
        raise ConfigError(f"{error}; the first start of this run wrote it: restore it, or remove it") from None
    differences = _differences(config, before, world_size)
    problems = [f"{config.origin.place(key)}: saved {old}, now {new}" for key, old, new in differences]
    if problems:
        problems.append(
            f"{folder} holds a run with the saved settings: put them back, or start another run with --job.name NAME "
            f"(from these weights: add --checkpoint.initial_load_path {folder / config.checkpoint.folder}/step-N)"
        )
    raise_problems(problems, config.origin.file)


def _differences(
    config: RunConfig, before: Mapping[str, Any], world_size: int | None
) -> Iterator[tuple[str, str, str]]:
    """(key, saved, now) of every key that matters. A key that the saved file lacks was added since: its default."""
    saved, now = dict(_texts(before)), dict(_texts(_tables(config)))
    other_model = saved.get("model.name", now["model.name"]) != now["model.name"]
    old = {**dict(_texts(_tables(type(config)(model=type(config.model)())))), **saved}
    batch = int(old[BATCH])
    if config.training.global_batch_size == -1 and batch != -1:  # saved as what it came to; how it is cut may change
        for key in (BATCH, "training.local_batch_size"):
            now.pop(key)
            saved.pop(key, None)
        sequences = config.training.local_batch_size
        ranks = degrees(config.parallelism, world_size).data_parallel if world_size else 0
        if world_size and sequences * ranks != batch:
            came_to = (
                f"-1, which is {sequences * ranks}: training.local_batch_size = {sequences} on {ranks} data-parallel "
                f"rank{'s' * (ranks > 1)}; nearest: --{BATCH}={batch} goes on with the same step on these ranks"
            )
            yield BATCH, f"{batch} sequences of a step", came_to
    for key in {**now, **saved}:
        if not _matters(key, config) or (other_model and key.startswith("model.") and key != "model.name"):
            continue
        if key not in now:
            yield key, saved[key], "no such key"
        elif old[key] != now[key]:
            yield key, old[key], now[key]


def _matters(key: str, config: RunConfig) -> bool:
    if key == "training.local_batch_size":
        return config.training.global_batch_size == -1  # then it says a step's length, else only how it is cut
    return key.startswith(_IDENTITY) and key not in _MAY_CHANGE
