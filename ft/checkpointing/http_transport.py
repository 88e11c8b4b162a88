"""torchft.checkpointing.http_transport, under its name."""

from ft.compat.transports import HTTPTransport

__all__ = ["HTTPTransport"]
