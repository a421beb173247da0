"""Penalties for what has been said before: repetition, frequency, presence; and the token counts they need.

A `TokenHistory` grows with its sample, so that a step costs by the tokens that are new. It holds nothing but what the
token ids say: give it others, after a preemption or on another worker, and it counts them anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.engine.interface import Sampling


class _Numbers:
    """A growing array of int64."""

    def __init__(self) -> None:
        self._values = np.empty(64, dtype=np.int64)
        self._length = 0

    @property
    def values(self) -> np.ndarray:
        return self._values[: self._length]

    def extend(self, numbers: Sequence[int]) -> None:
        length = self._length + len(numbers)
        if length > self._values.shape[0]:
            self._values = np.concatenate([self.values, np.empty(length, dtype=np.int64)])
        self._values[self._length : length] = numbers
        self._length = length


class TokenHistory:
    """The tokens of one sample, as its penalties see them; ids outside the vocabulary count for nothing."""

    def __init__(self, sampling: Sampling, vocabulary: int) -> None:
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._clear(0)

    def update(self, token_ids: Sequence[int], prompt_length: int) -> None:
        """Take note of `token_ids`: prompt, then output so far."""
        known = self._tokens.values
        grown = len(token_ids) >= len(known) and (len(known) == 0 or token_ids[len(known) - 1] == known[-1])
        if not grown or prompt_length != self._prompt_length:
            self._clear(prompt_length)
            known = self._tokens.values
        start = len(known)
        new = list(token_ids[start:])
        self._tokens.extend(new)
        first_seen = [token for token in dict.fromkeys(new) if token not in self._seen]
        self._seen.update(first_seen)
        self._distinct.extend([token for token in first_seen if 0 <= token < self._vocabulary])
        for token in new[max(0, prompt_length - start) :]:
            if 0 <= token < self._vocabulary:
                self._output_counts[token] = self._output_counts.get(token, 0) + 1

    def repetition(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids to penalise and how strongly; an id may come twice, with the same strength."""
        sampling = self._sampling
        penalty, window = sampling.repetition_penalty, sampling.repetition_range
        if penalty == 1:
            return np.empty(0, dtype=np.int64), np.empty(0)
        recent = self._tokens.values[-window:] if window > 0 else self._tokens.values
        if sampling.repetition_slope > 0 and len(recent) > 1:
            ids, strengths = _sloped(recent, penalty, sampling.repetition_slope)
        else:
            ids = recent if window > 0 else self._distinct.values
            strengths = np.full(len(ids), penalty)
        inside = (ids >= 0) & (ids < self._vocabulary)
        return ids[inside], strengths[inside]

    def deduction(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the output, each once, and what the frequency and presence penalties take from their logits."""
        sampling, counts = self._sampling, self._output_counts
        if sampling.frequency_penalty == 0 and sampling.presence_penalty == 0:
            return np.empty(0, dtype=np.int64), np.empty(0)
        ids = np.fromiter(counts, dtype=np.int64, count=len(counts))
        amounts = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
        return ids, amounts * sampling.frequency_penalty + sampling.presence_penalty

    def _clear(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._tokens, self._distinct = _Numbers(), _Numbers()
        self._seen: set[int] = set()
        self._output_counts: dict[int, int] = {}


def penalise_rows(rows: Tensor, histories: Sequence[TokenHistory]) -> None:
    """Apply the penalties in place to rows of the whole vocabulary.

    Repetition (Keskar et al. 2019), over prompt and output: a positive logit is divided by the penalty, a negative one
    multiplied; each token is hit once, however often it occurred. With a range only the last so many tokens count, and
    a slope > 0 lets the penalty fade with age among them, along KoboldAI's curve: with x running from -1 (oldest) to 1
    (newest) and y = slope * x / (1 + |x| * (slope - 1)), it is 1 + (penalty - 1) * (y + 1) / 2; a token counts at its
    newest place.

    Then frequency and presence, as OpenAI defines them, over the output only: a token that occurred c > 0 times loses
    c * frequency_penalty + presence_penalty.
    """
    row, ids, strengths = _flat([history.repetition() for history in histories], rows)
    if row.shape[0] > 0:
        rows[row, ids] = _repeated(rows[row, ids], strengths)
    row, ids, amounts = _flat([history.deduction() for history in histories], rows)
    if row.shape[0] > 0:
        rows[row, ids] -= amounts


def penalise_candidates(logits: Tensor, ids: Tensor, histories: Sequence[TokenHistory], vocabulary: int) -> Tensor:
    """The same for rows of candidates: logits and their token ids, [rows, candidates]."""
    penalised = logits.clone()
    for row, history in enumerate(histories):
        hit, strengths = history.repetition()
        if len(hit) > 0:
            by_id = np.ones(vocabulary)
            by_id[hit] = strengths
            penalised[row] = _repeated(penalised[row], torch.from_numpy(by_id)[ids[row]])
        hit, amounts = history.deduction()
        if len(hit) > 0:
            by_id = np.zeros(vocabulary)
            by_id[hit] = amounts
            penalised[row] -= torch.from_numpy(by_id)[ids[row]]
    return penalised


def _sloped(recent: np.ndarray, penalty: float, slope: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1.0, 1.0, len(recent))
    y = slope * x / (1 + np.abs(x) * (slope - 1))
    ids, newest = np.unique(recent[::-1], return_index=True)
    return ids, (1 + (penalty - 1) * (y + 1) / 2)[::-1][newest]


def _repeated(logits: Tensor, strengths: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / strengths, logits * strengths)


def _flat(entries: list[tuple[np.ndarray, np.ndarray]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids and numbers of all entries, one after another, on the device of `like`."""
    row = np.repeat(np.arange(len(entries)), [len(ids) for ids, _ in entries])
    ids = np.concatenate([ids for ids, _ in entries])
    numbers = np.concatenate([numbers for _, numbers in entries])
    device = like.device
    return (
        torch.from_numpy(row).to(device),
        torch.from_numpy(ids).to(device),
        torch.from_numpy(numbers).to(like.dtype).to(device),
    )
