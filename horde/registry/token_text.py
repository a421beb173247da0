"""Whether token ids are what a text is made of.

A worker shows text while it makes tokens: it holds back a character until all its bytes are there, and ends the text before
a stop string, of which the last token or two may have had more. So a few tokens may stand behind less text than they
decode to, and never many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Of what came before: enough for a tokenizer to see that what follows is not the beginning of a text.
CONTEXT_TOKENS = 6
HALF_CHARACTER = "\ufffd"
# Tokens of which no character is whole yet; beyond that a row of bytes is no text.
MOST_PENDING = 16
# A character has at most four bytes, and a token at least one.
_MOST_OF_HALF = 3

Decode = Callable[[Sequence[int]], str]


def accounts_for(decode: Decode, ids: Sequence[int], text: str, *, before: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether `text` is what a worker shows of `ids`, all of which have text.

    Args:
        decode: the text of ids, with U+FFFD where bytes are no character.
        before: the ids that `ids` come after; the last few count.
        stop: strings of which one may have ended the text.
    """
    context = before[-CONTEXT_TOKENS:]
    return _fits(_AtOnce(decode, context, ids), text, stop) or _fits(_Stepwise(decode, context, ids), text, stop)


def _fits(reading: _Reading, text: str, stop: Sequence[str]) -> bool:
    whole = reading.whole
    if whole == text:
        return True
    if not whole.startswith(text):
        return False
    if whole.endswith(HALF_CHARACTER) and reading.pending <= _MOST_OF_HALF and len(text) >= reading.shown:
        return True
    ends = [len(text) + len(string) for string in stop if string and whole.startswith(string, len(text))]
    # Had it been there a token earlier, that would have been the last one.
    return any(end > reading.shown_before_last for end in ends)


class _Reading:
    """What ids say, and how much of it a worker has shown.

    Attributes:
        whole: their text.
        pending: how many of the last ids have shown nothing, since a character is not whole yet.
        shown, shown_before_last: characters of `whole` that were shown after all ids, and after all but the last.
    """

    whole = ""
    pending = 0
    shown = 0
    shown_before_last = 0


class _AtOnce(_Reading):
    """All ids decoded together, as almost every tokenizer lets one."""

    def __init__(self, decode: Decode, before: Sequence[int], ids: Sequence[int]) -> None:
        self._decode, self._before, self._ids = decode, before, ids
        self._skipped = len(decode(before))
        self.whole = self._text(len(ids))
        self.pending, self.shown = self._look(len(ids))
        _, self.shown_before_last = self._look(len(ids) - 1)

    def _text(self, count: int) -> str:
        return self._decode([*self._before, *self._ids[: max(0, count)]])[self._skipped :]

    def _look(self, count: int) -> tuple[int, int]:
        for pending in range(MOST_PENDING + 1):
            text = self._text(count - pending)
            if not text.endswith(HALF_CHARACTER) or count - pending <= 0:
                return pending, len(text)
        return MOST_PENDING, len(text)


class _Stepwise(_Reading):
    """One id after another, as a worker decodes them: some tokenizers read bytes otherwise once more of them are there."""

    def __init__(self, decode: Decode, before: Sequence[int], ids: Sequence[int]) -> None:
        window, fresh = list(before), 0
        known = decode(window)
        pieces: list[str] = []
        for token_id in ids:
            self.shown_before_last = self.shown
            window.append(token_id)
            fresh += 1
            if fresh > MOST_PENDING and decode(window[-CONTEXT_TOKENS:]).endswith(HALF_CHARACTER):
                continue
            text = decode(window)
            if text.endswith(HALF_CHARACTER):
                continue
            pieces.append(text[len(known) :])
            self.shown += len(pieces[-1])
            window, fresh = window[-CONTEXT_TOKENS:], 0
            known = decode(window)
        if fresh:
            pieces.append(decode(window)[len(known) :])
        self.whole, self.pending = "".join(pieces), fresh
