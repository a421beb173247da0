"""How many tokens an output has: what its client pays for, whoever says what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horde.kudos.prices import estimate_tokens
from horde.lifecycle.rows import JobFacts
from horde.registry.chat_tokenizer import ChatTokenizer
from horde.registry.tokenizers import Tokenizers


def count_tokens(
    tokenizer: ChatTokenizer | None, text: str, token_ids: Sequence[int] | None, payload: Mapping[str, Any]
) -> int:
    """Tokens of an output, by its ids where they are what its text is made of; a worker's own count is never believed.

    Args:
        tokenizer: None where nobody has published it: then a token is four characters.
        payload: of the order; its prompt and its stop strings have a part in what ids show.
    """
    if tokenizer is None:
        return estimate_tokens(text)
    stop = payload.get("stop") or payload.get("stop_sequence") or []
    prompt_ids = payload.get("prompt_token_ids") or []
    if token_ids is not None and tokenizer.accounts_for(token_ids, text, prompt_ids=prompt_ids, stop=stop):
        return len(token_ids)
    return tokenizer.count(text)


def count_posted(tokenizers: Tokenizers, job: JobFacts, text: str, token_ids: Sequence[int]) -> int:
    """The same of what was posted of a job, with its request locked: by what this process has at hand."""
    tokenizer = tokenizers.loaded(job.tokenizer_revision) if job.tokenizer_revision else None
    return count_tokens(tokenizer, text, token_ids, job.payload)
