"""Fault tolerance: the seam of the training loop and what stands behind it. Imports no sibling package, so it can be lifted out whole.

Names resolve on first use (PEP 562), so that importing `ft` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Commit": "ft.seam",
    "DataAssignment": "ft.seam",
    "DiLoCo": "ft.compat.local_sgd",
    "DistributedDataParallel": "ft.compat.wrappers",
    "DistributedSampler": "ft.compat.wrappers",
    "ErrorSwallowingProcessGroup": "ft.compat.process_groups",
    "LighthouseClient": "ft.compat.lighthouse_client",
    "LighthouseServer": "ft.compat.lighthouse_server",
    "LocalSGD": "ft.compat.local_sgd",
    "Manager": "ft.compat.manager",
    "Optimizer": "ft.compat.wrappers",
    "ProcessGroupBabyGloo": "ft.process_groups.baby",
    "ProcessGroupBabyNCCL": "ft.process_groups.baby",
    "ProcessGroupDummy": "ft.compat.process_groups",
    "ProcessGroupGloo": "ft.process_groups.gloo",
    "ProcessGroupNCCL": "ft.process_groups.nccl",
    "Seam": "ft.seam",
    "SoloManager": "ft.start",
    "StepTotals": "ft.seam",
    "WorldSizeMode": "ft.compat.manager",
}

# Names before they were changed, which programs written then import.
_FORMER = {"Deal": "DataAssignment", "Sums": "StepTotals"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'ft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
