"""What an engine takes and gives back: requests in, events out, one `step()` at a time.

An engine is driven from a single thread. Token ids are ints below the model's vocabulary size; text is `str`;
lengths are counted in tokens. Everything crossing this border is frozen, so a request can be kept, compared and resent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum


class SamplerStep(StrEnum):
    """One stage between raw logits and the draw; `Sampling.order` says which runs when."""

    REPETITION = "repetition"
    TEMPERATURE = "temperature"
    TOP_K = "top_k"
    TOP_A = "top_a"
    TAIL_FREE = "tail_free"
    TYPICAL = "typical"
    TOP_P = "top_p"  # min_p is applied right after it


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; each default switches its stage off.

    `temperature` 0 is argmax (after the repetition penalty and the bans). Formulas: `logits_filters.py`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_a: float = 0.0
    tail_free: float = 1.0
    typical: float = 1.0
    repetition_penalty: float = 1.0
    repetition_range: int = 0
    repetition_slope: float = 0.0
    smoothing_factor: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    ban_eos: bool = False
    order: tuple[SamplerStep, ...] = tuple(SamplerStep)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to continue.

    Args:
        id: the caller's name for it, unique among the requests an engine holds.
        prompt: text, fed as it is, or token ids.
        max_new_tokens: at least 1.
        seed: any int; the same seed gives the same tokens whatever else runs.
        stop: strings that end the text; they are not part of it. Empty ones are ignored.
        max_context: prompt and answer together must fit in it, and in the model's context; the prompt loses tokens
            from its left until they do. None: a prompt that does not fit the model is refused instead.
    """

    id: str
    prompt: str | tuple[int, ...]
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    max_context: int | None = None
    sampling: Sampling = field(default_factory=Sampling)


class FinishReason(StrEnum):
    """Why a text ended by itself."""

    STOP = "stop"  # the model said so, or a stop string came up
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a request.

    `text` may lag behind `token_ids`: half a character or the possible beginning of a stop string is held back. The
    texts of all deltas of a request, joined, are its text; end-of-text tokens are not among the ids.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over and gone from the engine; `stop_string` is the one that ended it, if one did."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over and gone from the engine through its own fault; the others go on."""

    request_id: str
    message: str


Event = Delta | Finished | Failed


class RequestRefusedError(Exception):
    """`add` cannot take this request now or ever; the engine is unchanged.

    Args:
        code: `invalid_request` or `context_length_exceeded`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Engine(ABC):
    """Holds one model and runs up to `max_batch` requests side by side."""

    max_batch: int
    context_length: int

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests the engine holds now."""

    @property
    def capacity(self) -> int:
        """How many more requests `add` takes now."""
        return self.max_batch - self.running

    @abstractmethod
    def add(self, request: GenerationRequest) -> None:
        """Take a request in.

        Raises:
            RequestRefusedError: it can never run here (see its codes).
            ValueError: its id is in use, or there is no capacity: a fault of the caller.
        """

    @abstractmethod
    def step(self) -> list[Event]:
        """Advance what runs, by about a token each; returns at once, with nothing, when nothing runs."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request; no event follows. Unknown ids are fine, so that an abort may cross a finish."""
