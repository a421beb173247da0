"""What a job has produced, and what of it the broker holds.

The engine's thread adds and the poster's thread reads, without a lock between them: lists only grow, and the id of a
token is appended last, so whatever belongs to the tokens that can be counted is there. How far the broker is, only the
poster reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker.engine.interface import TokenLogprob

# As JSON: most bytes of an id with its comma, of a character (`\ud83d\ude00`), and of a number with its comma.
_BYTES_A_TOKEN, _BYTES_A_CHARACTER, _BYTES_A_NUMBER = 12, 12, 16
# Of a logarithm behind its point: about what a float32 has, and half the bytes of a float64.
_DIGITS = 6
# Less than a broker takes of one job in a post, and in a post of all jobs together.
_MOST_TOKENS = 4096

WireLogprob = list[Any]


@dataclass(slots=True)
class Room:
    """What still fits into a post: bytes, and arrays and objects."""

    size: int
    containers: int

    def take(self, size: int, containers: int) -> bool:
        """Take that much, if there is as much."""
        if size > self.size or containers > self.containers:
            return False
        self.size -= size
        self.containers -= containers
        return True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of a slot; offsets count from its first token and its first character."""

    offset: int
    token_ids: list[int]
    text: str
    text_offset: int
    logprobs: list[WireLogprob] | None

    def body(self) -> dict[str, Any]:
        """As a post carries it."""
        logprobs = {} if self.logprobs is None else {"logprobs": self.logprobs}
        return {
            "offset": self.offset,
            "token_ids": self.token_ids,
            "text": self.text,
            "text_offset": self.text_offset,
            **logprobs,
        }


class JobOutput:
    """The output of one job.

    Args:
        prefix_token_ids, prefix_text: what the slot had when the job was claimed; the broker holds it.
        with_logprobs: whether the job asked for them; then each token added comes with one.
    """

    def __init__(
        self, prefix_token_ids: Sequence[int] = (), prefix_text: str = "", *, with_logprobs: bool = False
    ) -> None:
        self._prefix_text = prefix_text
        self._prefix_tokens = len(prefix_token_ids)
        self._token_ids = list(prefix_token_ids)
        # One entry for each token after the prefix: the text that it showed, and the slot's characters with it.
        self._pieces: list[str] = []
        self._ends: list[int] = []
        self._logprobs: list[WireLogprob] | None = [] if with_logprobs else None
        self._characters = len(prefix_text)
        self._tail = ""
        self._accepted = self._prefix_tokens

    @property
    def token_ids(self) -> list[int]:
        """All of the slot, the prefix included."""
        return list(self._token_ids)

    @property
    def text(self) -> str:
        """All of the slot, the prefix included."""
        return self._prefix_text + "".join(self._pieces) + self._tail

    @property
    def logprobs(self) -> list[WireLogprob] | None:
        """One entry a token, those of the prefix not among them; None where nobody asked."""
        return None if self._logprobs is None else list(self._logprobs)

    @property
    def begun(self) -> bool:
        """Whether this job has made a token."""
        return len(self._token_ids) > self._prefix_tokens

    @property
    def unsent(self) -> bool:
        """Whether there are tokens that the broker does not hold."""
        return len(self._token_ids) > self._accepted

    def add(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Take what the engine made next. Text that comes without a token ends the text, and only the result has it."""
        if not token_ids:
            self._tail += text
            return
        text, self._tail = self._tail + text, ""
        if self._logprobs is not None:
            self._logprobs += map(_on_the_wire, logprobs)
        last = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            # What several tokens showed together is whole with the last of them.
            piece = text if place == last else ""
            self._characters += len(piece)
            self._pieces.append(piece)
            self._ends.append(self._characters)
            self._token_ids.append(token_id)

    def next_chunk(self, room: Room) -> Chunk | None:
        """As much of what the broker does not hold as there is room for, which is then taken; None if that is nothing."""
        begin, there = self._accepted, len(self._token_ids)
        end = begin
        while end < min(there, begin + _MOST_TOKENS) and room.take(*self._cost(end - self._prefix_tokens)):
            end += 1
        if end == begin:
            return None
        first, last = begin - self._prefix_tokens, end - self._prefix_tokens
        return Chunk(
            offset=begin,
            token_ids=self._token_ids[begin:end],
            text="".join(self._pieces[first:last]),
            text_offset=self._ends[first - 1] if first else len(self._prefix_text),
            logprobs=None if self._logprobs is None else self._logprobs[first:last],
        )

    def accept(self, tokens: int) -> bool:
        """The broker holds that many of the slot's tokens; whether that is more than before."""
        before = self._accepted
        self._accepted = max(self._prefix_tokens, min(tokens, len(self._token_ids)))
        return self._accepted > before

    def _cost(self, place: int) -> tuple[int, int]:
        """Bytes and containers of one token in a post."""
        size = _BYTES_A_TOKEN + _BYTES_A_CHARACTER * len(self._pieces[place])
        if self._logprobs is None:
            return size, 0
        top = len(self._logprobs[place][2])
        return size + _BYTES_A_NUMBER * 2 * (top + 1), top + 2


def _on_the_wire(entry: TokenLogprob) -> WireLogprob:
    top = [[token_id, round(logprob, _DIGITS)] for token_id, logprob in entry.top]
    return [entry.token_id, round(entry.logprob, _DIGITS), top]
