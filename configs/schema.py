"""RunConfig, composed of all sections. The dataclass of each section is next to the code that uses it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch

import models
from configs.document import Origin
from ft.config import FaultTolerance
from models.contract import Model, ModelConfig, check_contract, model_error
from models.init import NoInit
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.distributed import ENV, CommConfig
from parallelisms.execution import CompileConfig, ExecutionConfig, Precision
from parallelisms.float8 import Float8Config
from parallelisms.mesh import ParallelismConfig
from training.checkpoint_config import CheckpointConfig
from training.config import ResumeConfig, TrainingConfig, ValidationConfig
from training.loss import chunk_tokens
from training.metrics import MetricsConfig
from training.optimizer import LRSchedulerConfig, OptimizerConfig
from training.profiling import ProfilingConfig
from training.sampling import SampleConfig


@dataclass(frozen=True)
class JobConfig:
    """[job]: name of the run and location of its files."""

    name: Annotated[
        str, "the run's folder in dump_folder; \"\": the config file's name, so that the same command resumes the run"
    ] = ""
    dump_folder: Annotated[str, "folder of all runs"] = "./outputs"
    description: Annotated[str, "free text, logged at the start"] = ""
    print_config: Annotated[bool, "log every setting at the start"] = False

    def check(self) -> None:
        if self.name != Path(self.name).name or self.name in (".", "..") or "\0" in self.name:
            raise ValueError(
                f'job.name = "{self.name}": must be the name of one folder, which is created in job.dump_folder'
            )


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, one attribute per section. Two are equal if all settings are."""

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)  # the Config of models/<model.name>.py
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    comm: CommConfig = field(default_factory=CommConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)  # not a section: sources of the settings

    @property
    def run_folder(self) -> Path:
        """<run>, the folder of all files of the run."""
        folder = os.path.expanduser(self.job.dump_folder)  # noqa: PTH111 (Path's raises RuntimeError if there is no such user)
        return Path(folder) / self.job.name

    def for_any_machine(self) -> RunConfig:
        """Returns these settings without those that depend on ranks and devices, which cannot be checked on this machine."""
        return replace(
            self,
            parallelism=ParallelismConfig(),
            training=replace(self.training, enable_cpu_offload=False),
            float8=replace(self.float8, enable=False),
            fault_tolerance=replace(self.fault_tolerance, process_group="auto"),
            comm=replace(self.comm, backend="auto", init_method=ENV),
        )

    def meta_model(self, vocab_size: int, max_seq_len: int = 0) -> Model:
        """Returns the model on the meta device, without memory. `max_seq_len`: 0: training.seq_len. Raises ValueError."""
        build = model_module(self.model.name).build
        try:
            with torch.device("meta"), NoInit():
                model = build(self.model, vocab_size=vocab_size, max_seq_len=max_seq_len or self.training.seq_len)
        except Exception as error:
            raise model_error(error, self.model.name, "build") from error
        check_contract(model, self.model.name)
        return model

    def execution_config(self, precision: Precision, *, vocab_size: int, device_type: str) -> ExecutionConfig:
        return ExecutionConfig(
            self.parallelism,
            self.activation_checkpoint,
            self.compile,
            self.float8,
            precision,
            cpu_offload=self.training.enable_cpu_offload,
            loss_chunk_tokens=chunk_tokens(self.training, vocab_size, device_type),
        )


def model_module(name: str) -> ModuleType:
    """Returns the module models/<name>.py. Raises ValueError if there is no such model."""
    cause = f"there is no models/{name}.py"
    if name.isidentifier() and importlib.util.find_spec(f"models.{name}"):
        module = importlib.import_module(f"models.{name}")
        section = getattr(module, "Config", None)
        if isinstance(section, type) and issubclass(section, ModelConfig) and hasattr(module, "build"):
            return module
        cause = f"models/{name}.py does not define a model: it needs `Config`, a subclass of ModelConfig, and `build`"
    files = sorted(Path(models.__path__[0]).glob("*.py"))
    # searched as text, since importing an unfinished file could fail
    names = [file.stem for file in files if "\nclass Config(" in file.read_text(encoding="utf-8")]
    raise ValueError(f'model.name = "{name}": {cause}; there are: {", ".join(names)}')
