"""The sampler of torchft's interface: the samples of each rank, under both sets of names."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest

from ft.compat.wrappers import DistributedSampler

GROUPS, RANKS = 3, 2


def draws(length: int, *, epoch: int = 0, **arguments: object) -> list[list[int]]:
    """Returns the samples of every rank of every group, in order."""
    drawn = []
    for group in range(GROUPS):
        for rank in range(RANKS):
            sampler = DistributedSampler(
                range(length),  # type: ignore[arg-type]
                replica_rank=group,
                num_replica_groups=GROUPS,
                group_rank=rank,
                num_replicas=RANKS,
                **arguments,  # type: ignore[arg-type]
            )
            sampler.set_epoch(epoch)
            drawn.append(list(sampler))
            assert len(drawn[-1]) == len(sampler)
            assert (sampler.global_rank, sampler.global_world_size) == (rank + RANKS * group, GROUPS * RANKS)
    return drawn


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_together_draw_every_sample_once(shuffle: bool):
    drawn = draws(60, shuffle=shuffle)
    assert sorted(chain(*drawn)) == list(range(60))


def test_what_does_not_divide_is_drawn_twice_or_dropped():
    drawn = Counter(chain(*draws(61)))
    assert set(drawn) == set(range(61))
    assert drawn.total() == 66
    dropped = Counter(chain(*draws(61, drop_last=True)))
    assert dropped.total() == 60 == len(dropped)


def test_the_order_is_a_function_of_seed_and_epoch():
    assert draws(60, seed=7, epoch=2) == draws(60, seed=7, epoch=2)
    assert draws(60, seed=7, epoch=2) != draws(60, seed=7, epoch=3)
    assert draws(60, seed=7, epoch=2) != draws(60, seed=8, epoch=2)
    assert draws(60, shuffle=False)[0] == list(range(0, 60, 6))


def test_older_names_mean_the_same():
    older = DistributedSampler(
        range(60),  # type: ignore[arg-type]
        replica_group=1,
        num_replica_groups=GROUPS,
        rank=1,
        num_replicas=RANKS,
        shuffle=True,
        seed=5,
    )
    assert list(older) == draws(60, seed=5)[1 * RANKS + 1]


def test_a_group_of_one_rank_needs_neither_rank_nor_size():
    alone = [list(DistributedSampler(range(10), group, 2, shuffle=False)) for group in range(2)]  # type: ignore[arg-type]
    assert alone == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(num_replica_groups=2), TypeError, "requires replica_rank and num_replica_groups"),
        (dict(replica_rank=0), TypeError, "requires replica_rank and num_replica_groups"),
        (dict(replica_rank=0, replica_group=0, num_replica_groups=2), TypeError, "replica_rank and replica_group are the same"),
        (dict(replica_rank=0, num_replica_groups=2, rank=0, group_rank=0), TypeError, "group_rank and rank are the same"),
        (dict(replica_rank=2, num_replica_groups=2), ValueError, "replica_rank = 2 of num_replica_groups = 2: must be from 0 to 1"),
        (dict(replica_rank=0, num_replica_groups=2, rank=3, num_replicas=2), ValueError, "group_rank = 3 of num_replicas = 2"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments: dict[str, int], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        DistributedSampler(range(10), **arguments)  # type: ignore[arg-type]
