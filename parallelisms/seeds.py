"""Random numbers that need no saving: every generator is seeded anew from what the work is."""

from __future__ import annotations

import hashlib
import os

import torch

from parallelisms.mesh import MeshCoordinate


def seed_slot(seed: int, step: int, slot: int, coordinate: MeshCoordinate) -> None:
    """Seeds torch's generators (CPU and CUDA) for one slot of one step, so that a resumed or repeated step draws the same numbers.

    Ranks that compute different things draw different numbers; tensor-parallel ranks draw the same, since what they hold in common
    must stay equal (DTensor's own generator gives each its part of what they share).
    """
    digest = hashlib.sha256(
        f"{seed}/{step}/{slot}/{coordinate.dp_rank}/{coordinate.pp_rank}/{coordinate.cp_rank}".encode()
    ).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def make_deterministic() -> None:
    """Only deterministic kernels; an operation that has none raises. The cuBLAS workspace must be fixed before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
