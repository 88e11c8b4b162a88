"""Imported by the fork server of pool.py: what ranks need, frozen, since a garbage collection with all of torch's objects takes 0.2 s."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel

import training.checkpoint  # noqa: F401

torch.set_num_threads(1)


def caches() -> list[functools._lru_cache_wrapper[Any]]:
    """Returns the caches of torch.distributed, less those that are frozen."""
    found = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    return [cache for cache in found if (cache.__module__ or "").startswith("torch.distributed.")]


FROZEN_CACHES = caches()
gc.collect()
gc.freeze()
