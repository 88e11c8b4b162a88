"""Each mode of activation checkpointing gives the same gradients with less memory, and recomputes what it states."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from models import llama, ops
from parallelisms.activation_checkpoint import KEPT, ActivationCheckpointConfig, apply_activation_checkpoint
from parallelisms.context import Attend, attentions
from training.loss import cross_entropy_sum
from training.states import ModelState

V, T, LAYERS = 31, 96, 4
SIZES = llama.Config(dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden_dim=96)
MODES = {
    "none": ActivationCheckpointConfig(),
    "second": ActivationCheckpointConfig("selective", "2"),
    "op": ActivationCheckpointConfig("selective", "op"),
    "full": ActivationCheckpointConfig("full"),
}
PRODUCTS_OF_A_BLOCK = 7


class Watch(TorchDispatchMode):
    """Counts operations, and knows which of the storages that they created are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[op.name().partition("::")[2]] += 1
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                weak = StorageWeakRef(storage)
                self._made[weak.cdata] = (weak, storage.nbytes())
        return result

    def alive_bytes(self) -> int:
        return sum(size for weak, size in self._made.values() if not weak.expired())


def torchs_attention(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None = None) -> Tensor:
    """Computes attention by torch's kernel, as ops.causal_attention does for longer sequences."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@dataclass
class Ran:
    loss: Tensor
    gradients: dict[str, Tensor]
    kept_bytes: int  # between forward and backward
    backward: Counter[str]  # operations


def built(
    config: ActivationCheckpointConfig, dtype: torch.dtype = torch.float32, attend: Attend = ops.causal_attention
) -> llama.Llama:
    model = llama.build(SIZES, vocab_size=V, max_seq_len=T)
    model.init_weights(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    assert model.output is not None
    model.output.loss = lambda h, weight, labels: cross_entropy_sum(F.linear(h, weight), labels)
    for attention in attentions(model, 1):
        attention.attend = attend
    apply_activation_checkpoint(model, config)
    return model


def run(
    config: ActivationCheckpointConfig, dtype: torch.dtype = torch.float32, attend: Attend = ops.causal_attention
) -> Ran:
    model = built(config, dtype, attend)
    inputs, labels = torch.randint(0, V, (2, 2, T), generator=torch.Generator().manual_seed(0))
    with Watch() as forward:
        loss = model(inputs, labels=labels)
        kept = forward.alive_bytes()
    with Watch() as backward:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Ran(loss.detach(), gradients, kept, backward.calls)


@pytest.mark.parametrize("attend", [ops.causal_attention, torchs_attention], ids=["our attention", "torch's attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_same_from_fewer_bytes(dtype: torch.dtype, attend: Attend) -> None:
    results = {name: run(config, dtype, attend) for name, config in MODES.items()}
    plain = results["none"]
    for ran in results.values():
        assert torch.equal(ran.loss, plain.loss)
        assert ran.gradients.keys() == plain.gradients.keys()
        assert all(torch.equal(gradient, plain.gradients[name]) for name, gradient in ran.gradients.items())
    none, second, by_operation, full = (results[name].kept_bytes for name in ("none", "second", "op", "full"))
    assert full < 0.3 * none
    assert abs(second - (none + full) / 2) < 0.02 * none
    # of each token: what attention gives, and the second, fourth and sixth product: wk, wo, w3; torch's attention has statistics
    kept = SIZES.dim + SIZES.dim // 2 + SIZES.dim + SIZES.hidden_dim
    statistics = 4 * SIZES.n_heads if attend is torchs_attention else 0
    assert by_operation - full == LAYERS * 2 * T * (kept * dtype.itemsize + statistics)
    assert by_operation < 0.5 * none


@pytest.mark.parametrize(
    ("attend", "attention"),
    [(ops.causal_attention, "causal_attention"), (torchs_attention, "_scaled_dot_product_flash_attention_for_cpu")],
)
def test_what_is_computed_again(attend: Attend, attention: str) -> None:
    again = {name: run(config, attend=attend).backward for name, config in MODES.items()}
    attentions = {name: calls[attention] for name, calls in again.items()}
    assert attentions == {"none": 0, "second": LAYERS // 2, "op": 0, "full": LAYERS}
    products = {name: calls["mm"] - again["none"]["mm"] for name, calls in again.items()}
    whole_block = PRODUCTS_OF_A_BLOCK - 1  # nothing needs the result of the last
    assert products == {"none": 0, "second": 2 * whole_block, "op": 3 * LAYERS, "full": LAYERS * whole_block}


@pytest.mark.parametrize("mode", ["second", "op", "full"])
def test_compiled_blocks_go_through_a_cache_where_no_gradient_is_asked_for(mode: str) -> None:
    """The text sample at the end of a run uses a cache; a checkpoint around a block that appends to it cannot be traced."""
    model = built(MODES[mode])
    tokens = torch.randint(0, V, (1, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(tokens)
    for block in model.layers.values():
        block.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        cache = model.new_cache(1, T)
        assert torch.allclose(model(tokens, cache=cache), plain, atol=1e-6)


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_names_are_those_of_the_model(config: ActivationCheckpointConfig) -> None:
    plain, model = built(MODES["none"]), built(config)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(ModelState([model]).state_dict()) == list(plain.state_dict())


def test_every_third_block_of_a_stage_is_chosen_as_in_the_whole_model() -> None:
    model = llama.build(llama.Config(n_layers=7), vocab_size=V, max_seq_len=T)
    for name in ("0", "1", "2", "6"):
        del model.layers[name]
    apply_activation_checkpoint(model, ActivationCheckpointConfig("selective", "3"))
    assert [name for name, block in model.layers.items() if "forward" in vars(block)] == ["5"]


def test_nothing_is_kept_and_nothing_is_different_without_gradients() -> None:
    tokens = torch.zeros(1, T, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(built(MODES["op"])(tokens), built(MODES["none"])(tokens))


@pytest.mark.parametrize("config", [MODES["full"], MODES["op"]], ids=["full", "op"])
def test_a_compiled_block_is_one_graph(config: ActivationCheckpointConfig) -> None:
    plain, model = built(MODES["none"]), built(config)
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    inputs, labels = torch.randint(0, V, (2, 1, T))
    for each in (plain, model):
        each(inputs, labels=labels).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm(), name


def test_the_memory_budget_is_the_compilers() -> None:
    import torch._functorch.config as compiler

    with compiler.patch(activation_memory_budget=1.0):  # put back afterwards
        model = built(ActivationCheckpointConfig("memory_budget", memory_budget=0.25))
        assert compiler.activation_memory_budget == 0.25
    assert not any("forward" in vars(block) for block in model.layers.values())


@pytest.mark.parametrize("option", ["", "0", "-1", "two", "2.0", "ops", "²"])
def test_options_that_mean_nothing_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"^activation_checkpoint\.selective_ac_option = "):
        ActivationCheckpointConfig("selective", option).check()
    ActivationCheckpointConfig("selective", "12").check()


def test_whichever_kernel_attention_runs_its_result_is_kept() -> None:
    """All fused attention kernels are in KEPT: on CUDA torch chooses among three, on Hopper cuDNN's first."""
    names = torch._C._dispatch_get_all_op_names()
    kernels = {
        name
        for name in names
        if re.fullmatch(r"aten::_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?", name)
    }
    assert len(kernels) == 4 and kernels <= {operation.name() for operation in KEPT}
