"""torchft.checkpointing, under its names, which resolve on first use. The transports are in ft/healing."""

import importlib
from typing import Any

_MODULE_OF = {"CheckpointTransport": "transport", "HTTPTransport": "http_transport", "PGTransport": "pg_transport"}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ft.checkpointing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ft.checkpointing.{_MODULE_OF[name]}"), name)
