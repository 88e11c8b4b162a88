"""torchft.checkpointing.transport, under its name."""

from ft.healing.transport import Transport as CheckpointTransport

__all__ = ["CheckpointTransport"]
