"""What the model thought of a token, whatever the sampler made of it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.sampling.rows import OUT, choose, random_rows
from worker.engine.interface import Sampling
from worker.engine.sampling.batch_sampler import BatchSampler, SampleRow
from worker.engine.sampling.logprobs import LOWEST_LOGPROB


@pytest.mark.parametrize("size", [5, 257, 5003])
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_they_are_the_log_softmax_of_the_raw_logits(size, count):
    logits = random_rows(1, size=size)[0]
    settings = {"temperature": 0.2, "top_k": 3, "repetition_penalty": 1.5, "logit_bias": ((2, 3.0),)}
    choice = choose(logits, (1, 2, 3), logprobs=count, **settings)
    assert choice.logprob is not None
    exact = logits.log_softmax(-1)
    assert choice.logprob.token_id == choice.token_id
    assert choice.logprob.logprob == pytest.approx(float(exact[choice.token_id]), abs=1e-5)
    values, ids = exact.sort(descending=True, stable=True)
    assert [token for token, _ in choice.logprob.top] == ids[:count].tolist()
    assert [value for _, value in choice.logprob.top] == pytest.approx(values[:count].tolist(), abs=1e-5)


def test_there_are_none_unless_asked_for():
    assert choose(torch.zeros(3)).logprob is None


def test_equals_are_listed_by_their_ids():
    choice = choose(torch.zeros(100), logprobs=4)
    assert choice.logprob is not None
    assert [token for token, _ in choice.logprob.top] == [0, 1, 2, 3]


def test_they_are_finite_even_for_what_the_model_rules_out():
    """A token far below a certain one; and tokens at minus infinity, which are no alternatives."""
    choice = choose(torch.tensor([0.0, -30_000.0, OUT]), logprobs=3, banned_tokens=(0,))
    assert choice.logprob is not None
    assert choice.token_id == 1
    assert choice.logprob.logprob == LOWEST_LOGPROB
    assert choice.logprob.top == ((0, 0.0), (1, LOWEST_LOGPROB))
    json.dumps([choice.logprob.logprob, choice.logprob.top], allow_nan=False)


@given(
    counts=st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    tied=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_each_row_gets_the_number_it_asked_for_and_the_values_it_gets_alone(counts, seed, tied):
    logits = random_rows(seed, rows=len(counts), size=300)
    if tied:
        logits = logits.round()
    sampler = BatchSampler(300)
    rows = [SampleRow(sampler.prepare(Sampling(), seed=1, logprobs=count), (), 0) for count in counts]
    together = sampler.choose(logits, rows)
    for place, (count, choice) in enumerate(zip(counts, together, strict=True)):
        assert choice == sampler.choose(logits[place : place + 1], [rows[place]])[0]
        assert (choice.logprob is None) == (count is None)
        if choice.logprob is not None:
            assert len(choice.logprob.top) == count
