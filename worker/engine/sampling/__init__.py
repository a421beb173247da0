"""From logits to tokens, for a whole batch at once, each row under its own settings and its own random numbers."""
