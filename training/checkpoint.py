"""Checkpoints: the steps that are due, and one save from beginning to end. Checkpointer is also the entry to loading.

Flow: components.py loads, rewinds and closes; train.py asks which saves are due; saver.py saves and waits. Below this file:

    checkpoint_load.py     the checkpoint from which a launch or a rewind continues, and whether it fits the run
    checkpoint_fetch.py    copies it out of an object store, if checkpoint.folder is one
    object_store.py        the store, and the thread that puts saves into it
    checkpoint_files.py    folders: verification, atomic publication, removal
    checkpoint_dcp.py      tensors to files and back, by torch.distributed.checkpoint
    checkpoint_config.py   settings
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from training import checkpoint_files
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_fetch import CheckpointFetcher
from training.checkpoint_files import EMA_STATE, CheckpointFailed, FileRecord, Manifest
from training.checkpoint_load import CheckpointLoader
from training.log import Log
from training.object_store import ObjectStore, Uploader, is_url
from training.progress import Clock
from training.rank_collectives import RankCollectives
from training.states import live_states
from training.writer_lease import FETCH, OutsideQuorumLease, SoloLease, WriterLease

if TYPE_CHECKING:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    from torch.distributed.checkpoint.stateful import Stateful  # its import takes a second

    from training.checkpoint_dcp import StreamingPlanner

SAVE_RETRY_S = 30.0  # from a failed save to its retry
T = TypeVar("T")


class SaveReport(NamedTuple):
    """One rank's result of a save."""

    records: list[FileRecord]  # one per file of this rank
    local_error: str  # writing this rank's files; "": none
    peer_error: str  # reported by another rank through DCP; "": none


class Checkpointer:
    """Saves and restores `states` in `<run_folder>/<config.local_folder>/step-N`. Every rank of the default process group has one and calls
    every collective. Ensures: a kill at any instant leaves the last published checkpoint intact, and the next launch finds it; a damaged
    one is not loaded (with verify_digests); a run with checkpoints never silently restarts from step 0; all ranks raise the same error."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        states: Mapping[str, Stateful],
        *,
        log: Log,
        computed: Collection[str] = (),
        ranks: RankCollectives | None = None,
        lease: WriterLease | None = None,
        clock: Clock = time.monotonic,
        in_thread: Callable[[Callable[[], None]], None] | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
        report: Callable[[str], None] | None = None,
        extra_files: Sequence[str] = (),
        fetcher: str = "",
        on_bytes: Callable[[], None] = lambda: None,
    ) -> None:
        """`computed`: names of buffers that are computed from the configuration, such as the rotary table; one of another size is not
        loaded. `lease`: for replica groups that share the folder; only its holder saves and removes leftovers. `in_thread`: runs work in
        the background. `on_stage`: for tests of kills: called before a save makes its folder ("begin", rank 0), writes ("write"), renames
        ("publish", rank 0). `report`: reports that an object store fails or recovers; None: `log` does. `extra_files`: patterns of further
        files of the run's folder that an object store gets. `fetcher`: see ObjectStore.fetch. `on_bytes`: called on all ranks while rank 0
        copies out of an object store, if bytes arrive."""
        self.folder = run_folder / config.local_folder
        self.location = config.location(run_folder)
        self.saving: Future[None] | None = None  # a save in the background, until `wait`
        self._config = config
        self._states = states
        self._log = log
        self._clock = clock
        self._computed = computed
        self._lease = lease or SoloLease()
        self._ranks = ranks or RankCollectives()
        self._on_stage = on_stage
        self._in_thread = in_thread or (
            lambda work: threading.Thread(target=work, name="checkpoint-scan", daemon=True).start()
        )
        self._saves_enabled = not config.nothing_saved
        self.saved_step: int | None = None  # newest step that this group has saved
        self._saved_full_step: int | None = None  # of the newest full checkpoint loaded or saved: `save` skips it
        self._stager: StateDictStager | None = None
        self._background: ThreadPoolExecutor | None = None
        self._failed_at: float | None = None  # time of the last save, if it failed; set on all ranks
        self._had_role = False  # the writer role at the last `overdue`; rank 0 only
        self._found_step: int | None = None  # newest step in the folder, read when this group became the writer
        self._uploader: Uploader | None = None  # of rank 0, if the folder is a URL
        if is_url(config.folder) and self._ranks.rank == 0:
            self._uploader = Uploader(
                ObjectStore(self.location),
                self.folder,
                config.keep_latest_k,
                extra_files=extra_files,
                lease=self._lease,
                log=log,
                report=report or log.warning,
                clock=clock,
            )
        checkpoint_fetcher = CheckpointFetcher(
            config,
            run_folder,
            uploader=self._uploader,
            shared=self._lease.shared,
            ranks=self._ranks,
            log=log,
            extra_files=extra_files,
            name=fetcher,
            on_bytes=on_bytes,
        )
        self._loader = CheckpointLoader(
            config, run_folder, states, checkpoint_fetcher, computed=computed, ranks=self._ranks, log=log
        )

    def due(self, step: int) -> bool:
        """Returns True if the configuration requires a checkpoint after `step`."""
        if not self._saves_enabled or self._failed_at is not None:  # `overdue` handles the retry
            return False
        return step % self._config.interval == 0 or (step == 1 and self._config.enable_first_step_checkpoint)

    def overdue(self, step: int) -> bool:
        """Returns True on rank 0 if a save due by `step` is missing: it failed SAVE_RETRY_S ago, or its writer group died. Never blocks."""
        if not self._saves_enabled or self._ranks.rank != 0:
            return False
        if self.saving is not None and self.saving.done() and self.saving.exception() is not None:
            return True
        has_role, had_role = self._lease.has_role, self._had_role
        if self._failed_at is not None:
            return has_role and self._clock() - self._failed_at >= SAVE_RETRY_S
        self._had_role = has_role
        if has_role and not had_role and self._lease.shared:
            self._in_thread(self._find_newest)
        if self._found_step is None or not has_role:
            return False
        found, self._found_step = self._found_step, None
        first = self._config.enable_first_step_checkpoint and step > 0
        newest_due = max(step // self._config.interval * self._config.interval, int(first))
        return newest_due > max(found, self._loader.loaded_step)  # up to that step saves belong to an earlier launch

    def last_save_exists(self, step: int) -> bool:
        """Returns True if any group has saved `step`, the last of the run (with an object store: has uploaded it), or if saving is
        disabled. Called on one rank."""
        if not self._saves_enabled or self._uploader is None:
            return not self._saves_enabled or step == self.saved_step or self._newest() >= step
        if step in self._uploader.done:
            return True
        try:
            return not self.is_uploading(step) and max({0, *self._uploader.store.steps()} - self._loader.stale) >= step
        except OSError:
            return False

    def is_uploading(self, step: int) -> bool:
        """Returns True if the object store does not have a save of this group yet. Called on one rank."""
        return self._uploader is not None and step in self._uploader.in_use

    def agree(self, decide: Callable[[bool], T], request: bool) -> T:
        """Returns on all ranks `decide(any rank's request)`, evaluated on rank 0. Collective."""
        requests = self._ranks.all_gather(request)
        return self._ranks.on_rank0(lambda: decide(any(requests)))

    def save(self, step: int, *, branch: int = 0, last: bool = False, outside_quorum: bool = False) -> None:
        """Saves the states as `step`, due or not. `branch`: how often the run has gone back to a checkpoint. `last`: the run ends with this
        step. `outside_quorum`: see OutsideQuorumLease; nothing can be saved after it. Does nothing if saving is disabled, the step is saved
        already, or another group is the writer. Async modes write in the background; a later call raises that CheckpointFailed."""
        self._failed_at = self._clock()  # until success below: an exception in between makes `overdue` retry
        self.wait()
        model_only = last and self._config.last_save_model_only
        if self._saves_enabled and (model_only or step != self._saved_full_step):
            if outside_quorum:
                self._lease = OutsideQuorumLease()
                if self._uploader is not None:
                    self._uploader.lease = self._lease
            if model_only:
                dtype = getattr(torch, self._config.export_dtype)
                weights = {
                    name: self._states[name].state_dict() for name in ("model", EMA_STATE) if name in self._states
                }
                for state, values in weights.items():
                    for name, value in values.items():
                        is_computed = f"{state}.{name}" in self._computed
                        if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_computed:
                            values[name] = value.to(dtype)
                self._write(step, branch, "model", weights)
            elif last or outside_quorum or self._config.async_mode == "disabled":
                self._write(step, branch, "full", live_states(self._states, self._states))
            else:
                stager, background = self._prepare_background()
                states = self._stage(stager)
                self.saving = background.submit(self._write, step, branch, "full", states)
        self._failed_at = self._found_step = None

    def save_seed(self, planner: StreamingPlanner | None = None) -> None:
        """Saves only the weights, as step 0, bit for bit. Raises CheckpointFailed. `planner`: see checkpoint_dcp.py."""
        self.wait()
        self._lease = SoloLease()  # no quorum is needed to write it
        self._write(0, 0, "model", {"model": self._states["model"].state_dict()}, planner)
        while not self.wait_uploaded():
            pass

    def load(self) -> int | None:
        """Restores this run from its checkpoints, else from initial_load_path. Called before the first step, and by the manager whenever no
        group has a state. Returns the step from which the run continues; None: it begins at step 0, with or without another run's state.
        Raises ValueError for a setting to be changed, CheckpointFailed if none of its checkpoints is intact. Collective."""
        if not self._config.enable:
            return None
        with suppress(CheckpointFailed, OSError):
            self.wait()
        self._loader.fetch()
        if not self._config.load_only:
            self._ranks.on_rank0(lambda: self._remove_leftovers(restore_only=self._lease.shared))
        step = self._loader.load()
        if self._config.create_seed_checkpoint:
            return None
        self._saved_full_step = self._loader.resumed_step
        if step is not None:
            self.upload(step)  # an earlier launch was killed before its upload
        if self._saves_enabled and self._config.async_mode != "disabled":
            self._prepare_background()  # slower than a copy, as it allocates memory: now rather than in the first save
        return step

    def rewind(self, step: int, rewind_steps: Sequence[int], reset: Callable[[], None]) -> None:
        """Goes back to a checkpoint before `step`: see CheckpointLoader.rewind. Collective. Raises CheckpointFailed, ValueError."""
        with suppress(CheckpointFailed, OSError):
            self.wait()
        self._loader.rewind(step, rewind_steps, reset)
        self._saved_full_step = self._loader.resumed_step
        self._failed_at = self._found_step = None

    def newest_step(self, kind: str = "full") -> int:
        """Returns the newest step, whatever load_step and enable are; 0: none, or the seed. Reads no contents. `kind` "model": of exported
        weights. Collective."""
        self.wait()
        return self._loader.newest_step(kind)

    def checkpoint_to_continue(self) -> Path | None:
        """Returns checkpoint_load.checkpoint_to_continue on all ranks, after copying initial_load_path out of an object store if needed.
        Collective."""
        return self._loader.checkpoint_to_continue()

    def set_abandoned_aside(self) -> None:
        """Sets aside, on rank 0, the checkpoints newer than load_step: see CheckpointLoader.set_abandoned_aside. Raises OSError."""
        self._loader.set_abandoned_aside()

    def wait(self) -> None:
        """Waits, without a timeout, until the save in the background has ended. Raises its failure, once."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()

    def upload(self, step: int) -> None:
        """Asks for an upload of a local checkpoint into the object store, if the folder is one and does not have it. Returns at once."""
        uploader = self._uploader
        if (
            uploader is not None
            and self._saves_enabled
            and step in {*checkpoint_files.list_steps(self.folder)} - uploader.replaceable
        ):
            uploader.enqueue(step)

    def wait_uploaded(self, timeout_s: float = 1.0) -> bool:
        """Returns True once the object store has the newest save, or if there is none; False after `timeout_s`. Collective. Raises
        CheckpointFailed if the store has refused it since `retry_upload`."""
        if not is_url(self._config.folder):
            return True
        self.wait()
        return self._ranks.on_rank0(lambda: self._uploader is None or self._uploader.wait(timeout_s))

    def retry_upload(self) -> None:
        """Tries at once what the object store has refused."""
        if self._uploader is not None:
            self._uploader.retry()

    def close(self) -> None:
        """Waits for the save in the background and for the object store; nothing can be saved afterwards. Their failures are only logged,
        since the run ends for another reason. May be called twice."""
        try:
            self.wait()
        except (CheckpointFailed, OSError) as failure:
            if self._ranks.rank == 0:
                self._log.warning("%s", failure)
        finally:
            if self._background is not None:
                self._background.shutdown()
            if self._uploader is not None:
                try:
                    self._uploader.close()
                except CheckpointFailed as failure:
                    self._log.warning("%s", failure)

    def _stage(self, stager: StateDictStager) -> dict[str, Any]:
        """Returns a copy of the states in host memory."""
        accelerator = torch.accelerator.is_available()
        states: dict[str, Any] = stager.stage(live_states(self._states, self._states), non_blocking=accelerator)
        if accelerator:
            torch.accelerator.synchronize()
        return states

    def _prepare_background(self) -> tuple[StateDictStager, ThreadPoolExecutor]:
        """Returns the stager and the thread for saves in the background, created on the first call."""
        # not torch's DefaultStager: in torch 2.11 it releases its memory after each copy and fails at the second
        from torch.distributed.checkpoint._state_dict_stager import StateDictStager

        if self._stager is None or self._background is None:
            pinned = torch.accelerator.is_available() and self._config.async_mode == "async_with_pinned_mem"
            self._stager = StateDictStager(pin_memory=pinned)
            self._stage(self._stager)  # allocates the memory that later saves reuse
            self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
            index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

            def begin() -> None:
                """Puts the thread on this rank's device. CUDA begins each thread on device 0, where DCP's wait for a stream would create a
                context, in another rank's memory."""
                if index is not None:
                    torch.accelerator.set_device_index(index)

            self._background.submit(begin).result()  # starts the thread now, not in the first save
        return self._stager, self._background

    def _write(
        self, step: int, branch: int, kind: str, states: Mapping[str, Any], planner: StreamingPlanner | None = None
    ) -> None:
        """Performs one save from beginning to end, in the caller's thread or the background thread."""
        from training import checkpoint_dcp as dcp

        began, lease, records = time.perf_counter(), self._lease, list[FileRecord]()
        local_error = peer_error = ""  # see SaveReport

        def begin() -> Path | None:
            if not lease.acquire():  # here, as it reads a file, which must not block the training thread
                return None
            self._on_stage("begin")
            return checkpoint_files.begin(self.folder, step, lease.suffix)

        try:
            partial = self._ranks.on_rank0(begin)
            if partial is None:
                self._log.info("checkpoint: step %d not saved: another group is the checkpoint writer now", step)
                return
            self._on_stage("write")
            records = dcp.write(states, partial, group=self._ranks.group, planner=planner)
        except OSError as error:
            local_error = checkpoint_files.reason(error)
        except dcp.OtherRankFailed as error:
            peer_error = str(error)
        reports = self._ranks.all_gather(SaveReport(records, local_error, peer_error))
        size_bytes = self._ranks.on_rank0(lambda: self._finish_save(step, branch, kind, tuple(states), reports))
        if size_bytes is None:
            self._log.info("checkpoint: step %d not saved: another group has saved since", step)
            return
        self.saved_step = step
        if kind == "full":
            self._saved_full_step = step
        self._loader.damaged.pop(step, None)
        self._loader.stale.discard(step)
        if self._uploader is not None:
            self._uploader.enqueue(step)
        label = ", weights only," if kind != "full" else ", outside of a quorum," if lease.outside_quorum else ""
        seconds = time.perf_counter() - began
        self._log.info("checkpoint: step %d%s saved: %.1f MB in %.2f s", step, label, size_bytes / 1e6, seconds)

    def _finish_save(
        self, step: int, branch: int, kind: str, states: tuple[str, ...], reports: Sequence[SaveReport]
    ) -> int | None:
        """Publishes, on rank 0, the files of all ranks and returns their bytes, or removes them and raises CheckpointFailed. Returns None
        if another group has become the writer and has saved this step or a later one."""
        lease, records = self._lease, tuple(record for report in reports for record in report.records)
        manifest = Manifest(step, kind, states, len(reports), torch.__version__, records, lease.outside_quorum, branch)

        def is_late() -> bool:
            """Returns True if another group has become the writer and has saved this step or a later one."""
            return lease.is_superseded() and self._newest() >= step

        try:
            problems = [report.local_error for report in reports] + [report.peer_error for report in reports]
            if problem := next(filter(None, problems), ""):
                raise OSError(problem)
            if is_late():
                checkpoint_files.remove_partial(self.folder, step, lease.suffix)
                return None
            self._on_stage("publish")
            self._loader.set_abandoned_aside()  # a kill before the next line leaves load_step the newest
            checkpoint_files.publish(self.folder, manifest, lease.suffix)
        except OSError as error:
            checkpoint_files.remove_partial(self.folder, step, lease.suffix)
            with suppress(OSError):  # with failing storage the lease may be unreadable too
                if is_late():
                    return None
            rest = ""
            with suppress(OSError):
                good = checkpoint_files.newest(self.folder, exclude=self._loader.damaged)
                rest = "; there is no earlier one" if good is None else f"; step {good} is the last good one"
            raise CheckpointFailed(
                f"checkpoint: step {step} not saved: {checkpoint_files.reason(error)}{rest}"
            ) from None
        try:
            in_use, damaged = self._uploader.in_use if self._uploader else (), self._loader.damaged.keys() - {step}
            keep = self._config.keep_latest_k
            if not lease.outside_quorum:
                checkpoint_files.remove_older(
                    self.folder, keep, written=step, branch=branch, damaged=damaged, in_use=in_use
                )
                # copies begun by groups that never returned; the store does not keep those steps either
                if lease.shared:
                    oldest = min(checkpoint_files.list_steps(self.folder), default=0)
                    checkpoint_files.remove_leftovers(self.folder, oldest - 1, lambda suffix: suffix.startswith(FETCH))
        except OSError as error:
            self._log.warning("checkpoint: older ones could not be removed: %s", checkpoint_files.reason(error))
        if lease.shared:
            self._remove_leftovers(until=step)
        return manifest.size_bytes

    def _remove_leftovers(self, until: int | None = None, *, restore_only: bool = False) -> None:
        """Removes, on rank 0, the leftovers of a killed process. `until`: only up to that step; other groups may be writing later ones.
        `restore_only`: see checkpoint_files.remove_leftovers."""
        try:
            notes = checkpoint_files.remove_leftovers(
                self.folder, until, self._lease.may_remove, restore_only=restore_only
            )
        except OSError as error:
            notes = [f"its files could not be removed ({checkpoint_files.reason(error)})"]
        if notes:
            self._log.warning("checkpoint: a save was interrupted by a kill: %s", ", ".join(notes))

    def _newest(self) -> int:
        """Returns the newest saved step of either kind, ignoring those in `stale`; 0: none."""
        return max(
            checkpoint_files.newest(self.folder, kind=kind, exclude=self._loader.stale) or 0
            for kind in ("full", "model")
        )

    def _find_newest(self) -> None:
        self._found_step = self._newest()
