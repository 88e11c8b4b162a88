"""Checkpoints: the steps that are due, one save from beginning to end, and the checkpoint from which a launch resumes.

Flow: components.py loads, rewinds and closes; train.py asks which saves are due; saver.py saves and waits. checkpoint_dcp.py writes and
reads the states, checkpoint_files.py publishes the files of a checkpoint atomically; object_store.py copies it into an object store and
out of it, if checkpoint.folder is one."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from ft.seam import from_checkpoint
from training import checkpoint_files
from training.checkpoint_config import INITIAL, CheckpointConfig, initial_folder, steps_phrase
from training.checkpoint_files import (
    EMA_STATE,
    ROWS_STATE,
    SPIKES_STATE,
    CheckpointFailed,
    Damaged,
    FileRecord,
    Manifest,
    manifest_or_problem,
)
from training.log import Log
from training.object_store import ObjectStore, Uploader, fetch_suffix, is_url
from training.progress import Bar, Clock, as_ranges
from training.rank_collectives import RankCollectives
from training.writer_lease import FETCH, OutsideQuorumLease, SoloLease, WriterLease

if TYPE_CHECKING:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    from torch.distributed.checkpoint.stateful import Stateful  # its import takes a second

    from training.checkpoint_dcp import StreamingPlanner

SAVE_RETRY_S = 30.0  # from a failed save to its retry
POLL_S = 1.0  # longest wait in a collective for a copy out of an object store
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
        """`computed`: names of tensors that follow from the configuration; one of another size is not loaded. `lease`: for replica groups
        that share the folder; only its holder saves and removes leftovers. `in_thread`: runs work in the background. `on_stage`: called
        before a save makes its folder ("begin", rank 0), writes ("write"), renames ("publish", rank 0). `report`: reports that an object
        store fails or recovers; None: `log` does. `extra_files`: patterns of further files of the run's folder that an object store gets.
        `fetcher`: see ObjectStore.fetch. `on_bytes`: called on all ranks while rank 0 copies out of an object store, if bytes arrive."""
        self._run_folder = run_folder
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
        self._extra_files = extra_files
        self._fetcher = fetcher
        self._on_bytes = on_bytes
        self._fetched_bytes = 0  # copied so far by the thread of `_copy_on_rank0`
        self._ends_copy = False  # True: that thread stops at its next segment
        self._saves_enabled = not config.nothing_saved
        self.saved_step: int | None = None  # newest step that this group has saved
        self._saved_full_step: int | None = None  # step of a full checkpoint of this run: not saved again
        self._damaged: dict[int, str] = {}
        self._stale: set[int] = set()  # newer steps that `load` did not use: damaged, or to be trained again
        # manifests of checkpoints newer than load_step, on rank 0, until they are set aside: in the folder, in the object store
        self._abandoned: tuple[dict[int, Manifest], dict[int, Manifest]] = {}, {}
        self._setting_aside = threading.Lock()
        self._stager: StateDictStager | None = None
        self._background: ThreadPoolExecutor | None = None
        self._loaded_step = 0  # step that `load` restored: saves due up to it belong to an earlier launch
        self._failed_at: float | None = None  # time of the last save, if it failed; set on all ranks
        self._had_role = False  # the writer role at the last `overdue`; rank 0 only
        self._found_step: int | None = None  # newest step in the folder, read when this group became the writer
        self._uploader: Uploader | None = None  # of rank 0, if the folder is a URL
        if is_url(config.folder) and self._ranks.rank == 0:
            store, keep = ObjectStore(self.location), config.keep_latest_k
            self._uploader = Uploader(
                store,
                self.folder,
                keep,
                extra_files=extra_files,
                lease=self._lease,
                log=log,
                report=report or log.warning,
                clock=clock,
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
        return max(step // self._config.interval * self._config.interval, int(first)) > max(found, self._loaded_step)

    def last_save_exists(self, step: int) -> bool:
        """Returns True if any group has saved `step`, the last of the run, also into the object store if the folder is one, or if saving is
        disabled. Called on one rank."""
        if not self._saves_enabled or self._uploader is None:
            return not self._saves_enabled or step == self.saved_step or self._newest() >= step
        if step in self._uploader.done:
            return True
        try:
            return not self.is_uploading(step) and max({0, *self._uploader.store.steps()} - self._stale) >= step
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
        already, or another group is the writer. Async modes write in the background; a later call raises its CheckpointFailed."""
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
                self._write(step, branch, "full", self._live_states(self._states))
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
        """Restores this run from its own checkpoints, else from initial_load_path. Called before the first step, and by the manager
        whenever no group has a state. Returns the step from which the run continues; None: it begins at step 0, with or without another
        run's state. Raises ValueError for a setting to be changed, CheckpointFailed if no checkpoint of its own is intact."""
        if not self._config.enable:
            return None
        with suppress(CheckpointFailed, OSError):
            self.wait()
        if is_url(self._config.folder):
            self._copy_on_rank0(lambda: self._fetch(self._config.load_step))
        if not self._config.load_only:
            self._ranks.on_rank0(lambda: self._remove_leftovers(restore_only=self._lease.shared))
        steps = self._ranks.on_rank0(self._own_steps)
        if self._config.create_seed_checkpoint:
            if steps and steps[-1] > 0:  # an earlier seed may be replaced, a later step may not
                raise ValueError(
                    f"checkpoint.create_seed_checkpoint = true: {self.folder} has step {steps[-1]} of an earlier run; "
                    "set a different job.name for the seed"
                )
            return None
        step = self._load_own(steps) if steps or self._config.load_step >= 0 else self._load_initial()
        self._loaded_step = step or 0
        stored = self._uploader.replaceable if self._uploader else ()
        self._stale = {newer for newer in (*steps, *stored) if newer > self._loaded_step}
        if self._config.load_step >= 0:
            self._ranks.on_rank0(self._find_abandoned)
        if step is not None:
            self.upload(step)  # an earlier launch was killed before its upload
        if self._saves_enabled and self._config.async_mode != "disabled":
            self._prepare_background()  # slower than a copy, as it allocates memory: now rather than in the first save
        return step

    def _find_abandoned(self) -> None:
        """Notes on rank 0 the checkpoints newer than load_step; damaged ones are not used anyway."""
        newer = (step for step in checkpoint_files.list_steps(self.folder) if step > self._loaded_step)
        found = {step: manifest_or_problem(checkpoint_files.step_folder(self.folder, step)) for step in newer}
        stored = {step: each for step, each in self._stored().items() if each and step > self._loaded_step}
        self._abandoned = {step: each for step, each in found.items() if isinstance(each, Manifest)}, stored

    def set_abandoned_aside(self) -> None:
        """Sets aside, on rank 0, the checkpoints newer than load_step, except for those that another group has replaced since, which
        belong to this run's history. Called before the first row and the first save, in different threads. Raises OSError."""
        with self._setting_aside:
            own, stored = self._abandoned
            same = [
                step
                for step, found in own.items()
                if checkpoint_files.is_same(checkpoint_files.step_folder(self.folder, step), found)
            ]
            for step in same:
                checkpoint_files.set_aside(self.folder, step)
            self._abandoned = {}, {}
        self._stale.difference_update(same)
        if same:
            listed, places = as_ranges("step", same), self.folder / "step-*.abandoned*"
            newer = f"newer than checkpoint.load_step = {self._config.load_step}"
            self._log.warning("checkpoint: %s, %s, set aside as %s", listed, newer, places)
        if self._uploader is not None:
            self._uploader.abandoned.update(stored)

    def _fetch(self, requested_step: int, *, before: float = math.inf) -> None:
        """Copies the newest checkpoint `before` a step out of the object store, or `requested_step` if >= 0, unless the folder has a newer
        one. Raises CheckpointFailed if the store does not answer."""
        assert self._uploader
        abandoned, is_rewind = self._uploader.abandoned, math.isfinite(before)
        stored = {step: found for step, found in self._stored().items() if not found or abandoned.get(step) != found}
        self._uploader.replaceable.update(stored)  # by this launch, if it trains these steps again
        if requested_step >= 0 and requested_step not in (*stored, *checkpoint_files.list_steps(self.folder)):
            phrase = steps_phrase([*stored], requested_step)
            raise ValueError(
                f"checkpoint.load_step = {requested_step}: not in {self.location}, nor in {self.folder}; {phrase}"
            )
        damaged = []
        for step, is_newer in self._candidates(stored, requested_step, before):
            try:
                if self._extra_files and is_newer and not is_rewind:
                    # rows that another machine wrote; before the checkpoint, since a start that finds the step on disk fetches
                    # nothing more
                    self._uploader.store.fetch_files(self.folder.parent)
                self._copy(self._uploader.store, step, self.folder)
                # a group that does not write removes its older ones nowhere else
                if self._saves_enabled and self._lease.shared and requested_step < 0 and not is_rewind:
                    in_use, keep = self._uploader.in_use, self._config.keep_latest_k
                    with suppress(OSError):
                        checkpoint_files.remove_older(
                            self.folder, keep, written=step, damaged=self._damaged, in_use=in_use
                        )
                break
            except Damaged as damage:
                damaged.append(f"step {step}: {damage}")
                self._log.warning("checkpoint: step %d in %s is damaged and not used: %s", step, self.location, damage)
            except OSError as error:  # of the store, or of a full disk
                what = f"checkpoint: step {step} cannot be copied from {self.location} to {self.folder}"
                raise CheckpointFailed(
                    f"{what}: {checkpoint_files.reason(error)}; the next launch copies the rest"
                ) from None
        else:
            if damaged and not checkpoint_files.list_steps(self.folder):
                raise CheckpointFailed(f"checkpoint: no checkpoint in {self.location} is intact ({'; '.join(damaged)})")
        for step in stored:  # what an earlier launch had begun to copy, if it is not needed any more
            checkpoint_files.remove_partial(self.folder, step, fetch_suffix(self._fetcher))
        if self._saves_enabled and not self._uploader.done and not self._uploader.in_use:  # none is on its way
            self._uploader.remove_unneeded()

    def _candidates(
        self, stored: Mapping[int, Manifest | None], requested_step: int, before: float
    ) -> list[tuple[int, bool]]:
        """Returns the steps of the object store that `_fetch` may copy, the best first, each with True if it is newer than the folder's
        newest. If the folder has one, older steps are left out, and so are those that come last: weights alone, and what a group saved as
        it left, where the folder has that step or the run goes back."""
        is_rewind = math.isfinite(before)

        def is_unfit(step: int) -> bool:
            path = checkpoint_files.step_folder(self.folder, step)
            return step >= before or (is_rewind and self._is_outside_quorum(step, manifest_or_problem(path)))

        own = checkpoint_files.newest(
            self.folder, exclude=list(filter(is_unfit, checkpoint_files.list_steps(self.folder)))
        )
        recency = {step: found.recency if found else (0, step) for step, found in stored.items()}
        own_recency = checkpoint_files.recency(self.folder, own)
        last = {
            step
            for step, found in stored.items()
            if found
            and (
                found.kind == "model"
                or (step == own and found.outside_quorum)
                or (is_rewind and self._is_outside_quorum(step, found))
            )
        }
        steps = [requested_step] if requested_step in stored else []
        if requested_step < 0:
            as_new = {step for step in stored if step not in last and recency[step] >= own_recency}
            steps = [step for step in stored if step < before and (own is None or step in as_new)]
        steps.sort(key=lambda step: (step not in last, recency[step]), reverse=True)
        return [(step, recency[step] > own_recency) for step in steps]

    def _fetch_again(self, step: int) -> Manifest | None:
        """Replaces a damaged checkpoint, on rank 0, by that of the object store; None: it has no intact one."""
        assert self._uploader
        try:
            return checkpoint_files.read_manifest(self._copy(self._uploader.store, step, self.folder, again=True))
        except (OSError, Damaged):
            return None

    def _copy(self, store: ObjectStore, step: int, folder: Path, *, again: bool = False) -> Path:
        """Copies a checkpoint out of a store, on rank 0: see ObjectStore.fetch."""
        label = f"checkpoint: step {step} from {store.url}"
        bar = Bar(store.manifest(step).size_bytes, label, log=self._log)

        def on_bytes(count: int) -> None:
            if self._ends_copy:
                raise CheckpointFailed(f"{label}: not complete; the next launch copies the rest")
            self._fetched_bytes += count
            bar.update(count)

        try:
            return store.fetch(step, folder, fetcher=self._fetcher, again=again, on_bytes=on_bytes)
        finally:
            bar.close()

    def _copy_on_rank0(self, work: Callable[[], T]) -> T:
        """Calls `work`, which may copy a checkpoint out of an object store for hours, on rank 0 in a thread; every rank returns its result
        or raises its exception. Collectives wait for POLL_S at most, since gloo limits their time. Collective."""
        copied_bytes, self._ends_copy = self._fetched_bytes, False
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy") as thread:
            copying = thread.submit(work) if self._ranks.rank == 0 else Future[T]()

            def poll() -> tuple[bool, int]:
                wait([copying], POLL_S)
                return copying.done(), self._fetched_bytes

            try:
                while True:
                    is_done, now_bytes = self._ranks.on_rank0(poll)
                    if is_done:
                        return self._ranks.on_rank0(copying.result)
                    if now_bytes > copied_bytes:
                        copied_bytes = now_bytes
                        self._on_bytes()
            finally:
                self._ends_copy = True

    def _stored(self) -> dict[int, Manifest | None]:
        """Returns the manifests in the object store by step, ascending, on rank 0. Raises CheckpointFailed if it does not answer."""
        try:
            return self._uploader.store.manifests() if self._uploader and self._config.enable else {}
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> CheckpointFailed:
        why = f"checkpoint: {self.location} cannot be read: {checkpoint_files.reason(error)}"
        return CheckpointFailed(f"{why}; refusing to start: it may hold this run's checkpoints")

    def newest_step(self, kind: str = "full") -> int:
        """Returns the newest step, whatever load_step and enable are; 0: none, or the seed. Reads no contents. `kind` "model": of exported
        weights."""
        self.wait()

        def newest() -> int:
            own = checkpoint_files.newest(self.folder, kind=kind) or 0
            stored = (found.recency for found in self._stored().values() if found and found.kind == kind)
            return max([checkpoint_files.recency(self.folder, own), *stored])[1]

        return self._ranks.on_rank0(newest)

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
        """Returns True once the object store has the newest save, or if the folder is none; False after `timeout_s`. Collective. Raises
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
            self._warn("%s", failure)
        finally:
            if self._background is not None:
                self._background.shutdown()
            if self._uploader is not None:
                try:
                    self._uploader.close()
                except CheckpointFailed as failure:
                    self._log.warning("%s", failure)

    def _live_states(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {name: values for name in names if (values := self._states[name].state_dict())}

    def _stage(self, stager: StateDictStager) -> dict[str, Any]:
        """Returns a copy of the states in host memory."""
        accelerator = torch.accelerator.is_available()
        states: dict[str, Any] = stager.stage(self._live_states(self._states), non_blocking=accelerator)
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
            self._background.submit(lambda: None).result()  # starts the thread now, not in the first save
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
        self._damaged.pop(step, None)
        self._stale.discard(step)
        if self._uploader is not None:
            self._uploader.enqueue(step)
        label = ", weights only," if kind != "full" else ", outside of a quorum," if lease.outside_quorum else ""
        seconds = time.perf_counter() - began
        self._log.info("checkpoint: step %d%s saved: %.1f MB in %.2f s", step, label, size_bytes / 1e6, seconds)

    def _finish_save(
        self, step: int, branch: int, kind: str, states: tuple[str, ...], reports: Sequence[SaveReport]
    ) -> int | None:
        """Publishes, on rank 0, the files of all ranks and returns their bytes, or removes them and raises CheckpointFailed. Returns None
        if a newer writer has removed them or has saved this step or a later one."""
        lease, records = self._lease, tuple(record for report in reports for record in report.records)
        manifest = Manifest(
            step, kind, states, len(reports), torch.__version__, "", records, lease.outside_quorum, branch
        )

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
            self.set_abandoned_aside()  # a kill before the next line leaves load_step the newest
            checkpoint_files.publish(self.folder, manifest, lease.suffix)
        except OSError as error:
            checkpoint_files.remove_partial(self.folder, step, lease.suffix)
            with suppress(OSError):  # with failing storage the lease may be unreadable too
                if is_late():
                    return None
            rest = ""
            with suppress(OSError):
                good = checkpoint_files.newest(self.folder, exclude=self._damaged)
                rest = "; there is no earlier one" if good is None else f"; step {good} is the last good one"
            raise CheckpointFailed(
                f"checkpoint: step {step} not saved: {checkpoint_files.reason(error)}{rest}"
            ) from None
        try:
            in_use, damaged = self._uploader.in_use if self._uploader else (), self._damaged.keys() - {step}
            keep = self._config.keep_latest_k
            if not lease.outside_quorum:
                checkpoint_files.remove_older(
                    self.folder, keep, written=step, branch=branch, damaged=damaged, in_use=in_use
                )
                # copies that groups began which never returned; the store does not keep those steps either
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
        """Returns the newest saved step of either kind, ignoring those in `_stale`; 0: none."""
        return max(
            checkpoint_files.newest(self.folder, kind=kind, exclude=self._stale) or 0 for kind in ("full", "model")
        )

    def _find_newest(self) -> None:
        self._found_step = self._newest()

    def _own_steps(self) -> list[int]:
        try:
            next(os.scandir(self.folder), None)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # the folder may contain this run's checkpoints
            why = f"checkpoint: {self.folder} cannot be read: {checkpoint_files.reason(error)}"
            raise CheckpointFailed(f"{why}; refusing to start a new run over it") from None
        return checkpoint_files.list_steps(self.folder)

    def _load_own(self, steps: Sequence[int]) -> int:
        load_step = self._config.load_step
        if load_step >= 0 and load_step not in steps:
            raise ValueError(
                f"checkpoint.load_step = {load_step}: not in {self.folder}; {steps_phrase(steps, load_step)}"
            )
        surveyed = self._survey([load_step] if load_step >= 0 else None)
        if (loaded := self._load_first(surveyed)) is not None:
            return loaded
        if self._damaged:
            listed = "; ".join(f"step {step}: {problem}" for step, problem in self._damaged.items())
            folders = f"the folder and {self.location}" if is_url(self._config.folder) else "the folder"
            rest = "set a different load_step" if load_step >= 0 else f"rename {folders} to start from step 0"
            raise CheckpointFailed(f"checkpoint: no checkpoint in {self.folder} is intact ({listed}); {rest}")
        # There is no full checkpoint. Of checkpoints with only weights, a run can start from the seed only.
        if 0 not in surveyed or (load_step < 0 and len(steps) > 1):
            newest = next(iter(surveyed))
            raise ValueError(
                f"checkpoint.load_step = {load_step}: step {newest} in {self.folder} has only the weights "
                "(checkpoint.last_save_model_only), so this run cannot resume from it; a new run can start from them: "
                f'checkpoint.initial_load_path = "{checkpoint_files.step_folder(self.folder, newest)}"'
            )
        self._load_seed(surveyed[0])
        return 0

    def _survey(self, steps: Sequence[int] | None = None) -> dict[int, Manifest | str]:
        """Returns on all ranks manifest_or_problem of these steps (None: of all, the newest first). Collective."""

        def survey() -> dict[int, Manifest | str]:
            found = checkpoint_files.by_recency(self.folder) if steps is None else steps
            return {step: manifest_or_problem(checkpoint_files.step_folder(self.folder, step)) for step in found}

        return self._ranks.on_rank0(survey)

    def _load_first(self, surveyed: Mapping[int, Manifest | str]) -> int | None:
        """Restores the first full checkpoint that is intact, and returns its step; None: there is none."""
        for step, found in surveyed.items():
            if isinstance(found, Manifest) and found.kind == "model":
                continue
            path = checkpoint_files.step_folder(self.folder, step)
            problem = self._restore(path, found, tuple(self._states))
            if problem and is_url(self._config.folder):
                found = self._copy_on_rank0(partial(self._fetch_again, step)) or problem
                if isinstance(found, Manifest):
                    self._warn(
                        "checkpoint: step %d is damaged (%s), fetched again from %s", step, problem, self.location
                    )
                    problem = self._restore(path, found, tuple(self._states))
            if problem:
                self._damaged[step] = problem
                self._warn("checkpoint: step %d is damaged and not used: %s", step, problem)
                continue
            self._saved_full_step = step
            if isinstance(found, Manifest) and found.outside_quorum:
                self._log.info("checkpoint: step %d was saved by a group that left while it waited for others", step)
            return step
        return None

    def _load_seed(self, found: Manifest | str) -> None:
        path = checkpoint_files.step_folder(self.folder, 0)
        if problem := self._restore(path, found, ("model",)):
            raise CheckpointFailed(f"checkpoint: the seed {path} is damaged: {problem}")

    def rewind(self, step: int, rewind_steps: Sequence[int], reset: Callable[[], None]) -> None:
        """Restores the newest intact checkpoint from which this run came to `step`; one that another group saved as it left, only if there
        is no other. `rewind_steps`: steps to which it went back before, one for each branch. If there is none, restores what the run began
        with: calls `reset`, then loads the seed or initial_load_path, if there is one. Collective. Raises CheckpointFailed if none of its
        checkpoints is intact, ValueError."""
        with suppress(CheckpointFailed, OSError):
            self.wait()

        def prepare() -> None:
            try:
                self.set_abandoned_aside()
            except OSError as error:
                raise CheckpointFailed(f"checkpoint: {self.folder}: {checkpoint_files.reason(error)}") from None
            # without replica groups the disk has what this launch has loaded and saved, also while the store does not answer
            if is_url(self._config.folder) and (
                self._lease.shared or not any(at < step for at in checkpoint_files.list_steps(self.folder))
            ):
                self._fetch(-1, before=step)  # not load_step: the run has gone on since

        self._copy_on_rank0(prepare)
        surveyed = self._survey()
        seed = surveyed.pop(0) if isinstance(found := surveyed.get(0), Manifest) and found.kind == "model" else None

        def leads_to_step(at: int, found: Manifest | str) -> bool:
            if at >= step or isinstance(found, str):  # a damaged manifest does not tell
                return at < step
            return found.branch <= len(rewind_steps) and at <= min(rewind_steps[found.branch :], default=at)

        history = {at: found for at, found in surveyed.items() if leads_to_step(at, found)}
        history = {at: history[at] for at in sorted(history, key=lambda at: self._is_outside_quorum(at, history[at]))}
        loaded = self._load_first(history)
        if loaded is None and history:
            raise CheckpointFailed(f"checkpoint: none before step {step} in {self.folder} is intact")
        if loaded is None:
            reset()
            if seed is not None:
                self._load_seed(seed)
            else:
                loaded = self._load_initial()
            self._saved_full_step = None
        self._loaded_step, self._failed_at, self._found_step = loaded or 0, None, None
        self._stale = {later for later in surveyed if later > self._loaded_step}

    def _is_outside_quorum(self, step: int, found: Manifest | str) -> bool:
        """Returns True for a checkpoint that was saved outside of a quorum, unless this run has continued from it."""
        return isinstance(found, Manifest) and found.outside_quorum and step != self._loaded_step

    def _load_initial(self) -> int | None:
        """Loads another run's checkpoint, if one is given; one without a manifest (from another program) is loaded without verification.
        Returns the step from which this run continues; None: it starts at step 0."""
        config = self._config
        if not config.initial_load_path:
            return None
        setting = f'checkpoint.initial_load_path = "{config.initial_load_path}"'

        def find() -> tuple[Path, Manifest | str | None]:
            path = self._fetch_initial()
            return path, manifest_or_problem(path) if (path / checkpoint_files.MANIFEST).exists() else None

        path, found = self._copy_on_rank0(find)
        if found is None:
            self._warn("%s: has no %s, so it is not verified", setting, checkpoint_files.MANIFEST)
        is_full = isinstance(found, Manifest) and found.kind == "full"
        if not config.initial_load_model_only and not is_full and not isinstance(found, str):
            raise ValueError(f"{setting}: has only the weights; nearest: checkpoint.initial_load_model_only = true")
        names = ["model"]
        if not config.initial_load_model_only:
            names = [name for name in self._states if name != ROWS_STATE]  # metrics of the other run
        if problem := self._restore(path, found, names, initial=setting):
            raise CheckpointFailed(f"{setting}: damaged: {problem}")
        if config.initial_load_model_only or "ledger" in config.exclude_from_loading:  # as in `checkpoint_to_continue`
            return None
        return found.step if isinstance(found, Manifest) else None

    def checkpoint_to_continue(self) -> Path | None:
        """Returns the module's checkpoint_to_continue on all ranks, after copying initial_load_path out of an object store if needed.
        Collective."""
        return self._copy_on_rank0(
            lambda: checkpoint_to_continue(self._config, self._run_folder, fetch_initial=self._fetch_initial)
        )

    def _fetch_initial(self) -> Path:
        """Returns the checkpoint that initial_load_path names, copied out of an object store, once, if it is a URL. In rank 0. Raises
        CheckpointFailed, and ValueError if there is none."""
        name = self._config.initial_load_path
        if not is_url(name):
            return initial_folder(name)
        parent, _, last = name.rstrip("/").rpartition("/")
        store, setting = ObjectStore(parent), f'checkpoint.initial_load_path = "{name}"'
        try:
            steps = store.steps()
            for step in steps:
                if last == f"step-{step}":
                    return self._copy(store, step, self._run_folder / INITIAL)
        except OSError as error:
            raise CheckpointFailed(f"{setting}: cannot be read: {checkpoint_files.reason(error)}") from None
        except Damaged as damage:
            raise CheckpointFailed(f"{setting}: damaged: {damage}") from None
        raise ValueError(f"{setting}: not a checkpoint; {steps_phrase(steps, -1)}")

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
        began, live = time.perf_counter(), self._live_states(names)
        try:
            metadata, problem = dcp.read_metadata(path), ""
        except Exception as error:  # noqa: BLE001 (an unverified pickle can raise anything, and all ranks must know of it)
            problem = f".metadata: {type(error).__name__}: {error}"
        if problem := ranks.problem(problem):
            return problem
        compared = {*names, *(found.states if found is not None and not initial else ())}
        exclude = list(config.exclude_from_loading) if initial else []
        if initial and not config.initial_load_model_only:  # its settings are this run's, not those of the other run
            exclude.append("optimizer.param_groups")
        # they follow from this run's configuration; in its own checkpoints they are as in training, unless seq_len was changed
        exclude += [name for name in self._computed if initial or dcp.other_size(name, live, metadata)]
        fit = dcp.fit(live, metadata, compared=compared, exclude=exclude, exact=not initial)
        fits = ranks.all_gather(fit._replace(states={}))
        unknown = set.intersection(*(each.only_in_checkpoint for each in fits))
        unused = set.intersection(*(each.unused_excludes for each in fits))
        misfits = [f'exclude_from_loading: no name begins with "{prefix}"' for prefix in sorted(unused)]
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
        for name in lacking:  # what they hold is of steps that are given up
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
    """Returns the full checkpoint from which a launch continues data and step: the run's own, else initial_load_path, if its step and
    position are loaded; None: it begins at step 0. `fetch_initial`: copies initial_load_path out of an object store; without it a URL, and
    what only the run's own store has, count as none. Raises ValueError if initial_load_path is not a checkpoint."""
    if not config.enable:
        return None
    folder = run_folder / config.local_folder
    step = config.load_step if config.load_step >= 0 else checkpoint_files.newest(folder)
    if step is not None or checkpoint_files.list_steps(folder):
        return None if step is None else checkpoint_files.step_folder(folder, step)
    excluded = "ledger" in config.exclude_from_loading
    if not config.initial_load_path or config.initial_load_model_only or excluded:
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
