"""From a checkpoint's folder into states, by name and size.

Flow: checkpoint.py (which checkpoint) -> this (does it fit?) -> checkpoint_dcp.py (files to tensors).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from training import checkpoint_files as files
from training.checkpoint_files import Damaged, Manifest
from training.checkpoint_ranks import Ranks
from training.checkpoint_states import Stateful


class LogLike(Protocol):
    """training.log.Log or logging.Logger."""

    def info(self, message: str, *args: object) -> None: ...

    def warning(self, message: str, *args: object) -> None: ...


def restore(
    stateful: Mapping[str, Stateful],
    path: Path,
    manifest: Manifest | None,
    *,
    ranks: Ranks,
    log: LogLike,
    request: str,
    exclude: Sequence[str] = (),
    exact: bool = False,
) -> str:
    """Reads `stateful` from a checkpoint, by name and size. Returns why it cannot be read, or "".

    `exact`: the dtypes must be the same and the checkpoint must hold no other state. `request` is what the user asked
    for; it begins the ValueError that says what does not fit.
    """
    from training import checkpoint_dcp as dcp

    began = time.perf_counter()
    live = {name: values for name, state in stateful.items() if (values := state.state_dict())}
    try:
        metadata, problem = dcp.read_metadata(path), ""
    except Exception as error:  # noqa: BLE001 (an unverified pickle can raise anything, and the ranks must agree on it)
        problem = f".metadata: {type(error).__name__}: {error}"
    if problem := next(filter(None, ranks.gather(problem)), ""):
        return problem
    wanted = set(stateful) | set(manifest.states if exact and manifest is not None else ())
    fit = dcp.fit(live, metadata, wanted=wanted, exclude=exclude, exact=exact)
    everywhere = set.intersection(*ranks.gather(fit.unknown))  # a rank may hold a part of the model only
    # once each: ranks that hold parts of one tensor say the same of it
    misfits = list(dict.fromkeys(misfit for found in ranks.gather(fit.misfits) for misfit in found))
    misfits += [f"{name} is there and not here" for name in sorted(everywhere)]
    if misfits:
        more = f" (and {len(misfits) - 3} more)" if len(misfits) > 3 else ""
        raise ValueError(f"{request}: does not fit this run: {'; '.join(misfits[:3])}{more}")
    if problem := dcp.read(fit.states, path, group=ranks.group):
        return problem
    for name, values in fit.states.items():
        stateful[name].load_state_dict(values)
    size = "" if manifest is None else f"{manifest.size_bytes / 1e6:.1f} MB "
    seconds = time.perf_counter() - began
    log.info("checkpoint: %s loaded from %s, %sin %.2f s", ", ".join(stateful), path, size, seconds)
    return ""


def survey(path: Path) -> Manifest | str:
    """The manifest, or what is wrong as far as one can see without reading the files."""
    try:
        return files.read_manifest(path)
    except Damaged as damage:
        return str(damage)


def initial(text: str) -> tuple[Path, Manifest | str | None]:
    """The folder that initial_load_path names and what `survey` finds there; None: another program's checkpoint."""
    path = initial_folder(text)
    return path, survey(path) if (path / files.MANIFEST).exists() else None


def initial_folder(text: str) -> Path:
    setting, path = f'checkpoint.initial_load_path = "{text}"', Path(text).expanduser()
    if (path / ".metadata").is_file():
        return path
    for folder in (path, path / "checkpoint"):
        if steps := files.list_steps(folder):
            nearest = files.step_folder(folder, steps[-1])
            raise ValueError(f'{setting}: a folder of checkpoints, not one of them; nearest: "{nearest}"')
    if not path.exists():
        steps = files.list_steps(path.parent)
        raise ValueError(f"{setting}: no such folder; {steps_phrase(steps, -1)}")
    raise ValueError(f"{setting}: not a checkpoint, as it has no file .metadata")


def steps_phrase(steps: Sequence[int], wanted: int) -> str:
    if not steps:
        return "there are no checkpoints in it"
    nearest = min(steps, key=lambda step: abs(step - wanted)) if wanted >= 0 else steps[-1]
    return f"steps there: {', '.join(map(str, steps))}; nearest: {nearest}"


def refuse_seed_after(steps: Sequence[int], folder: Path) -> None:
    """A seed is the first state of a run, so there is nothing to load, and nothing that may be there already."""
    if later := [step for step in steps if step > 0]:
        raise ValueError(
            f"checkpoint.create_seed_checkpoint = true: {folder} holds step {later[-1]} of a run that has begun; "
            "give the seed a job.name of its own"
        )
