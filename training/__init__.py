"""Data, loss, optimizer, checkpoints, metrics and watchdog of a training run."""
