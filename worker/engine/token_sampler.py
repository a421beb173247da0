"""Chooses the next token of one request: its stages in its order, its own random numbers.

Every request draws from a generator of its own, one number a token, so neighbours and global state cannot move it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.engine import logits_filters as filters
from worker.engine.interface import SamplerStep, Sampling

# Below this the division overflows fp32; such a request means "the likeliest token" anyway.
_COLDEST = 1e-6


class BadLogitsError(Exception):
    """The model's output for this request holds NaN or +inf, or rules out every token."""


class TokenSampler:
    """Turns a row of logits into a token id, for one request.

    Args:
        sampling: the stages and their order.
        seed: any int, taken modulo 2**64.
        eos_token_ids: what `ban_eos` bans.
        vocabulary: ids from here up exist in the model's output only as padding and are never chosen.
    """

    def __init__(self, sampling: Sampling, seed: int, *, eos_token_ids: tuple[int, ...], vocabulary: int) -> None:
        self._sampling = sampling
        self._banned = torch.tensor(eos_token_ids if sampling.ban_eos else (), dtype=torch.long)
        self._vocabulary = vocabulary
        # On the CPU whatever the device, so that a seed means the same on all of them.
        self._generator = torch.Generator().manual_seed(seed % 2**64)

    def choose(self, history: Tensor, logits: Tensor) -> int:
        """Draw the next token.

        Args:
            history: [tokens] int64, prompt and output so far.
            logits: [vocab], any float dtype; not changed.

        Raises:
            BadLogitsError: there is nothing sensible to draw from.
        """
        row = logits.float().clone()
        if bool(torch.isnan(row).any()) or bool(torch.isposinf(row).any()):
            raise BadLogitsError("the model's output is not finite")
        row[self._vocabulary :] = float("-inf")
        row[self._banned.to(row.device)] = float("-inf")
        if not bool((row > float("-inf")).any()):
            raise BadLogitsError("no token is left to choose from")
        if self._sampling.temperature < _COLDEST:
            return int(self._repetition(row, history).argmax())
        for step in self._sampling.order:
            row = self._apply(step, row, history)
        return self._draw(row)

    def _apply(self, step: SamplerStep, row: Tensor, history: Tensor) -> Tensor:
        sampling = self._sampling
        stages: dict[SamplerStep, tuple[bool, Callable[[], Tensor]]] = {
            SamplerStep.REPETITION: (True, lambda: self._repetition(row, history)),
            SamplerStep.TEMPERATURE: (True, lambda: self._temperature(row)),
            SamplerStep.TOP_K: (sampling.top_k > 0, lambda: filters.top_k(row, sampling.top_k)),
            SamplerStep.TOP_A: (sampling.top_a > 0, lambda: filters.top_a(row, sampling.top_a)),
            SamplerStep.TAIL_FREE: (sampling.tail_free < 1, lambda: filters.tail_free(row, sampling.tail_free)),
            SamplerStep.TYPICAL: (sampling.typical < 1, lambda: filters.typical(row, sampling.typical)),
            SamplerStep.TOP_P: (True, lambda: self._top_p_and_min_p(row)),
        }
        enabled, stage = stages[step]
        return stage() if enabled else row

    def _repetition(self, row: Tensor, history: Tensor) -> Tensor:
        sampling = self._sampling
        if sampling.repetition_penalty == 1 or history.numel() == 0:
            return row
        return filters.repetition(
            row, history, sampling.repetition_penalty, sampling.repetition_range, sampling.repetition_slope
        )

    def _temperature(self, row: Tensor) -> Tensor:
        sampling, value = self._sampling, self._sampling.temperature
        if sampling.dynatemp_range > 0:
            value = filters.dynamic_temperature(row, value, sampling.dynatemp_range, sampling.dynatemp_exponent)
        if value < _COLDEST:
            return filters.top_k(row, 1)
        return filters.temperature(row, value, sampling.smoothing_factor)

    def _top_p_and_min_p(self, row: Tensor) -> Tensor:
        if self._sampling.top_p < 1:
            row = filters.top_p(row, self._sampling.top_p)
        if self._sampling.min_p > 0:
            row = filters.min_p(row, self._sampling.min_p)
        return row

    def _draw(self, row: Tensor) -> int:
        cumulative = row.cpu().double().softmax(-1).cumsum(-1)
        point = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative[-1]
        # right=True: a point of exactly 0 must not land on an excluded token at the front.
        index = int(torch.searchsorted(cumulative, point, right=True))
        if index < row.numel():
            return index
        return int(torch.nonzero(row > float("-inf"))[-1])
