"""The text side of one sample: tokens in, showable text out, and the moment it ends.

Everything here depends on the tokens alone, so a sample that is computed again, or goes on elsewhere, shows the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.engine.detokenizer import Decoder, Detokenizer
from worker.engine.intake import Prepared
from worker.engine.interface import Finished, FinishReason, GenerationRequest
from worker.engine.stop_checker import StopChecker


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds: its id unless it only ended the text, the text to show now, and why it ended if it did."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason | None = None
    stop_string: str | None = None

    def finished(
        self, request_id: str, sample: int, prompt_tokens: int, completion_tokens: int, cached_tokens: int
    ) -> Finished:
        """The event of the end; only for a piece with a reason."""
        assert self.reason is not None
        return Finished(
            request_id, self.reason, prompt_tokens, completion_tokens, self.stop_string, sample, cached_tokens
        )


class TextStream:
    """Follows the output of one sample.

    Args:
        decoder: the tokenizer.
        prompt: its ids; the first characters of the output may depend on the last of them.
        limit: most output tokens.
        ending: ids that end the text; they are not part of it.
        stop: strings that end it.
    """

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int], *, limit: int, ending: Iterable[int], stop: tuple[str, ...]
    ) -> None:
        self._detokenizer = Detokenizer(decoder, list(prompt))
        self._stop = StopChecker(stop)
        self._ending = frozenset(ending)
        self._limit = limit
        self.tokens = 0

    @classmethod
    def of(
        cls, request: GenerationRequest, prepared: Prepared, decoder: Decoder, eos_token_ids: Iterable[int]
    ) -> TextStream:
        """The stream of one sample of a request, before its `prefix`."""
        eos = () if request.sampling.ignore_eos else eos_token_ids
        return cls(
            decoder,
            prepared.prompt,
            limit=prepared.max_new_tokens,
            ending=(*eos, *request.stop_token_ids),
            stop=request.stop,
        )

    def push(self, token_id: int) -> Piece:
        """Take the next token. After a piece with a reason there is none."""
        if token_id in self._ending:
            return self._end((), self._stop.push(self._detokenizer.flush()), FinishReason.STOP)
        self.tokens += 1
        text = self._stop.push(self._detokenizer.push(token_id))
        if self._stop.matched is None and self.tokens >= self._limit:
            text += self._stop.push(self._detokenizer.flush())
            return self._end((token_id,), text, FinishReason.LENGTH)
        if self._stop.matched is not None:
            return self._end((token_id,), text, FinishReason.STOP)
        return Piece((token_id,), text)

    def resume(self, prefix: Sequence[int]) -> Piece | None:
        """Take tokens whose text was shown already; the piece that ended the text, if one of them did."""
        for token_id in prefix:
            piece = self.push(token_id)
            if piece.reason is not None:
                return piece
        return None

    def _end(self, token_ids: tuple[int, ...], text: str, reason: FinishReason) -> Piece:
        matched = self._stop.matched
        if matched is not None:
            return Piece(token_ids, text, FinishReason.STOP, matched)
        return Piece(token_ids, text + self._stop.flush(), reason)
