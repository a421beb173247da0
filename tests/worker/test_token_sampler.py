"""The choice of one token."""

from __future__ import annotations

import pytest
import torch

from worker.engine.interface import SamplerStep, Sampling
from worker.engine.token_sampler import BadLogitsError, TokenSampler

HISTORY = torch.tensor([1, 2, 3])


def sampler(seed: int = 0, *, eos: tuple[int, ...] = (), vocabulary: int = 100, **settings) -> TokenSampler:
    return TokenSampler(Sampling(**settings), seed, eos_token_ids=eos, vocabulary=vocabulary)


def test_temperature_zero_is_argmax_even_with_a_tie_and_top_k_one():
    logits = torch.tensor([0.0, 5.0, 5.0])
    assert {sampler(seed, temperature=0.0, top_k=1).choose(HISTORY, logits) for seed in range(50)} == {1}


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-7, 1e-4])
def test_a_tiny_temperature_is_argmax_and_never_nan(temperature):
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1)) * 10
    assert sampler(temperature=temperature).choose(HISTORY, logits) == int(logits.argmax())


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    chooser = sampler(seed=7)
    drawn = torch.tensor([chooser.choose(HISTORY, probabilities.log()) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=5) / 4000
    # four standard deviations of the widest share
    torch.testing.assert_close(shares, probabilities, atol=0.032, rtol=0)
    assert shares[4] == 0


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63, 2**64 - 1, 2**64 + 5, 10**400])
def test_every_integer_is_a_seed_and_repeats_itself(seed):
    logits = torch.zeros(100)

    def draws() -> list[int]:
        chooser = sampler(seed)
        return [chooser.choose(HISTORY, logits) for _ in range(8)]

    assert draws() == draws()


def test_different_seeds_draw_differently():
    logits = torch.zeros(100)
    assert len({tuple(sampler(s).choose(HISTORY, logits) for _ in range(3)) for s in range(20)}) > 1
    assert len({sampler(s).choose(HISTORY, logits) for s in range(20)}) > 5


def test_sampling_leaves_the_global_random_numbers_alone():
    before = torch.get_rng_state()
    sampler().choose(HISTORY, torch.zeros(100))
    assert torch.equal(before, torch.get_rng_state())


def test_a_banned_end_is_never_chosen():
    logits = torch.tensor([0.0, 9.0, 1.0])
    assert sampler(eos=(1,), temperature=0.0).choose(HISTORY[:0], logits) == 1
    assert sampler(eos=(1,), temperature=0.0, ban_eos=True).choose(HISTORY[:0], logits) == 2


def test_padding_beyond_the_vocabulary_is_never_chosen():
    assert sampler(vocabulary=2, temperature=0.0).choose(HISTORY[:0], torch.tensor([0.0, 1.0, 9.0])) == 1


def test_the_order_of_the_stages_is_obeyed():
    """top_p before a high temperature leaves one token; after it, several."""
    logits = torch.tensor([0.9, 0.05, 0.05]).log()
    rest = tuple(step for step in SamplerStep if step not in {SamplerStep.TOP_P, SamplerStep.TEMPERATURE})

    def seen(*order: SamplerStep) -> set[int]:
        chooser = sampler(temperature=50.0, top_p=0.85, order=(*order, *rest))
        return {chooser.choose(HISTORY, logits) for _ in range(60)}

    assert seen(SamplerStep.TOP_P, SamplerStep.TEMPERATURE) == {0}
    assert seen(SamplerStep.TEMPERATURE, SamplerStep.TOP_P) == {0, 1, 2}


def test_the_penalty_holds_at_temperature_zero_too():
    logits = torch.tensor([2.0, 1.9])
    assert sampler(temperature=0.0).choose(torch.tensor([0]), logits) == 0
    assert sampler(temperature=0.0, repetition_penalty=2.0).choose(torch.tensor([0]), logits) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_an_error(bad):
    with pytest.raises(BadLogitsError):
        sampler().choose(HISTORY, torch.tensor([0.0, bad]))


def test_logits_that_rule_everything_out_are_an_error():
    with pytest.raises(BadLogitsError):
        sampler().choose(HISTORY, torch.full((3,), float("-inf")))


def test_a_dynamic_temperature_that_reaches_zero_takes_the_likeliest():
    logits = torch.tensor([50.0, 0.0])
    assert sampler(temperature=0.5, dynatemp_range=0.5).choose(HISTORY[:0], logits) == 0
