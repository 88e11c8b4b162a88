"""Restores a run from a checkpoint: which one a launch, or a rewind, continues from, and whether it fits the run.

Flow: checkpoint.py calls CheckpointLoader, and checkpoint_fetch.py copies out of an object store what it restores. checkpoint_dcp.py reads
the states."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ft.seam import from_checkpoint
from training import checkpoint_files
from training.checkpoint_config import CheckpointConfig, initial_folder, steps_phrase
from training.checkpoint_fetch import CheckpointFetcher
from training.checkpoint_files import (
    EMA_STATE,
    ROWS_STATE,
    SPIKES_STATE,
    CheckpointFailed,
    Damaged,
    Manifest,
    manifest_or_problem,
)
from training.log import Log
from training.object_store import is_url
from training.progress import as_ranges
from training.rank_collectives import RankCollectives
from training.states import live_states

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # its import takes a second


class CheckpointLoader:
    """Restores `states` from the checkpoints in the run's folder, or from initial_load_path. On every rank; its methods are collective,
    except `set_abandoned_aside`."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        states: Mapping[str, Stateful],
        fetcher: CheckpointFetcher,
        *,
        computed: Collection[str],
        ranks: RankCollectives,
        log: Log,
    ) -> None:
        """`computed`: see Checkpointer."""
        self.loaded_step = 0  # step that was restored; 0: none
        self.resumed_step: int | None = None  # the same, if it was a full checkpoint of this run
        self.damaged: dict[int, str] = {}  # problem by step of this run's checkpoints, until the step is saved again
        self.stale: set[int] = set()  # newer steps that were not restored: damaged, or to be trained again
        self._config = config
        self._run_folder = run_folder
        self._folder = run_folder / config.local_folder
        self._location = config.location(run_folder)
        self._states = states
        self._fetcher = fetcher
        self._computed = computed
        self._ranks = ranks
        self._log = log
        # manifests of checkpoints newer than load_step, on rank 0, until they are set aside: in the folder, in the object store
        self._abandoned: tuple[dict[int, Manifest], dict[int, Manifest]] = {}, {}
        self._setting_aside = threading.Lock()

    def fetch(self) -> None:
        """Copies the checkpoint that `load` restores out of the object store, if checkpoint.folder is one. Raises ValueError,
        CheckpointFailed."""
        if is_url(self._config.folder):
            self._fetcher.on_rank0(lambda: self._fetcher.fetch(self._config.load_step, damaged=self.damaged))

    def load(self) -> int | None:
        """Restores the run: see Checkpointer.load."""
        steps = self._ranks.on_rank0(self._local_steps)
        if self._config.create_seed_checkpoint:
            if steps and steps[-1] > 0:  # an earlier seed may be replaced, a later step may not
                raise ValueError(
                    f"checkpoint.create_seed_checkpoint = true: {self._folder} has step {steps[-1]} of an earlier run; "
                    "set a different job.name for the seed"
                )
            return None
        self.resumed_step = None
        step = self._load_this_run(steps) if steps or self._config.load_step >= 0 else self._load_initial()
        self.loaded_step = step or 0
        stored = self._fetcher.uploader.replaceable if self._fetcher.uploader else ()
        self.stale = {newer for newer in (*steps, *stored) if newer > self.loaded_step}
        if self._config.load_step >= 0:
            self._ranks.on_rank0(self._find_abandoned)
        return step

    def _find_abandoned(self) -> None:
        """Notes on rank 0 the checkpoints newer than load_step; damaged ones are not used anyway."""
        newer = (step for step in checkpoint_files.list_steps(self._folder) if step > self.loaded_step)
        found = {step: manifest_or_problem(checkpoint_files.step_folder(self._folder, step)) for step in newer}
        stored = {step: each for step, each in self._fetcher.stored().items() if each and step > self.loaded_step}
        self._abandoned = {step: each for step, each in found.items() if isinstance(each, Manifest)}, stored

    def set_abandoned_aside(self) -> None:
        """Sets aside, on rank 0, the checkpoints newer than load_step, except for those that another group has replaced since, which
        belong to this run's history. Called before the first row and the first save, in different threads. Raises OSError."""
        with self._setting_aside:
            local, stored = self._abandoned
            same = [
                step
                for step, found in local.items()
                if checkpoint_files.is_same(checkpoint_files.step_folder(self._folder, step), found)
            ]
            for step in same:
                checkpoint_files.set_aside(self._folder, step)
            self._abandoned = {}, {}
        self.stale.difference_update(same)
        if same:
            listed, places = as_ranges("step", same), self._folder / "step-*.abandoned*"
            newer = f"newer than checkpoint.load_step = {self._config.load_step}"
            self._log.warning("checkpoint: %s, %s, set aside as %s", listed, newer, places)
        if self._fetcher.uploader is not None:
            self._fetcher.uploader.abandoned.update(stored)

    def newest_step(self, kind: str = "full") -> int:
        """Returns the newest step, whatever load_step and enable are; 0: none, or the seed. Reads no contents. `kind` "model": of exported
        weights."""

        def newest() -> int:
            local = checkpoint_files.newest(self._folder, kind=kind) or 0
            stored = (found.recency for found in self._fetcher.stored().values() if found and found.kind == kind)
            return max([checkpoint_files.recency(self._folder, local), *stored])[1]

        return self._ranks.on_rank0(newest)

    def _local_steps(self) -> list[int]:
        """Returns the steps in the folder. Raises CheckpointFailed if it cannot be read."""
        try:
            next(os.scandir(self._folder), None)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # the folder may contain this run's checkpoints
            why = f"checkpoint: {self._folder} cannot be read: {checkpoint_files.reason(error)}"
            raise CheckpointFailed(f"{why}; refusing to start a new run over it") from None
        return checkpoint_files.list_steps(self._folder)

    def _load_this_run(self, steps: Sequence[int]) -> int:
        """Restores the newest intact checkpoint of the folder, or that of load_step, and returns its step. `steps`: those in the folder."""
        load_step = self._config.load_step
        if load_step >= 0 and load_step not in steps:
            raise ValueError(
                f"checkpoint.load_step = {load_step}: not in {self._folder}; {steps_phrase(steps, load_step)}"
            )
        surveyed = self._survey([load_step] if load_step >= 0 else None)
        if (loaded := self._load_first(surveyed)) is not None:
            return loaded
        if self.damaged:
            listed = "; ".join(f"step {step}: {problem}" for step, problem in self.damaged.items())
            folders = f"the folder and {self._location}" if is_url(self._config.folder) else "the folder"
            rest = "set a different load_step" if load_step >= 0 else f"rename {folders} to start from step 0"
            raise CheckpointFailed(f"checkpoint: no checkpoint in {self._folder} is intact ({listed}); {rest}")
        # There is no full checkpoint. Of checkpoints with only weights, a run can start from the seed only.
        if 0 not in surveyed or (load_step < 0 and len(steps) > 1):
            newest = next(iter(surveyed))
            raise ValueError(
                f"checkpoint.load_step = {load_step}: step {newest} in {self._folder} has only the weights "
                "(checkpoint.last_save_model_only), so this run cannot resume from it; a new run can start from them: "
                f'checkpoint.initial_load_path = "{checkpoint_files.step_folder(self._folder, newest)}"'
            )
        self._load_seed(surveyed[0])
        return 0

    def _survey(self, steps: Sequence[int] | None = None) -> dict[int, Manifest | str]:
        """Returns on all ranks manifest_or_problem of these steps (None: of all, the newest first). Collective."""

        def survey() -> dict[int, Manifest | str]:
            found = checkpoint_files.by_recency(self._folder) if steps is None else steps
            return {step: manifest_or_problem(checkpoint_files.step_folder(self._folder, step)) for step in found}

        return self._ranks.on_rank0(survey)

    def _load_first(self, surveyed: Mapping[int, Manifest | str]) -> int | None:
        """Restores the first full checkpoint that is intact, and returns its step; None: there is none."""
        for step, found in surveyed.items():
            if isinstance(found, Manifest) and found.kind == "model":
                continue
            path = checkpoint_files.step_folder(self._folder, step)
            problem = self._restore(path, found, tuple(self._states))
            if problem and is_url(self._config.folder):
                found = self._fetcher.on_rank0(partial(self._fetcher.fetch_again, step)) or problem
                if isinstance(found, Manifest):
                    self._warn(
                        "checkpoint: step %d is damaged (%s), fetched again from %s", step, problem, self._location
                    )
                    problem = self._restore(path, found, tuple(self._states))
            if problem:
                self.damaged[step] = problem
                self._warn("checkpoint: step %d is damaged and not used: %s", step, problem)
                continue
            self.resumed_step = step
            if isinstance(found, Manifest) and found.outside_quorum:
                self._log.info("checkpoint: step %d was saved by a group that left while it waited for others", step)
            return step
        return None

    def _load_seed(self, found: Manifest | str) -> None:
        """Restores the weights of step 0. Raises CheckpointFailed."""
        path = checkpoint_files.step_folder(self._folder, 0)
        if problem := self._restore(path, found, ("model",)):
            raise CheckpointFailed(f"checkpoint: the seed {path} is damaged: {problem}")

    def rewind(self, step: int, rewind_steps: Sequence[int], reset: Callable[[], None]) -> None:
        """Restores the newest intact checkpoint in the history of `step`: not one of steps that an earlier rewind undid. One that was saved
        outside of a quorum is the last choice, unless this launch has continued from it. `rewind_steps`: the steps that earlier rewinds
        restored, oldest first. If there is none, restores what the run began with: calls `reset`, then loads the seed or initial_load_path,
        if there is one. Raises CheckpointFailed if none of its checkpoints is intact, ValueError."""

        def prepare() -> None:
            try:
                self.set_abandoned_aside()
            except OSError as error:
                raise CheckpointFailed(f"checkpoint: {self._folder}: {checkpoint_files.reason(error)}") from None
            # without replica groups the disk has what this launch has loaded and saved, also while the store does not answer
            if is_url(self._config.folder) and (
                self._fetcher.shared or not any(at < step for at in checkpoint_files.list_steps(self._folder))
            ):
                # not load_step: the run has continued since
                self._fetcher.fetch(-1, before=step, loaded_step=self.loaded_step)

        self._fetcher.on_rank0(prepare)
        surveyed = self._survey()
        seed = surveyed.pop(0) if isinstance(found := surveyed.get(0), Manifest) and found.kind == "model" else None

        def leads_to_step(at: int, found: Manifest | str) -> bool:
            """Returns True if `at` is before `step`, and no rewind since that checkpoint went back beyond it."""
            if at >= step or isinstance(found, str):  # a damaged manifest does not say its branch
                return at < step
            return found.branch <= len(rewind_steps) and at <= min(rewind_steps[found.branch :], default=at)

        def is_last_choice(of_step: tuple[int, Manifest | str]) -> bool:
            at, found = of_step
            return at != self.loaded_step and isinstance(found, Manifest) and found.outside_quorum

        history = {at: found for at, found in surveyed.items() if leads_to_step(at, found)}
        history = dict(sorted(history.items(), key=is_last_choice))
        loaded = self._load_first(history)
        if loaded is None and history:
            raise CheckpointFailed(f"checkpoint: none before step {step} in {self._folder} is intact")
        if loaded is None:
            reset()
            if seed is not None:
                self._load_seed(seed)
            else:
                loaded = self._load_initial()
            self.resumed_step = None
        self.loaded_step = loaded or 0
        self.stale = {later for later in surveyed if later > self.loaded_step}

    def _load_initial(self) -> int | None:
        """Loads another run's checkpoint, if one is given; one without a manifest (from another program) is loaded without verification.
        Returns the step from which this run continues; None: it starts at step 0."""
        config = self._config
        if not config.initial_load_path:
            return None
        setting = f'checkpoint.initial_load_path = "{config.initial_load_path}"'

        def find() -> tuple[Path, Manifest | str | None]:
            path = self._fetcher.fetch_initial()
            return path, manifest_or_problem(path) if (path / checkpoint_files.MANIFEST).exists() else None

        path, found = self._fetcher.on_rank0(find)
        if found is None:
            self._warn("%s: has no %s, so it is not verified", setting, checkpoint_files.MANIFEST)
        is_full = isinstance(found, Manifest) and found.kind == "full"
        if not config.initial_load_model_only and not is_full and not isinstance(found, str):
            why = (
                "has only the weights"
                if found
                else f"has no {checkpoint_files.MANIFEST}, so only its weights can be loaded"
            )
            raise ValueError(f"{setting}: {why}; nearest: checkpoint.initial_load_model_only = true")
        names = ["model"]
        if not config.initial_load_model_only:
            names = [name for name in self._states if name != ROWS_STATE]  # metrics of the other run
        if problem := self._restore(path, found, names, initial=setting):
            raise CheckpointFailed(f"{setting}: damaged: {problem}")
        if config.initial_load_model_only or config.excludes("ledger"):  # as in `checkpoint_to_continue`
            return None
        return found.step if isinstance(found, Manifest) else None

    def checkpoint_to_continue(self) -> Path | None:
        """Returns the module's checkpoint_to_continue on all ranks, after copying initial_load_path out of an object store if needed.
        Collective."""
        return self._fetcher.on_rank0(
            lambda: checkpoint_to_continue(self._config, self._run_folder, fetch_initial=self._fetcher.fetch_initial)
        )

    def _restore(self, path: Path, found: Manifest | str | None, names: Sequence[str], *, initial: str = "") -> str:
        """Verifies a checkpoint and reads the states `names`, by name and size. `found`: see manifest_or_problem; None: no manifest.
        `initial`: the setting that names another run's checkpoint, which may have other dtypes and states. Returns, on all ranks, why the
        checkpoint cannot be read, or "". Raises ValueError if it does not fit the run."""
        from training import checkpoint_dcp as dcp

        if isinstance(found, str):
            return found
        config, ranks = self._config, self._ranks
        if found is not None and config.verify_digests:  # each rank verifies a share
            try:
                checkpoint_files.verify(path, found, share=ranks.rank, shares=ranks.world_size)
                problem = ""
            except Damaged as damage:
                problem = str(damage)
            if problem := ranks.problem(problem):
                return problem
        began, live = time.perf_counter(), live_states(self._states, names)
        try:
            metadata, problem = dcp.read_metadata(path), ""
        except Exception as error:  # noqa: BLE001 (an unverified pickle can raise anything, and all ranks must know of it)
            problem = f".metadata: {type(error).__name__}: {error}"
        if problem := ranks.problem(problem):
            return problem
        compared = {*names, *(found.states if found is not None and not initial else ())}
        exclude = list(config.exclude_from_loading) if initial else []
        if initial and not config.initial_load_model_only:  # the optimizer's settings are this run's
            exclude.append("optimizer.param_groups")
        # computed buffers follow from this run's configuration; a checkpoint of this run has the same, unless seq_len was changed
        exclude += [name for name in self._computed if initial or dcp.other_size(name, live, metadata)]
        fit = dcp.fit(live, metadata, compared=compared, exclude=exclude, exact=not initial)
        fits = ranks.all_gather(fit._replace(states={}))
        unknown = set.intersection(*(each.only_in_checkpoint for each in fits))
        unused = set.intersection(*(each.unused_excludes for each in fits))
        misfits = [f'exclude_from_loading: no name begins with "{prefix}", or matches it' for prefix in sorted(unused)]
        # once each: ranks with shards of the same tensor report the same misfit
        misfits += dict.fromkeys(misfit for each in fits for misfit in each.misfits)
        misfits += [f"{name} is in the checkpoint but not in this run" for name in sorted(unknown)]
        if misfits:
            more = f" (and {len(misfits) - 3} more)" if len(misfits) > 3 else ""
            if any(misfit.startswith("loader.rank ") for misfit in misfits):  # a key of StreamingLoader
                more += "; a stream is resumed by the same number of data-parallel ranks"
            request = initial or f'checkpoint.folder = "{config.folder}": {path}'
            raise ValueError(f"{request}: does not fit this run: {'; '.join(misfits[:3])}{more}")
        if problem := dcp.load_into(fit.states, path, group=ranks.group):
            return problem
        for name, values in fit.states.items():
            self._states[name].load_state_dict(values)
        lacking = {EMA_STATE, SPIKES_STATE}.intersection(names) - fit.states.keys()
        for name in lacking:  # what they hold is of steps that are undone
            cast(Any, self._states[name]).reset()
        size = "" if found is None else f"{found.size_bytes / 1e6:.1f} MB "
        seconds = time.perf_counter() - began
        self._log.info("checkpoint: %s loaded from %s, %sin %.2f s", ", ".join(fit.states), path, size, seconds)
        return ""

    def _warn(self, message: str, *args: object) -> None:
        if self._ranks.rank == 0:  # all ranks call this
            self._log.warning(message, *args)


def checkpoint_to_continue(
    config: CheckpointConfig, run_folder: Path, *, fetch_initial: Callable[[], Path] | None = None
) -> Path | None:
    """Returns the full checkpoint from which a launch continues data and step: one of the run's folder, else initial_load_path, if its step
    and position are loaded; None: it begins at step 0. `fetch_initial`: copies initial_load_path out of an object store; without it a URL
    counts as none, as does what only the run's object store has. Raises ValueError if initial_load_path is not a checkpoint."""
    if not config.enable:
        return None
    folder = run_folder / config.local_folder
    step = config.load_step if config.load_step >= 0 else checkpoint_files.newest(folder)
    if step is not None or checkpoint_files.list_steps(folder):
        return None if step is None else checkpoint_files.step_folder(folder, step)
    if not config.initial_load_path or config.initial_load_model_only or config.excludes("ledger"):
        return None
    if is_url(config.initial_load_path):
        return fetch_initial() if fetch_initial else None
    return initial_folder(config.initial_load_path)


def step_and_ledger(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns step and ledger of a checkpoint, unverified. May raise anything, which configs/check.py and components.py catch: `load`
    reports damage."""
    from training import checkpoint_dcp as dcp

    saved = dcp.read_values(path, "ledger")
    return saved["step"], from_checkpoint(saved)["ledger"]
