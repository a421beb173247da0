"""The stages between penalties and draw, as formulas over rows of logits, [rows, tokens].

Settings are one number a row: tensors of shape [rows]. Each stage returns new rows; a token that is ruled out becomes
-inf, one that was out stays out, and at least one token of a row always survives. Rows may be the whole vocabulary, or
only those candidates that can survive the stage at all; then `whole` carries what the formula needs of the rest.
All tensors lie on the CPU, except that `temperature` works anywhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.engine.sampling.rows import WholeRow

_OUT = float("-inf")

# Below this a temperature means "the likeliest token": dividing by it would overflow fp32.
COLDEST = 1e-6


def top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep the `k` likeliest tokens (and ties of the last of them)."""
    k = k.clamp(1, logits.shape[1]).long()
    kth = torch.topk(logits, int(k.max())).values.gather(1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, _OUT)


def top_p(logits: Tensor, p: Tensor, whole: WholeRow | None = None) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020): the smallest set of likeliest tokens whose mass reaches `p`.

    Among equals the lower id comes first, so p = 0 leaves exactly one token.
    """
    descending = _descending(logits)
    mass = _probabilities(descending, whole).cumsum(-1)
    return _keep_first(logits, descending, 1 + (mass[:, :-1] < p[:, None]).sum(-1, keepdim=True))


def min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep tokens at least `p` times as likely as the likeliest."""
    distance = logits - logits.amax(-1, keepdim=True)
    return logits.masked_fill((distance.exp() < p[:, None]) & (distance < 0), _OUT)


def top_a(logits: Tensor, a: Tensor, whole: WholeRow | None = None) -> Tensor:
    """Keep tokens at least `a` times as likely as the square of the likeliest's probability."""
    probabilities = _probabilities(logits, whole)
    peak = probabilities.amax(-1, keepdim=True)
    return logits.masked_fill((probabilities < a[:, None] * peak * peak) & (probabilities < peak), _OUT)


def tail_free(logits: Tensor, z: Tensor, outside: int = 0) -> Tensor:
    """Tail-free sampling: cut where the curvature of the sorted probabilities has spent the share `z` of itself.

    Args:
        logits: rows of tokens.
        z: the share.
        outside: how many tokens of the vocabulary are out already and not among `logits`.
    """
    # The drop to probability 0 behind the last token is a bend as well; two places are enough to see it.
    descending = _descending(torch.nn.functional.pad(logits, (0, min(outside, 2)), value=_OUT))
    curvature = descending.softmax(-1).diff(n=2).abs()
    if curvature.shape[1] == 0:
        return logits
    spent = curvature.cumsum(-1)
    total = spent[:, -1:]
    # A second difference belongs to the middle one of its three tokens; the last one goes with the tail.
    kept = 1 + (spent / total <= z[:, None]).sum(-1, keepdim=True)
    return _keep_first(logits, descending, torch.where(total > 0, kept, logits.shape[1]))


def tail_free_head(logits: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """`tail_free` seen from the likeliest tokens alone, while the tail below them is still in play.

    The tail's own curvature is at most twice the probability it starts from (its steps down add up to no more), so
    most rows are decided without it.

    Returns:
        Filtered logits, and for each row whether they are what `tail_free` gives on the whole row.
    """
    counts = (logits > _OUT).sum(-1, keepdim=True)
    descending = _descending(logits)
    weights = (descending - descending[:, :1]).exp()
    curvature = weights.diff(n=2).abs()
    curvature = curvature.masked_fill(torch.arange(curvature.shape[1])[None] >= counts - 2, 0.0)
    spent = curvature.cumsum(-1)
    least = spent[:, -1:]
    most = least + 2 * weights.gather(1, (counts - 2).clamp(min=0))
    # Rounding must not decide either.
    kept = 1 + (spent <= z[:, None] * most * (1 + 1e-9)).sum(-1, keepdim=True)
    at_least = 1 + (spent <= z[:, None] * least * (1 - 1e-9)).sum(-1, keepdim=True)
    certain = (kept == at_least) & (kept < counts - 1)
    return _keep_first(logits, descending, kept), certain[:, 0]


def typical(logits: Tensor, mass: Tensor, whole: WholeRow | None = None) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise lies nearest the entropy, up to `mass`."""
    if whole is None:
        log_probabilities = logits.log_softmax(-1)
        entropy = -(log_probabilities.exp() * log_probabilities.clamp(min=-1000.0)).sum(-1, keepdim=True)
    else:
        log_probabilities = logits - whole.total[:, None]
        entropy = whole.entropy[:, None]
    distance = (-log_probabilities - entropy).abs()
    order = torch.from_numpy(np.argsort(distance.numpy(), axis=-1))
    reached = log_probabilities.exp().gather(1, order).cumsum(-1)
    last = (reached < mass[:, None]).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > distance.gather(1, order.gather(1, last)), _OUT)


def temperature(logits: Tensor, value: Tensor, smoothing_factor: Tensor | None = None) -> Tensor:
    """Divide by the temperature, then bend the curve.

    With a `smoothing_factor` s > 0 (quadratic sampling) a logit d below the top one ends s * d**2 below it: close
    followers come closer, the far tail goes further away. A temperature below `COLDEST` leaves the likeliest tokens.
    """
    cold = value < COLDEST
    scaled = logits / torch.where(cold, 1.0, value)[:, None]
    if bool(cold.any()):
        peaks = logits == logits.amax(-1, keepdim=True)
        scaled = scaled.masked_fill(cold[:, None] & ~peaks, _OUT)
    if smoothing_factor is None:
        return scaled
    peak = scaled.amax(-1, keepdim=True)
    smoothing = smoothing_factor[:, None]
    return torch.where(smoothing > 0, peak - smoothing * (scaled - peak) ** 2, scaled)


def dynamic_temperature(entropy: Tensor, tokens: Tensor, value: Tensor, spread: Tensor, exponent: Tensor) -> Tensor:
    """A temperature within `value` +- `spread`, by how undecided the model is.

    low + (high - low) * (entropy / largest possible entropy) ** exponent, over the tokens still in play; a row with a
    single one keeps `value`.

    Args:
        entropy: of each row, in nats.
        tokens: in play in each row.
        value: the temperature to vary.
        spread: how far; 0 keeps `value`.
        exponent: of the curve.
    """
    low, high = (value - spread).clamp(min=0.0), value + spread
    share = (entropy / tokens.clamp(min=2).to(entropy.dtype).log()).clamp(0.0, 1.0)
    return torch.where((tokens < 2) | (spread <= 0), value, low + (high - low) * share**exponent)


def _probabilities(logits: Tensor, whole: WholeRow | None) -> Tensor:
    return logits.softmax(-1) if whole is None else (logits - whole.total[:, None]).exp()


def _descending(logits: Tensor) -> Tensor:
    # NumPy sorts numbers ten times as fast as `torch.sort`, which moves their places along.
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def _keep_first(logits: Tensor, descending: Tensor, count: Tensor) -> Tensor:
    """Keep the `count` [rows, 1] likeliest tokens; among equals the lower id comes first."""
    last = descending.gather(1, count - 1)
    keep, equal = logits > last, logits == last
    room = count - keep.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(-1) <= room
    return logits.masked_fill(~(keep | equal), _OUT)
