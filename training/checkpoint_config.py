"""Settings of checkpoints: [checkpoint] in a configuration, and the checkpoint that initial_load_path names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated, Literal

from training import checkpoint_files
from training.config import os_errors_of
from training.object_store import is_url

INITIAL = "initial"  # in the run's folder: the copy of an initial_load_path that is in an object store


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: saving and resuming."""

    enable: Annotated[bool, "save, and resume from the newest checkpoint; false: start at step 0, save none"] = True
    folder: Annotated[
        str,
        "folder of the checkpoints, inside the run's folder unless absolute; an absolute one must belong to this run alone; or a URL "
        '(s3://, gs://), where they are put below the job\'s name, with a local copy in "checkpoint"',
    ] = "checkpoint"
    interval: Annotated[int, "steps between checkpoints", ">= 1"] = 500
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"],
        "disabled: training waits for the disk; async: training waits for a copy in host memory, which is written in "
        "the background; async_with_pinned_mem: as async, with the copy in pinned memory, which CUDA fills faster",
    ] = "disabled"
    keep_latest_k: Annotated[
        int, "newest checkpoints to keep; 0: all; 1 would leave none to fall back to", ">= 0", "!= 1"
    ] = 10
    load_step: Annotated[
        int,
        "begin from this step at every launch, restarts included: remove it after the first save, with an object store after its upload; "
        "newer checkpoints are set aside (step-N.abandoned) after the first step; -1: resume from the newest intact checkpoint",
        ">= -1",
    ] = -1
    verify_digests: Annotated[bool, "verify the digests of every file before loading"] = True
    load_only: Annotated[
        bool,
        "resume from a checkpoint, and save nothing: no checkpoints, metrics, samples or settings; log, events and traces are written",
    ] = False
    enable_first_step_checkpoint: Annotated[bool, "also save after step 1, to find storage problems early"] = False
    # true in torchtitan. Here a finished run can be continued by raising training.steps, which is worth the space of a full checkpoint.
    last_save_model_only: Annotated[
        bool, "the last save has only the weights, in export_dtype; the run cannot be continued from it"
    ] = False
    export_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], "dtype of the weights with last_save_model_only"
    ] = "float32"
    initial_load_path: Annotated[
        str, 'checkpoint (".../step-N", also a URL) to start from if the run has none of its own; "": none'
    ] = ""
    initial_load_model_only: Annotated[
        bool, "load only the weights from initial_load_path; false: also optimizer, step and data position"
    ] = True
    exclude_from_loading: Annotated[
        tuple[str, ...],
        "names, their first dotted parts, or shell patterns of names, that are neither loaded from initial_load_path nor required to be "
        'in it, such as "model.output" or "model.*_lora_*"',
    ] = ()
    create_seed_checkpoint: Annotated[
        bool,
        "save the initial weights as step 0, which every layout can load, and exit; "
        "scripts/make_seed_checkpoint.py does the same in one process, for a model of any size",
    ] = False

    def check(self) -> None:
        for key in ("initial_load_path", "load_only", "create_seed_checkpoint"):
            if (value := getattr(self, key)) and not self.enable:
                shown = "true" if value is True else f'"{value}"'
                raise ValueError(f"checkpoint.{key} = {shown}: needs checkpoint.enable = true")
        if self.load_step != -1 and not self.enable:
            raise ValueError(f"checkpoint.load_step = {self.load_step}: needs checkpoint.enable = true; nearest: -1")
        if not self.folder.strip("/. "):
            raise ValueError(f'checkpoint.folder = "{self.folder}": must be a folder of its own; nearest: "checkpoint"')
        parts = PurePath(self.local_folder).parts
        if ".." in parts:  # two runs would share it
            near = PurePath(*(part for part in parts if part != ".."))
            raise ValueError(
                f'checkpoint.folder = "{self.folder}": must be inside the run\'s folder, or absolute, without ".."; nearest: "{near}"'
            )
        if parts == (INITIAL,):
            raise ValueError(
                f'checkpoint.folder = "{self.folder}": a copy of checkpoint.initial_load_path has that name; nearest: "checkpoint"'
            )
        if self.create_seed_checkpoint and self.load_only:
            raise ValueError("checkpoint.load_only = true: no seed checkpoint would be written; set it to false")
        if self.create_seed_checkpoint and self.initial_load_path:
            raise ValueError(
                f'checkpoint.initial_load_path = "{self.initial_load_path}": a seed has freshly initialised weights; nearest: ""'
            )
        if self.exclude_from_loading and not self.initial_load_path:
            shown = ", ".join(f'"{name}"' for name in self.exclude_from_loading)
            raise ValueError(f"checkpoint.exclude_from_loading = [{shown}]: needs checkpoint.initial_load_path")

    @property
    def nothing_saved(self) -> str:
        """The reason for which no checkpoint is saved; "": they are."""
        setting = "checkpoint.load_only = true" if self.enable else "checkpoint.enable = false"
        return f"nothing is saved ({setting})" if self.load_only or not self.enable else ""

    def excludes(self, state: str) -> bool:
        """Returns True if exclude_from_loading leaves out all names of a state."""
        return any(name.rstrip(".") == state or fnmatchcase(f"{state}.", name) for name in self.exclude_from_loading)

    @property
    def local_folder(self) -> str:
        """Folder of the checkpoints, relative to the run's folder unless absolute; of the local copies if `folder` is a URL."""
        return "checkpoint" if is_url(self.folder) else os.path.expanduser(self.folder)  # noqa: PTH111 (see run_folder)

    def location(self, run_folder: Path) -> str:
        """Returns the folder or URL that has the checkpoints of the run."""
        is_store = is_url(self.folder)
        return f"{self.folder.rstrip('/')}/{run_folder.name}" if is_store else str(run_folder / self.local_folder)

    def check_files(self) -> None:
        """Raises ValueError if initial_load_path is not a checkpoint. Opens no file, and connects to no store."""
        if self.initial_load_path and not is_url(self.initial_load_path):
            initial_folder(self.initial_load_path)


def initial_folder(name: str) -> Path:
    """Returns the checkpoint that initial_load_path names. Raises ValueError if there is none."""
    setting, path = f'checkpoint.initial_load_path = "{name}"', Path(name).expanduser()
    with os_errors_of(setting):
        is_there = path.exists()
        if (path / ".metadata").is_file():
            return path
    for folder in (path, path / "checkpoint"):
        if steps := checkpoint_files.list_steps(folder):
            nearest = checkpoint_files.step_folder(folder, steps[-1])
            raise ValueError(f'{setting}: a folder of checkpoints, not a checkpoint; nearest: "{nearest}"')
    if not is_there:
        raise ValueError(f"{setting}: no such folder; {steps_phrase(checkpoint_files.list_steps(path.parent), -1)}")
    raise ValueError(f"{setting}: not a checkpoint, as it has no file .metadata")


def steps_phrase(steps: Sequence[int], requested_step: int) -> str:
    """Returns the steps that exist, and the one nearest to a requested step (-1: the newest), for a message."""
    if not steps:
        return "there are no checkpoints in it"
    nearest = min(steps, key=lambda step: abs(step - requested_step)) if requested_step >= 0 else steps[-1]
    return f"steps there: {', '.join(map(str, steps))}; nearest: {nearest}"
