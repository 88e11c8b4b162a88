"""The [training], [validation] and [resume] sections, and the check for optional packages. Imports no other module of the repository."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

MAX_STEPS = 1 << 30  # equals ft.protocol.messages.STEPS_PER_BRANCH: from there on, steps are those of the next branch


@dataclass(frozen=True)
class DataloaderConfig:
    """[training.dataloader]: prefetching; does not change the content of batches, except that num_workers decides the order of a stream."""

    num_workers: Annotated[int, "worker processes that prepare batches; 0: one thread", ">= 0"] = 0
    prefetch_factor: Annotated[int, "batches prefetched by each worker", ">= 1"] = 2


@dataclass(frozen=True)
class StoreConfig:
    """A token store in one of the lists of sources."""

    path: Annotated[str, "folder of the store (scripts/prepare_data.py)"]
    name: Annotated[str, 'name of its validation loss; "": the folder\'s name'] = ""

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name

    def check(self, key: str) -> None:
        if not self.path:
            raise ValueError(f'{key}.path = "": must be the folder of a token store')
        if not self.label:  # "" names the validation set of a run without training.sources
            near = Path(self.path).resolve().name or "store"
            raise ValueError(f'{key}.name = "": {key}.path = "{self.path}" has no name to take; nearest: "{near}"')


@dataclass(frozen=True)
class SourceConfig(StoreConfig):
    """[[training.sources]]: a token store of a mixture."""

    weight: Annotated[
        float,
        "weight relative to the other sources; the resulting share of the sequences is rounded to 1/4096",
        "> 0",
        "<= 1e9",
    ] = 1.0
    epochs: Annotated[float, "passes over the store until its budget ends; 0: no limit", ">= 0", "<= 1e9"] = 0.0
    tokens: Annotated[int, "tokens until its budget ends; 0: no limit", ">= 0"] = 0

    def check(self, key: str) -> None:
        super().check(key)
        if self.epochs and self.tokens:
            raise ValueError(
                f"{key}.tokens = {self.tokens}: {key}.epochs = {self.epochs:g} is a budget, too; set one of them to 0"
            )


@dataclass(frozen=True)
class SkipConfig:
    """[[training.skip]]: data that is not trained on. first and end are positions, as in samples.jsonl: each batch that has one of them is
    left out. With `source`, first and end are document numbers of that store; sequences are then cut from its other documents."""

    first: Annotated[int, "first position, or document", ">= 0"]
    end: Annotated[int, "position, or document, after the last", ">= 1"]
    source: Annotated[str, 'store of the documents: its name, or training.dataset_path; "": positions'] = ""

    def check(self, key: str) -> None:
        if self.end <= self.first:
            raise ValueError(
                f"{key}.end = {self.end}: must exceed {key}.first = {self.first}; nearest: {self.first + 1}"
            )


@dataclass(frozen=True)
class TrainingConfig:
    """[training]: data, batch size, number of steps and dtypes of the run."""

    dataset: Annotated[
        Literal["stdlib", "files", "tokens", "store", "huggingface"],
        "stdlib: Python's own source; store: of scripts/prepare_data.py",
    ] = "stdlib"
    dataset_path: Annotated[
        str, "files: text; tokens: .npy/.bin (comma-separated globs); store: its folder; huggingface: owner/name"
    ] = ""
    sources: Annotated[tuple[SourceConfig, ...], "stores of a mixture, in place of dataset_path"] = ()
    dataset_text_key: Annotated[str, "field with the text: .jsonl, .parquet, huggingface"] = "text"
    dataset_token_dtype: Annotated[Literal["uint16", "uint32"], "dtype of a .bin token file"] = "uint16"
    dataset_subset: Annotated[str, 'subset of a huggingface data set, such as "en" of allenai/c4; "": default'] = ""
    dataset_split: Annotated[str, "split of a huggingface data set to train on"] = "train"
    dataset_held_out: Annotated[
        float,
        "share of the documents held out for [validation]. Unless set: 0 without validation.enable, and a resumed run keeps its share. The "
        "share of a store is fixed by prepare_data.py: here 0 also trains on its held-out documents, any other value does not",
        ">= 0",
        "< 1",
    ] = 0.03
    skip: Annotated[
        tuple[SkipConfig, ...], "positions in the data, or documents of a store, that are not trained on"
    ] = ()
    local_batch_size: Annotated[int, "sequences of one forward and backward pass of a data-parallel rank", ">= 1"] = 8
    global_batch_size: Annotated[
        int,
        "sequences per step of one replica group, not of the job as in torchtitan; -1: local_batch_size x data-parallel ranks",
        ">= -1",
        "!= 0",
    ] = -1
    seq_len: Annotated[int, "tokens per sequence", ">= 1"] = 2048
    document_mask: Annotated[
        bool,
        "attention within each document of a sequence, positions from its first token, no loss across documents; needs Triton on CUDA",
    ] = False
    max_norm: Annotated[float, "gradients are clipped to this norm; 0: no clipping", ">= 0"] = 1.0
    on_spike: Annotated[
        Literal["stop", "skip", "rewind"],
        "at a spike, a loss or gradient norm of NaN or Inf, or beyond spike_factor, stop: the run ends (of several groups, one with a "
        "loss of NaN or Inf contributes zeros, and its batch is assigned again); skip: the step is not applied, its data is skipped; "
        "rewind: the run goes back to the newest checkpoint before it, the data since is skipped",
    ] = "stop"
    spike_window: Annotated[
        int,
        "number of preceding applied steps whose mean and standard deviation, of loss and gradient norm, define a spike; 0: only NaN and "
        "Inf",
        ">= 0",
        "!= 1",
    ] = 0
    spike_factor: Annotated[float, "standard deviations from that mean to a spike", "> 0"] = 6.0
    spike_max_skips: Annotated[
        int,
        "steps in a row that on_spike = skip leaves out, or returns in a row to one checkpoint with rewind; one more ends the run",
        ">= 1",
    ] = 10
    steps: Annotated[int, "optimizer steps of the run", ">= 1"] = 10000
    seed: Annotated[int, "seed of initial weights, data order and random numbers", ">= 0", "< 4294967296"] = 0
    deterministic: Annotated[bool, "deterministic kernels only; slower on CUDA"] = False
    dtype: Annotated[Literal["float32", "bfloat16"], "master weights and optimizer state"] = "float32"
    mixed_precision_param: Annotated[Literal["auto", "bfloat16", "float32"], "compute dtype; auto: fastest"] = "auto"
    mixed_precision_reduce: Annotated[
        Literal["float32"],
        "dtype of gradient reductions over data- and context-parallel ranks; the gradients of norms are summed over tensor-parallel ranks "
        "in the compute dtype",
    ] = "float32"
    loss_chunk_tokens: Annotated[
        int, "tokens per chunk of the loss; 0: none; -1: chosen by device if the vocabulary is large, else 0", ">= -1"
    ] = -1
    enable_cpu_offload: Annotated[bool, "keep parameters and optimizer state in host memory (CUDA)"] = False
    gc_freq: Annotated[int, "steps between garbage collections; 0: Python's automatic collection", ">= 0"] = 50
    dataloader: Annotated[DataloaderConfig, "prefetching of batches"] = field(default_factory=DataloaderConfig)

    @property
    def store_names(self) -> list[str]:
        """Names of the stores, in their order."""
        return [source.label for source in self.sources] or [self.dataset_path] * (self.dataset == "store")

    def slot_size(self, data_parallel: int) -> int:
        """Returns the sequences of one step of a replica group with so many data-parallel ranks."""
        return self.local_batch_size * data_parallel if self.global_batch_size == -1 else self.global_batch_size

    def sequences_left(self, position: int, end: int, slot_size: int) -> int:
        """Returns the number of sequences from `position`, where a slot begins, to `end`, without those of skipped slots: a slot
        is skipped as a whole if a span of `skip` has one of its sequences (Ledger)."""
        left, counted = end - position, position  # skipped slots before `counted` are left out: spans may share one
        for first, until in sorted((span.first, span.end) for span in self.skip if not span.source):
            if until > counted:
                first = position + max(0, first - position) // slot_size * slot_size
                until = position - (position - until) // slot_size * slot_size
                left -= max(0, min(until, end) - max(first, counted))
                counted = until
        return left

    def check(self) -> None:
        for index, source in enumerate(self.sources):
            source.check(f"training.sources[{index}]")
        for index, span in enumerate(self.skip):
            span.check(f"training.skip[{index}]")
            if span.source and span.source not in (names := self.store_names):
                near = difflib.get_close_matches(span.source, names, n=1, cutoff=0.0)
                legal = (
                    f"legal: {', '.join(names)}; nearest: {near[0]}" if near else 'it needs training.dataset = "store"'
                )
                raise ValueError(f'training.skip[{index}].source = "{span.source}": no store has that name; {legal}')
        if self.skip and self.dataset == "huggingface":
            raise ValueError(
                'training.skip: training.dataset = "huggingface" is a stream, which has no positions; prepare it with '
                "scripts/prepare_data.py, or remove training.skip"
            )
        if self.steps >= MAX_STEPS:
            raise ValueError(f"training.steps = {self.steps}: must be below 2^30; nearest: {MAX_STEPS - 1}")
        if self.on_spike == "rewind" and self.dataset == "huggingface":
            raise ValueError(
                'training.on_spike = "rewind": training.dataset = "huggingface" is a stream, which cannot pass over the data since a '
                'checkpoint; prepare it with scripts/prepare_data.py, or nearest: "skip"'
            )
        if self.sources:
            if self.dataset != "store" or self.dataset_path:
                raise ValueError(
                    f'training.dataset = "{self.dataset}": training.sources are token stores, in place of training.dataset_path; set '
                    'training.dataset = "store" and training.dataset_path = ""'
                )
            _check_labels("training.sources", self.sources)
            return
        if self.dataset == "stdlib" and self.dataset_path:
            raise ValueError(
                f'training.dataset_path = "{self.dataset_path}": training.dataset = "stdlib" reads no path; '
                'for a path: training.dataset = "files", "tokens", "store" or "huggingface"'
            )
        if self.dataset != "stdlib" and not self.dataset_path:
            places = {"huggingface": "owner/name", "store": "the folder of a store, or [[training.sources]]"}
            wanted = places.get(self.dataset, "a file or a glob")
            raise ValueError(f'training.dataset_path = "": training.dataset = "{self.dataset}" needs {wanted}')


@dataclass(frozen=True)
class ValidationSourceConfig(StoreConfig):
    """[[validation.sources]]: a token store that is only validated on: all its documents count as held out; a validation reads its first
    validation.steps batches."""


@dataclass(frozen=True)
class ValidationConfig:
    """[validation]: loss on documents that are never trained on."""

    enable: Annotated[
        bool,
        "hold documents out and measure the loss on them: nats per token, and bits per byte unless they have ids that the tokenizer lacks, "
        "as those of token files without model.tokenizer_path may",
    ] = False
    freq: Annotated[int, "steps between validations; the last step is always validated", ">= 1"] = 100
    steps: Annotated[
        int,
        "batches of one validation, each as large as the batch of one replica group in a step; every group computes all of them; a set "
        "with fewer sequences is read again from its beginning",
        ">= 1",
    ] = 10
    sources: Annotated[tuple[ValidationSourceConfig, ...], "further sets of documents"] = ()

    def check(self) -> None:
        if self.sources and not self.enable:
            raise ValueError("validation.sources: validation.enable = false; set it to true, or remove the sources")
        for index, source in enumerate(self.sources):
            source.check(f"validation.sources[{index}]")
        _check_labels("validation.sources", self.sources)


@dataclass(frozen=True)
class ResumeConfig:
    """[resume]: what may differ from the saved settings of the run that this launch resumes."""

    allow: Annotated[
        str,
        "comma-separated keys that may differ from the run's config.toml, such as optimizer.lr; the new values hold from the next step on; "
        "other differences in model, dtype of the weights, data, batch, update rule, semi-sync settings, or keys that configs/saved.py "
        "does not list, are refused; all other keys may differ anyway",
    ] = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(filter(None, (key.strip() for key in self.allow.split(","))))


def _check_labels(key: str, sources: Sequence[StoreConfig]) -> None:
    labels = [source.label for source in sources]
    if twice := next((label for label in labels if labels.count(label) > 1), ""):
        raise ValueError(f'{key}: two have the name "{twice}"; set their name')


@contextmanager
def os_errors_of(setting: str) -> Iterator[None]:
    """Turns an OSError inside, such as that of a folder which this user may not search, into a ValueError that begins with `setting`."""
    try:
        yield
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise ValueError(f"{setting}: cannot be read: {error.strerror}{file}") from None


def need(package: str, *, extra: str, setting: str) -> None:
    """Raises ValueError, beginning with `setting` ("section.key = value"), if `package` is not installed. `extra`: in pyproject.toml."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # of the package that has it
        found = None
    if found is None:
        raise ValueError(
            f"{setting}: needs the package {package}, which is not installed; "
            f'in the repository: {sys.executable} -m pip install -e ".[{extra}]"'
        )
