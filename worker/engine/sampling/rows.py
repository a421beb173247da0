"""Reductions over whole rows of logits, [rows, vocab] in fp32, in which a row's result never depends on its neighbours.

A row is read as `depth` slabs of `width` neighbouring tokens, and a short tail; seen across the slabs it is `width`
columns. Both directions reduce at memory speed on a CPU, where a reduction along a whole row is several times slower
or, for a single row, is split by the number of threads and so rounds differently alone than in company.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

_MOST_SLABS = 64


@dataclass(frozen=True, slots=True)
class Slabs:
    """How a row of `vocabulary` tokens is cut: token t lies in slab t // width, column t % width."""

    vocabulary: int
    depth: int
    width: int

    @classmethod
    def of(cls, vocabulary: int) -> Slabs:
        """The cut for rows of this length; the tail is always shorter than a slab."""
        depth = max(1, min(_MOST_SLABS, isqrt(vocabulary)))
        return cls(vocabulary, depth, vocabulary // depth)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the slabs, [rows, depth, width], and of the tail, [rows, less than width]."""
        even = self.depth * self.width
        return rows[:, :even].reshape(-1, self.depth, self.width), rows[:, even:]


def column_maxima(rows: Tensor) -> Tensor:
    """The largest value of each column, [rows, width]; NaN if the column holds one."""
    slabs, tail = Slabs.of(rows.shape[1]).split(rows)
    maxima = slabs.amax(1)
    if tail.shape[1] > 0:
        front = maxima[:, : tail.shape[1]]
        torch.maximum(front, tail, out=front)
    return maxima


def slab_sums(rows: Tensor) -> Tensor:
    """Sums of the slabs and, last, of the tail: [rows, depth + 1] in fp64 on the CPU."""
    slabs, tail = Slabs.of(rows.shape[1]).split(rows)
    return torch.cat([slabs.sum(-1), tail.sum(-1, keepdim=True)], dim=1).cpu().double()


def row_sums(rows: Tensor) -> Tensor:
    """Sums of whole rows, [rows] in fp64 on the CPU."""
    return slab_sums(rows).sum(-1)


def like(numbers: Tensor, rows: Tensor) -> Tensor:
    """`numbers` in the type and on the device of `rows`; not every device knows fp64."""
    return numbers.to(rows.dtype).to(rows.device)


@dataclass(frozen=True, slots=True)
class WholeRow:
    """Figures of each row's distribution as a whole, [rows] in fp64 on the CPU.

    `total` is the logarithm of the sum of exp(logit): log-probability = logit - total.
    """

    total: Tensor
    entropy: Tensor


def measure(rows: Tensor, peak: Tensor, *, entropy: bool = False) -> WholeRow:
    """Normaliser and, if wanted, entropy (else 0) of finite rows whose largest logits are `peak` [rows]."""
    distance = rows - like(peak, rows)[:, None]
    weights = distance.exp() if entropy else distance.exp_()
    mass = row_sums(weights)
    total = peak.cpu().double() + mass.log()
    if not entropy:
        return WholeRow(total, torch.zeros_like(total))
    # Beyond exp(-1000) weights are 0 anyway, and 0 * -inf would be NaN.
    spent = row_sums(weights.mul_(distance.clamp_(min=-1000.0)))
    return WholeRow(total, (mass.log() - spent / mass).clamp(min=0.0))
