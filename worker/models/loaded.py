"""A model in memory, with what an engine needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights and tokenizer that belong together.

    Args:
        model: a `transformers.PreTrainedModel` in evaluation mode, on its device (its annotations fail a type checker).
        tokenizer: its `PreTrainedTokenizerBase`.
        context_length: most tokens, prompt and output together.
        eos_token_ids: each of them ends a text.
        quantize: what its linear layers keep their weights in (`int8`, `int4`), if not in the model's own format.
    """

    model: Any
    tokenizer: Any
    context_length: int
    eos_token_ids: tuple[int, ...]
    quantize: str | None = None


class ModelNotFoundError(Exception):
    """The name or path leads to no usable model; the message says why and what to do."""
