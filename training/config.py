"""The [training] and [validation] sections, and the check for optional packages. Imports no other module of the repository."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Literal


@dataclass(frozen=True)
class DataloaderConfig:
    """[training.dataloader]: prefetching of batches; does not change their content."""

    num_workers: Annotated[int, "worker processes that prepare batches; 0: one thread", ">= 0"] = 0
    prefetch_factor: Annotated[int, "batches prefetched by each worker", ">= 1"] = 2


@dataclass(frozen=True)
class TrainingConfig:
    """[training]: data, batch size, number of steps and dtypes of the run."""

    dataset: Annotated[Literal["stdlib", "files", "tokens", "huggingface"], "stdlib: Python's own source"] = "stdlib"
    dataset_path: Annotated[str, "files: text; tokens: .npy/.bin (comma-separated globs); huggingface: owner/name"] = ""
    dataset_text_key: Annotated[str, "field with the text: .jsonl, .parquet, huggingface"] = "text"
    dataset_token_dtype: Annotated[Literal["uint16", "uint32"], "dtype of a .bin token file"] = "uint16"
    dataset_subset: Annotated[str, 'subset of a huggingface data set, such as "en" of allenai/c4; "": default'] = ""
    dataset_split: Annotated[str, "split of a huggingface data set to train on"] = "train"
    dataset_held_out: Annotated[float, "share of the documents kept for [validation]", ">= 0", "< 1"] = 0.03
    local_batch_size: Annotated[int, "sequences of one forward and backward pass of a data-parallel rank", ">= 1"] = 8
    global_batch_size: Annotated[int, "sequences per step; -1: local x data-parallel ranks", ">= -1", "!= 0"] = -1
    seq_len: Annotated[int, "tokens per sequence", ">= 1"] = 2048
    max_norm: Annotated[float, "gradients are clipped to this norm; 0: no clipping", ">= 0"] = 1.0
    steps: Annotated[int, "optimizer steps of the run", ">= 1"] = 10000
    seed: Annotated[int, "seed of initial weights, data order and random numbers", ">= 0", "< 4294967296"] = 0
    deterministic: Annotated[bool, "deterministic kernels only; slower on CUDA"] = False
    dtype: Annotated[Literal["float32", "bfloat16"], "master weights and optimizer state"] = "float32"
    mixed_precision_param: Annotated[Literal["auto", "bfloat16", "float32"], "compute dtype; auto: fastest"] = "auto"
    mixed_precision_reduce: Annotated[Literal["float32"], "dtype of gradient reductions"] = "float32"
    loss_chunk_tokens: Annotated[
        int, "tokens per chunk of the loss; 0: none; -1: chosen by device if the vocabulary is large, else 0", ">= -1"
    ] = -1
    enable_cpu_offload: Annotated[bool, "keep parameters and optimizer state in host memory (CUDA)"] = False
    gc_freq: Annotated[int, "steps between garbage collections; 0: Python's automatic collection", ">= 0"] = 50
    dataloader: Annotated[DataloaderConfig, "prefetching of batches"] = field(default_factory=DataloaderConfig)

    def check(self) -> None:
        if self.dataset == "stdlib" and self.dataset_path:
            raise ValueError(
                f'training.dataset_path = "{self.dataset_path}": training.dataset = "stdlib" reads no path; '
                'for a path: training.dataset = "files", "tokens" or "huggingface"'
            )
        if self.dataset != "stdlib" and not self.dataset_path:
            wanted = "owner/name" if self.dataset == "huggingface" else "a file or a glob"
            raise ValueError(f'training.dataset_path = "": training.dataset = "{self.dataset}" needs {wanted}')


@dataclass(frozen=True)
class ValidationConfig:
    """[validation]: loss on documents that are never trained on."""

    enable: Annotated[bool, "hold documents out and measure the loss on them"] = False
    freq: Annotated[int, "steps between validations; the last step is always validated", ">= 1"] = 100
    steps: Annotated[int, "batches of one validation, each of training's global size", ">= 1"] = 10


def need(package: str, *, extra: str, setting: str) -> None:
    """Raises ValueError, beginning with `setting` ("section.key = value"), if `package` is not installed. `extra`: in pyproject.toml."""
    if find_spec(package) is None:
        raise ValueError(
            f"{setting}: needs the package {package}, which is not installed; "
            f'in the repository: {sys.executable} -m pip install ".[{extra}]"'
        )
