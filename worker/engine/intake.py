"""What `add` does before anything runs: prompt to ids, everything checked, what can never run refused by name.

All engines share it, so a request means the same to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.engine.field_checks import LARGEST_COUNT, check_types, refused
from worker.engine.interface import GenerationRequest, RequestRefusedError, Sampling
from worker.models.loaded import LoadedModel

MOST_SAMPLES = 64
MOST_LOGPROBS = 100

_AT_LEAST_ZERO = (
    "temperature", "top_k", "top_a", "repetition_range", "repetition_slope", "smoothing_factor", "dynatemp_range",
    "min_tokens",
)  # fmt: skip
_SHARES = ("top_p", "min_p", "tail_free", "typical")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can run: prompt ids cut to fit, and the output length that fits beside them."""

    prompt: list[int]
    max_new_tokens: int


class Intake:
    """Reads requests for one model.

    Args:
        loaded: its tokenizer and vocabulary.
        context_length: most tokens of prompt and output together: of the model, or of the cache where that is smaller.
    """

    def __init__(self, loaded: LoadedModel, context_length: int) -> None:
        self._tokenizer: Any = loaded.tokenizer
        self._eos = loaded.eos_token_ids
        self._context_length = context_length
        self.vocabulary = min(len(loaded.tokenizer), int(loaded.model.config.get_text_config().vocab_size))

    def read(self, request: GenerationRequest) -> Prepared:
        """Check and prepare.

        Raises:
            RequestRefusedError: a field makes no sense, or the request cannot fit; the message names the field.
        """
        check_types(request)
        self._check_fields(request)
        self._check_sampling(request.sampling)
        return self._fit(request, self._encode(request.prompt))

    def _check_fields(self, request: GenerationRequest) -> None:
        if request.max_new_tokens < 1:
            raise refused("max_new_tokens is less than 1")
        if not 1 <= request.n <= MOST_SAMPLES:
            raise refused(f"n is not from 1 to {MOST_SAMPLES}")
        if request.logprobs is not None and not 0 <= request.logprobs <= min(MOST_LOGPROBS, self.vocabulary):
            raise refused(f"logprobs is not from 0 to {min(MOST_LOGPROBS, self.vocabulary)}")
        if request.prefix and request.n > 1:
            raise refused("prefix continues one sample, and n asks for several")
        self._check_ids("stop_token_ids", request.stop_token_ids)
        self._check_ids("prefix", request.prefix)

    def _check_sampling(self, sampling: Sampling) -> None:
        for name in _AT_LEAST_ZERO:
            if getattr(sampling, name) < 0:
                raise refused(f"{name} is less than 0")
        for name in _SHARES:
            if not 0 <= getattr(sampling, name) <= 1:
                raise refused(f"{name} is not from 0 to 1")
        if sampling.repetition_penalty <= 0:
            raise refused("repetition_penalty is not above 0")
        self._check_ids("banned_tokens", sampling.banned_tokens)
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias))

    def _check_ids(self, field: str, ids: tuple[int, ...]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocabulary:
                # An integer of thousands of digits cannot be written out.
                number = token_id if abs(token_id) <= LARGEST_COUNT else "a number"
                raise refused(f"{field} holds {number}, which is outside the vocabulary of {self.vocabulary}")

    def _encode(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            try:
                ids = [int(i) for i in self._tokenizer(prompt).input_ids]
            except (TypeError, ValueError, UnicodeError) as error:
                raise refused("the prompt is not valid Unicode text") from error
        else:
            ids = list(prompt)
        self._check_ids("prompt", tuple(ids))
        return ids or [self._first_token()]

    def _first_token(self) -> int:
        """What an empty text begins with."""
        begin = self._tokenizer.bos_token_id
        first = begin if begin is not None else next(iter(self._eos), None)
        if first is None:
            raise refused("the prompt is empty and the model has no token to begin with")
        return int(first)

    def _fit(self, request: GenerationRequest, prompt: list[int]) -> Prepared:
        """Prompt and output that fit the context together; see `GenerationRequest.max_context`."""
        wanted = request.max_new_tokens
        if request.max_context is None:
            if len(prompt) + wanted > self._context_length:
                raise RequestRefusedError(
                    "context_length_exceeded",
                    f"{len(prompt)} prompt tokens and {wanted} new ones exceed the context of {self._context_length}",
                )
            return Prepared(prompt, wanted)
        room = max(2, min(request.max_context, self._context_length))
        wanted = min(wanted, room - 1)
        keep = room - wanted
        if len(prompt) <= keep:
            return Prepared(prompt, wanted)
        if prompt[0] == self._tokenizer.bos_token_id and keep > 1:
            return Prepared([prompt[0], *prompt[len(prompt) - keep + 1 :]], wanted)
        return Prepared(prompt[-keep:], wanted)
