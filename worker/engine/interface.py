"""What an engine takes and gives back: requests in, events out, one `step()` at a time.

    engine = PagedEngine(load(resolve("SmolLM2-135M-Instruct")))
    engine.add(GenerationRequest(id="a", prompt="The sea is", max_new_tokens=20, seed=1))
    while engine.running:
        for event in engine.step():
            print(event)

An engine is driven from a single thread. Token ids are ints below the model's vocabulary size; text is `str`;
lengths are counted in tokens. Everything crossing this border is frozen, so a request can be kept, compared and resent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class SamplerStep(StrEnum):
    """One stage between raw logits and the draw; `Sampling.order` says which runs when."""

    REPETITION = "repetition"  # with the frequency and presence penalties right after it
    TEMPERATURE = "temperature"
    TOP_K = "top_k"
    TOP_A = "top_a"
    TAIL_FREE = "tail_free"
    TYPICAL = "typical"
    TOP_P = "top_p"  # min_p is applied right after it


class TokenConstraint(Protocol):
    """What a grammar says about the next token."""

    def allowed(self, output: Sequence[int]) -> Any:
        """The tokens that may follow: a bool tensor of shape [vocab] on the CPU, or None for all of them.

        Its type is not written here, so that whoever only passes requests on needs no torch.

        Args:
            output: the ids generated so far. The answer depends on them alone, so that it is the same after a
                preemption and on another worker.
        """


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; each default switches its stage off. Formulas: `sampling/filters.py`.

    Applied first, whatever `order` says: `logit_bias` (id -> added to its logit), `banned_tokens`, `constraint`,
    and until `min_tokens` tokens are out the ban on everything that would end the text by its id.
    `temperature` 0 is argmax (after the penalties and the bans).
    `ignore_eos`: end-of-text tokens are tokens like any other. `ban_eos`: they are never chosen.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    smoothing_factor: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    ban_eos: bool = False
    ignore_eos: bool = False
    constraint: TokenConstraint | None = None
    order: tuple[SamplerStep, ...] = tuple(SamplerStep)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to continue.

    Args:
        id: the caller's name for it, unique among the requests an engine holds.
        prompt: text, fed as it is, or token ids.
        max_new_tokens: at least 1; `prefix` counts.
        seed: any int; the same seed gives the same tokens whatever else runs.
        stop: strings that end the text; they are not part of it. Empty ones are ignored.
        stop_token_ids: tokens that end the text, like the model's own end-of-text tokens, even with `ignore_eos`.
        max_context: prompt and answer together must fit in it, and in the model's context; the prompt loses tokens
            from its left until they do. None: a prompt that does not fit the model is refused instead.
        prefix: output that another engine made already; this one goes on after it, as that one would have.
        n: samples of the same prompt; events tell them apart by `sample`.
        logprobs: None, or how many of the likeliest tokens to report beside each chosen one.
        priority: lower ones are served first; among equals it is first come, first served.
        cache_salt: prompts share computed blocks only with prompts of the same salt: one salt a tenant.
    """

    id: str
    prompt: str | tuple[int, ...]
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_context: int | None = None
    prefix: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    priority: int = 0
    cache_salt: str = ""
    sampling: Sampling = field(default_factory=Sampling)


class FinishReason(StrEnum):
    """Why a text ended by itself."""

    STOP = "stop"  # the model said so, or a stop string came up
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities in the model's own distribution, before any stage of `Sampling`.

    `top` holds the likeliest tokens, likeliest first. Values are finite.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sample of a request.

    `text` may lag behind `token_ids`: half a character or the possible beginning of a stop string is held back. The
    texts of all deltas of a sample, joined, are its text (after the text of a `prefix`); a token that ended it by its
    id is not among the ids. `logprobs` has one entry an id where they were asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    sample: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample is over and gone from the engine; `stop_string` is the one that ended it, if one did.

    `completion_tokens` includes a `prefix`; `cached_tokens` of the prompt were found computed already.
    """

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None
    sample: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over and gone from the engine, with all its samples, by its own fault; the others go on."""

    request_id: str
    message: str


Event = Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """How an engine is doing; counts of blocks and tokens. An engine without a paged cache leaves those at 0.

    `blocks_cached` hold computed tokens that nobody uses now; they count as free too. `prefix_hits` of
    `prefix_queries` prompt tokens were found in the cache. `kv_bytes_per_token`: of the cache, all layers together.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    block_size: int = 0
    kv_bytes_per_token: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class RequestRefusedError(Exception):
    """`add` cannot take this request now or ever; the engine is unchanged.

    Args:
        code: `invalid_request` or `context_length_exceeded`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Engine(ABC):
    """Holds one model and runs up to `max_batch` samples side by side."""

    max_batch: int
    context_length: int

    @property
    @abstractmethod
    def running(self) -> int:
        """Samples the engine holds now, those that wait for room included."""

    @property
    def capacity(self) -> int:
        """How many more samples could run at once; never below 0."""
        return max(0, self.max_batch - self.running)

    @abstractmethod
    def add(self, request: GenerationRequest) -> None:
        """Take a request in.

        Raises:
            RequestRefusedError: it can never run here (see its codes).
            ValueError: its id is in use, or there is no capacity and the engine has no queue: a fault of the caller.
        """

    @abstractmethod
    def step(self) -> list[Event]:
        """Advance what runs, by about a token each; returns at once, with nothing, when nothing runs."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request; no event follows. Unknown ids are fine, so that an abort may cross a finish."""

    def statistics(self) -> EngineStatistics:
        """Figures of this moment."""
        return EngineStatistics(running=self.running)
