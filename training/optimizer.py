"""Optimizer (AdamW, Adam or Muon, with parameter groups by name), learning rate schedule, gradient norm, clipping and update."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.config import TrainingConfig
from training.ema import EMA
from training.muon import is_hidden_matrix, muon_step
from training.progress import Progress
from training.spikes import SpikeRule

if TYPE_CHECKING:  # takes as long to import as torch, and a configuration is checked without it
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ParameterGroup:
    """[[optimizer.groups]]: settings of the parameters whose name matches."""

    pattern: Annotated[str, 'shell pattern over parameter names, such as "*norm.weight" or "output.*"']
    weight_decay: Annotated[float, "weight decay of these parameters; -1: optimizer.weight_decay", ">= -1"] = -1.0
    lr_factor: Annotated[float, "factor of the scheduled learning rate", ">= 0"] = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: the update rule."""

    name: Annotated[
        Literal["AdamW", "Adam", "Muon"],
        "AdamW: decoupled weight decay; Adam: the decay is added to the gradient; Muon: orthogonalised momentum for the matrices of "
        "blocks, AdamW for the rest",
    ] = "AdamW"
    lr: Annotated[float, "peak learning rate", "> 0"] = 8e-4
    beta1: Annotated[float, "decay of the gradient's running mean", ">= 0", "< 1"] = 0.9
    beta2: Annotated[float, "decay of the squared gradient's running mean", ">= 0", "< 1"] = 0.95
    eps: Annotated[float, "added to the root of the second moment", "> 0"] = 1e-8
    weight_decay: Annotated[float, "weight decay coefficient (AdamW, Muon: times the learning rate)", ">= 0"] = 0.1
    implementation: Annotated[
        Literal["fused", "foreach", "for-loop"], "implementation in torch.optim (of Muon: for the rest)"
    ] = "fused"
    momentum: Annotated[float, "with Muon: decay of the gradient's running mean", ">= 0", "< 1"] = 0.95
    nesterov: Annotated[bool, "with Muon: Nesterov momentum"] = True
    ns_steps: Annotated[int, "with Muon: Newton-Schulz steps that orthogonalise a matrix", ">= 1", "<= 99"] = 5
    adjust_lr_fn: Annotated[
        Literal["original", "match_rms_adamw"],
        "with Muon: factor of the learning rate by the matrix's shape [A, B]; match_rms_adamw: 0.2 sqrt(max(A, B)), for which the rate of "
        "AdamW fits; original: sqrt(max(1, A / B))",
    ] = "match_rms_adamw"
    ema_decay: Annotated[
        float, "decay of an exponential moving average of the weights, in fp32, such as 0.999; 0: none", ">= 0", "< 1"
    ] = 0.0
    groups: Annotated[tuple[ParameterGroup, ...], "settings by parameter name; the first match counts"] = ()

    def check(self) -> None:
        for index, group in enumerate(self.groups):
            if -1 < group.weight_decay < 0:
                raise ValueError(
                    f"optimizer.groups[{index}].weight_decay = {group.weight_decay}: must be >= 0, or -1 for optimizer.weight_decay; "
                    "nearest: 0.0"
                )


@dataclass(frozen=True)
class LRSchedulerConfig:
    """[lr_scheduler]: the shape of the learning rate over the run."""

    warmup_steps: Annotated[int, "steps of linear growth from 0 to optimizer.lr", ">= 0"] = 200
    total_steps: Annotated[
        int,
        "length of the schedule, steps; 0: training.steps, so a later launch with more steps has another schedule",
        ">= 0",
    ] = 0
    decay_ratio: Annotated[
        float, "share of the schedule spent decaying at its end; -1: everything after the warm-up", ">= -1", "<= 1"
    ] = -1.0
    decay_type: Annotated[
        Literal["linear", "sqrt", "cosine"],
        "the factor of the part above min_lr_factor, p being the share of the decay that is done; linear: 1 - p; sqrt: 1 - sqrt(p); "
        "cosine: (1 + cos(pi p)) / 2",
    ] = "linear"
    min_lr_factor: Annotated[float, "the decay ends at this share of optimizer.lr", ">= 0", "<= 1"] = 0.0

    def check(self) -> None:
        if -1.0 < self.decay_ratio < 0.0:
            raise ValueError(
                f"lr_scheduler.decay_ratio = {self.decay_ratio}: must be between 0 and 1, or -1; nearest: 0.0"
            )

    def decay_length(self, training_steps: int) -> int:
        """Returns the number of decay steps at the end of the schedule."""
        total = self.total_steps or training_steps
        return max(0, total - self.warmup_steps) if self.decay_ratio < 0 else round(total * self.decay_ratio)


class ShardedAdam(torch.optim.Adam):
    """Adam or AdamW that updates this rank's local shards; its state has DTensors where its parameters are. DTensor's dispatch, which
    changes nothing in an element-wise update, costs the host 9 ms a step with 291 parameters, and in the first step 0.9 s, growing with the
    square of their number.

    `own_updates`: parameters that the model updates by itself in the same step (models/contract.py). `scales_in_kernel`: True if every
    fused kernel that step() calls divides by `grad_scale` and applies nothing if `found_inf` is set, as for torch.amp.GradScaler. A
    subclass declares it again, since it may add a kernel that does not."""

    scales_in_kernel = True
    own_updates: Sequence[tuple[nn.Parameter, Callable[[Tensor, Tensor], None]]] = ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        skip: Any = getattr(self, "found_inf", None)
        for parameter, update in self.own_updates:
            if parameter.grad is not None:
                local, grad = (x.to_local() if hasattr(x, "to_local") else x for x in (parameter, parameter.grad))
                # torch's fused kernels skip such a step on the device; NaN times 0 is NaN
                update(local, grad if skip is None else torch.where(skip.bool(), 0, grad))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter, _ in self.own_updates:
            parameter.grad = None

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex = bool(super()._init_group(group, *lists))
        for tensors in lists:
            tensors[:] = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        return is_complex


class MuonAdamW(ShardedAdam):
    """Muon for the groups with `is_muon`, AdamW for the others (training/muon.py). Muon's settings are keys of its groups, as in torch."""

    scales_in_kernel = False  # muon_step has no such kernel: the host reads the norm before it

    def __init__(self, groups: Any, *, orthogonal_dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(groups, decoupled_weight_decay=True, **settings)
        self.orthogonal_dtype = orthogonal_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            if "is_muon" in group:
                muon_step(self.state, group, self.orthogonal_dtype)
        return result

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        if "is_muon" not in group:
            return super()._init_group(group, *lists)
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return False  # Adam steps with the lists, which stay empty


def build_optimizer(
    config: OptimizerConfig, parts: Iterable[nn.Module], *, compute: torch.dtype = torch.float32
) -> ShardedAdam:
    """Builds one optimizer over all parts, its state sharded as the parameters are. `compute`: dtype of large matmuls.

    A new optimizer is a name in OptimizerConfig and a class in `classes`, best a subclass of ShardedAdam. It must accept the arguments of
    the call below; keep only tensors in its state, by parameter, which begin as zeros; make this state in a step with learning rate 0,
    without a collective (ft/optim_state.py); keep `lr_factor` in its groups; carry out `own_updates` in step() and clear their gradients in
    zero_grad(); and set `scales_in_kernel` if its fused kernels divide by grad_scale and skip if found_inf is set. docs/optimizers.md says
    where else its name belongs."""
    settings = [*config.groups, ParameterGroup("*")]
    members = defaultdict[tuple[int, bool], list[nn.Parameter]](list)  # by index in `settings`, and True for Muon
    own = []
    for part in parts:
        updates: Mapping[str, Any] = getattr(part, "own_updates", {})
        for name, parameter in part.named_parameters():
            if found := [update for pattern, update in updates.items() if fnmatch.fnmatchcase(name, pattern)]:
                own.append((parameter, found[0]))
                continue
            first = next(i for i, group in enumerate(settings) if fnmatch.fnmatchcase(name, group.pattern))
            members[first, config.name == "Muon" and is_hidden_matrix(name, parameter)].append(parameter)
    muon = {key: getattr(config, key) for key in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")}
    groups = [
        {
            "params": members[first, is_muon],
            "weight_decay": config.weight_decay if settings[first].weight_decay < 0 else settings[first].weight_decay,
            "lr_factor": settings[first].lr_factor,
            **({"is_muon": True, **muon} if is_muon else {}),
        }
        for first, is_muon in sorted(members)
    ]
    classes: dict[str, Callable[..., ShardedAdam]] = {
        "AdamW": partial(ShardedAdam, decoupled_weight_decay=True),
        "Adam": ShardedAdam,
        "Muon": partial(MuonAdamW, orthogonal_dtype=compute),
    }
    optimizer = classes[config.name](
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
    optimizer.own_updates = own
    return optimizer


def check_patterns(config: OptimizerConfig, model: nn.Module) -> None:
    """Raises ValueError for a pattern that matches no parameter that the optimizer steps: a typo would otherwise go unnoticed."""
    own = getattr(model, "own_updates", {})
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = [name for name in trained if not any(fnmatch.fnmatchcase(name, each) for each in own)]
    for index, group in enumerate(config.groups):
        if not fnmatch.filter(names, group.pattern):
            kinds = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names})
            raise ValueError(
                f'optimizer.groups[{index}].pattern = "{group.pattern}": matches no parameter that the optimizer steps; the names are '
                f"{', '.join(kinds)}"
            )


def learning_rate_factor(config: LRSchedulerConfig, *, steps_before: int, total_steps: int, decay_steps: int) -> float:
    """Returns the factor of optimizer.lr, within (0, 1], for the step after `steps_before` committed ones. `decay_steps`: from
    decay_length. Warm-up and decay are computed as if one step longer, so that no step has a rate of exactly 0 (configs/check.py refuses a
    run that goes on after a decay to 0)."""
    if steps_before < config.warmup_steps:
        return (steps_before + 1) / (config.warmup_steps + 1)
    decayed = steps_before - (total_steps - decay_steps) + 1  # 1 in the first step of the decay
    if decayed <= 0 or not decay_steps:
        return 1.0
    left = max(0.0, 1 - decayed / (decay_steps + 1))
    shapes = {"linear": left, "sqrt": 1 - math.sqrt(1 - left), "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return config.min_lr_factor + (1 - config.min_lr_factor) * shapes[config.decay_type]


def gradient_norm(parameters: Iterable[nn.Parameter], loss: float | None = None) -> Tensor:
    """Returns the L2 norm of the whole gradient, an fp32 scalar on the device, the same on every rank, without a host sync. Each rank adds
    the squares of its shards; of ranks with the same shard only the first one does, so that each element counts once. With `loss`, whose
    last bits may differ between ranks, it returns [norm, the loss of rank 0]."""
    everything = [cast("DTensor", p) for p in parameters]  # parallelize() makes every parameter one
    trained = [p for p in everything if p.grad is not None]  # none on a pipeline rank whose stages are frozen
    gradients = [cast("DTensor", p.grad).to_local() for p in trained]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else ()
    owned, device = [], everything[0].device_mesh.device_type if everything else "cpu"  # whose backend all-reduces
    for norm, parameter in zip(norms, trained, strict=True):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        # The first rank on every axis that replicates the parameter: no earlier rank has the same shard.
        if all(here == 0 for here, kind in zip(coordinate, parameter.placements, strict=True) if kind.is_replicate()):
            owned.append(norm)
    square = torch.stack(owned).square().sum() if owned else torch.zeros(())
    square = square.to(device)  # offloaded shards are on the CPU
    sums = square
    if loss is not None:
        sums = torch.stack((square, torch.full_like(square, loss if dist.get_rank() == 0 else 0.0)))
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return sums.sqrt() if loss is None else torch.stack((sums[0].sqrt(), sums[1]))


class Update(NamedTuple):
    """The result of an optimizer step. `lr`: 0 if nothing was applied. `spike`: why the step is a spike; "": it is none."""

    grad_norm: float  # of the mean gradient before clipping; with divisor 0 of the sum
    lr: float
    spike: str = ""


@dataclass(eq=False)
class OptimizerStep:
    """Optimizer step at the scheduled learning rate; one scaling of the gradients both divides and clips them."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    config: OptimizerConfig
    schedule: LRSchedulerConfig
    training: TrainingConfig
    progress: Progress
    spikes: SpikeRule | None = None  # None: only a step whose norm is not finite is left out
    ema: EMA | None = None  # follows the weights

    def __post_init__(self) -> None:
        own = {id(parameter) for parameter, _ in getattr(self.optimizer, "own_updates", ())}
        self.parameters = [parameter for parameter in self.parameters if id(parameter) not in own]
        self._total_steps = self.schedule.total_steps or self.training.steps
        self._decay_steps = self.schedule.decay_length(self.training.steps)
        # kernels without grad_scale and found_inf would step with undivided sums; read from the class itself, as a subclass may add such
        scales_in_kernel = vars(type(self.optimizer)).get("scales_in_kernel", False)
        self._fused = self.config.implementation == "fused" and scales_in_kernel

    def step(self, steps_before: int, divisor: float, loss: float = 0.0) -> Update:
        """Applies optimizer step `steps_before` + 1 to gradients that are sums over `divisor` tokens. `loss`: the mean loss. Changes
        no weight and no state of the optimizer if the norm is not finite, `divisor` is 0, or the step is a spike."""
        fused, spikes = self._fused, self.spikes
        with self.progress.phase("reduce"):
            values = gradient_norm(self.parameters, None if spikes is None else loss).reshape(-1)  # norm, loss
            if not fused or self.training.enable_cpu_offload:  # a kernel on the CPU reads the values at once
                values = values.cpu()
            norm = values[0]
            applies = norm.isfinite() if spikes is None else spikes.accepts(norm, values[1], divisor)
        is_tried, lr = bool(divisor and (fused or applies)), 0.0
        if is_tried:  # fused: the kernel itself skips what does not apply
            with self.progress.phase("optimizer"):
                lr = self.config.lr * learning_rate_factor(
                    self.schedule,
                    steps_before=steps_before,
                    total_steps=self._total_steps,
                    decay_steps=self._decay_steps,
                )
                for group in self.optimizer.param_groups:
                    group["lr"] = lr * group["lr_factor"]
                # one division by the number of tokens that also clips: grad / divisor * min(1, max_norm / (norm / divisor))
                max_norm = self.training.max_norm * divisor  # bound for the norm of the sums
                grad_scale = divisor * ((norm / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm))
                if fused:  # the kernel divides by grad_scale and skips the update if found_inf is set: no host sync
                    kernel: Any = self.optimizer
                    kernel.grad_scale, kernel.found_inf = grad_scale, applies.logical_not().float()
                else:
                    gradients = [cast("DTensor", p.grad).to_local() for p in self.parameters if p.grad is not None]
                    if gradients:
                        torch._foreach_div_(gradients, grad_scale.item())
                self.optimizer.step()
        # on CUDA a wait for the norm and the fused kernels
        with self.progress.phase("optimizer" if fused else "reduce"):
            grad_norm, *losses = values.tolist()
        spike = "" if spikes is None or not divisor else spikes.judge(grad_norm, losses[0], divisor)
        if not divisor:
            self.optimizer.zero_grad()  # a balance loss has gradients even where no token has a label
        mean_norm = grad_norm / divisor if divisor else grad_norm
        if spike or not (is_tried and math.isfinite(grad_norm)):
            return Update(mean_norm, 0.0, spike)
        self.optimizer.zero_grad()
        if self.ema is not None:
            with self.progress.phase("optimizer"):
                self.ema.update()
        return Update(mean_norm, lr)
