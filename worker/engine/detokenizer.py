"""Token ids to text, piece by piece, such that the pieces joined are the whole text.

A character may be spread over several tokens, and some tokenizers drop a space at the very beginning of what they
decode. So ids are decoded together with a few before them, and text that ends in half a character waits.
"""

from __future__ import annotations

from typing import Protocol

# Enough tokens of the past for a tokenizer to see that it is not at the beginning of a text.
_CONTEXT = 6
_HALF_CHARACTER = "\ufffd"
# More tokens than any character is spread over.
_MOST_PENDING = 16


class Decoder(Protocol):
    """The one thing needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Text of these ids."""


class Detokenizer:
    """Text of one request's output.

    Args:
        tokenizer: decodes lists of ids.
        prompt: ids of the prompt; only the last few matter, and their text is never given back.
    """

    def __init__(self, tokenizer: Decoder, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._before = prompt[-_CONTEXT:]
        self._before_text = self._decode(self._before)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is whole with this token; empty while a character is incomplete."""
        self._pending.append(token_id)
        if len(self._pending) > _MOST_PENDING and self._decode(self._pending[-_CONTEXT:]).endswith(_HALF_CHARACTER):
            # A long row of bytes that are no text: to decode all of it again for each would take ever longer.
            return ""
        text = self._decode(self._before + self._pending)
        if text.endswith(_HALF_CHARACTER):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The rest; a character cut off at the end comes out as one U+FFFD."""
        return self._advance(self._decode(self._before + self._pending)) if self._pending else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._before_text) :]
        self._before, self._pending = (self._before + self._pending)[-_CONTEXT:], []
        self._before_text = self._decode(self._before)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
