"""Sums in eight bits on a device: the host's bits, and of what the stream will have written."""

from __future__ import annotations

import pytest
import torch

from ft.process_groups.nccl import ProcessGroupNCCL
from ft.process_groups.store import serve
from ft.quantized import BLOCK, CollectiveQueue, dequantize, message_bytes, quantize
from tests.gpu.devices import one_device, spin

pytestmark = [one_device, pytest.mark.timeout(300)]


def test_the_bits_are_those_of_the_host():
    values = torch.randn(5000, BLOCK, generator=torch.Generator().manual_seed(1)) * 3.7
    values[7, 3], values[9] = float("nan"), 0.0
    told = {}
    for device in ("cpu", "cuda"):
        left_out = values.to(device, copy=True)
        message = torch.empty(message_bytes(len(values)), dtype=torch.uint8, device=device)
        quantize(left_out, message)
        dequantize(message, read := torch.empty_like(left_out))
        told[device] = [tensor.cpu().nan_to_num() for tensor in (read, left_out)]
    assert all(map(torch.equal, told["cpu"], told["cuda"]))


def test_a_lane_sums_what_the_stream_will_have_written():
    server = serve()
    group = ProcessGroupNCCL()
    group.configure(f"127.0.0.1:{server.port}/quantized", 0, 1)
    tensor, lane = torch.zeros(1 << 20, device="cuda"), CollectiveQueue(group)
    spin(1.0)
    tensor.fill_(3.0)
    assert lane.allreduce_quantized(tensor, None).wait() and lane.allreduce([tensor]).wait()
    assert (tensor == 3.0).all()
    lane.close()
    lane.join()
    group.shutdown()
