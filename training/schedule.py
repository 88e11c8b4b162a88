"""The learning rate: warm-up, stable, decay; a pure function of the step, so there is nothing to save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True)
class LRSchedulerConfig:
    """[lr_scheduler]: the shape of the learning rate over the run."""

    warmup_steps: Annotated[int, "steps of linear growth from 0 to optimizer.lr", ">= 0"] = 200
    total_steps: Annotated[int, "length of the schedule, steps; 0: training.steps", ">= 0"] = 0
    decay_ratio: Annotated[
        float, "share of the schedule spent decaying at its end; -1: everything after the warm-up", ">= -1", "<= 1"
    ] = -1.0
    decay_type: Annotated[Literal["linear", "sqrt", "cosine"], "the shape of the decay"] = "linear"
    min_lr_factor: Annotated[float, "the decay ends at this share of optimizer.lr", ">= 0", "<= 1"] = 0.0

    def check(self) -> None:
        if -1.0 < self.decay_ratio < 0.0:
            raise ValueError(
                f"lr_scheduler.decay_ratio = {self.decay_ratio}: a share between 0 and 1, or -1; nearest: 0.0"
            )


def learning_rate_factor(config: LRSchedulerConfig, *, step: int, training_steps: int) -> float:
    """The factor of optimizer.lr in the step that follows `step` committed ones; within (0, 1] where min_lr_factor is 0.

    Warm-up and decay run over one virtual step more than they have, so that no step is wasted on a rate of exactly 0.
    """
    total = config.total_steps or training_steps
    decay_steps = decay_length(config, training_steps)
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    decayed = step - (total - decay_steps) + 1  # 1 in the first step of the decay
    if decayed <= 0:
        return 1.0
    left = max(0.0, 1 - decayed / (decay_steps + 1))
    shape = {"linear": left, "sqrt": 1 - math.sqrt(1 - left), "cosine": 0.5 * (1 - math.cos(math.pi * left))}[
        config.decay_type
    ]
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape


def decay_length(config: LRSchedulerConfig, training_steps: int) -> int:
    """Steps of decay at the end of the schedule."""
    total = config.total_steps or training_steps
    if config.decay_ratio < 0:
        return max(0, total - config.warmup_steps)
    return round(total * config.decay_ratio)
