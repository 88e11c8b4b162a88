"""torchft's modules and names, under `ft`; errors for absent ones name a replacement."""

from __future__ import annotations

import importlib
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import ft
from ft.process_groups.base import Operation

MODULES = {
    "checkpointing": ["CheckpointTransport", "HTTPTransport", "PGTransport"],
    "checkpointing.http_transport": ["HTTPTransport"],
    "checkpointing.pg_transport": ["PGTransport"],
    "checkpointing.transport": ["CheckpointTransport"],
    "coordination": ["LighthouseClient", "LighthouseServer", "Quorum", "QuorumMember"],
    "data": ["DistributedSampler"],
    "ddp": ["DistributedDataParallel"],
    "local_sgd": ["DiLoCo", "LocalSGD"],
    "optim": ["OptimizerWrapper"],
    "process_group": [
        "ErrorSwallowingProcessGroupWrapper",
        "ManagedProcessGroup",
        "ProcessGroup",
        "ProcessGroupBabyGloo",
        "ProcessGroupBabyNCCL",
        "ProcessGroupDummy",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
    ],
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_torchft_has_its_names(module: str):
    found = importlib.import_module(f"ft.{module}")
    assert found.__all__ == MODULES[module]
    for name in found.__all__:
        assert getattr(found, name) is getattr(ft, name, getattr(found, name))
    if "." not in module:
        assert getattr(ft, module) is found  # as after `import torchft`


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import ft.parameter_server", "ft has no parameter_server: .*LocalSGD and DiLoCo"),
        ("from ft import parameter_server", "ft has no parameter_server"),
        ("from ft.parameter_server import ParameterServer", "ft has no parameter_server"),
        ("from ft import ProcessGroupXCCL", "ft has no ProcessGroupXCCL: .*ProcessGroupGloo"),
        ("from ft.process_group import ProcessGroupBabyXCCL", "ft has no ProcessGroupBabyXCCL"),
        ("from ft.coordination import ManagerServer", "ft has no ManagerServer: the Manager starts"),
    ],
)
def test_what_is_absent_says_why(statement: str, message: str):
    with pytest.raises(ImportError, match=message):
        exec(statement)


def test_the_transports_take_the_arguments_of_torchft():
    from ft.checkpointing import CheckpointTransport, HTTPTransport, PGTransport

    over_group = PGTransport(Mock(), timedelta(seconds=10), torch.device("cpu"), state_dict=dict)
    assert (HTTPTransport(timeout=timedelta(seconds=10), num_chunks=4).KIND, over_group.KIND) == ("http", "pg")
    assert not isinstance(over_group, CheckpointTransport)  # the Manager makes one of these


def test_a_managed_process_group_is_that_of_its_manager():
    manager = Mock()
    manager.core.process_group = ft.ProcessGroupDummy()
    manager.num_participants.return_value, manager.participating_rank.return_value = 3, None
    group = ft.ManagedProcessGroup(manager)
    assert (group.size(), group.rank(), manager.errored()) == (3, 0, group.errored())
    assert group.DEVICE == "", "it may reduce by NCCL"
    value = torch.ones(2)
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        dist.all_reduce(value, op=op, group=group)
        [tensor], given = manager.allreduce.call_args
        assert tensor is value and given["reduce_op"] == op and given["repeat"] is False
    assert group.allreduce([value]) is manager.allreduce.return_value
    assert group.launch(Operation("broadcast", ([value],), {"rootRank": 0})).wait()
    with pytest.raises(ValueError):
        group.allreduce([value, value])
