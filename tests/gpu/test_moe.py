"""A mixture of experts on CUDA: the grouped kernel gives what the loop gives, and without expert parallelism the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from models import moe, ops
from tests.gpu.devices import error, one_device

pytestmark = one_device
CONFIG = moe.Config(
    name="moe", dim=128, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=32, expert_hidden_dim=64, n_experts=8, experts_per_token=2,
    balance_rate=0.01,
)  # fmt: skip


@pytest.mark.parametrize("counts", [[7, 0, 130, 3, 0, 61, 1, 54], [0, 0, 256, 0, 0, 0, 0, 0]])
def test_the_grouped_kernel_gives_what_fp32_gives_forward_and_backward(counts: list[int]):
    draws = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=draws).bfloat16() for shape in ((256, 128), (8, 64, 128), (256, 64))
    )
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (x, weight)]
        out = ops.grouped_linear(inputs[0], inputs[1], torch.tensor(counts, device=device))
        grad_out, unused = grad.to(device, dtype), torch.tensor(counts, device=device) == 0
        # The allocator gives memory with numbers, so that zeros are written ones. On Blackwell with CUTLASS before 4.3, which torch left in
        # December 2025 (pytorch/pytorch#168308), an expert without rows got what an accumulator held (pytorch/pytorch#172439).
        dirty = [torch.full_like(inputs[1], 7.0) for _ in range(4)]
        del dirty
        grad_x, grad_w = torch.autograd.grad(out, inputs, grad_out)
        assert not grad_w[unused].any()
        results.append([out, grad_x, grad_w])
    for got, want in zip(*results, strict=True):
        assert error(got, want) < 5e-3


def test_a_block_trains_without_a_host_sync():
    with torch.device("cuda"):
        layer = moe.MoE(CONFIG).to(torch.bfloat16)
    layer.router.float()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()  # the kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
