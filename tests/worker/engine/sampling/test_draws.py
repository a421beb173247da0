"""Draws follow the distribution, and never touch what is ruled out."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.sampling.rows import OUT, draws, random_rows
from worker.engine.sampling.candidates import Candidates
from worker.engine.sampling.draws import draw_from_candidates, draw_from_rows

# 99.9th percentiles of chi-square by degrees of freedom. The draws are fixed by their seeds: these tests cannot flake.
CRITICAL = {3: 16.27, 5: 20.52, 7: 24.32}


def chi_square(drawn: list[int], expected: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected)).double()
    wanted = expected * len(drawn)
    assert counts[wanted == 0].sum() == 0
    inside = wanted > 0
    return float(((counts - wanted)[inside] ** 2 / wanted[inside]).sum())


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.03, 0.02]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0009, 0.0004]),
        ({"top_k": 4}, [0.4, 0.3, 0.15, 0.1]),
        ({"top_p": 0.9}, [0.4, 0.3, 0.15, 0.1]),
        ({"min_p": 0.2, "temperature": 2.0}, [0.4**0.5, 0.3**0.5, 0.15**0.5, 0.1**0.5, 0.03**0.5, 0.02**0.5]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(settings, expected, seed):
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.03, 0.02, 0.0]).log()
    probabilities = torch.tensor([*expected, *[0.0] * (7 - len(expected))], dtype=torch.float64)
    probabilities /= probabilities.sum()
    drawn = draws(logits, 4000, seed=seed, **settings)
    assert chi_square(drawn, probabilities) < CRITICAL[len(expected) - 1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_draws_from_a_large_vocabulary_follow_the_distribution(seed):
    """Eight groups of tokens, across all slabs, against their masses."""
    logits = random_rows(seed, size=5003, spread=2.0)[0]
    masses = torch.zeros(8, dtype=torch.float64)
    group = torch.arange(5003) % 8
    masses.scatter_add_(0, group, logits.double().softmax(-1))
    drawn = [token % 8 for token in draws(logits, 3000, seed=seed)]
    assert chi_square(drawn, masses) < CRITICAL[7]


POINTS = torch.tensor([0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 257, 5003])
def test_the_ends_of_the_unit_interval_hit_the_first_and_the_last_token_in_play(size):
    rows = torch.full((len(POINTS), size), OUT)
    first, last = size // 3, size // 3 + (size - size // 3) // 2
    rows[:, [first, last]] = 2.0
    peak = torch.full((len(POINTS),), 2.0, dtype=torch.float64)
    candidates = Candidates(list(range(len(POINTS))), torch.arange(size).expand_as(rows), rows.double())
    for drawn in (draw_from_rows(rows, peak, POINTS), draw_from_candidates(candidates, POINTS)):
        assert drawn.tolist() == [first, first, first, last, last, last]


def test_a_draw_walks_through_the_tokens_in_the_order_of_their_ids():
    logits = random_rows(1, size=300)
    points = torch.linspace(0, 1 - 2**-53, 999, dtype=torch.float64)
    rows = logits.expand(999, -1)
    drawn = draw_from_rows(rows, rows.amax(-1).double(), points)
    exact = torch.searchsorted(logits[0].double().softmax(-1).cumsum(-1), points, right=True).clamp(max=299)
    assert torch.equal(drawn, drawn.sort().values)
    # fp32 weights may place a border between two tokens a little elsewhere
    assert int((drawn != exact).sum()) <= 1
    candidates = Candidates(list(range(999)), torch.arange(300).expand(999, -1), rows.double())
    assert torch.equal(draw_from_candidates(candidates, points), exact)
