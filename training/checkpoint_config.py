"""[checkpoint]: when a run is saved, and from what it goes on (checkpoint.py does both)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from training.checkpoint_restore import initial_folder


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: saving the run and going on from it."""

    enable: Annotated[bool, "save, and go on from what was saved; false: start from nothing and leave nothing"] = True
    folder: Annotated[str, "where, inside the run's folder"] = "checkpoint"
    interval: Annotated[int, "steps from one checkpoint to the next", ">= 1"] = 500
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"],
        "disabled: the step waits for the disk; async: for a copy in host memory, which is then written in the "
        "background; async_with_pinned_mem: the copy is in pinned memory, which CUDA fills faster",
    ] = "disabled"
    keep_latest_k: Annotated[
        int, "older checkpoints are removed; 0: keep all; 1 would leave none to fall back to", ">= 0", "!= 1"
    ] = 10
    load_step: Annotated[int, "go on from this step; -1: from the newest that is whole", ">= -1"] = -1
    verify_digests: Annotated[bool, "compare every file with its digests before it is loaded"] = True
    load_only: Annotated[bool, "go on from a checkpoint, but write none"] = False
    enable_first_step_checkpoint: Annotated[bool, "save after step 1 too, to see early that saving works"] = False
    # true in torchtitan. Here a finished run may be continued by raising training.steps, which needs the optimizer's
    # state, and that is worth the space of one full checkpoint.
    last_save_model_only: Annotated[
        bool, "the last save holds the weights alone, in export_dtype; the run cannot be continued from it"
    ] = False
    export_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], "what weights are cast to where they are saved alone"
    ] = "float32"
    initial_load_path: Annotated[
        str, 'checkpoint (".../step-N") with which a run that has none of its own begins; "": none'
    ] = ""
    initial_load_model_only: Annotated[
        bool, "take the weights alone from initial_load_path; false: optimizer, step and data cursor too"
    ] = True
    exclude_from_loading: Annotated[
        tuple[str, ...],
        'names, or beginnings of names, that initial_load_path is not asked for, such as "model.output"',
    ] = ()
    create_seed_checkpoint: Annotated[
        bool,
        "save the freshly initialised weights as step 0, with which every layout can begin, and end; "
        "scripts/make_seed_checkpoint.py does it for a model of any size, without the run's machines",
    ] = False

    def check(self) -> None:
        wishes = {
            "initial_load_path": self.initial_load_path,
            "load_only": self.load_only,
            "create_seed_checkpoint": self.create_seed_checkpoint,
        }
        for key, value in wishes.items():
            if value and not self.enable:
                shown = "true" if value is True else f'"{value}"'
                raise ValueError(f"checkpoint.{key} = {shown}: needs checkpoint.enable = true")
        if not self.folder.strip("/. "):
            raise ValueError(f'checkpoint.folder = "{self.folder}": must be a folder of its own; nearest: "checkpoint"')
        if self.create_seed_checkpoint and self.load_only:
            raise ValueError("checkpoint.load_only = true: no seed checkpoint would be written; nearest: false")
        if self.create_seed_checkpoint and self.initial_load_path:
            raise ValueError(
                f'checkpoint.initial_load_path = "{self.initial_load_path}": a seed holds freshly initialised weights; '
                'nearest: ""'
            )
        if self.exclude_from_loading and not self.initial_load_path:
            shown = ", ".join(f'"{name}"' for name in self.exclude_from_loading)
            raise ValueError(f"checkpoint.exclude_from_loading = [{shown}]: needs checkpoint.initial_load_path")

    def check_files(self) -> None:
        """Raises ValueError when initial_load_path is not a checkpoint. Opens no file."""
        if self.initial_load_path:
            initial_folder(self.initial_load_path)
