"""The bit flip of a fault drill: only when allowed, only where requested, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.fault_injection import CORRUPT, FaultInjector, flip_bit
from training.log import Log


def corruption(folder: Path, weights: list[torch.Tensor], *, rank: int = 0, enabled: bool = True) -> FaultInjector:
    return FaultInjector(folder, rank, weights, enabled=enabled, log=Log())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_bit_of_the_largest_element_flips(dtype: torch.dtype):
    before = torch.tensor([[0.25, -0.5], [0.0, 0.125]], dtype=dtype)
    after = before.clone()
    flip_bit(after)
    bits = [(a ^ b).item().bit_count() for a, b in zip(_bytes(before), _bytes(after), strict=True)]
    assert sum(bits) == 1 and after.isfinite().all()
    assert (before != after).tolist() == [[False, True], [False, False]]
    assert 0 < abs(after[0, 1] / before[0, 1] - 1) < 0.25


def test_the_rank_that_was_named_flips_it_once_and_the_others_do_not(tmp_path: Path):
    (tmp_path / CORRUPT).write_text("1\n")
    mine, other = torch.ones(4), torch.ones(4)
    corruption(tmp_path, [other], rank=0).step(1)
    assert (tmp_path / CORRUPT).exists() and torch.equal(other, torch.ones(4))
    asked = corruption(tmp_path, [torch.empty(0), mine], rank=1)
    asked.step(1)
    flipped = mine.clone()
    asked.step(2)
    assert not (tmp_path / CORRUPT).exists()
    assert (flipped != 1).sum() == 1 and torch.equal(mine, flipped)


def test_nothing_is_looked_at_outside_of_a_drill(tmp_path: Path):
    (tmp_path / CORRUPT).write_text("0")
    weight = torch.ones(4)
    corruption(tmp_path, [weight], enabled=False).step(1)
    assert torch.equal(weight, torch.ones(4)) and (tmp_path / CORRUPT).exists()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
