"""One sample's settings, made ready once for all its steps."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import numpy as np

from worker.engine.interface import SamplerStep, Sampling
from worker.engine.sampling.filters import COLDEST
from worker.engine.sampling.penalties import TokenHistory

# Larger biases would overflow fp32; they decide everything anyway.
_LARGEST_BIAS = 1e30


class Stage(StrEnum):
    """What a row goes through between bans and draw; `SamplerStep.TOP_P` is two of them."""

    PENALTIES = "penalties"
    TEMPERATURE = "temperature"
    TOP_K = "top_k"
    TOP_A = "top_a"
    TAIL_FREE = "tail_free"
    TYPICAL = "typical"
    TOP_P = "top_p"
    MIN_P = "min_p"


class SampleSettings:
    """What `BatchSampler.prepare` makes of a request's `Sampling`; an engine keeps one for each sample.

    Ids outside the vocabulary are left out.

    Attributes:
        stages: those that do something, in their order; of a greedy sample only the penalties.
        greedy: the likeliest token is taken, nothing is drawn.
        history: for the penalties; None where there are none.
        bias: ids, and what is added to their logits.
        banned: ids that are never chosen.
        logprobs: how many likely tokens to report, or None.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        sample: int,
        stop_token_ids: tuple[int, ...],
        logprobs: int | None,
        eos_token_ids: tuple[int, ...],
        vocabulary: int,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.sample = sample
        self.logprobs = logprobs
        self.greedy = sampling.temperature < COLDEST
        penalised = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)
        self.history = TokenHistory(sampling, vocabulary) if penalised else None
        self.stages = self._enabled_stages()

        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            if 0 <= token < vocabulary:
                bias[token] = bias.get(token, 0.0) + value
        self.bias = (
            np.fromiter(bias, dtype=np.int64, count=len(bias)),
            np.clip(np.fromiter(bias.values(), dtype=np.float64, count=len(bias)), None, _LARGEST_BIAS),
        )
        always = (*sampling.banned_tokens, *(eos_token_ids if sampling.ban_eos else ()))
        endings = (*stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))
        self.banned = _ids(always, vocabulary)
        self._banned_at_first = _ids((*always, *endings), vocabulary)

    def banned_after(self, output_tokens: int) -> np.ndarray:
        """Ids that may not follow so many tokens of output."""
        return self._banned_at_first if output_tokens < self.sampling.min_tokens else self.banned

    def changes_logits_after(self, output_tokens: int) -> bool:
        """Whether there are biases or bans before the first stage."""
        return len(self.bias[0]) > 0 or len(self.banned_after(output_tokens)) > 0

    def _enabled_stages(self) -> tuple[Stage, ...]:
        sampling = self.sampling
        warmed = sampling.temperature != 1 or sampling.dynatemp_range > 0 or sampling.smoothing_factor > 0
        enabled: dict[SamplerStep, dict[Stage, bool]] = {
            SamplerStep.REPETITION: {Stage.PENALTIES: self.history is not None},
            SamplerStep.TEMPERATURE: {Stage.TEMPERATURE: warmed},
            SamplerStep.TOP_K: {Stage.TOP_K: sampling.top_k > 0},
            SamplerStep.TOP_A: {Stage.TOP_A: sampling.top_a > 0},
            SamplerStep.TAIL_FREE: {Stage.TAIL_FREE: sampling.tail_free < 1},
            SamplerStep.TYPICAL: {Stage.TYPICAL: sampling.typical < 1},
            SamplerStep.TOP_P: {Stage.TOP_P: sampling.top_p < 1, Stage.MIN_P: sampling.min_p > 0},
        }
        order = (SamplerStep.REPETITION,) if self.greedy else sampling.order
        return tuple(stage for step in order for stage, wanted in enabled[step].items() if wanted)


def _ids(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    return np.array(sorted({token for token in tokens if 0 <= token < vocabulary}), dtype=np.int64)
