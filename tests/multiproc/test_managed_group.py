"""ManagedProcessGroup as programs for torchft use it: FSDP's all-reduce hook and a comm hook of torch's DDP, each rank a replica group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multiproc.pool import Pool

STEPS, LR = 3, 0.5


def train(wrapper: str) -> list[float]:
    """Trains two groups of one rank, whose gradients are 1 and 2. Returns the weights, which begin at 0."""
    from torch.distributed.device_mesh import DeviceMesh  # with these a worker takes seconds to start
    from torch.distributed.fsdp import fully_shard

    from ft import LighthouseServer, ManagedProcessGroup, Manager, Optimizer, ProcessGroupGloo

    rank = dist.get_rank()
    lighthouse = LighthouseServer("127.0.0.1:0", 2) if rank == 0 else None
    address = [lighthouse.address() if lighthouse else ""]
    dist.broadcast_object_list(address)
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        lighthouse_addr=address[0],
        replica_id=f"g{rank}",
        init_sync=False,
        dies_with_group=False,
    )
    managed = ManagedProcessGroup(manager)
    managed.register("groups")
    if wrapper == "fsdp":
        trained: nn.Module = model
        fully_shard(model, mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("groups", "shard"))["shard"])
        model.set_all_reduce_hook(lambda output: dist.all_reduce(output, group=managed, op=dist.ReduceOp.AVG))  # type: ignore[operator]
    else:
        alone = [dist.new_group([one]) for one in range(2)][rank]
        trained = torch.nn.parallel.DistributedDataParallel(model, process_group=alone)

        def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            work = managed.allreduce([bucket.buffer()], dist.ReduceOp.AVG)
            return work.get_future().then(lambda done: done.value()[0])

        hook.__annotations__ = {}  # DDP compares them with types, and finds strings
        trained.register_comm_hook(None, hook)
    optimizer = Optimizer(manager, torch.optim.SGD(trained.parameters(), lr=LR))
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        assert managed.size() == 2
        trained(torch.full((1, 4), rank + 1.0)).sum().backward()
        optimizer.step()
    manager.shutdown()
    managed.unregister()
    weight = next(iter(trained.parameters())).detach()
    weights = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).flatten().tolist()
    dist.barrier()
    if lighthouse:
        lighthouse.shutdown()
    return weights


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_a_hook_averages_over_the_groups(pool: Pool, wrapper: str):
    assert pool.run(2, train, wrapper) == [[-STEPS * LR * 1.5] * 8] * 2
