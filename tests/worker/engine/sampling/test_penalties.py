"""Penalties for what was said before, on whole rows and on candidates, and the history that they count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tests.worker.engine.sampling.rows import random_rows
from worker.engine.interface import Sampling
from worker.engine.sampling.penalties import TokenHistory, penalise_candidates, penalise_rows


def history_of(token_ids: list[int], prompt_length: int = 0, vocabulary: int = 50, **settings) -> TokenHistory:
    history = TokenHistory(Sampling(**settings), vocabulary)
    history.update(token_ids, prompt_length)
    return history


def penalised(logits: list[float], token_ids: list[int], prompt_length: int = 0, **settings) -> list[float]:
    rows = torch.tensor([logits])
    penalise_rows(rows, [history_of(token_ids, prompt_length, len(logits), **settings)])
    return rows[0].tolist()


@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("seed", range(5))
def test_the_plain_repetition_penalty_agrees_with_transformers(seed, penalty):
    logits, token_ids = random_rows(seed), [3, 9, 3, 3, 40]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids]), logits.clone())
    penalise_rows(logits, [history_of(token_ids, 2, repetition_penalty=penalty)])
    torch.testing.assert_close(logits, theirs)


def test_a_repetition_range_forgets_older_tokens():
    assert penalised([2.0] * 4, [0, 1, 2], repetition_penalty=2.0, repetition_range=2) == [2.0, 1.0, 1.0, 2.0]


def test_a_repetition_slope_spares_old_tokens_and_takes_a_repeated_one_by_its_newest_place():
    slope = {"repetition_penalty": 2.0, "repetition_slope": 1.0}
    assert penalised([2.0] * 4, [0, 1, 2], **slope) == pytest.approx([2.0, 2.0 / 1.5, 1.0, 2.0])
    assert penalised([2.0] * 4, [0, 1, 0], **slope)[0] == pytest.approx(1.0)
    assert penalised([2.0] * 4, [3], **slope) == [2.0, 2.0, 2.0, 1.0]


def test_a_steeper_slope_bends_the_penalty_between_its_ends():
    x = torch.linspace(-1, 1, 5)
    expected = 1 / (1 + 2 * ((4 * x / (1 + x.abs() * 3)) + 1) / 2)
    steep = penalised([1.0] * 5, [0, 1, 2, 3, 4], repetition_penalty=3.0, repetition_slope=4.0)
    assert steep == pytest.approx(expected.tolist())


def test_frequency_and_presence_count_the_output_only():
    both = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    assert penalised([1.0] * 4, [0, 0, 1, 2, 1], 2, **both) == pytest.approx([1.0, -0.25, 0.25, 1.0])


def test_negative_frequency_and_presence_penalties_favour_what_was_said():
    assert penalised([1.0, 1.0], [1, 1], 0, frequency_penalty=-0.5) == [1.0, 2.0]
    assert penalised([1.0, 1.0], [1, 1], 0, presence_penalty=-0.5) == [1.0, 1.5]


def test_ids_outside_the_vocabulary_count_for_nothing():
    for more in ({}, {"repetition_range": 9}, {"repetition_slope": 1.0}):
        odd = penalised([2.0] * 3, [-1, 7, 10**9, 1], 0, repetition_penalty=2.0, presence_penalty=1.0, **more)
        assert odd == [2.0, 0.0, 2.0]


TOKENS = st.lists(st.integers(0, 19), max_size=30)
SETTINGS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.2, 0.8]),
        "repetition_range": st.sampled_from([0, 1, 5]),
        "repetition_slope": st.sampled_from([0.0, 0.9, 3.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "presence_penalty": st.sampled_from([0.0, -0.3]),
    }
)


@given(prompt=TOKENS, output=TOKENS, cuts=st.lists(st.integers(0, 60), max_size=4), settings=SETTINGS)
@settings(deadline=None)
def test_a_history_that_grew_step_by_step_or_went_back_penalises_like_a_new_one(prompt, output, cuts, settings):
    token_ids = [*prompt, *output]
    grown = TokenHistory(Sampling(**settings), 20)
    for cut in cuts:
        grown.update(token_ids[:cut], min(len(prompt), cut))
    grown.update(token_ids, len(prompt))
    rows, again = random_rows(0, size=20), random_rows(0, size=20)
    penalise_rows(rows, [grown])
    penalise_rows(again, [history_of(token_ids, len(prompt), 20, **settings)])
    assert torch.equal(rows, again)


@given(histories=st.lists(TOKENS, min_size=1, max_size=4), settings=SETTINGS, seed=st.integers(0, 99))
@settings(deadline=None)
def test_candidates_are_penalised_like_the_same_tokens_of_a_whole_row(histories, settings, seed):
    rows = random_rows(seed, rows=len(histories), size=20).double()
    known = [history_of(tokens, len(tokens) // 2, 20, **settings) for tokens in histories]
    ids = torch.arange(20).roll(seed)[:7].expand(len(histories), -1)
    candidates = penalise_candidates(rows.gather(1, ids), ids, known, 20)
    penalise_rows(rows, known)
    torch.testing.assert_close(candidates, rows.gather(1, ids))
