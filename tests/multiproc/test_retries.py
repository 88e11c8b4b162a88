"""A step that has to be tried again, through the whole stack: in each group a pipeline of two ranks, real managers, a real lighthouse."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ft import LighthouseServer
from ft.buckets import to_local
from ft.gradients import Gradients
from ft.manager import Manager, ManagerOptions
from ft.membership import ReplicaGroupConfig
from ft.process_groups.errors import ProcessGroupError
from ft.process_groups.gloo import ProcessGroupGloo
from ft.protocol import messages as m
from ft.rpc.access import Access
from models import llama, moe
from parallelisms.execution import ExecutionConfig, Precision
from parallelisms.mesh import ParallelismConfig
from parallelisms.parallelize import Parallelized
from tests.multiproc.pool import Pool
from tests.multiproc.test_gradients import digest
from tests.multiproc.test_layouts import on_cpu
from tests.multiproc.test_process_groups import server
from training.config import TrainingConfig
from training.ema import EMA
from training.optimizer import LRSchedulerConfig, OptimizerConfig, OptimizerStep, build_optimizer
from training.progress import Progress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="in-process gloo needs /proc")

V, T, STEPS = 61, 8, 5
ALL_HERE_S = 60.0  # below the pool's time: a rank that does not come is then an error with a line number
BATCH, PASSES = 4, 2  # microbatches of a schedule, which runs so many times a step
SIZES = llama.Config(dim=16, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=24)
MIXTURE = moe.Config(
    dim=16, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=24, head_dim=4, expert_hidden_dim=12, n_experts=4,
    router_init_std=0.5, balance_rate=0.01,
)  # fmt: skip
MUON = OptimizerConfig("Muon", lr=0.02, ema_decay=0.5)
BF16 = Precision(master=torch.bfloat16, compute=torch.bfloat16, reduce=torch.bfloat16)
FAILURES = {1: "before the last bucket", 2: "behind the last bucket", 3: "of one rank"}  # by committed steps


@dataclass
class Trained:
    """The observations of one rank of one group."""

    # their digest after each step; of a mixture also that of their averages
    weights: list[str] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # steps whose forward and backward ran
    sent: list[int] = field(default_factory=list)  # buckets that were on their way before the schedule had run
    abandoned: list[int] = field(default_factory=list)  # generations, by committed steps
    biases: list[list[float]] = field(default_factory=list)  # of this rank's routers, after the last step


class Counting(ProcessGroupGloo):
    count = 0

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        self.count += 1
        return super().allreduce(tensors, opts)


def trained(lighthouse: str, schedule: str, failures: dict[int, str], sizes: llama.Config = SIZES) -> Trained:
    """STEPS steps of this rank: of two groups the first has ranks 0 and 1. A mixture has Muon and an average of the weights."""
    name, group_rank, store = join_group()
    between, seen = Counting(60.0, rendezvous_s=60.0), Trained()

    def notes(now_s: float, event: m.Event, out: m.Out) -> None:
        if any(isinstance(effect, m.AbandonGeneration) for effect in out.effects):
            seen.abandoned.append(manager.step)

    config = ReplicaGroupConfig(name, group_rank, 2, lighthouse, "127.0.0.1", Access(), m.Timeouts())
    options = ManagerOptions(slot_size=PASSES * BATCH, dies_with_group=False, init_sync=False)
    manager = Manager(between, config, options, store=store, gradients=Gradients(bucket_bytes=2000), observer=notes)
    parallel = pipeline(schedule, sizes)
    parameters = [parameter for part in parallel.parts for parameter in part.parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.02)
    ema, mixed = None, None
    if sizes == MIXTURE:
        optimizer, ema = build_optimizer(MUON, parallel.parts), EMA(parallel.parts, MUON.ema_decay)
        mixed = OptimizerStep(optimizer, parameters, MUON, LRSchedulerConfig(), TrainingConfig(), Progress(), ema=ema)
    manager.attach([*parallel.parts, *([ema] if ema else [])])
    try:
        while manager.step < STEPS:
            assignment = manager.begin_step(until=STEPS)
            for slot in assignment.slots:
                seen.computed.append(assignment.steps_before)
                before = between.count
                forward_backward(manager, parallel, slot)
                seen.sent.append(between.count - before)
            if failures:  # a rank that heard of one before it has computed would give its slots back: another case
                all_here(store.underlying_store, f"{lighthouse}/{assignment.steps_before}")
            fail(manager, failures.get(assignment.steps_before, ""), first=(name, group_rank) == ("a", 0))
            commit = manager.commit(manager.reduce([1.0] * len(assignment.slots), 1.0, True))
            assert commit is not None and commit.contributors == (0, 1), commit
            if mixed:
                mixed.step(manager.step, commit.divisor)
            else:
                optimizer.step()
            optimizer.zero_grad()
            compared = [*parameters, *(ema.parameters() if ema else [])]
            seen.weights.append(digest([to_local(tensor.detach()) for tensor in compared]))
    finally:
        manager.close()
    named = (named for part in parallel.parts for named in part.named_parameters())
    seen.biases += [to_local(parameter).tolist() for name, parameter in named if name.endswith("router.bias")]
    return seen


def join_group() -> tuple[str, int, PrefixStore]:
    """Makes this worker's default group that of its replica group alone, as a launcher would have made it."""
    rank, (host, _, port) = dist.get_rank(), server().rstrip("/").partition(":")
    dist.destroy_process_group()
    name, group_rank = "ab"[rank // 2], rank % 2
    store = PrefixStore(name, TCPStore(host, int(port), None, False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=group_rank, world_size=2)
    return name, group_rank, store


def all_here(store: Any, key: str) -> None:
    """Returns when all four ranks have come to this place. Raises DistStoreError where one does not."""
    if store.add(key, 1) == 4:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timedelta(seconds=ALL_HERE_S))


def pipeline(schedule: str, sizes: llama.Config) -> Parallelized:
    config = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = (moe if sizes == MIXTURE else llama).build(sizes, vocab_size=V, max_seq_len=T)
    return on_cpu(model, ExecutionConfig(config, precision=BF16), batch=BATCH, seq_len=T)


def forward_backward(manager: Manager, parallel: Parallelized, slot: int) -> None:
    """The slot, in PASSES runs of the schedule: gradients add up over all of their microbatches."""
    draws = torch.Generator().manual_seed(slot)
    for index in range(PASSES):
        inputs, labels = torch.randint(0, V, (2, BATCH, T), generator=draws)
        if index < PASSES - 1:
            parallel.forward_backward(inputs, labels)
        else:
            with manager.last_backward(slot):
                parallel.forward_backward(inputs, labels)


def fail(manager: Manager, how: str, *, first: bool) -> None:
    """Makes the attempt whose forward and backward have run fail, so that no group holds its sums."""
    wait, attempt = manager.gradients.wait, manager.machine.attempt_id

    def in_vain() -> tuple[float, ...]:
        manager.gradients.wait = wait  # type: ignore[method-assign]
        tail = wait()
        if manager.machine.attempt_id == attempt:  # else others failed first, and this rank voted no without a wait
            raise ProcessGroupError("the connection broke behind the last byte")
        return tail

    if how == "behind the last bucket":
        manager.gradients.wait = in_vain  # type: ignore[method-assign]
    elif how == "before the last bucket" or (how == "of one rank" and first):
        manager.process_group.interrupt("the connection broke")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("1F1B", SIZES),
        pytest.param("ZBVZeroBubble", SIZES, marks=pytest.mark.long),
        pytest.param("1F1B", MIXTURE, id="mixture"),
    ],
)
def test_a_step_of_a_pipeline_that_is_tried_again_has_the_same_bits(pool: Pool, schedule: str, sizes: llama.Config):
    """bf16, gradients accumulated over two runs of the schedule; three ways to fail after the backward. In a mixture the biases of the
    routers, which the model moves by itself, and with Muon the averages of the weights are as if the first try had not been, too."""
    runs = []
    for failures in ({}, FAILURES):
        lighthouse = LighthouseServer("127.0.0.1:0", 2)
        try:
            runs.append(pool.run(4, trained, lighthouse.address(), schedule, failures, sizes, timeout_s=120))
        finally:
            lighthouse.shutdown()
    for calm, tried in zip(*runs, strict=True):
        assert tried.weights == calm.weights and len(set(calm.weights)) == STEPS
        assert tried.biases == calm.biases and len(calm.biases) == (2 if sizes == MIXTURE else 0)
        assert all(any(bias) for bias in calm.biases), "the load moves them"
        assert tried.computed == calm.computed == list(range(STEPS)), "what was computed is kept"
        assert not calm.abandoned and tried.abandoned == list(FAILURES)
        assert min(calm.sent) > 1, "some buckets go while the schedule runs, so a failure finds them on their way"
    for rank in (0, 1):
        assert runs[1][rank].weights == runs[1][rank + 2].weights, "both groups"
