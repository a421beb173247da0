"""Log-probabilities of tokens in OpenAI's two shapes: that of chat, and the older one of completions."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from horde.usecases.chat_stream import TokenLogprob

# JSON has no infinity; this is what OpenAI writes for a token that could not come.
LEAST = -9999.0


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    return {
        "content": [
            {
                **_entry(token.token, token.bytes, token.logprob),
                "top_logprobs": [_entry(*likely) for likely in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """`logprobs` of the choices of completions; keeps where in its text each choice is."""

    def __init__(self) -> None:
        self._at: dict[int, _Position] = defaultdict(_Position)

    def write(self, slot: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens of a choice. The chosen one is always among the likeliest, as OpenAI has it."""
        at = self._at[slot]
        return {
            "text_offset": [at.pass_over(token.bytes) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "tokens": [token.token for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
        }


class _Position:
    """Characters of a text so far. A token may end within one, which counts where it is whole."""

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_over(self, token: bytes) -> int:
        """Where this token begins."""
        begin = self._characters
        self._characters += len(self._decoder.decode(token))
        return begin


def _likeliest(token: TokenLogprob) -> dict[str, float]:
    found = {token.token: _finite(token.logprob)}
    for text, _, logprob in token.top:
        # Several tokens may read the same, as those that are half a character do: then the likeliest is told.
        found.setdefault(text, _finite(logprob))
    return found


def _entry(token: str, encoded: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(encoded)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
