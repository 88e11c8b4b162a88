"""Activation checkpointing: which activations are computed again in the backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from models.contract import Model


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint]: memory for time."""

    mode: Annotated[
        Literal["none", "full", "selective", "memory_budget"],
        "none: keep everything; full: keep the input of each block; selective: by selective_ac_option; memory_budget: let the "
        "compiler choose",
    ] = "none"
    selective_ac_option: Annotated[
        str, 'a number n: every n-th block is computed again; "op": in each block what is cheap to compute again'
    ] = "2"
    memory_budget: Annotated[
        float, "share of the activations that may be kept; needs compile.enable", ">= 0", "<= 1"
    ] = 0.5


def apply_activation_checkpoint(part: Model, config: ActivationCheckpointConfig) -> None:
    if config.mode != "none":
        raise NotImplementedError
