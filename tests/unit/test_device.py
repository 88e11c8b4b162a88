"""Decisions by device type, as functions of its name, since these tests have no GPU."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from configs.load import load
from ft.device import HAVE_STREAMS, future_devices, streams_of
from models.init import normal_
from models.ops import aligns_last_rows
from parallelisms.device import DEVICE_TRAITS, Device, local_device_type
from parallelisms.loss import equal_chunks, fp32_addmm
from tests.unit.fakes import set_device_module
from training.config import TrainingConfig
from training.loss import chunk_tokens

LLAMA3 = 128_256
FOR_GPUS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("llama3_*.toml"))


def test_the_kinds_of_devices() -> None:
    cuda, cpu = Device(torch.device("cuda", 3)), Device(torch.device("cpu"))
    assert (cuda.type, cuda.traits.backend, cpu.traits.backend) == ("cuda", "nccl", "gloo")
    assert cuda.traits.pins_batches and not cpu.traits.pins_batches
    assert cuda.traits.has_allocator and not cpu.traits.has_allocator
    # ft/ knows no other package
    assert {kind for kind, found in DEVICE_TRAITS.items() if found.queues_work} == HAVE_STREAMS


def test_streams_are_those_of_the_device() -> None:
    assert streams_of(torch.device("cuda", 3)) is torch.cuda
    assert streams_of(torch.device("cpu")) is None


def test_the_devices_of_a_future_are_the_current_one_and_those_of_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has devices once CUDA is initialized; before, the call must not initialize it."""
    assert future_devices(torch.ones(1)) == []

    class OnDevice(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 5)

    default = {"a": [torch.ones(1), torch.ones(1).as_subclass(OnDevice)], "b": 2}
    set_device_module(
        monkeypatch, SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 8, current_device=lambda: 3)
    )
    assert future_devices(1) == [torch.device("cuda", 3)]
    assert future_devices(default) == [torch.device("cuda", 3), torch.device("cuda", 5)]


def test_the_kind_of_device_that_is_found() -> None:
    assert local_device_type() == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((0, 0), True)])
def test_gpus_that_multiply_bf16(capability: tuple[int, int], *, fast: bool) -> None:
    """An absent GPU, (0, 0), counts as one that multiplies bf16 fast."""
    assert Device(torch.device("cuda")).fast_bfloat16(capability) is fast


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "by_name"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.bfloat16, 264, False),  # too wide for the kernel
        ("cuda", torch.bfloat16, 20, False),  # it pads no head
        ("cuda", torch.float32, 128, False),
        ("cpu", torch.bfloat16, 128, False),
    ],
)
def test_which_attention_takes_the_last_rows(device: str, dtype: torch.dtype, head_dim: int, *, by_name: bool) -> None:
    assert aligns_last_rows(device, dtype, head_dim) is by_name


def test_weights_are_drawn_by_a_generator_of_the_host_wherever_they_lie() -> None:
    """Weights are drawn on the CPU for any device, so every layout and device starts with the same bits."""
    here, there = torch.empty(3, 4), torch.empty(3, 4)
    normal_(here, "weight", 7, std=1.0)
    torch.manual_seed(1)
    with torch.device("meta"):  # as a model is built, and as a GPU would be the default
        normal_(there, "weight", 7, std=1.0)
    assert torch.equal(here, there)


ROOT = Path(__file__).resolve().parents[2]
# Files outside parallelisms/device.py and ft/device.py that ask for a kind of device, how often, and why there.
ELSEWHERE = {
    "models/ops.py": (6, "knows of torch alone: a CPU or not, and where the grouped kernel is"),
    "configs/check.py": (3, "which settings are CUDA's alone"),
    "tools/explain/rank.py": (1, "acts CUDA's kernels out on tensors of the CPU"),
    "tools/explain/command.py": (4, "the values of --device, and advice about GPUs"),
    "ft/compat/manager.py": (1, "which process group it advises for a tensor"),
    "ft/config.py": (2, "which library sums, and words for it, since ft/ knows no other package"),
    "ft/healing/capture.py": (1, "whether memory can be read as Python's, whatever device it is"),
    "ft/process_groups/base.py": (1, "a torch.futures.Future takes streams of CUDA"),
    "ft/process_groups/shared.py": (3, "memory that processes share: CUDA's own calls"),
    "ft/process_groups/baby.py": (2, "an event that processes share, and whose device that is"),
}


def test_no_other_line_asks_for_a_kind_of_device() -> None:
    seen = {}
    for package in ("models", "parallelisms", "training", "ft", "configs", "scripts", "tools", "contrib", "."):
        for path in sorted((ROOT / package).glob("*.py" if package == "." else "**/*.py")):
            asks = sum(map(_asks, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
            if asks and path.name != "device.py":
                seen[str(path.relative_to(ROOT))] = asks
    assert seen == {file: count for file, (count, _) in ELSEWHERE.items()}


def _asks(node: ast.AST) -> bool:
    """Returns True for a comparison with "cuda" or "cpu", a dict with these keys, or `.is_cuda`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda"
    if isinstance(node, ast.Dict):
        return any(isinstance(key, ast.Constant) and key.value in ("cuda", "cpu") for key in node.keys)
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    inside = [one for side in sides for one in (side.elts if isinstance(side, ast.Tuple) else [side])]
    return any(isinstance(one, ast.Constant) and one.value in ("cuda", "cpu") for one in inside)


@pytest.mark.parametrize(
    ("device", "vocab_size", "asked", "tokens"),
    [
        ("cpu", LLAMA3, -1, 1046),
        ("cuda", LLAMA3, -1, 4096),
        ("cuda", 32_000, -1, 4096),  # 4,194 fit
        ("cuda", 16_384, -1, 8192),
        ("cuda", 16_383, -1, 0),
        ("cpu", 16_383, -1, 0),
        ("cuda", LLAMA3, 1000, 1000),  # the user's word
        ("cuda", LLAMA3, 0, 0),
    ],
)
def test_tokens_of_a_chunk_of_the_loss(device: str, vocab_size: int, asked: int, tokens: int) -> None:
    assert chunk_tokens(TrainingConfig(loss_chunk_tokens=asked), vocab_size, device) == tokens


@pytest.mark.parametrize(
    ("tokens", "most", "chunk"),
    [
        (32_768, 4096, 4096),
        (16_384, 1046, 1024),  # 16, and no seventeenth of 342
        (6000, 4096, 3000),
        (24_576, 4096, 4096),
        (33, 4, 3),
        (4099, 4096, 4096),  # a prime
        (10, 20, 10),
    ],
)
def test_chunks_have_one_shape(tokens: int, most: int, chunk: int) -> None:
    assert equal_chunks(tokens, most) == chunk


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 and 2.12 fail at this operation on the meta device")
def test_a_gpu_adds_a_product_to_the_gradient_of_the_weight_in_one_operation() -> None:
    """The operation is traced without a device; tests/gpu checks the values."""
    total = torch.empty(64, 16, device="meta")
    a, b = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((64, 32), (32, 16)))
    with Names() as one:
        fp32_addmm(total, a, b, fused=DEVICE_TRAITS["cuda"].has_fp32_addmm)
    with Names() as two:
        fp32_addmm(total, a, b, fused=DEVICE_TRAITS["cpu"].has_fp32_addmm)
    assert one.seen == ["aten.addmm.dtype_out"] and two.seen == ["aten.mm.default", "aten.add_.Tensor"]


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: path.stem)
def test_configurations_for_gpus_compile_and_read_beside_the_step(path: Path) -> None:
    config = load([str(path)])
    compiled = config.compile
    assert (compiled.enable, compiled.components, compiled.backend) == (True, ("model", "loss"), "inductor")
    assert 2 <= config.training.dataloader.num_workers <= 4
