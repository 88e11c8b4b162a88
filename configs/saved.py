"""<run>/config.toml: all settings of a run, written at its first launch and compared at later ones.

A later launch resumes from the checkpoints of earlier ones. A different model, data, update rule or seed would make it a different run
under the same name; such changes are rejected, except those of the update rule, the batch and the data that resume.allow names."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from configs.errors import ConfigError, raise_problems
from configs.keys import to_text
from configs.load import CONFIG_FILE, read_saved, section_types, with_held_out_share
from configs.schema import RunConfig
from parallelisms.mesh import degrees
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import list_steps
from training.durable_files import replace_file
from training.object_store import ObjectStore, check_url, is_url

BATCH = "training.global_batch_size"
LOCAL_BATCH = "training.local_batch_size"
# Key prefix -> when such a setting may change between launches; the longest prefix of a key counts. All but free ones must be equal in all
# replica groups.
# never: it would be another run
# order: if resume.allow names it and the data has random access; its order then begins anew (training/data/dataset.py)
# rule: if resume.allow names it; what an older state lacks for it begins anew (EMA, spike window)
# groups: always, but equal in all groups, such as length and layout
# free: always, and groups may differ in it
# A key that has no prefix here is one that a fork has added, and may change the result.
Change = Literal["never", "order", "rule", "groups", "free"]
_FREE = (
    *("job.", "activation_checkpoint.", "compile.", "checkpoint.", "resume.", "validation.", "metrics.", "profiling."),
    *("comm.", "sample.", "training.deterministic", "training.mixed_precision_", "training.loss_chunk_tokens"),
    *("training.gc_freq", "training.dataloader."),
)
_CHANGES: dict[str, Change] = {
    "": "rule",
    **dict.fromkeys(_FREE, "free"),
    "model.": "never",
    "optimizer.": "rule",
    "optimizer.name": "never",
    "optimizer.implementation": "groups",  # the same update rule, rounded differently
    "lr_scheduler.": "rule",
    "lr_scheduler.total_steps": "groups",  # the length of the run, as training.steps
    "training.steps": "groups",
    "training.enable_cpu_offload": "groups",  # decides between gloo and NCCL, which do not meet
    "training.dataset": "order",
    "training.sources": "order",
    "training.seq_len": "order",
    "training.seed": "order",
    "training.skip": "rule",
    "training.document_mask": "rule",
    "training.max_norm": "rule",
    "training.on_spike": "rule",
    "training.spike_": "rule",
    BATCH: "rule",
    LOCAL_BATCH: "rule",  # where it determines the global one: _matters
    "training.dtype": "never",
    "float8.": "groups",
    "parallelism.": "groups",
    "fault_tolerance.": "groups",
    "fault_tolerance.semi_sync_method": "never",
    "fault_tolerance.sync_steps": "never",
    "fault_tolerance.num_fragments": "never",
    "fault_tolerance.fragment_": "never",
    "fault_tolerance.outer_": "never",
    "fault_tolerance.should_quantize": "never",
    "fault_tolerance.interface": "free",  # depends on the machine
    "fault_tolerance.slots_per_step": "free",  # ft/start.py adds the resolved value to the fingerprint
}
_NO_SUCH_KEY = "no such key"


def to_toml(config: RunConfig, *, without: str = "") -> str:
    """Returns every setting, also defaults, as TOML that loads as an equal RunConfig. Lists of tables are inline. `without`: a key."""
    tables = dict[str, str]()
    for key, text in _texts(as_tables(config)):
        if key != without:
            table, _, name = key.rpartition(".")
            tables[table] = tables.get(table, f"[{table}]\n") + f"{name} = {text}\n"
    return "\n".join(tables.values())


def as_tables(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns every setting as plain values, by section and key."""
    tables = {name: asdict(getattr(config, name)) for name in section_types(type(config))}
    for span in tables["training"]["skip"]:
        if not span["source"]:
            del span["source"]  # gives the text of runs from before this key existed
    return tables


def _texts(tables: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the full key and the text of every setting, as in the saved file."""
    for name, value in tables.items():
        full = f"{path}{name}"
        yield from _texts(value, f"{full}.") if isinstance(value, dict) else [(full, to_text(value))]


def save(config: RunConfig, folder: Path, *, batch: int | None = None) -> None:
    """Writes <folder>/config.toml atomically; an equal file stays. `batch`: sequences per step, saved in place of -1. Raises OSError."""
    if batch is not None:
        config = replace(config, training=replace(config.training, global_batch_size=batch))
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / CONFIG_FILE, to_toml(config).encode()
    if not path.exists() or path.read_bytes() != content:
        replace_file(path, content)


def shared_setting_digests(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Returns the settings that must be equal in all replica groups: keys with digests of their values, ("optimizer.lr", "9f86d081...")."""
    return tuple(
        (key, hashlib.sha256(text.encode()).hexdigest()[:16])
        for key, text in _texts(as_tables(config))
        if _matters(key, config) or _change(key) == "groups"
    )


def fetch_saved(config: RunConfig, *, newer: bool = True) -> RunConfig:
    """Copies config.toml of a run whose checkpoints are in an object store into the run's folder, if the folder has none or, with `newer`,
    if a launch on another machine has saved since; `newer` takes a request per checkpoint in the store, so not every rank sets it. Called
    before anything reads the file. Returns `config`, with the share of held-out documents that the run has."""
    folder, checkpoint = config.run_folder, config.checkpoint
    if not (checkpoint.enable and is_url(checkpoint.folder)):
        return config
    with suppress(OSError, ValueError):  # an illegal URL, or a store that does not answer, is reported later
        check_url("checkpoint.folder", checkpoint.folder)
        store, local = ObjectStore(checkpoint.location(folder)), folder / checkpoint.local_folder
        if not (folder / CONFIG_FILE).exists() or (newer and store.is_ahead_of(local)):
            store.fetch_files(folder, [CONFIG_FILE])
    return with_held_out_share(config)


def check_saved(config: RunConfig, folder: Path, *, world_size: int | None = None) -> dict[str, str]:
    """Raises ConfigError if this config differs from that of the run in `folder` in settings that must not change. Returns the differences
    that resume.allow names: key -> "old -> new". `world_size`: ranks of this launch; None: nothing is trained, and the batch size is not
    compared."""
    _check_allowed(config)
    if (before := read_saved(folder)) is None:
        return {}
    if world_size is not None:
        _check_sees_checkpoints(config, folder, before)
    differences = list(_differences(config, before, world_size))
    kinds = (config.training.dataset, before.get("training", {}).get("dataset"))
    # a stream has one order, and no position that another data set could continue
    allowed = ("rule",) if "huggingface" in kinds else ("rule", "order")
    refused = [each for each in differences if each[0] not in config.resume.keys or _change(each[0]) not in allowed]
    # no such key: as a rule one that a fork had
    undo = {_NO_SUCH_KEY: f"; to continue without it, remove it from {folder / CONFIG_FILE}"}
    problems = [f"{config.origin.place(key)}: saved {old}, now {new}{undo.get(new, '')}" for key, old, new in refused]
    if problems:
        if can := [key for key, _, new in refused if _change(key) in allowed and new != _NO_SUCH_KEY]:
            allow = ",".join(dict.fromkeys((*config.resume.keys, *can)))
            problems.append(
                f"to continue this run with the new {' and '.join(can)} from the next step on: --resume.allow={allow}"
            )
        checkpoints = folder / config.checkpoint.local_folder
        weights = f" (from these weights: add --checkpoint.initial_load_path {checkpoints}/step-N)"
        problems.append(
            f"{folder} has a run with the saved settings: restore them, or start a new run with --job.name NAME"
            f"{weights if list_steps(checkpoints) or is_url(config.checkpoint.folder) else ''}"
        )
    raise_problems(problems, config.origin.file)
    return {key: f"{old} -> {new}" for key, old, new in differences}


def _check_sees_checkpoints(config: RunConfig, folder: Path, before: Mapping[str, Any]) -> None:
    """Raises ConfigError if a launch would not see the checkpoints of the run, begin it anew, and remove the rows of its metrics."""
    checkpoint = config.checkpoint
    saved = CheckpointConfig(folder=before.get("checkpoint", {}).get("folder", CheckpointConfig.folder)).local_folder
    step = max(list_steps(folder / saved), default=0)
    if not step or (checkpoint.enable and list_steps(folder / checkpoint.local_folder)):
        return
    key, value, near = ("folder", checkpoint.folder, saved) if checkpoint.enable else ("enable", False, True)
    place = config.origin.place(f"checkpoint.{key}")
    raise ConfigError(
        f"{place} = {to_text(value)}: {folder / saved} has checkpoints up to step {step}, and this launch would begin anew at step 0 and "
        f"erase the run's record; nearest: {to_text(near)}, or another --job.name"
    )


def _change(key: str) -> Change:
    return _CHANGES[max(filter(key.startswith, _CHANGES), key=len)]


def _check_allowed(config: RunConfig) -> None:
    keys = [key for key, _ in _texts(as_tables(config))]
    for key in config.resume.keys:
        if key not in keys or _change(key) == "never":
            legal = [each for each in keys if _change(each) in ("order", "rule")]
            near = difflib.get_close_matches(key, legal, n=1)
            why = "cannot change in a run" if key in keys else "no such key"
            raise ConfigError(
                f'{config.origin.place("resume.allow")} = "{config.resume.allow}": {key}: {why}; legal: {", ".join(legal)}'
                + (f"; nearest: {near[0]}" if near else "")
            )


def _differences(
    config: RunConfig, before: Mapping[str, Any], world_size: int | None
) -> Iterator[tuple[str, str, str]]:
    """Yields (key, saved, now) of every difference that matters. A key that the saved file lacks, added since, counts as its default."""
    saved, now = dict(_texts(before)), dict(_texts(as_tables(config)))
    other_model = saved.get("model.name", now["model.name"]) != now["model.name"]
    old = {**dict(_texts(as_tables(type(config)(model=type(config.model)())))), **saved}
    batch = int(old[BATCH])
    if config.training.global_batch_size == -1 and batch != -1:  # -1 is saved as resolved; the local size may change
        for key in (BATCH, LOCAL_BATCH):
            now.pop(key)
            saved.pop(key, None)
        sequences = config.training.local_batch_size
        ranks = degrees(config.parallelism, world_size).data_parallel if world_size else 0
        if world_size and sequences * ranks != batch:
            refused = (
                f"-1, which is {sequences * ranks}: training.local_batch_size = {sequences} on {ranks} data-parallel "
                f"rank{'s' * (ranks > 1)}; nearest: --{BATCH}={batch} keeps the batch size on these ranks"
            )
            resolved = str(sequences * ranks) if BATCH in config.resume.keys else refused
            yield BATCH, f"{batch} sequences of a step", resolved
    for key in {**now, **saved}:
        if not _matters(key, config) or (other_model and key.startswith("model.") and key != "model.name"):
            continue
        if key not in now:
            yield key, saved[key], _NO_SUCH_KEY
        elif old[key] != now[key]:
            yield key, old[key], now[key]


def _matters(key: str, config: RunConfig) -> bool:
    if key == LOCAL_BATCH:
        return config.training.global_batch_size == -1  # then it determines the global batch size
    return _change(key) in ("never", "order", "rule")
