"""Work of one rank for bench/parity.py: the reference by one process in plain PyTorch, and a layout's steps compared with it.

Flow: parity.py sends `alone` to one worker per vocabulary, optimizer and document masks, then `beside` to a worker per rank of a case.
The reference ("truth") does not use parallelisms/ or training/loss.py: mean loss and gradient are torch's own. No command.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.resume import checkpoint_values
from ft.buckets import to_local
from models.contract import ModelConfig, Router
from parallelisms.context import attentions, pieces_of_ranks, positions
from parallelisms.execution import ExecutionConfig
from parallelisms.fsdp import reshard_all
from parallelisms.mesh import ParallelDims, build_mesh, degrees
from parallelisms.parallelize import parallelize
from training import checkpoint_dcp
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import OptimizerConfig, build_optimizer, gradient_norm
from training.states import ModelState, plain_name

OptimizerName = Literal["SGD", "AdamW", "Muon"]
Key = tuple[int, OptimizerName, bool]  # of a reference: vocabulary, optimizer, True for documents that are masked
STEPS: dict[OptimizerName, int] = {"SGD": 3, "AdamW": 5, "Muon": 3}
SGD_RATE = 0.1
MARGIN = 5e-4  # of the k-th score over the next, in a router


@dataclass(frozen=True)
class Task:
    """The computation that all cases share."""

    model: ModelConfig
    optimizer: OptimizerConfig  # of the cases with AdamW and Muon, except for the name
    seq_len: int
    global_batch_size: int  # sequences
    seed: int
    folder: Path  # files of the references

    def file(self, key: Key, what: str) -> Path:
        """File or folder of a reference: "gradients" of all steps; "choices-N", the inputs of step N and the experts that the reference
        chooses for them, if the model has routers; "step-N", a checkpoint of the weights after N steps, the seed checkpoint if N is 0."""
        return self.folder / f"{'-'.join(map(str, key))}-{what}"


@dataclass(frozen=True)
class ParityCase:
    """A layout, and the settings with which it computes the task."""

    title: str  # of the layout
    execution: ExecutionConfig
    world_size: int
    optimizer: OptimizerName
    microsteps: int  # forward-backwards of a step: gradient accumulation
    local_batch_size: int  # sequences of one forward-backward of one rank
    vocab_size: int
    document_mask: bool

    @property
    def key(self) -> Key:
        return self.vocab_size, self.optimizer, self.document_mask

    @property
    def degrees(self) -> ParallelDims:
        return degrees(self.execution.parallelism, self.world_size)


@dataclass(frozen=True)
class Compared:
    """A tensor, gathered from all ranks that have a shard of it."""

    name: str
    shape: tuple[int, ...]
    deviation: float = 0.0  # ||x - x1|| / ||x1||, with x1 of the reference; inf: the reference has no such tensor


@dataclass(frozen=True)
class StepSeen:
    """Values of one step on one rank."""

    loss: float  # mean over all valid tokens
    tokens: float  # valid, of all ranks
    norm: float  # of the gradient
    gradients: tuple[Compared, ...] = ()  # of the mean loss, for each parameter of this rank


@dataclass(frozen=True)
class Seen:
    """Values of a case on one rank."""

    stage: int  # of the pipeline
    drawn_differently: tuple[str, ...]  # parameters whose initial values differ from the seed checkpoint in any bit
    rerouted: tuple[str, ...]  # routers that choose other experts in the first step
    # With AdamW the last step is repeated, from the reference's weights before it.
    steps: tuple[StepSeen, ...]
    moves: tuple[Compared, ...] = ()  # AdamW: change of each weight over all steps
    weights: tuple[Compared, ...] = ()  # Muon: each weight after all steps


def batch(task: Task, key: Key, step: int) -> tuple[Tensor, ...]:
    """Returns inputs and labels [B, T] of a step, and with documents where they start, as a model's forward takes them. Sequences have
    different numbers of targets: one has none, one has all. Sequences have from one document to one for each token."""
    draws = torch.Generator().manual_seed(task.seed * 1000 + step)
    shape = (task.global_batch_size, task.seq_len)
    inputs, labels = (torch.randint(0, key[0], shape, generator=draws) for _ in range(2))
    # number of ignored labels at the beginning of each sequence
    ignored = torch.randint(0, task.seq_len, (task.global_batch_size,), generator=draws)
    ignored[0], ignored[-1] = task.seq_len, 0
    labels[torch.arange(task.seq_len) < ignored.unsqueeze(1)] = IGNORED
    if (choices := task.file(key, f"choices-{step}")).exists():
        inputs, _ = torch.load(choices)
    if not key[2]:
        return inputs, labels
    share = torch.linspace(0, 1, task.global_batch_size)[:, None] ** 2  # of a sequence's tokens that begin a document
    begins = torch.rand(shape, generator=draws) < share
    return inputs, labels, torch.arange(task.seq_len).where(begins, 0).cummax(1).values


def plain_attention(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor) -> Tensor:
    """Computes ops.causal_attention of the reference by torch's formula, with the whole mask."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = (document_starts[:, :, None] == document_starts[:, None, :]).tril()  # [B, T, T]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True).transpose(1, 2)


def alone(task: Task, key: Key) -> tuple[StepSeen, ...]:
    """Computes the reference: one process, plain modules, the whole batch at once, torch's mean loss. Writes its tensors to task.folder."""
    vocab_size, optimizer, document_mask = key
    model = build(task, vocab_size)
    if document_mask:
        for attention in attentions(model, 1):
            attention.attend = plain_attention
    with torch.no_grad():
        model.init_weights(task.seed)
    rule = _optimizer(task, optimizer, [model])
    steps, gradients = list[StepSeen](), list[dict[str, Tensor]]()

    def keep_weights() -> None:
        state = {"model": ModelState([model]).state_dict()}
        checkpoint_dcp.write(state, task.file(key, f"step-{len(steps)}"), group=None)

    keep_weights()
    for step in range(STEPS[optimizer]):
        if routers([model]):
            torch.save(clear_choices(task, model, key, step), task.file(key, f"choices-{step}"))
        inputs, labels, *documents = batch(task, key, step)
        # A sum, as in training: what a model adds to the loss in its backward, such as a balance of experts, is one, too
        logits = model(inputs, **dict(zip(["document_starts"], documents, strict=False)))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss.backward()
        tokens = (labels != IGNORED).sum().item()
        scale_gradients(list(model.parameters()), 1 / tokens)
        here = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in here.values()]).double().norm().item()
        sizes = tuple(Compared(name, tuple(g.shape)) for name, g in here.items())
        steps.append(StepSeen(loss.item() / tokens, tokens, norm, sizes))
        gradients.append(here)
        rule.step()
        rule.zero_grad()
        keep_weights()
    torch.save(gradients, task.file(key, "gradients"))
    return tuple(steps)


def routers(parts: Iterable[nn.Module]) -> list[tuple[str, Router]]:
    return [(name, module) for part in parts for name, module in part.named_modules() if isinstance(module, Router)]


def clear_choices(task: Task, model: nn.Module, key: Key, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draws inputs [B, T] for which each router of `model` chooses by a margin of more than MARGIN: rounding differs between layouts, and
    once a token goes to another expert nothing can be compared. Returns also the experts chosen, [B, T, k] by router."""
    draws = torch.Generator().manual_seed(task.seed * 1000 + step)
    margins, chosen = list[Tensor](), dict[str, Tensor]()

    def seen(router: Router, args: tuple[Tensor], output: tuple[Tensor, Tensor], name: str) -> None:
        k = output[1].shape[-1]
        best, _ = router.selection(args[0]).topk(k + 1)
        margins.append((best[..., k - 1] - best[..., k]).amin(1))  # [B]
        chosen[name] = output[1]

    hooks = [router.register_forward_hook(partial(seen, name=name)) for name, router in routers([model])]
    inputs, _, *documents = batch(task, key, step)
    named = dict(zip(["document_starts"], documents, strict=False))
    is_clear = torch.zeros(len(inputs), dtype=torch.bool)
    with torch.no_grad():
        while not is_clear.all():
            drawn = torch.randint(0, key[0], inputs.shape, generator=draws)
            inputs = torch.where(is_clear[:, None], inputs, drawn)
            margins.clear()
            model(inputs, **named)
            is_clear = torch.stack(margins).amin(0) > MARGIN
    for hook in hooks:
        hook.remove()
    margin = torch.stack(margins).min().item()
    assert margin > 1e-4, f"step {step}: a router chooses by a margin of {margin:.1e}"
    return inputs, chosen


def _append_choice(found: list[Tensor], _: Router, args: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    found.append(output[1])


def beside(task: Task, case: ParityCase) -> Seen:
    """Runs the case's steps on this rank, from the seed checkpoint, and compares the results with the reference.

    With AdamW weights diverge, since the sign of a rounding error determines a whole step where a gradient is near 0. So the last step is
    repeated from the reference's weights, where gradients must match as with SGD.
    """
    rank = Rank(task, case)
    drawn = {name: to_local(value).clone() for name, value in ModelState(rank.parallel.parts).state_dict().items()}
    rank.load_weights(0)
    loaded = ModelState(rank.parallel.parts).state_dict()
    rerouted = tuple(rank.rerouted())
    drawn_differently = tuple(name for name, value in loaded.items() if not torch.equal(to_local(value), drawn[name]))
    steps = list[StepSeen]()
    for step in range(len(rank.truth)):
        steps.append(rank.forward_backward(step))
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    moves, weights, last = tuple[Compared, ...](), tuple[Compared, ...](), len(steps) - 1
    if case.optimizer == "Muon":
        weights = tuple(rank.weights())
    if case.optimizer == "AdamW":
        moves = tuple(rank.moves())
        rank.load_weights(last)
        steps.append(rank.forward_backward(last))
    return Seen(rank.coordinate.pp_rank, drawn_differently, rerouted, tuple(steps), moves, weights)


class Rank:
    def __init__(self, task: Task, case: ParityCase) -> None:
        self.task, self.case = task, case
        self.coordinate = case.degrees.coordinate(dist.get_rank())
        count = task.global_batch_size // case.degrees.data_parallel
        first = self.coordinate.dp_rank * count
        self.mine = slice(first, first + count)  # of the step's sequences
        self.truth: list[dict[str, Tensor]] = torch.load(task.file(case.key, "gradients"))
        with torch.device("meta"):
            model = build(task, case.vocab_size)
        mesh, device = build_mesh(case.degrees, "cpu"), torch.device("cpu")
        sizes = {"local_batch_size": case.local_batch_size, "seq_len": task.seq_len, "seed": task.seed}
        self.parallel = parallelize(model, mesh, cross_entropy_sum, case.execution, **sizes, device=device)
        self.optimizer = _optimizer(task, case.optimizer, self.parallel.parts)

    def rerouted(self) -> list[str]:
        """Runs the first step's forward, and returns the routers that choose other experts than the reference's for any token."""
        case, at, chosen = self.case, self.coordinate, dict[str, list[Tensor]]()
        choices = self.task.file(case.key, "choices-0")
        if not choices.exists():
            return []
        _, expected = torch.load(choices)
        hooks = []
        for name, router in routers(self.parallel.parts):
            chosen[name] = []
            hooks.append(router.register_forward_hook(partial(_append_choice, chosen[name])))
        for microbatch in self.microbatches(0):
            self.parallel.evaluate(*microbatch)
        reshard_all(self.parallel.parts)
        for hook in hooks:
            hook.remove()
        pieces = pieces_of_ranks(case.degrees.cp, case.execution.parallelism.context_parallel_load_balancer)
        tokens = torch.arange(self.task.seq_len)
        if case.degrees.cp > 1:
            tokens = positions(pieces, self.task.seq_len)[at.cp_rank]
        mine = {name: expected[name][self.mine][:, tokens.chunk(case.degrees.tp)[at.tp_rank]] for name in chosen}
        return [name for name, found in chosen.items() if not torch.equal(torch.cat(found), mine[name])]

    def moves(self) -> list[Compared]:
        """Compares the change of each weight since the seed checkpoint."""
        before, after = (checkpoint_values(self.reference(step)) for step in (0, len(self.truth)))
        moved = ((name, _whole(p.detach()) - before[f"model.{name}"]) for name, p in self._parameters())
        return list(_compare(moved, {name: after[f"model.{name}"] - before[f"model.{name}"] for name in self.truth[0]}))

    def weights(self) -> list[Compared]:
        """Compares each weight after all steps."""
        after = checkpoint_values(self.reference(len(self.truth)))
        found = ((name, _whole(p.detach())) for name, p in self._parameters())
        return list(_compare(found, {name: after[f"model.{name}"] for name in self.truth[0]}))

    def load_weights(self, step: int) -> None:
        """Loads the reference's weights after `step` steps."""
        state = ModelState(self.parallel.parts)
        live = state.state_dict()
        for value in live.values():
            to_local(value).fill_(nan)  # values that the checkpoint does not fill fail the comparison
        folder, group = self.reference(step), dist.group.WORLD if self.case.world_size > 1 else None
        metadata = checkpoint_dcp.read_metadata(folder)
        fit = checkpoint_dcp.fit({"model": live}, metadata, compared={"model"}, exclude=(), exact=True)
        if problem := "; ".join(fit.misfits) or checkpoint_dcp.load_into(fit.states, folder, group=group):
            raise RuntimeError(f"the reference's checkpoint does not fit: {problem}")
        state.load_state_dict(fit.states["model"])

    def forward_backward(self, step: int) -> StepSeen:
        """Computes this rank's sequences, all-reduces, and divides once, as train.py; without clipping, which would hide a wrong scale."""
        loss_sum, tokens = torch.zeros((), dtype=torch.float64), 0
        for microbatch in self.microbatches(step):
            loss_sum += self.parallel.forward_backward(*microbatch).double()
            tokens += int((microbatch[1] != IGNORED).sum()) if self.coordinate.counts_tokens else 0
        sums = torch.stack((loss_sum, torch.tensor(tokens).double()))
        dist.all_reduce(sums)
        loss, divisor = sums.tolist()
        parameters = [parameter for _, parameter in self._parameters()]
        norm = gradient_norm(parameters).item() / divisor
        scale_gradients(parameters, 1 / divisor)
        gradients = ((name, _whole(p.grad)) for name, p in self._parameters() if p.grad is not None)
        return StepSeen(loss / divisor, divisor, norm, tuple(_compare(gradients, self.truth[step])))

    def microbatches(self, step: int) -> Iterator[tuple[Tensor, ...]]:
        """Yields inputs and labels, and with documents where they start, of this rank's sequences."""
        whole = batch(self.task, self.case.key, step)
        yield from zip(*(rows[self.mine].split(self.case.local_batch_size) for rows in whole), strict=True)

    def reference(self, step: int) -> Path:
        return self.task.file(self.case.key, f"step-{step}")

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (name in the unsharded model, parameter): a tied one once, but each copy of two stages."""
        return [(plain_name(name), p) for part in self.parallel.parts for name, p in part.named_parameters()]


def scale_gradients(parameters: list[nn.Parameter], factor: float) -> None:
    torch._foreach_mul_([to_local(p.grad) for p in parameters if p.grad is not None], factor)


def _whole(value: Tensor) -> Tensor:
    """Returns the unsharded tensor. Collective over the ranks that have a shard."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _compare(found: Iterable[tuple[str, Tensor]], truth: dict[str, Tensor]) -> Iterator[Compared]:
    for name, value in found:
        deviation = inf
        if (expected := truth.get(name)) is not None and expected.shape == value.shape:
            deviation = ((value - expected).norm() / expected.norm()).nan_to_num(inf, inf).item()
        yield Compared(name, tuple(value.shape), deviation)


def _optimizer(task: Task, name: OptimizerName, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
    parameters = [p for part in parts for p in part.parameters()]
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=SGD_RATE)
    return build_optimizer(replace(task.optimizer, name=name), parts)


def build(task: Task, vocab_size: int) -> Any:
    module = importlib.import_module(f"models.{task.model.name}")
    return module.build(task.model, vocab_size=vocab_size, max_seq_len=task.seq_len)
