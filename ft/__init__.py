"""Fault tolerance: the interface of the trainer (seam.py) and its implementation. Imports no sibling package, so it can be used alone.

Names resolve on first use (PEP 562), so that importing `ft` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {  # public names, by module
    "ft.compat.lighthouse": ("LighthouseClient", "LighthouseServer"),
    "ft.compat.local_sgd": ("DiLoCo", "LocalSGD"),
    "ft.compat.manager": ("Manager", "WorldSizeMode"),
    "ft.compat.process_groups": ("ErrorSwallowingProcessGroup", "ManagedProcessGroup", "ProcessGroupDummy"),
    "ft.compat.wrappers": ("DistributedDataParallel", "DistributedSampler", "Optimizer"),
    "ft.optim_state": ("init_optim_state",),
    "ft.process_groups.baby": ("ProcessGroupBabyGloo", "ProcessGroupBabyNCCL"),
    "ft.process_groups.gloo": ("ProcessGroupGloo",),
    "ft.process_groups.nccl": ("ProcessGroupNCCL",),
    "ft.seam": ("Commit", "DataAssignment", "Seam", "StepTotals"),
    "ft.start": ("SoloManager",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

# Former names, for programs that still import them.
_FORMER = {"Deal": "DataAssignment", "Sums": "StepTotals"}

# torchft's modules, which a program may use as attributes after `import ft`.
_TORCHFT = ("checkpointing", "coordination", "data", "ddp", "local_sgd", "optim", "process_group")

# torchft's names that are absent, with the alternative.
_XCCL = "Intel GPUs are not supported; ProcessGroupGloo is for CPUs, ProcessGroupNCCL for NVIDIA GPUs"
_ABSENT = {
    "ManagerClient": "the Manager has its own connection to its group's server",
    "ManagerServer": "the Manager starts its group's server",
    "ProcessGroupBabyXCCL": _XCCL,
    "ProcessGroupXCCL": _XCCL,
    "parameter_server": "no server offers weights; LocalSGD and DiLoCo average them, and the Manager sends them to a group that joins",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    if name in _TORCHFT:
        return importlib.import_module(f"ft.{name}")
    if name in _ABSENT:  # ImportError, as `from ft import ...` hides the message of an AttributeError
        raise ImportError(f"ft has no {name}: {_ABSENT[name]} (docs/torchft.md)")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ft' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
