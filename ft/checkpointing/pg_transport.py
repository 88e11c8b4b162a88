"""torchft.checkpointing.pg_transport, under its name."""

from ft.compat.transports import PGTransport

__all__ = ["PGTransport"]
