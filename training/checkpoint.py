"""Checkpoints: when the run is saved, and from which of them it goes on; model and optimizer as flat dictionaries under full names.

Flow: components.py calls `load` and `close`, saver.py `save` where `due` says so. checkpoint_dcp.py moves states to files and back,
checkpoint_files.py makes files appear at once or not at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ft.optim_state import init_optim_state
from training import checkpoint_files as files
from training.checkpoint_files import METRICS_STATE, CheckpointFailed, Damaged, FileRecord, Manifest
from training.log import Log
from training.progress import Clock
from training.writer_lease import UncheckedLease, WriterLease

if TYPE_CHECKING:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    from torch.distributed.checkpoint.stateful import Stateful  # a second to import

    from training.checkpoint_dcp import Streamed

RETRY_S = 30.0  # from a save that failed to the next try
T = TypeVar("T")


class SaveReport(NamedTuple):
    """One rank's result of a save."""

    records: list[FileRecord]  # of its files
    own_error: str  # of its own files; "": none
    peer_error: str  # that another rank told it; "": none


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: saving the run and going on from it."""

    enable: Annotated[bool, "save, and resume from the newest checkpoint; false: start anew and save nothing"] = True
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
    load_step: Annotated[int, "resume from this step; -1: from the newest whole checkpoint", ">= -1"] = -1
    verify_digests: Annotated[bool, "compare every file with its digests before it is loaded"] = True
    load_only: Annotated[bool, "resume from a checkpoint, but write none"] = False
    enable_first_step_checkpoint: Annotated[bool, "save after step 1 too, to see early that saving works"] = False
    # true in torchtitan. Here a finished run may be continued, by raising training.steps, which is worth the space of a full checkpoint.
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
        for key in ("initial_load_path", "load_only", "create_seed_checkpoint"):
            if (value := getattr(self, key)) and not self.enable:
                shown = "true" if value is True else f'"{value}"'
                raise ValueError(f"checkpoint.{key} = {shown}: needs checkpoint.enable = true")
        if not self.folder.strip("/. "):
            raise ValueError(f'checkpoint.folder = "{self.folder}": must be a folder of its own; nearest: "checkpoint"')
        if self.create_seed_checkpoint and self.load_only:
            raise ValueError("checkpoint.load_only = true: no seed checkpoint would be written; set it to false")
        if self.create_seed_checkpoint and self.initial_load_path:
            raise ValueError(
                f'checkpoint.initial_load_path = "{self.initial_load_path}": a seed holds freshly initialised weights; nearest: ""'
            )
        if self.exclude_from_loading and not self.initial_load_path:
            shown = ", ".join(f'"{name}"' for name in self.exclude_from_loading)
            raise ValueError(f"checkpoint.exclude_from_loading = [{shown}]: needs checkpoint.initial_load_path")

    def check_files(self) -> None:
        """Raises ValueError when initial_load_path is not a checkpoint. Opens no file."""
        if self.initial_load_path:
            initial_folder(self.initial_load_path)


class Checkpointer:
    """Saves and restores `states` in `<run_folder>/<config.folder>/step-N`. Every rank of the default group has one and calls every method.
    Guarantees: a kill at any instant leaves the last published checkpoint whole, and the next start finds it; damaged ones are not loaded
    (with verify_digests); a run that has checkpoints never begins from nothing unasked; all ranks raise the same error. `states` must
    contain "model", which exports and seeds save."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        states: Mapping[str, Stateful],
        *,
        log: Log,
        ranks: RankCollectives | None = None,
        lease: WriterLease | None = None,
        clock: Clock = time.monotonic,
        in_thread: Callable[[Callable[[], None]], None] | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`lease`: of groups that share the folder: its holder alone saves and removes leftovers. `in_thread`: starts work that none waits
        for. `on_stage`: called before a save makes its folder ("begin", rank 0), writes ("write"), and renames it ("publish", rank 0)."""
        self.folder = run_folder / config.folder
        self.saving: Future[None] | None = None  # in the background, until it is joined
        self._config, self._states, self._log, self._clock = config, states, log, clock
        self._lease = lease or UncheckedLease()
        self._ranks, self._on_stage = ranks or RankCollectives(), on_stage
        self._in_thread = in_thread or (
            lambda work: threading.Thread(target=work, name="checkpoint-look", daemon=True).start()
        )
        self._saves_enabled = config.enable and not config.load_only
        self._saved_step: int | None = None  # the newest that this group has saved
        self._saved_full_step: int | None = None  # in a full checkpoint of this run: no need to save it again
        self._damaged: dict[int, str] = {}
        self._stager: StateDictStager | None = None
        self._background: ThreadPoolExecutor | None = None
        self._loaded_step = 0  # the step that `load` restored: saves due up to it belong to an earlier start
        self._failed_at: float | None = None  # the last save; the same on all ranks
        self._had_role = False  # at the last `overdue`; as `_found_step`, rank 0's
        self._found_step: int | None = None  # the newest save in the folder, when this group took the role over

    def due(self, step: int) -> bool:
        """True when the configuration asks for a checkpoint after `step`."""
        if not self._saves_enabled or self._failed_at is not None:  # then see `overdue`
            return False
        return step % self._config.interval == 0 or (step == 1 and self._config.enable_first_step_checkpoint)

    def overdue(self, step: int) -> bool:
        """True on rank 0 if a save due by `step` is missing: it failed RETRY_S ago, or the group that was to make it died. Never waits."""
        if not self._saves_enabled or self._ranks.rank != 0:
            return False
        if self.saving is not None and self.saving.done() and self.saving.exception() is not None:
            return True
        has_role, had_role = self._lease.has_role, self._had_role
        if self._failed_at is not None:
            return has_role and self._clock() - self._failed_at >= RETRY_S
        self._had_role = has_role
        if has_role and not had_role and self._lease.shared:
            self._in_thread(self._find_newest)
        if self._found_step is None or not has_role:
            return False
        found, self._found_step = self._found_step, None
        first = self._config.enable_first_step_checkpoint and step > 0
        return max(step // self._config.interval * self._config.interval, int(first)) > max(found, self._loaded_step)

    def has(self, step: int) -> bool:
        """True when the last save of a run that ends with `step` exists, whichever group's, or checkpoints are off. Called on one rank."""
        return not self._saves_enabled or step == self._saved_step or self._newest() >= step

    def agree(self, decide: Callable[[bool], T], wish: bool) -> T:
        """Asks rank 0 to decide once it knows whether any rank wishes it. By all ranks."""
        wishes = self._ranks.all_gather(wish)
        return self._ranks.on_rank0(lambda: decide(any(wishes)))

    def save(self, step: int, *, last: bool = False, settled: bool = True) -> float:
        """Saves the states as `step`, due or not; returns the seconds that held the caller up. `last`: the run is finished with this step.
        Not `settled`: see UncheckedLease; nothing can be saved after it. Does nothing when checkpoints are off or hold this step already,
        or another group saves. In an async mode all but the last is written in the background; a failure there is raised by the next
        `save`, `wait` or `close`. Raises CheckpointFailed."""
        began = time.perf_counter()
        self._failed_at = self._clock()  # unless it succeeds
        self.wait()
        alone = last and self._config.last_save_model_only
        if self._saves_enabled and (alone or step != self._saved_full_step):
            if not settled:
                self._lease = UncheckedLease(settled=False)
            if alone:
                dtype, weights = getattr(torch, self._config.export_dtype), self._states["model"].state_dict()
                converted = {name: v.to(dtype) if torch.is_floating_point(v) else v for name, v in weights.items()}
                self._write(step, "model", {"model": converted})
            elif last or not settled or self._config.async_mode == "disabled":
                self._write(step, "full", self._live_states(self._states))
            else:
                stager, background = self._prepared()
                states = self._staged(stager)
                self.saving = background.submit(self._write, step, "full", states)
        self._failed_at = self._found_step = None
        return time.perf_counter() - began

    def save_seed(self, streamed: Streamed | None = None) -> None:
        """Saves the weights alone as step 0, bit for bit. Raises CheckpointFailed. `streamed`: see checkpoint_dcp.py."""
        self.wait()
        self._lease = UncheckedLease()  # no quorum is needed to write it
        self._write(0, "model", {"model": self._states["model"].state_dict()}, streamed)

    def load(self) -> int | None:
        """Restores this run from its own checkpoints, else begins with initial_load_path. Called once, before any save. Returns the step to
        go on from; None: the run begins. Raises ValueError for what the user must change, CheckpointFailed if none of its own is whole."""
        if not self._config.enable:
            return None
        if not self._config.load_only and not self._lease.shared:
            self._ranks.on_rank0(self._tidy)
        steps = self._ranks.on_rank0(self._own_steps)
        if self._config.create_seed_checkpoint:
            if steps and steps[-1] > 0:  # a seed is the first state of a run; another seed may be there already
                raise ValueError(
                    f"checkpoint.create_seed_checkpoint = true: {self.folder} holds step {steps[-1]} of a run that has begun; "
                    "give the seed a job.name of its own"
                )
            return None
        if steps or self._config.load_step >= 0:
            step: int | None = self._load_own(steps)
        else:
            step = self._load_initial() if self._config.initial_load_path else None
        self._loaded_step = step or 0
        if self._saves_enabled and self._config.async_mode != "disabled":
            self._prepared()  # takes longer than a copy: now, rather than in the first step that saves
        return step

    def newest_step(self, kind: str = "full") -> int:
        """The step that `load` would try first; 0: none, or the seed. No content is read. "model": the newest step whose weights were saved
        alone: a finished run may have left nothing else."""
        self.wait()
        return self._ranks.on_rank0(lambda: files.newest(self.folder, kind=kind)) or 0

    def wait(self) -> None:
        """Returns when nothing is being written, however long that takes. Raises the failure of a save in the background, once."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()

    def close(self) -> None:
        """As `wait`; then nothing can be saved any more. May be called twice."""
        try:
            self.wait()
        finally:
            if self._background is not None:
                self._background.shutdown()

    def _live_states(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {name: values for name in names if (values := self._states[name].state_dict())}

    def _staged(self, stager: StateDictStager) -> dict[str, Any]:
        """A copy of the states in the host's memory."""
        accelerator = torch.accelerator.is_available()
        states: dict[str, Any] = stager.stage(self._live_states(self._states), non_blocking=accelerator)
        if accelerator:
            torch.accelerator.synchronize()
        return states

    def _prepared(self) -> tuple[StateDictStager, ThreadPoolExecutor]:
        """Memory and a thread for saves in the background."""
        # not torch's DefaultStager: that of torch 2.11 gives its memory up after each copy, and fails at the second
        from torch.distributed.checkpoint._state_dict_stager import StateDictStager

        if self._stager is None or self._background is None:
            pinned = torch.accelerator.is_available() and self._config.async_mode == "async_with_pinned_mem"
            self._stager = StateDictStager(pin_memory=pinned)
            self._staged(self._stager)  # allocates its memory, which later saves use again
            self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
            self._background.submit(int).result()  # it exists from now on: starting it would hold up the first save
        return self._stager, self._background

    def _write(self, step: int, kind: str, states: Mapping[str, Any], planner: Streamed | None = None) -> None:
        """One save from begin to end, in the background too."""
        from training import checkpoint_dcp as dcp

        began, lease, records = time.perf_counter(), self._lease, list[FileRecord]()
        problem = heard = ""  # of this rank's own files; of another's

        def begin() -> Path | None:
            if not lease.acquire():  # reads a file: not before, in the step's own thread
                return None
            self._on_stage("begin")
            return files.begin(self.folder, step, lease.name)

        try:
            partial = self._ranks.on_rank0(begin)
            if partial is None:
                return self._log.info("checkpoint: step %d not saved: another group is the checkpoint writer now", step)
            self._on_stage("write")
            records = dcp.write(states, partial, group=self._ranks.group, planner=planner)
        except OSError as error:
            problem = files.reason(error)
        except dcp.OtherRankFailed as error:
            heard = str(error)
        reports = self._ranks.all_gather(SaveReport(records, problem, heard))
        size_bytes = self._ranks.on_rank0(lambda: self._conclude(step, kind, tuple(states), reports))
        if size_bytes is None:
            return self._log.info("checkpoint: step %d not saved: another group has saved since", step)
        self._saved_step = step
        if kind == "full":
            self._saved_full_step = step
        self._damaged.pop(step, None)
        what = ", the weights alone," if kind != "full" else "" if lease.settled else ", unsettled,"
        seconds = time.perf_counter() - began
        self._log.info("checkpoint: step %d%s saved: %.1f MB in %.2f s", step, what, size_bytes / 1e6, seconds)

    def _conclude(self, step: int, kind: str, states: tuple[str, ...], reports: Sequence[SaveReport]) -> int | None:
        """Rank 0: publishes the files of all ranks and returns their bytes, or removes them and raises CheckpointFailed. None: a later
        writer has removed them, or has saved as much."""
        lease, records = self._lease, tuple(record for report in reports for record in report.records)
        manifest = Manifest(step, kind, states, len(reports), torch.__version__, "", records, lease.settled)

        def is_late() -> bool:
            """Another group saves by now, and has saved this step, or a later one."""
            return lease.is_superseded() and self._newest() >= step

        try:
            problems = [report.own_error for report in reports] + [report.peer_error for report in reports]
            if problem := next(filter(None, problems), ""):
                raise OSError(problem)
            if is_late():
                raise OSError("another has saved")
            self._on_stage("publish")
            files.publish(self.folder, manifest, lease.name)
        except OSError as error:
            files.discard(self.folder, step, lease.name)
            with suppress(OSError):  # failing storage may not be able to tell which group is the writer, either
                if is_late():
                    return None
            good = files.newest(self.folder, but=self._damaged)
            rest = "there is no earlier one" if good is None else f"step {good} is the last good one"
            raise CheckpointFailed(f"checkpoint: step {step} not saved: {files.reason(error)}; {rest}") from None
        try:
            files.prune(self.folder, self._config.keep_latest_k, written=step, damaged=self._damaged.keys() - {step})
        except OSError as error:
            self._log.warning("checkpoint: older ones could not be removed: %s", files.reason(error))
        if lease.shared:
            self._tidy(until=step)
        return manifest.size_bytes

    def _tidy(self, until: int | None = None) -> None:
        """Rank 0: removes the leftovers of a killed process. `until`: of steps up to it, for another group may write later ones."""
        try:
            notes = files.tidy(self.folder, until, self._lease.may_remove)
        except OSError as error:
            notes = [f"could not clear away what was left ({files.reason(error)})"]
        if notes:
            self._log.warning("checkpoint: a save was cut short by a kill: %s", ", ".join(notes))

    def _newest(self) -> int:
        """Newest step of all that were saved, the weights alone, too; 0: none."""
        return max(files.newest(self.folder, kind=kind) or 0 for kind in ("full", "model"))

    def _find_newest(self) -> None:
        self._found_step = self._newest()

    def _own_steps(self) -> list[int]:
        try:
            next(os.scandir(self.folder), None)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # it may hold this run's checkpoints
            why = f"checkpoint: {self.folder} cannot be read: {files.reason(error)}"
            raise CheckpointFailed(f"{why}; refusing to start a new run over it") from None
        return files.list_steps(self.folder)

    def _load_own(self, steps: Sequence[int]) -> int:
        wanted = self._config.load_step
        if wanted >= 0 and wanted not in steps:
            raise ValueError(f"checkpoint.load_step = {wanted}: not in {self.folder}; {steps_phrase(steps, wanted)}")
        candidates = [wanted] if wanted >= 0 else sorted(steps, reverse=True)
        paths = {step: files.step_folder(self.folder, step) for step in candidates}
        surveyed = self._ranks.on_rank0(lambda: {step: survey(path) for step, path in paths.items()})
        for step, found in surveyed.items():
            if isinstance(found, Manifest) and found.kind == "model":
                continue
            if problem := self._restore(paths[step], found, tuple(self._states)):
                self._damaged[step] = problem
                self._warn("checkpoint: step %d is damaged and not used: %s", step, problem)
                continue
            self._saved_full_step = step
            if isinstance(found, Manifest) and not found.settled:
                self._log.info("checkpoint: step %d was saved by a group that went while it waited for others", step)
            return step
        if self._damaged:
            listed = "; ".join(f"step {step}: {problem}" for step, problem in self._damaged.items())
            rest = "set another load_step" if wanted >= 0 else "rename it to begin from nothing"
            raise CheckpointFailed(f"checkpoint: none in {self.folder} that could be used is intact ({listed}); {rest}")
        # There is no full checkpoint. The weights alone are a beginning only as the seed.
        if candidates[-1] != 0 or (wanted < 0 and len(steps) > 1):
            newest = candidates[0]
            raise ValueError(
                f"checkpoint.load_step = {wanted}: step {newest} in {self.folder} holds the weights alone "
                "(checkpoint.last_save_model_only), so nothing can go on from it; another run can begin with them: "
                f'checkpoint.initial_load_path = "{paths[newest]}"'
            )
        if problem := self._restore(paths[0], surveyed[0], ("model",)):
            raise CheckpointFailed(f"checkpoint: the seed {paths[0]} is damaged: {problem}")
        return 0

    def _load_initial(self) -> int | None:
        """Begins with another run's checkpoint; one without a manifest (another program's) is taken as it is."""
        config = self._config
        setting = f'checkpoint.initial_load_path = "{config.initial_load_path}"'

        def find() -> tuple[Path, Manifest | str | None]:
            path = initial_folder(config.initial_load_path)
            return path, survey(path) if (path / files.MANIFEST).exists() else None

        path, found = self._ranks.on_rank0(find)
        if found is None:
            self._warn("%s: has no %s, so it is not verified", setting, files.MANIFEST)
        whole = isinstance(found, Manifest) and found.kind == "full"
        if not config.initial_load_model_only and not whole and not isinstance(found, str):
            raise ValueError(f"{setting}: holds the weights alone; nearest: checkpoint.initial_load_model_only = true")
        names = ["model"]
        if not config.initial_load_model_only:
            names = [name for name in self._states if name != METRICS_STATE]  # another run's files are not this one's
        if problem := self._restore(path, found, names, initial=setting):
            raise CheckpointFailed(f"{setting}: damaged: {problem}")
        return found.step if isinstance(found, Manifest) and not config.initial_load_model_only else None

    def _restore(self, path: Path, found: Manifest | str | None, names: Sequence[str], *, initial: str = "") -> str:
        """Verifies a checkpoint and reads the states `names` from it, by name and size. `found`: see `survey`; None: it has no manifest.
        `initial`: the setting that asked for another run's checkpoint, which may have other dtypes and states. Returns why it cannot be
        read, or "", on all ranks. Raises ValueError where it does not fit."""
        from training import checkpoint_dcp as dcp

        if isinstance(found, str):
            return found
        config, ranks = self._config, self._ranks
        if found is not None and config.verify_digests:  # the ranks share the reading
            try:
                files.verify(path, found, share=ranks.rank, shares=ranks.world_size)
                problem = ""
            except Damaged as damage:
                problem = str(damage)
            if problem := ranks.problem(problem):
                return problem
        began, live = time.perf_counter(), self._live_states(names)
        try:
            metadata, problem = dcp.read_metadata(path), ""
        except Exception as error:  # noqa: BLE001 (an unverified pickle can raise anything, and the ranks must agree on it)
            problem = f".metadata: {type(error).__name__}: {error}"
        if problem := ranks.problem(problem):
            return problem
        wanted = {*names, *(found.states if found is not None and not initial else ())}
        exclude = config.exclude_from_loading if initial else ()
        filled, unfit, unknown = dcp.fit(live, metadata, wanted=wanted, exclude=exclude, exact=not initial)
        everywhere = set.intersection(*ranks.all_gather(unknown))  # a rank may hold a part of the model only
        # once each: ranks that hold parts of one tensor say the same of it
        misfits = list(dict.fromkeys(misfit for listed in ranks.all_gather(unfit) for misfit in listed))
        misfits += [f"{name} is in the checkpoint but not in this run" for name in sorted(everywhere)]
        if misfits:
            more = f" (and {len(misfits) - 3} more)" if len(misfits) > 3 else ""
            request = initial or f'checkpoint.folder = "{config.folder}": {path}'
            raise ValueError(f"{request}: does not fit this run: {'; '.join(misfits[:3])}{more}")
        if problem := dcp.read(filled, path, group=ranks.group):
            return problem
        for name, values in filled.items():
            self._states[name].load_state_dict(values)
        size = "" if found is None else f"{found.size_bytes / 1e6:.1f} MB "
        seconds = time.perf_counter() - began
        self._log.info("checkpoint: %s loaded from %s, %sin %.2f s", ", ".join(names), path, size, seconds)
        return ""

    def _warn(self, message: str, *args: object) -> None:
        if self._ranks.rank == 0:  # all ranks know it
            self._log.warning(message, *args)


class RankCollectives:
    """Agreement between the ranks, over a gloo group of its own, apart from training's collectives; DCP uses it, too. `timeout`: how long a
    rank waits for the slowest one's files."""

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        values = [value] * self.world_size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def problem(self, problem: str) -> str:
        """The error of the lowest rank that has one; empty: none has."""
        return next(filter(None, self.all_gather(problem)), "")

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Rank 0 works; every rank returns what it returned or raises what it raised."""
        if self.group is None:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:  # noqa: BLE001 (whatever it is: raised alone, it would leave the others waiting)
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def survey(path: Path) -> Manifest | str:
    """The manifest, or what is wrong as far as one can see without reading the files."""
    try:
        return files.read_manifest(path)
    except Damaged as damage:
        return str(damage)


def initial_folder(text: str) -> Path:
    """The checkpoint that initial_load_path names. Raises ValueError where it is none."""
    setting, path = f'checkpoint.initial_load_path = "{text}"', Path(text).expanduser()
    if (path / ".metadata").is_file():
        return path
    for folder in (path, path / "checkpoint"):
        if steps := files.list_steps(folder):
            nearest = files.step_folder(folder, steps[-1])
            raise ValueError(f'{setting}: a folder of checkpoints, not one of them; nearest: "{nearest}"')
    if not path.exists():
        raise ValueError(f"{setting}: no such folder; {steps_phrase(files.list_steps(path.parent), -1)}")
    raise ValueError(f"{setting}: not a checkpoint, as it has no file .metadata")


def steps_phrase(steps: Sequence[int], wanted: int) -> str:
    if not steps:
        return "there are no checkpoints in it"
    nearest = min(steps, key=lambda step: abs(step - wanted)) if wanted >= 0 else steps[-1]
    return f"steps there: {', '.join(map(str, steps))}; nearest: {nearest}"


class ModelState:
    """The weights and persistent buffers of all model parts under their full names, whatever wraps or shards them."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Live tensors (DTensors where sharded); reading into them changes the model."""
        return {plain_name(name): value for part in self._parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what is there; names that are missing stay as they are."""
        for part in self._parts:
            own = {name: state[plain] for name in part.state_dict() if (plain := plain_name(name)) in state}
            part.load_state_dict(own, strict=False)


class OptimizerState:
    """An optimizer's state by parameter name: "state.<parameter>.exp_avg", "param_groups.<parameter>.lr", ... The names are those of DCP's
    flattened optimizer state dicts; but the optimizer may span several model parts."""

    # which kernel does the update is the machine's business
    _NOT_STATE = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})

    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._parts, self._optimizer = parts, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, made first where there are none yet: a fresh optimizer has nothing to load into."""
        init_optim_state(self._optimizer)
        entries = ((place, key, value) for place, values in self._walk() for key, value in values.items())
        return {f"{place}.{key}": value for place, key, value in entries if key not in self._NOT_STATE}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As ModelState's."""
        for place, target in self._walk():
            for key in target.keys() - self._NOT_STATE:
                if (full := f"{place}.{key}") not in state:
                    continue
                if not isinstance(target[key], torch.Tensor):
                    target[key] = state[full]
                elif target[key] is not state[full]:  # it keeps its identity: it may be live in a compiled step
                    target[key].copy_(state[full])

    def _walk(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The state and the group of every parameter that is optimized, each with the beginning of its names."""
        names = {parameter: plain_name(name) for part in self._parts for name, parameter in part.named_parameters()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                # optimizer.state is a defaultdict: looking up would make an entry
                yield f"state.{names[parameter]}", self._optimizer.state.get(parameter, {})
                yield f"param_groups.{names[parameter]}", group


def plain_name(name: str) -> str:
    """The name without what torch.compile and activation checkpointing wrap around modules, as DCP has it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
