"""Who runs in the next step and in which blocks: plain Python, no tensors, tested without a model."""
