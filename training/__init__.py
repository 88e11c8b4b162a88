"""What a step needs that is neither model, mesh nor protocol: data, loss, optimizer, checkpoint, watching."""
