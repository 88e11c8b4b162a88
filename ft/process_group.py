"""torchft.process_group, under its names. The implementations are in ft/process_groups."""

from typing import NoReturn

from ft import absent
from ft.compat.process_groups import ErrorSwallowingProcessGroup as ErrorSwallowingProcessGroupWrapper
from ft.compat.process_groups import ManagedProcessGroup, ProcessGroupDummy
from ft.process_groups.baby import ProcessGroupBabyGloo, ProcessGroupBabyNCCL
from ft.process_groups.base import ProcessGroup
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.nccl import ProcessGroupNCCL

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
]


def __getattr__(name: str) -> NoReturn:  # says why ProcessGroupXCCL is absent
    raise absent(__name__, name)
