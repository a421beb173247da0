"""Each stage between logits and draw: against transformers' own where there is one, against numbers elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from worker.engine import logits_filters as filters

OUT = float("-inf")


def row(seed: int, size: int = 50) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 4


def row_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def kept(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits > OUT).flatten().tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: filters.top_k(x, 7), TopKLogitsWarper(7)),
        (lambda x: filters.top_k(x, 1000), TopKLogitsWarper(1000)),
        (lambda x: filters.top_p(x, 0.8), TopPLogitsWarper(0.8)),
        (lambda x: filters.top_p(x, 0.001), TopPLogitsWarper(0.001)),
        (lambda x: filters.min_p(x, 0.05), MinPLogitsWarper(0.05)),
        (lambda x: filters.typical(x, 0.6), TypicalLogitsWarper(0.6)),
        (lambda x: filters.temperature(x, 0.7), TemperatureLogitsWarper(0.7)),
    ],
    ids=["top_k", "top_k beyond the vocabulary", "top_p", "tiny top_p", "min_p", "typical", "temperature"],
)
def test_a_stage_agrees_with_transformers(seed, ours, theirs):
    logits = row(seed)
    torch.testing.assert_close(ours(logits), theirs(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_plain_repetition_penalty_agrees_with_transformers(seed):
    logits, history = row(seed), torch.tensor([3, 9, 3, 3, 40])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(history[None], logits[None].clone())[0]
    torch.testing.assert_close(filters.repetition(logits, history, 1.3), theirs)


def test_a_repetition_range_forgets_older_tokens():
    logits = torch.full((4,), 2.0)
    assert filters.repetition(logits, torch.tensor([0, 1, 2]), 2.0, window=2).tolist() == [2.0, 1.0, 1.0, 2.0]


def test_a_repetition_slope_spares_old_tokens_and_takes_a_repeated_one_by_its_newest_place():
    logits = torch.full((4,), 2.0)
    penalised = filters.repetition(logits, torch.tensor([0, 1, 2]), 2.0, slope=1.0)
    torch.testing.assert_close(penalised, torch.tensor([2.0, 2.0 / 1.5, 1.0, 2.0]))
    again = filters.repetition(logits, torch.tensor([0, 1, 0]), 2.0, slope=1.0)
    assert float(again[0]) == pytest.approx(1.0)


def test_a_steeper_slope_bends_the_penalty_between_its_ends():
    history = torch.arange(5)
    penalised = filters.repetition(torch.full((5,), 1.0), history, 3.0, slope=4.0)
    x = torch.linspace(-1, 1, 5)
    expected = 1 / (1 + 2 * ((4 * x / (1 + x.abs() * 3)) + 1) / 2)
    torch.testing.assert_close(penalised, expected)


def test_top_a_measures_against_the_square_of_the_peak():
    # 0.5 * 0.6^2 = 0.18
    assert kept(filters.top_a(row_of(0.6, 0.2, 0.15, 0.05), 0.5)) == [0, 1]


def test_tail_free_cuts_where_the_curve_has_spent_its_bend():
    # second differences 0.18, 0.05, 0.01, 0.0 -> cumulated shares 0.75, 0.96, 1.0, 1.0 for tokens 1 to 4
    probabilities = (0.5, 0.25, 0.18, 0.16, 0.15, 0.14)
    logits = torch.tensor(probabilities).log()
    assert kept(filters.tail_free(logits, 0.8)) == [0, 1]
    assert kept(filters.tail_free(logits, 0.97)) == [0, 1, 2]


def test_smoothing_squares_the_distance_to_the_peak():
    smoothed = filters.temperature(torch.tensor([3.0, 2.5, 1.0]), 1.0, smoothing_factor=0.5)
    torch.testing.assert_close(smoothed, torch.tensor([3.0, 2.875, 1.0]))


def test_dynamic_temperature_runs_from_low_for_a_sure_model_to_high_for_an_unsure_one():
    sure, unsure = row_of(1 - 1e-7, 1e-7), torch.zeros(8)
    assert filters.dynamic_temperature(sure, 1.0, 0.5, 1.0) == pytest.approx(0.5, abs=1e-3)
    assert filters.dynamic_temperature(unsure, 1.0, 0.5, 1.0) == pytest.approx(1.5)
    half = row_of(0.5, 0.5, 1e-9, 1e-9)
    assert filters.dynamic_temperature(half, 1.0, 0.5, 2.0) == pytest.approx(0.5 + 0.25, abs=1e-3)


def test_dynamic_temperature_counts_only_the_tokens_still_in_play():
    assert filters.dynamic_temperature(torch.tensor([0.0, 0.0, OUT, OUT]), 1.0, 0.5, 1.0) == pytest.approx(1.5)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
    strength=st.floats(0, 1),
    name=st.sampled_from(["top_p", "min_p", "top_a", "tail_free", "typical"]),
)
def test_the_likeliest_or_most_typical_token_always_survives(seed, size, strength, name):
    filtered = getattr(filters, name)(row(seed, size), strength)
    assert len(kept(filtered)) >= 1
    assert math.isfinite(float(filtered.max()))
