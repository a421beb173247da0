"""From a step's plan to logits: the flat batch, the model with our attention in it, its linear layers."""
