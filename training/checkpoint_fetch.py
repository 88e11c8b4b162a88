"""Copies checkpoints out of an object store into the run's folder, from where checkpoint_load.py restores them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from training import checkpoint_files
from training.checkpoint_config import INITIAL, CheckpointConfig, initial_folder, steps_phrase
from training.checkpoint_files import CheckpointFailed, Damaged, Manifest, manifest_or_problem
from training.log import Log
from training.object_store import ObjectStore, Uploader, fetch_suffix, is_url
from training.progress import Bar
from training.rank_collectives import RankCollectives

POLL_S = 1.0  # longest wait in a collective for a copy out of an object store
T = TypeVar("T")


class CheckpointFetcher:
    """Copies a run's checkpoints, and initial_load_path, out of object stores. Rank 0 copies; `on_rank0` is for all ranks."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        *,
        uploader: Uploader | None,
        shared: bool,
        ranks: RankCollectives,
        log: Log,
        extra_files: Sequence[str],
        name: str,
        on_bytes: Callable[[], None],
    ) -> None:
        """`uploader`: of rank 0, if checkpoint.folder is a URL. `shared`: replica groups share the folder. `name`: the `fetcher` of
        ObjectStore.fetch. `extra_files`, `on_bytes`: see Checkpointer."""
        self.uploader = uploader
        self.shared = shared
        self._config = config
        self._run_folder = run_folder
        self._folder = run_folder / config.local_folder
        self._location = config.location(run_folder)
        self._ranks = ranks
        self._log = log
        self._extra_files = extra_files
        self._name = name
        self._on_bytes = on_bytes
        self._fetched_bytes = 0  # copied so far by the thread of `on_rank0`
        self._ends_copy = False  # True: that thread stops at its next segment

    def on_rank0(self, work: Callable[[], T]) -> T:
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

    def stored(self) -> dict[int, Manifest | None]:
        """Returns the manifests in the object store by step, ascending, on rank 0; {}: there is no store. Raises CheckpointFailed if it
        does not answer."""
        try:
            return self.uploader.store.manifests() if self.uploader and self._config.enable else {}
        except OSError as error:
            why = f"checkpoint: {self._location} cannot be read: {checkpoint_files.reason(error)}"
            raise CheckpointFailed(f"{why}; refusing to start: it may hold this run's checkpoints") from None

    def fetch(
        self, requested_step: int, *, before: float = math.inf, loaded_step: int = 0, damaged: Collection[int] = ()
    ) -> None:
        """Copies the newest checkpoint, or `requested_step` if >= 0, out of the object store, unless the folder has a newer one. `before`:
        of a rewind, only earlier steps; `loaded_step`: the one from which this launch has continued. `damaged`: steps of the folder. On
        rank 0. Raises ValueError if `requested_step` is in neither, CheckpointFailed if the store does not answer, a copy fails, or none is
        intact."""
        assert self.uploader
        uploader, is_rewind = self.uploader, math.isfinite(before)
        abandoned, saves_enabled = uploader.abandoned, not self._config.nothing_saved
        stored = {step: found for step, found in self.stored().items() if not found or abandoned.get(step) != found}
        uploader.replaceable.update(stored)  # by this launch, if it trains these steps again
        if requested_step >= 0 and requested_step not in (*stored, *checkpoint_files.list_steps(self._folder)):
            phrase = steps_phrase([*stored], requested_step)
            raise ValueError(
                f"checkpoint.load_step = {requested_step}: not in {self._location}, nor in {self._folder}; {phrase}"
            )
        problems = []
        for step, is_newer in self._candidates(stored, requested_step, before, loaded_step):
            try:
                if self._extra_files and is_newer and not is_rewind:
                    # rows that another machine wrote; before the checkpoint, since a start that finds the step on disk fetches
                    # nothing more
                    uploader.store.fetch_files(self._run_folder)
                self._copy(uploader.store, step, self._folder)
                # only here does a group that is not the writer remove its older ones
                if saves_enabled and self.shared and requested_step < 0 and not is_rewind:
                    keep = self._config.keep_latest_k
                    with suppress(OSError):
                        checkpoint_files.remove_older(
                            self._folder, keep, written=step, damaged=damaged, in_use=uploader.in_use
                        )
                break
            except Damaged as damage:
                problems.append(f"step {step}: {damage}")
                self._log.warning("checkpoint: step %d in %s is damaged and not used: %s", step, self._location, damage)
            except OSError as error:  # of the store, or of a full disk
                what = f"checkpoint: step {step} cannot be copied from {self._location} to {self._folder}"
                raise CheckpointFailed(
                    f"{what}: {checkpoint_files.reason(error)}; the next launch copies the rest"
                ) from None
        else:
            if problems and not checkpoint_files.list_steps(self._folder):
                raise CheckpointFailed(
                    f"checkpoint: no checkpoint in {self._location} is intact ({'; '.join(problems)})"
                )
        for step in stored:  # what an earlier launch had begun to copy, if it is not needed any more
            checkpoint_files.remove_partial(self._folder, step, fetch_suffix(self._name))
        if saves_enabled and not uploader.done and not uploader.in_use:  # no save is on its way
            uploader.remove_unneeded()

    def _candidates(
        self, stored: Mapping[int, Manifest | None], requested_step: int, before: float, loaded_step: int
    ) -> list[tuple[int, bool]]:
        """Returns (step, is_newer) of the checkpoints in the object store that `fetch` may copy, in the order in which it tries them.
        `is_newer`: newer than the newest in the folder. Last come those with weights alone and, in a rewind or if the folder has the
        same step, those saved outside of a quorum. If the folder has a usable checkpoint, these last ones are left out, and so are all that
        are older than that one."""
        is_rewind = math.isfinite(before)

        def is_unfit(step: int) -> bool:
            if step >= before or not is_rewind or step == loaded_step:
                return step >= before
            found = manifest_or_problem(checkpoint_files.step_folder(self._folder, step))
            return isinstance(found, Manifest) and found.outside_quorum

        local = checkpoint_files.newest(
            self._folder, exclude=list(filter(is_unfit, checkpoint_files.list_steps(self._folder)))
        )
        recency = {step: found.recency if found else (0, step) for step, found in stored.items()}
        local_recency = checkpoint_files.recency(self._folder, local)
        last = {
            step
            for step, found in stored.items()
            if found
            and (
                found.kind == "model"
                or (found.outside_quorum and (step == local or (is_rewind and step != loaded_step)))
            )
        }
        if requested_step >= 0:
            steps = [requested_step] if requested_step in stored else []
        else:
            steps = [step for step in stored if step < before]
            if local is not None:
                steps = [step for step in steps if step not in last and recency[step] >= local_recency]
        steps.sort(key=lambda step: (step not in last, recency[step]), reverse=True)
        return [(step, recency[step] > local_recency) for step in steps]

    def fetch_again(self, step: int) -> Manifest | None:
        """Replaces a damaged checkpoint, on rank 0, by that of the object store; None: it has no intact one."""
        assert self.uploader
        try:
            return checkpoint_files.read_manifest(self._copy(self.uploader.store, step, self._folder, again=True))
        except (OSError, Damaged):
            return None

    def fetch_initial(self) -> Path:
        """Returns the checkpoint that initial_load_path names, copied out of an object store, once, if it is a URL. On rank 0. Raises
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
            return store.fetch(step, folder, fetcher=self._name, again=again, on_bytes=on_bytes)
        finally:
            bar.close()
