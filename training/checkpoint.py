"""Checkpoints: when the run is saved, and from which of them it goes on.

Flow: train.py calls `load` once, `save` where `due` says so, `close` at the end. checkpoint_states.py names what
there is to save, checkpoint_dcp.py moves it to files and back, checkpoint_files.py makes files appear at once or not
at all. Nothing here knows fault tolerance: its ledger is one more state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from training import checkpoint_files as files
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_dues import RETRY_S, Dues
from training.checkpoint_files import CheckpointFailed, Damaged, Manifest
from training.checkpoint_ranks import Background, Ranks, Report
from training.checkpoint_restore import (
    LogLike,
    initial,
    refuse_seed_after,
    restore,
    steps_phrase,
    survey,
)
from training.checkpoint_states import FIGURES, ModelState, OptimizerState, Stateful
from training.progress import Clock
from training.writer_lease import Alone, Aside, WriterLease

T = TypeVar("T")

if TYPE_CHECKING:
    from training.checkpoint_dcp import Snapshot
    from training.checkpoint_streamed import Streamed

__all__ = ["FIGURES", "RETRY_S", "CheckpointConfig", "CheckpointFailed", "Checkpointer", "ModelState", "OptimizerState"]


class Checkpointer:
    """Saves and restores `states` in `<run_folder>/<config.folder>/step-N`. Every rank of the default group has one.

    Guarantees: a kill at any instant leaves the last published checkpoint whole, and the next start finds it; damaged
    ones are not loaded (while verify_digests holds); a run that has checkpoints never begins from nothing unasked;
    all ranks raise alike. "model" must be among the states, as exports and seeds hold it. Every method is called by
    all ranks.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        states: Mapping[str, Stateful],
        *,
        log: LogLike,
        config_digest: str = "",
        timeout: timedelta = timedelta(minutes=30),
        claim: WriterLease | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`config_digest` goes into the manifest. `timeout`: how long a rank waits for the slowest one's files. `claim`: others have the
        same folder, of whom one saves at a time; so what lies about is cleared away by who saves, and not by who loads."""
        self.folder = run_folder / config.folder
        self._config = config
        self._states = states
        self._log = log
        self._config_digest = config_digest
        self._claim = claim or Alone()
        self._ranks = Ranks(timeout)
        self._saved_step: int | None = None  # the newest that this group has saved
        self._held_step: int | None = None  # in a full checkpoint of this run: no need to save it again
        self._damaged: dict[int, str] = {}
        self._snapshot: Snapshot | None = None
        self._background: Background | None = None
        self._dues = Dues(config, self.folder, self._claim, clock)

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after `step`."""
        if not self._writes or self._dues.is_failing:  # then see `overdue`
            return False
        return step % self._config.interval == 0 or (step == 1 and self._config.enable_first_step_checkpoint)

    def overdue(self, step: int) -> bool:
        """On rank 0, after `step`: one that was due is not there, for its save failed RETRY_S ago, or whoever was to save it has died. The
        others are to be told: all ranks save at the same step. It waits for no storage."""
        if not self._writes or self._ranks.rank != 0:
            return False
        failed = self._background is not None and self._background.has_failed
        return failed or self._dues.missed(step)

    def has(self, step: int) -> bool:
        """On one rank: the last save of a run that ends with `step` is there, whoever made it, or none is asked for."""
        return not self._writes or step == self._saved_step or self._dues.newest() >= step

    def agree(self, decide: Callable[[bool], T], wish: bool) -> T:
        """Asks rank 0 to decide once it knows whether any rank wishes it. By all ranks."""
        wishes = self._ranks.gather(wish)
        return self._ranks.first(lambda: decide(any(wishes)))

    def save(self, step: int, *, last: bool = False, settled: bool = True) -> float:
        """Saves the states as `step`, due or not; returns the seconds that held the caller up.

        `last`: the run is finished with this step. Not `settled`: this group goes, and others may have another history of the step (Aside);
        nothing can be saved after it. Does nothing when checkpoints are off or hold this step already, or another group saves.
        In an async mode all but the last is written in the background; what fails there is raised by the next `save`,
        `wait` or `close`. Raises CheckpointFailed.
        """
        began = time.perf_counter()
        self._dues.failed()  # unless it succeeds
        self.wait()
        alone = last and self._config.last_save_model_only
        if not self._writes or (step == self._held_step and not alone):
            self._dues.begun()
            return time.perf_counter() - began
        if not settled:
            self._claim = Aside()
        if alone:
            self._export(step)
        elif last or not settled or self._config.async_mode == "disabled":
            self._write(step, "full", self._live_states())
        else:
            snapshot, background = self._prepared()
            states = snapshot.take(self._live_states())
            background.start(lambda: self._write(step, "full", states, snapshot))
        self._dues.begun()
        return time.perf_counter() - began

    def save_seed(self, streamed: Streamed | None = None) -> None:
        """Saves the weights alone as step 0, bit for bit. Raises CheckpointFailed.

        `streamed`: what gives the values of a model on the meta device, one tensor at a time.
        """
        self.wait()
        self._claim = Alone()  # no quorum is needed to write it
        self._write(0, "model", {"model": self._states["model"].state_dict()}, streamed)

    def load(self) -> int | None:
        """Restores this run from its own checkpoints, else begins with initial_load_path. Called once, before any save.

        Returns the step to go on from; None: the run begins (with another run's weights, maybe). Raises ValueError
        for what the user must change, CheckpointFailed when there are checkpoints and none is whole.
        """
        if not self._config.enable:
            return None
        if not self._config.load_only and not self._claim.shared:
            self._ranks.first(self._tidy)
        steps = self._ranks.first(self._own_steps)
        if self._config.create_seed_checkpoint:
            refuse_seed_after(steps, self.folder)
            return None
        if steps or self._config.load_step >= 0:
            step: int | None = self._load_own(steps)
        else:
            step = self._load_initial() if self._config.initial_load_path else None
        self._dues.since = step or 0
        if self._writes and self._config.async_mode != "disabled":
            self._prepared()  # takes longer than a copy: now, rather than in the first step that saves
        return step

    def exported_step(self) -> int | None:
        """The newest step whose weights were saved alone (not the seed): of a finished run's end there may be no more."""
        self.wait()
        return self._ranks.first(lambda: files.newest(self.folder, kind="model") or None)

    def newest_step(self) -> int | None:
        """Of what `load` would try first; nothing of it is read."""
        return self._ranks.first(lambda: files.newest(self.folder))

    def wait(self) -> None:
        """Returns when nothing is being written. Raises what a save in the background failed with, once."""
        if self._background is not None:
            self._background.join()

    def close(self) -> None:
        """Waits like `wait`, and raises like it; then nothing can be saved any more. May be called twice."""
        if self._background is not None:
            self._background.close()

    @property
    def _writes(self) -> bool:
        return self._config.enable and not self._config.load_only

    def _live_states(self) -> dict[str, dict[str, Any]]:
        return {name: values for name, state in self._states.items() if (values := state.state_dict())}

    def _prepared(self) -> tuple[Snapshot, Background]:
        from training.checkpoint_dcp import Snapshot

        if self._snapshot is None or self._background is None:
            self._snapshot = Snapshot(pinned=self._config.async_mode == "async_with_pinned_mem")
            self._snapshot.prepare(self._live_states())
            self._background = Background()
        return self._snapshot, self._background

    def _export(self, step: int) -> None:
        dtype = getattr(torch, self._config.export_dtype)
        weights = self._states["model"].state_dict()
        cast = {name: value.to(dtype) if torch.is_floating_point(value) else value for name, value in weights.items()}
        self._write(step, "model", {"model": cast})

    def _write(
        self, step: int, kind: str, states: Mapping[str, Any], planner: Snapshot | Streamed | None = None
    ) -> None:
        """One save from begin to end. In the background too: its process group is used by nobody else meanwhile."""
        from training import checkpoint_dcp as dcp

        began = time.perf_counter()
        try:
            partial = self._ranks.first(lambda: self._begin(step))
            if partial is None:
                return self._log.info("checkpoint: step %d not saved: another group is to save by now", step)
            report = Report(dcp.write(states, partial, group=self._ranks.group, planner=planner))
        except OSError as error:
            report = Report(problem=files.reason(error), own=True)
        except dcp.OtherRankFailed as error:
            report = Report(problem=str(error))
        reports = self._ranks.gather(report)
        size_bytes = self._ranks.first(lambda: self._conclude(step, kind, tuple(states), reports))
        if size_bytes is None:
            return self._log.info("checkpoint: step %d not saved: another group has saved since", step)
        self._saved_step = step
        if kind == "full":
            self._held_step = step
        self._damaged.pop(step, None)
        what = ", the weights alone," if kind != "full" else "" if self._claim.settled else ", unsettled,"
        seconds = time.perf_counter() - began
        self._log.info("checkpoint: step %d%s saved: %.1f MB in %.2f s", step, what, size_bytes / 1e6, seconds)

    def _conclude(self, step: int, kind: str, states: tuple[str, ...], reports: Sequence[Report]) -> int | None:
        """Rank 0: publishes what all have written and returns its bytes, or takes it back and raises CheckpointFailed. None: a writer that
        came after this one has cleared it away, or has saved as much."""
        problems = sorted((report for report in reports if report.problem), key=lambda report: not report.own)
        records = tuple(record for report in reports for record in report.records)
        settled = self._claim.settled
        manifest = Manifest(step, kind, states, len(reports), torch.__version__, self._config_digest, records, settled)
        name = self._claim.name
        try:
            if problems:
                raise OSError(problems[0].problem)
            if self._is_late(step):
                raise OSError("another has saved")
            files.publish(self.folder, manifest, name)
        except OSError as error:
            files.discard(self.folder, step, name)
            with suppress(OSError):  # what is unwell may not say who saves by now, either
                if self._is_late(step):
                    return None
            good = files.newest(self.folder, but=self._damaged)
            rest = "there is no earlier one" if good is None else f"step {good} is the last good one"
            raise CheckpointFailed(f"checkpoint: step {step} not saved: {files.reason(error)}; {rest}") from None
        try:
            files.prune(self.folder, self._config.keep_latest_k, written=step, damaged=self._damaged.keys() - {step})
        except OSError as error:
            self._log.warning("checkpoint: older ones could not be removed: %s", files.reason(error))
        if self._claim.shared:
            self._tidy(until=step)
        return manifest.size_bytes

    def _begin(self, step: int) -> Path | None:
        """None: another group is to save. With the rest of a save it is, as a file is read for it."""
        return files.begin(self.folder, step, self._claim.name) if self._claim.take() else None

    def _is_late(self, step: int) -> bool:
        """Another group saves by now, and has done so: this step, or a later one."""
        return self._claim.is_over() and self._dues.newest() >= step

    def _tidy(self, until: int | None = None) -> None:
        """Rank 0: clears away what a killed process left. until: only of steps up to this one, which has been saved, and of no newer
        writer: another group may be at work there."""
        try:
            notes = files.tidy(self.folder, until, self._claim.clears)
        except OSError as error:
            notes = [f"could not clear away what was left ({files.reason(error)})"]
        if notes:
            self._log.warning("checkpoint: a save was cut short by a kill: %s", ", ".join(notes))

    def _own_steps(self) -> list[int]:
        try:
            next(os.scandir(self.folder), None)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # it may hold this run's checkpoints
            why = f"checkpoint: {self.folder} cannot be read: {files.reason(error)}"
            raise CheckpointFailed(f"{why}; nothing begins anew over it") from None
        return files.list_steps(self.folder)

    def _load_own(self, steps: Sequence[int]) -> int:
        wanted = self._config.load_step
        if wanted >= 0 and wanted not in steps:
            raise ValueError(f"checkpoint.load_step = {wanted}: not in {self.folder}; {steps_phrase(steps, wanted)}")
        candidates = [wanted] if wanted >= 0 else sorted(steps, reverse=True)
        surveyed = self._ranks.first(
            lambda: [(step, survey(files.step_folder(self.folder, step))) for step in candidates]
        )
        for step, found in surveyed:
            if isinstance(found, Manifest) and found.kind == "model":
                continue
            path = files.step_folder(self.folder, step)
            problem = self._problem(path, found)
            if isinstance(found, Manifest) and not problem:
                problem = self._restore(path, found, tuple(self._states))
            if not problem:
                self._held_step = step
                if isinstance(found, Manifest) and not found.settled:
                    self._log.info(
                        "checkpoint: step %d was saved by a group that went while it waited for others", step
                    )
                return step
            self._damaged[step] = problem
            self._warn("checkpoint: step %d is damaged and not used: %s", step, problem)
        if self._damaged:
            listed = "; ".join(f"step {step}: {problem}" for step, problem in self._damaged.items())
            rest = "set another load_step" if wanted >= 0 else "rename it to begin from nothing"
            raise CheckpointFailed(f"checkpoint: none in {self.folder} that could be used is whole ({listed}); {rest}")
        return self._load_seed(steps, wanted, surveyed)

    def _load_seed(self, steps: Sequence[int], wanted: int, surveyed: Sequence[tuple[int, Any]]) -> int:
        """Where there is no full checkpoint, the weights alone are a beginning only as the seed."""
        step, manifest = surveyed[-1]
        if step != 0 or (wanted < 0 and len(steps) > 1):
            newest = surveyed[0][0]
            path = files.step_folder(self.folder, newest)
            raise ValueError(
                f"checkpoint.load_step = {wanted}: step {newest} in {self.folder} holds the weights alone "
                "(checkpoint.last_save_model_only), so nothing can go on from it; another run can begin with them: "
                f'checkpoint.initial_load_path = "{path}"'
            )
        path = files.step_folder(self.folder, 0)
        if problem := self._problem(path, manifest) or self._restore(path, manifest, ("model",)):
            raise CheckpointFailed(f"checkpoint: the seed {path} is damaged: {problem}")
        return 0

    def _load_initial(self) -> int | None:
        """Begins with another run's checkpoint; one without a manifest (another program's) is taken as it is."""
        config = self._config
        setting = f'checkpoint.initial_load_path = "{config.initial_load_path}"'
        path, found = self._ranks.first(lambda: initial(config.initial_load_path))
        if found is None:
            self._warn("%s: has no %s, so it is not verified", setting, files.MANIFEST)
        manifest = found if isinstance(found, Manifest) else None
        whole = manifest is not None and manifest.kind == "full"
        if not config.initial_load_model_only and not whole and not isinstance(found, str):
            raise ValueError(f"{setting}: holds the weights alone; nearest: checkpoint.initial_load_model_only = true")
        whole_run = tuple(name for name in self._states if name != FIGURES)  # another run's files are not this one's
        names = ("model",) if config.initial_load_model_only else whole_run
        problem = self._problem(path, found) or self._restore(path, manifest, names, initial=setting)
        if problem:
            raise CheckpointFailed(f"{setting}: damaged: {problem}")
        return manifest.step if manifest is not None and not config.initial_load_model_only else None

    def _problem(self, path: Path, found: Manifest | str | None) -> str:
        """What is wrong with a checkpoint, "" if nothing; the ranks share the reading and agree on the answer."""
        if not isinstance(found, Manifest) or not self._config.verify_digests:
            return found if isinstance(found, str) else ""
        try:
            files.verify(path, found, share=self._ranks.rank, shares=self._ranks.world_size)
            problem = ""
        except Damaged as damage:
            problem = str(damage)
        return next(filter(None, self._ranks.gather(problem)), "")

    def _restore(self, path: Path, manifest: Manifest | None, names: Sequence[str], *, initial: str = "") -> str:
        """Reads the states `names`; what kept it from doing so, "" if nothing. Raises ValueError where they do not fit.

        `initial`: the setting that asked for it, where it is not this run's own checkpoint.
        """
        return restore(
            {name: self._states[name] for name in names},
            path,
            manifest,
            ranks=self._ranks,
            log=self._log,
            request=initial or f'checkpoint.folder = "{self._config.folder}": {path}',
            exclude=self._config.exclude_from_loading if initial else (),
            exact=not initial,
        )

    def _warn(self, message: str, *args: object) -> None:
        """Once, for what all ranks know."""
        if self._ranks.rank == 0:
            self._log.warning(message, *args)
