"""The stages between raw logits and the draw, as pure functions on one row of fp32 logits of shape [vocab].

Each returns a new row; a token that is ruled out becomes -inf, and at least one token always survives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_OUT = float("-inf")


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the `k` likeliest tokens (and ties of the last of them)."""
    kth = torch.topk(logits, min(k, logits.numel())).values[-1]
    return logits.masked_fill(logits < kth, _OUT)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020): the smallest set of likeliest tokens whose mass reaches `p`."""
    ascending, indices = torch.sort(logits)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - p
    drop[-1] = False
    return _drop(logits, indices, drop)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least `p` times as likely as the likeliest."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.max(), _OUT)


def top_a(logits: Tensor, a: float) -> Tensor:
    """Keep tokens at least `a` times as likely as the square of the likeliest's probability."""
    probabilities = logits.softmax(-1)
    peak = probabilities.max()
    return logits.masked_fill((probabilities < a * peak * peak) & (probabilities < peak), _OUT)


def tail_free(logits: Tensor, z: float) -> Tensor:
    """Tail-free sampling: cut where the curvature of the sorted probabilities has spent the share `z` of itself."""
    descending, indices = torch.sort(logits, descending=True)
    curvature = descending.softmax(-1).diff(n=2).abs()
    total = curvature.sum()
    if curvature.numel() == 0 or total == 0:
        return logits
    drop = torch.zeros_like(descending, dtype=torch.bool)
    # A second difference belongs to the middle one of its three tokens; the last token has none and goes with the tail.
    drop[1:-1] = (curvature / total).cumsum(-1) > z
    drop[-1] = True
    return _drop(logits, indices, drop)


def typical(logits: Tensor, mass: float) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise lies nearest the entropy, up to `mass`."""
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy = -(log_probabilities * probabilities).nansum()
    distance, indices = torch.sort((-log_probabilities - entropy).abs())
    cumulative = probabilities[indices].cumsum(-1)
    last = min(int((cumulative < mass).sum()), logits.numel() - 1)
    drop = distance > distance[last]
    drop[0] = False
    return _drop(logits, indices, drop)


def temperature(logits: Tensor, value: float, smoothing_factor: float = 0.0) -> Tensor:
    """Divide by the temperature, then bend the curve.

    With `smoothing_factor` s > 0 (quadratic sampling) a logit d below the top one ends s * d**2 below it: close
    followers come closer, the far tail goes further away.
    """
    scaled = logits / value
    if smoothing_factor <= 0:
        return scaled
    peak = scaled.max()
    return peak - smoothing_factor * (scaled - peak) ** 2


def dynamic_temperature(logits: Tensor, value: float, spread: float, exponent: float) -> float:
    """A temperature within `value` +- `spread`, by how undecided the model is.

    low + (high - low) * (entropy / largest possible entropy) ** exponent, over the tokens still in play.
    """
    low, high = max(0.0, value - spread), value + spread
    candidates = logits[logits > _OUT]
    if candidates.numel() < 2:
        return value
    log_probabilities = candidates.log_softmax(-1)
    entropy = float(-(log_probabilities.exp() * log_probabilities).nansum()) / math.log(candidates.numel())
    return float(low + (high - low) * min(max(entropy, 0.0), 1.0) ** exponent)


def repetition(logits: Tensor, history: Tensor, penalty: float, window: int = 0, slope: float = 0.0) -> Tensor:
    """Make tokens of the past less likely (Keskar et al. 2019): positive logits / penalty, negative ones * penalty.

    Args:
        logits: [vocab].
        history: [tokens], prompt and output so far, oldest first.
        penalty: > 1 discourages; each token is hit once, however often it occurred.
        window: only the last so many tokens count; 0 = all.
        slope: > 0 lets the penalty fade with age within the window, along KoboldAI's curve: with x running from -1
            (oldest) to 1 (newest) and y = slope * x / (1 + |x| * (slope - 1)), it is 1 + (penalty - 1) * (y + 1) / 2.
    """
    recent = history[-window:] if window > 0 else history
    strength = torch.full((recent.numel(),), penalty, dtype=logits.dtype, device=logits.device)
    if slope > 0 and recent.numel() > 1:
        x = torch.linspace(-1, 1, recent.numel(), dtype=logits.dtype, device=logits.device)
        y = slope * x / (1 + x.abs() * (slope - 1))
        strength = 1 + (penalty - 1) * (y + 1) / 2
    # Where a token occurred more than once, its newest and so strongest penalty counts.
    per_token = torch.ones_like(logits).scatter_reduce(0, recent, strength, "amax")
    return torch.where(logits > 0, logits / per_token, logits * per_token)


def _drop(logits: Tensor, indices: Tensor, drop: Tensor) -> Tensor:
    """Rule out `indices[drop]`."""
    return logits.masked_fill(torch.zeros_like(drop).scatter(0, indices, drop), _OUT)
