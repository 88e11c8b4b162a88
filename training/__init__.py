"""The parts of a run that are neither model, mesh nor protocol: data, loss, optimizer, checkpoints, metrics, watchdog."""
