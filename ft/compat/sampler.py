"""Which samples a rank of a replica group draws, where groups have fixed numbers: the sampler of torchft's face (ft.Manager).

Under train.py the ledger deals positions instead (ft/protocol/ledger.py), and no sample is lost when a group is. Here a group that is
away takes its share of the epoch with it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as _DistributedSampler


class DistributedSampler(_DistributedSampler[Any]):
    """torch's DistributedSampler over all ranks of all groups: `group_rank` of `num_replicas` ranks of group `replica_rank` of
    `num_replica_groups`. The order is a function of (seed, epoch), set by set_epoch; all ranks together draw the whole dataset, some
    samples twice where it does not divide evenly, or all but a rest with drop_last.

    `group_rank` and `num_replicas` default to those of the default process group, or to one rank. `replica_group` and `rank` are older
    names of `replica_rank` and `group_rank`. Raises TypeError where one of the two is missing or both are given, ValueError where a
    number is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int | None = None,
        num_replica_groups: int | None = None,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        replica_group: int | None = None,
        rank: int | None = None,
    ) -> None:
        group = _one_of("replica_rank", replica_rank, "replica_group", replica_group)
        place = _one_of("group_rank", group_rank, "rank", rank)
        if group is None or num_replica_groups is None:
            raise TypeError("DistributedSampler needs replica_rank and num_replica_groups")
        in_group = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if in_group else 1
        if place is None:
            place = dist.get_rank() if in_group else 0
        _check("replica_rank", group, "num_replica_groups", num_replica_groups)
        _check("group_rank", place, "num_replicas", num_replicas)
        super().__init__(
            dataset,
            num_replicas=num_replicas * num_replica_groups,
            rank=place + num_replicas * group,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )


def _one_of(name: str, value: int | None, older: str, older_value: int | None) -> int | None:
    if value is not None and older_value is not None:
        raise TypeError(f"DistributedSampler: {name} and {older} are the same; give one")
    return older_value if value is None else value


def _check(name: str, value: int, of: str, many: int) -> None:
    if not 0 <= value < many:
        raise ValueError(f"{name} = {value} of {of} = {many}: must be from 0 to {many - 1}")
