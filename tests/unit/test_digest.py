"""The digest of weights covers any bit, place and dtype. Decisions of groups on several digests: tests/protocol/test_rules.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.digest import BLOCK, digest
from ft.protocol.compare import DIGEST_WORDS


@settings(deadline=None, max_examples=60)
@given(
    elements=st.sampled_from([1, 3, 8, BLOCK * 2 - 1, BLOCK * 2, BLOCK * 5 + 3]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_bit_counts(elements: int, where: float, bit: int):
    weights = torch.arange(elements, dtype=torch.float32) / 7
    before = digest([weights])
    octets = weights.view(torch.uint8)
    octets[int(where * octets.numel())] ^= 1 << bit
    assert digest([weights]) != before
    octets[int(where * octets.numel())] ^= 1 << bit
    assert digest([weights]) == before


def test_where_things_lie_counts():
    a, b = torch.randn(BLOCK), torch.randn(BLOCK)
    blocks = torch.cat((torch.randn(2 * BLOCK), torch.zeros(2 * BLOCK)))
    assert digest([a, b]) != digest([b, a])
    assert digest([blocks]) != digest([blocks.roll(2 * BLOCK)])
    assert digest([torch.zeros(3)]) != digest([torch.zeros(3), torch.zeros(3)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_of_the_values_alone(dtype: torch.dtype):
    """The memory layout does not change the digest: a view at an odd offset, a transposed tensor, an empty one."""
    base = torch.arange(1, 200).to(dtype)
    odd = base[1:100]
    assert digest([odd]) == digest([odd.clone()])
    table = base[:99].view(9, 11)
    assert digest([table.t()]) == digest([table.t().contiguous()])
    assert digest([odd[:0]]) == digest([torch.empty(0, dtype=dtype)])


def test_tensors_may_lie_on_several_devices():
    """With CPU offload the weights are in host memory, and the buffers are not. A meta tensor stands for those: its sum is to be copied."""
    with pytest.raises(NotImplementedError, match="copy out of meta"):
        digest([torch.zeros(9), torch.empty(9, device="meta")])


def test_its_figures_survive_a_sum_in_fp32():
    for seed in range(50):
        figures = digest([torch.full((4,), float(seed))])
        assert len(figures) == DIGEST_WORDS and any(figures)
        assert torch.tensor(figures, dtype=torch.float32).tolist() == list(figures)
    assert any(digest([]))
