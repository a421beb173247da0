"""Each stage between logits and draw: against transformers' own where there is one, against numbers elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.worker.engine.sampling.rows import OUT, kept, number, random_rows, row_of
from worker.engine.sampling import filters


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: filters.top_k(x, torch.tensor([7])), TopKLogitsWarper(7)),
        (lambda x: filters.top_k(x, torch.tensor([1000])), TopKLogitsWarper(1000)),
        (lambda x: filters.top_p(x, number(0.8)), TopPLogitsWarper(0.8)),
        (lambda x: filters.top_p(x, number(0.001)), TopPLogitsWarper(0.001)),
        (lambda x: filters.min_p(x, number(0.05)), MinPLogitsWarper(0.05)),
        (lambda x: filters.typical(x, number(0.6)), TypicalLogitsWarper(0.6)),
        (lambda x: filters.temperature(x, number(0.7)), TemperatureLogitsWarper(0.7)),
    ],
    ids=["top_k", "top_k beyond the vocabulary", "top_p", "tiny top_p", "min_p", "typical", "temperature"],
)
def test_a_stage_agrees_with_transformers(seed, ours, theirs):
    logits = random_rows(seed)
    torch.testing.assert_close(ours(logits), theirs(torch.zeros(1, 1, dtype=torch.long), logits.clone()))


def test_each_row_obeys_its_own_settings():
    logits = random_rows(3, rows=4)
    settings = torch.tensor([0.2, 0.5, 0.9, 0.99])
    for stage in (filters.top_p, filters.min_p, filters.top_a, filters.tail_free, filters.typical):
        alone = [stage(logits[i : i + 1], settings[i : i + 1]) for i in range(4)]
        assert torch.equal(stage(logits, settings), torch.cat(alone))
    ks = torch.tensor([1, 3, 9, 50])
    assert (filters.top_k(logits, ks) > OUT).sum(-1).tolist() == ks.tolist()


def test_top_k_keeps_ties_of_the_last_and_top_p_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    assert kept(filters.top_k(logits, torch.tensor([2]))) == [0, 1, 2, 3]
    assert kept(filters.top_p(logits, number(0.5))) == [0, 1]
    assert kept(filters.top_p(torch.zeros(1, 4), number(0.0))) == [0]


def test_top_a_measures_against_the_square_of_the_peak():
    # 0.5 * 0.6^2 = 0.18
    assert kept(filters.top_a(row_of(0.6, 0.2, 0.15, 0.05), number(0.5))) == [0, 1]


def test_tail_free_cuts_where_the_curve_has_spent_its_bend():
    # second differences 0.18, 0.05, 0.01, 0.0 -> cumulated shares 0.75, 0.96, 1.0, 1.0 for tokens 1 to 4
    logits = row_of(0.5, 0.25, 0.18, 0.16, 0.15, 0.14)
    assert kept(filters.tail_free(logits, number(0.8))) == [0, 1]
    assert kept(filters.tail_free(logits, number(0.97))) == [0, 1, 2]


@given(seed=st.integers(0, 2**32), out=st.integers(1, 12), z=st.floats(0.01, 0.999))
@settings(deadline=None)
def test_tail_free_on_candidates_counts_the_tokens_that_are_out_already(seed, out, z):
    candidates = random_rows(seed, size=12).double()
    whole = torch.nn.functional.pad(candidates, (0, out), value=OUT)
    assert kept(filters.tail_free(candidates, number(z), outside=out)) == kept(filters.tail_free(whole, number(z)))


@given(seed=st.integers(0, 2**32), head=st.integers(1, 60), z=st.floats(0.01, 0.999))
@settings(deadline=None)
def test_the_head_alone_decides_tail_free_only_where_the_whole_row_decides_the_same(seed, head, z):
    logits = random_rows(seed, size=60).double()
    ids = logits[0].topk(head).indices.sort().values
    filtered, certain = filters.tail_free_head(logits[:, ids], number(z))
    if bool(certain):
        assert [int(ids[i]) for i in kept(filtered)] == kept(filters.tail_free(logits, number(z)))


def test_a_long_head_decides_tail_free():
    logits = random_rows(1, size=2000).double()
    head = logits[0].topk(200).values[None]
    assert bool(filters.tail_free_head(head, number(0.9))[1])


def test_smoothing_squares_the_distance_to_the_peak():
    smoothed = filters.temperature(torch.tensor([[3.0, 2.5, 1.0]]), number(1.0), number(0.5))
    torch.testing.assert_close(smoothed, torch.tensor([[3.0, 2.875, 1.0]]))


def test_smoothing_of_one_row_leaves_its_neighbour_alone():
    logits = torch.tensor([[3.0, 2.5, OUT], [3.0, 2.5, OUT]])
    smoothed = filters.temperature(logits, torch.ones(2), torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(smoothed, torch.tensor([[3.0, 2.5, OUT], [3.0, 2.875, OUT]]))


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits.double()).entropy()


def test_dynamic_temperature_runs_from_low_for_a_sure_model_to_high_for_an_unsure_one():
    def value(logits: torch.Tensor, exponent: float) -> float:
        tokens = torch.tensor([logits.shape[1]])
        one, half = number(1.0).double(), number(0.5).double()
        return float(filters.dynamic_temperature(entropy_of(logits), tokens, one, half, number(exponent).double()))

    assert value(row_of(1 - 1e-7, 1e-7), 1.0) == pytest.approx(0.5, abs=1e-3)
    assert value(torch.zeros(1, 8), 1.0) == pytest.approx(1.5)
    assert value(row_of(0.5, 0.5, 1e-9, 1e-9), 2.0) == pytest.approx(0.5 + 0.25, abs=1e-3)
    assert value(torch.zeros(1, 1), 1.0) == 1.0


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
    strength=st.floats(0, 2),
    name=st.sampled_from(["top_p", "min_p", "top_a", "tail_free", "typical"]),
)
@settings(deadline=None)
def test_the_likeliest_or_most_typical_token_always_survives(seed, size, strength, name):
    filtered = getattr(filters, name)(random_rows(seed, size=size), number(strength))
    assert len(kept(filtered)) >= 1
    assert math.isfinite(float(filtered.max()))
