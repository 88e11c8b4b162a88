"""Ranks that share the batch (FSDP, HSDP, DDP), every matrix (TP) or every sequence (CP) compute what one process computes: initial values,
loss, gradients and norm; with activation checkpoints, chunks of the loss and compiled blocks, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models import llama, moe
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.execution import CompileConfig, ExecutionConfig, Precision
from parallelisms.fsdp import NoOpReduceScatter, reshard_all
from parallelisms.mesh import ParallelismConfig, build_mesh, degrees
from parallelisms.parallelize import Parallelized, parallelize
from tests.multiproc.pool import Pool
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import gradient_norm

T, BATCH = 16, 4
# rows that 2 and 3 ranks cannot share evenly
UNEVEN = llama.Config(dim=24, n_layers=2, n_heads=3, n_kv_heads=1, hidden_dim=40)
HEADS = llama.Config(dim=24, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=40)
GROUPED = llama.Config(dim=24, n_layers=3, n_heads=6, n_kv_heads=2, hidden_dim=40)
MIXTURE = moe.Config(
    name="moe", dim=24, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=6, expert_hidden_dim=20, n_experts=4, experts_per_token=2,
    balance_rate=0.01, balance_loss=0.01, router_init_std=0.5,
)  # fmt: skip
ALONE = ParallelismConfig()
FROZEN = ("tok_embeddings.*", "layers.0.*", "layers.1.attention_norm.*", "norm.*", "output.*")
ALL_BUT_NORMS = ("tok_embeddings.*", "*.w?.weight", "output.*")
EVERYTHING, FULL, SECOND, BY_OPERATION = (
    ActivationCheckpointConfig(*mode) for mode in ((), ("full",), ("selective", "2"), ("selective", "op"))
)


@dataclass(frozen=True)
class Case:
    """One way to compute the same."""

    sizes: llama.Config
    parallelism: ParallelismConfig = ALONE
    checkpointing: ActivationCheckpointConfig = EVERYTHING
    vocab: int = 61
    chunk_tokens: int = 0
    loss: str = "ours"
    microbatches: int = 1
    dtype: torch.dtype = torch.float32
    compile: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()  # patterns of names


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of whole logits, as a user may write it."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def parallelized(case: Case) -> Parallelized:
    with torch.device("meta"):
        build = moe.build if isinstance(case.sizes, moe.Config) else llama.build
        model = build(case.sizes, vocab_size=case.vocab, max_seq_len=T)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in case.frozen))
    execution = ExecutionConfig(
        case.parallelism,
        case.checkpointing,
        CompileConfig(bool(case.compile), case.compile, backend="aot_eager"),
        precision=Precision(compute=case.dtype),
        loss_chunk_tokens=case.chunk_tokens,
    )
    loss = {"ours": cross_entropy_sum, "plain": plain_loss}[case.loss]
    return on_cpu(model, execution, loss, batch=BATCH, seq_len=T)


def on_cpu(
    model: Any, execution: ExecutionConfig, loss: Any = cross_entropy_sum, *, seed: int = 0, batch: int, seq_len: int
) -> Parallelized:
    """The model on all ranks there are; `batch`: of a data-parallel rank."""
    mesh, cpu = build_mesh(degrees(execution.parallelism, dist.get_world_size()), "cpu"), torch.device("cpu")
    return parallelize(model, mesh, loss, execution, local_batch_size=batch, seq_len=seq_len, device=cpu, seed=seed)


def step(case: Case) -> dict[str, Any]:
    """Initial values, and what a step and a look at a batch of unequal sequences give, gathered."""
    parallel = parallelized(case)
    [model] = parallel.parts
    initial = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    held = sum(p.to_local().numel() for p in model.parameters())
    shape, draws = degrees(case.parallelism, dist.get_world_size()), torch.Generator().manual_seed(1)
    inputs, labels = (torch.randint(0, case.vocab, (BATCH, T), generator=draws) for _ in range(2))
    # One sequence has no target at all, and the last token of the vocabulary is one
    labels[0], labels[1, :5], labels[2, 3] = IGNORED, IGNORED, case.vocab - 1
    dp_rank, dp_size = shape.coordinate(dist.get_rank()).dp_rank, shape.data_parallel
    here = slice(dp_rank * BATCH // dp_size, (dp_rank + 1) * BATCH // dp_size)
    seen = parallel.evaluate(inputs[here], labels[here]).clone()
    assert all(p.grad is None for p in model.parameters())
    loss = torch.zeros(())
    for x, y in zip(inputs[here].chunk(case.microbatches), labels[here].chunk(case.microbatches), strict=True):
        loss += parallel.forward_backward(x, y)
    assert shape.cp == 1 or torch.equal(loss, seen)
    for value in (loss, seen):
        dist.all_reduce(value)
    norm = gradient_norm(model.parameters())
    beside, first_loss = gradient_norm(model.parameters(), 7.25 + dist.get_rank())
    torch.testing.assert_close(beside, norm)
    assert first_loss.item() == 7.25
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {"initial": initial, "loss": loss, "seen": seen, "norm": norm, "gradients": gradients, "held": held}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[Case], dict[str, Any]]:
    """Results of one process for the model of a case."""
    known: dict[Case, dict[str, Any]] = {}

    def alone(case: Case) -> dict[str, Any]:
        plain = Case(case.sizes, vocab=case.vocab, frozen=case.frozen)
        if plain not in known:
            [known[plain]] = pool.run(1, step, plain)
        return known[plain]

    return alone


def layout(**keys: Any) -> ParallelismConfig:
    """Returns the ParallelismConfig of short names of degrees."""
    names = {
        "pp": "pipeline_parallel",
        "tp": "tensor_parallel",
        "cp": "context_parallel",
        "ep": "expert_parallel",
        "shards": "data_parallel_shard",
        "copies": "data_parallel_replicate",
    }
    return ParallelismConfig(**{f"{names[key]}_degree" if key in names else key: value for key, value in keys.items()})


ALWAYS, NEVER = ({"fsdp_reshard_after_forward": when} for when in ("always", "never"))
ONE_PIECE = {"context_parallel_load_balancer": "none"}
GATHERED = layout(tp=2, disable_loss_parallel=True)
CASES = {
    "one rank": (1, Case(UNEVEN, layout(**ALWAYS), microbatches=2)),
    "fsdp": (2, Case(UNEVEN)),
    "fsdp, kept gathered": (2, Case(UNEVEN, layout(**NEVER), microbatches=2)),
    "fsdp, uneven": (3, Case(UNEVEN, layout(**ALWAYS))),
    "fsdp, two blocks a group": (2, Case(UNEVEN, layout(fsdp_blocks_per_group=2))),
    "fsdp, prefetched": (2, Case(UNEVEN, layout(fsdp_forward_prefetch=2, fsdp_backward_prefetch=2), microbatches=2)),
    "hsdp": (4, Case(UNEVEN, layout(copies=2))),
    "ddp": (2, Case(UNEVEN, layout(copies=2), microbatches=2)),
    "tp2": (2, Case(HEADS, layout(tp=2))),
    "tp2-chunks": (2, Case(HEADS, layout(tp=2), chunk_tokens=7)),
    "tp2-gathered": (2, Case(HEADS, GATHERED)),
    "tp2-gathered-chunks": (2, Case(HEADS, GATHERED, chunk_tokens=7)),
    "tp2-another-loss": (2, Case(HEADS, layout(tp=2), loss="plain")),
    "tp2-even": (2, Case(HEADS, layout(tp=2), vocab=64, chunk_tokens=16, microbatches=2)),
    "tp2-compiled": (2, Case(HEADS, layout(tp=2), chunk_tokens=16, compile=("model", "loss"))),
    "tp4": (4, Case(HEADS, layout(tp=4))),
    "tp4-259-chunks": (4, Case(HEADS, layout(tp=4), vocab=259, chunk_tokens=5)),
    "tp2-shard2": (4, Case(HEADS, layout(tp=2, shards=2), microbatches=2)),
    "tp2-shard2-259": (4, Case(HEADS, layout(tp=2, shards=2), vocab=259, chunk_tokens=9)),
    "tp2-shard2-even": (4, Case(HEADS, layout(tp=2, shards=2), vocab=62)),
    "tp2-copies2": (4, Case(HEADS, layout(tp=2, copies=2), chunk_tokens=9)),
    "chunks": (1, Case(HEADS, chunk_tokens=7)),
    "chunks-another-loss": (1, Case(HEADS, chunk_tokens=7, loss="plain")),
    "cp2": (2, Case(GROUPED, layout(cp=2))),
    "cp2, full": (2, Case(GROUPED, layout(cp=2, **NEVER), FULL)),
    "cp2, by operation": (2, Case(GROUPED, layout(cp=2), BY_OPERATION)),
    "cp2, one piece each, every second block": (2, Case(GROUPED, layout(cp=2, **ONE_PIECE), SECOND)),
    "cp2, by operation, compiled": (2, Case(GROUPED, layout(cp=2), BY_OPERATION, compile=("model",))),
    "cp4": (4, Case(GROUPED, layout(cp=4), BY_OPERATION)),
    "cp4, one piece each": (4, Case(GROUPED, layout(cp=4, **ONE_PIECE))),
    "cp2, and two shards": (4, Case(GROUPED, layout(cp=2, shards=2), FULL)),
    "cp2, and two copies": (4, Case(GROUPED, layout(cp=2, copies=2), BY_OPERATION)),
    "cp2, and two parts of each matrix": (4, Case(GROUPED, layout(cp=2, tp=2), BY_OPERATION)),
    "fsdp, frozen": (2, Case(UNEVEN, frozen=FROZEN)),
    "tp2, frozen": (2, Case(HEADS, layout(tp=2), frozen=FROZEN)),
    "tp2, all but the norms frozen, chunks": (2, Case(HEADS, layout(tp=2), chunk_tokens=7, frozen=ALL_BUT_NORMS)),
    "cp2, all but the norms frozen, full": (2, Case(GROUPED, layout(cp=2), FULL, frozen=ALL_BUT_NORMS)),
}


def errors(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the relative error of each gradient."""
    pairs = {name: (result["gradients"][name], value) for name, value in expected["gradients"].items()}
    return {name: float((got - value).norm() / value.norm()) for name, (got, value) in pairs.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_gives_what_one_process_gives(pool: Pool, alone: Callable[..., dict[str, Any]], name: str) -> None:
    world, case = CASES[name]
    expected, results = alone(case), pool.run(world, step, case)
    for result in results:
        assert result["gradients"].keys() == expected["gradients"].keys()  # what is frozen stays so
        for parameter, value in expected["initial"].items():
            assert torch.equal(result["initial"][parameter], value), parameter  # no layout changes what is drawn
        wrong = {parameter: error for parameter, error in errors(result, expected).items() if not error <= 1e-5}
        assert not wrong
        for scalar in ("loss", "seen", "norm"):
            torch.testing.assert_close(result[scalar], expected[scalar], rtol=1e-5, atol=0)
    # Of the matrices each rank holds its share, of the norms the whole on each tensor-parallel rank
    norms, shares = (2 * case.sizes.n_layers + 1) * case.sizes.dim, degrees(case.parallelism, world)
    matrices = shares.dp_replicate * (expected["held"] - norms)
    assert sum(result["held"] for result in results) == matrices + shares.dp_replicate * shares.tp * norms


@pytest.mark.timeout(300)  # a busy machine takes its time to compile
def test_compiled_experts_give_what_one_process_gives(pool: Pool, alone: Callable[..., dict[str, Any]]) -> None:
    """Experts are compiled for any number of rows: each pass sends another one."""
    case = Case(MIXTURE, layout(ep=2), microbatches=2, compile=("model",))
    expected = alone(case)
    for result in pool.run(2, step, case, timeout_s=240):
        assert {name for name, error in errors(result, expected).items() if not error <= 1e-5} == set()
        for scalar in ("loss", "seen", "norm"):
            torch.testing.assert_close(result[scalar], expected[scalar], rtol=1e-5, atol=0)


def test_frozen_experts_stay_frozen(pool: Pool, alone: Callable[..., dict[str, Any]]) -> None:
    case = Case(MIXTURE, layout(ep=2), frozen=("*.w2", "*.router.*"))
    expected = alone(case)
    for result in pool.run(2, step, case):
        assert result["gradients"].keys() == expected["gradients"].keys()
        assert {name for name, error in errors(result, expected).items() if not error <= 1e-5} == set()


@pytest.mark.parametrize(
    ("case", "each"),
    [
        (Case(UNEVEN), False),
        (Case(HEADS, layout(tp=2)), True),
        (Case(HEADS, layout(tp=2), chunk_tokens=7), True),
        (Case(HEADS, GATHERED, chunk_tokens=7), True),
        (Case(GROUPED, layout(cp=2), BY_OPERATION), False),
    ],
)
def test_bf16_gradients_are_near(pool: Pool, alone: Callable[..., dict[str, Any]], case: Case, *, each: bool) -> None:
    """The relative error of the gradients is at most 3 %: of all together or, with `each`, of each one, too."""
    expected = alone(case)
    whole = torch.cat([g.flatten() for g in expected["gradients"].values()])
    for result in pool.run(2, step, replace(case, dtype=torch.bfloat16)):
        got = torch.cat([g.flatten() for g in result["gradients"].values()])
        assert got.dtype == torch.float32  # accumulated and reduced in fp32
        assert (got - whole).norm() / whole.norm() < 0.03
        assert not each or max(errors(result, expected).values()) <= 0.03


DIVISIONS = (torch.ops.aten.div, torch.ops.aten.div_)


class Divisions(TorchDispatchMode):
    """Counts the divisions of tensors of gradients by one, which are superfluous, or by the number of ranks."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1, dist.get_world_size())

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op.overloadpacket in DIVISIONS and not torch.is_tensor(args[1]) and args[1] in self.factors
        return op(*args, **(kwargs or {}))


def divisions(case: Case) -> int:
    """Counts the divisions of a forward and backward."""
    with Divisions() as seen:
        step(case)
    return seen.count


@pytest.mark.parametrize("name", ["one rank", "fsdp", "hsdp", "ddp"])
def test_no_gradient_is_divided(pool: Pool, name: str) -> None:
    ranks, case = CASES[name]
    assert pool.run(ranks, divisions, replace(case, microbatches=1)) == [0] * ranks


def losses_around_a_write(case: Case) -> tuple[float, float]:
    """Nats per token of a forward without a backward, and of one after all weights have become 0."""
    parallel, tokens = parallelized(case), torch.arange(T).view(1, T)
    shards = [p for part in parallel.parts for p in part.parameters()]
    before = parallel.evaluate(tokens, tokens).item() / T
    reshard_all(parallel.parts)
    with torch.no_grad():
        for shard in shards:
            shard.zero_()
    return before, parallel.evaluate(tokens, tokens).item() / T


@pytest.mark.parametrize(("ranks", "axes"), [(1, {}), (2, {}), (2, {"copies": 2, "shards": 1})])
def test_weights_that_are_written_after_a_look_are_those_of_the_next_forward(
    pool: Pool, ranks: int, axes: dict[str, int]
) -> None:
    case = Case(UNEVEN, layout(**NEVER, **axes))
    for before, after in pool.run(ranks, losses_around_a_write, case):
        assert before != pytest.approx(math.log(61), abs=1e-4) and after == pytest.approx(math.log(61), abs=1e-6)


def losses_with_dropout(case: Case) -> list[float]:
    """Returns this rank's terms of the loss: evaluated, then evaluated and trained twice each with dropout after each block."""
    parallel, tokens = parallelized(case), torch.arange(BATCH * T).view(BATCH, T) % case.vocab
    before = parallel.evaluate(tokens, tokens).item()
    for part in parallel.parts:
        for block in part.layers.values():
            block.register_forward_hook(lambda block, _, hidden: F.dropout(hidden, 0.5, block.training))
    return [before, *(run(tokens, tokens).item() for run in 2 * [parallel.evaluate, parallel.forward_backward])]


@pytest.mark.parametrize(("ranks", "axes"), [(1, {}), (2, {"pp": 2})])
def test_a_look_has_no_dropout_and_training_has_it_again(pool: Pool, ranks: int, axes: dict[str, int]) -> None:
    results = pool.run(ranks, losses_with_dropout, Case(UNEVEN, layout(**axes)))
    plain, evaluated, trained, again, trained_again = (sum(losses) for losses in zip(*results, strict=True))
    assert plain == evaluated == again and len({plain, trained, trained_again}) == 3


def copies(case: Case) -> tuple[int, int]:
    """Counts the parameters that a forward computes with in other memory than their own, and all of them."""
    parallel, seen = parallelized(case), list[int]()
    [part] = parallel.parts
    kept = {parameter.to_local().data_ptr() for parameter in part.parameters()}  # type: ignore[attr-defined]
    for module in part.modules():
        module.register_forward_pre_hook(
            lambda module, _: seen.extend(p.data_ptr() for p in module.parameters(recurse=False))
        )
    tokens = torch.zeros(BATCH, T, dtype=torch.int64)
    for _ in range(2):
        parallel.forward_backward(tokens, tokens)
    return len([address for address in seen if address not in kept]) // 2, len(kept)


@pytest.mark.parametrize(("dtype", "copied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_one_rank_computes_with_its_parameters_themselves(pool: Pool, dtype: torch.dtype, copied: bool) -> None:
    [(others, parameters)] = pool.run(1, copies, Case(GROUPED, dtype=dtype))
    assert others == (parameters if copied else 0)


class WaitingStream(torch.cpu.Stream):
    """A stream that records the streams for which it has waited."""

    def __init__(self) -> None:
        self.waited = list[Any]()

    def wait_stream(self, stream: Any) -> None:
        self.waited.append(stream)


class Allocations(TorchDispatchMode):
    """The streams on which tensors are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = list[Any]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.streams.append(torch.cpu.current_stream())
        return op(*args, **(kwargs or {}))


def test_what_one_rank_sums_is_where_it_was_put_in_memory_of_the_stream_that_reduces() -> None:
    """torch frees the sum when that stream has yet to read it, and the backward pass may not write to that memory before."""
    form: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    computes, reduces, made = WaitingStream(), WaitingStream(), list[Tensor]()
    comm = NoOpReduceScatter(SimpleNamespace(comm_ctx=SimpleNamespace(reduce_scatter_stream=reduces)))
    for _ in range(2):
        with torch.cpu.stream(computes), Allocations() as allocations:
            made.append(comm.allocate((4,), **form))
        with torch.cpu.stream(reduces):
            assert comm.allocate((4,), **form) is made[-1]
        assert allocations.streams == [reduces] and computes.waited == [reduces] * len(made)
    assert made[0] is not made[1]
