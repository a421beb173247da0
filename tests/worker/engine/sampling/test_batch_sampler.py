"""The choice of tokens, row by row: what each setting does, and what a bad row gets."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.sampling.rows import OUT, choose, draws, random_rows
from worker.engine.interface import SamplerStep, Sampling
from worker.engine.sampling.batch_sampler import BatchSampler, Choice, SampleRow


def test_temperature_zero_is_argmax_even_with_a_tie_and_top_k_one():
    logits = torch.tensor([0.0, 5.0, 5.0])
    for settings in ({"temperature": 0.0, "top_k": 1}, {"temperature": -0.0}, {"top_p": 0.0}):
        assert {choose(logits, seed=seed, **settings).token_id for seed in range(50)} == {1}


def test_the_first_of_equals_is_the_likeliest_wherever_it_lies():
    for vocabulary in (1, 7, 257, 4097):
        for first in {0, vocabulary // 3, vocabulary - 1}:
            logits = torch.zeros(vocabulary)
            logits[[first, *range(first, vocabulary, 5)]] = 3.0
            assert choose(logits, temperature=0.0).token_id == int(logits.argmax()) == first


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-7, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tiny_temperature_is_argmax_and_never_nan(temperature, dtype):
    logits = (random_rows(1, size=100)[0] * 3).to(dtype)
    logits[41] = logits.max() + 1
    assert choose(logits, temperature=temperature, smoothing_factor=0.3, dynatemp_range=0.0).token_id == 41


def test_a_dynamic_temperature_that_reaches_zero_takes_the_likeliest():
    assert choose(torch.tensor([50.0, 0.0]), temperature=0.5, dynatemp_range=0.5).token_id == 0


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63, 2**64 - 1, 2**64 + 5, 10**400])
def test_every_integer_is_a_seed_and_repeats_itself(seed):
    assert draws(torch.zeros(100), 8, seed=seed) == draws(torch.zeros(100), 8, seed=seed)


def test_different_seeds_and_samples_draw_differently():
    logits = torch.zeros(100)
    assert len({tuple(draws(logits, 3, seed=seed)) for seed in range(20)}) > 15
    assert len({choose(logits, sample=sample).token_id for sample in range(20)}) > 10
    assert choose(logits, sample=3) == choose(logits, sample=3)


def test_the_draw_depends_on_the_position_in_the_output_and_not_on_the_prompt():
    logits = torch.zeros(1000)
    shorter, longer = choose(logits, (5, 6, 7), prompt_length=1), choose(logits, (1, 2, 3, 6, 7), prompt_length=3)
    assert shorter == longer != choose(logits, (5, 6, 7), prompt_length=2)


def test_sampling_leaves_the_global_random_numbers_and_the_logits_alone():
    before, logits = torch.get_rng_state(), random_rows(2, size=300)[0]
    kept = logits.clone()
    choose(
        logits,
        (3, 3),
        temperature=0.7,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias=((4, 2.0),),
        banned_tokens=(1,),
        top_p=0.9,
        logprobs=2,
    )
    choose(logits, temperature=0.7)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(kept, logits)


class TestOrder:
    def test_the_order_of_the_stages_is_obeyed(self):
        """top_p before a high temperature leaves one token; after it, several."""
        logits = torch.tensor([0.9, 0.05, 0.05]).log()
        rest = tuple(step for step in SamplerStep if step not in {SamplerStep.TOP_P, SamplerStep.TEMPERATURE})

        def seen(*order: SamplerStep) -> set[int]:
            return set(draws(logits, 60, temperature=50.0, top_p=0.85, order=(*order, *rest)))

        assert seen(SamplerStep.TOP_P, SamplerStep.TEMPERATURE) == {0}
        assert seen(SamplerStep.TEMPERATURE, SamplerStep.TOP_P) == {0, 1, 2}

    def test_min_p_follows_top_p(self):
        """top_p leaves 0.6 and 0.3, of which min_p then keeps those at least half as likely as the first."""
        logits = torch.tensor([0.6, 0.3, 0.1]).log()
        assert set(draws(logits, 60, top_p=0.85, min_p=0.49)) == {0, 1}
        assert set(draws(logits, 60, top_p=0.85, min_p=0.51)) == {0}

    def test_a_penalty_after_a_cut_brings_nothing_back(self):
        logits = torch.tensor([4.0, 3.9, 3.8])
        order = (SamplerStep.TOP_K, SamplerStep.REPETITION)
        assert choose(logits, (0,), top_k=1, repetition_penalty=9.0, order=order).token_id == 0
        assert choose(logits, (0,), top_k=1, repetition_penalty=9.0).token_id == 1


class TestBans:
    def test_a_banned_end_is_never_chosen(self):
        logits = torch.tensor([0.0, 9.0, 1.0])
        assert choose(logits, eos=(1,), temperature=0.0).token_id == 1
        assert choose(logits, eos=(1,), temperature=0.0, ban_eos=True).token_id == 2
        assert choose(logits, eos=(1,), temperature=0.0, ban_eos=True, ignore_eos=True).token_id == 2

    def test_ends_are_banned_until_enough_tokens_are_out(self):
        logits = torch.tensor([9.0, 8.0, 1.0])

        def chosen(output: int, **settings) -> int | None:
            history = (2,) * (4 + output)
            return choose(
                logits, history, prompt_length=4, temperature=0.0, eos=(0,), stop=(1,), min_tokens=2, **settings
            ).token_id

        assert [chosen(output) for output in range(4)] == [2, 2, 0, 0]
        assert [chosen(output, ignore_eos=True) for output in range(3)] == [0, 0, 0]

    def test_an_ignored_end_that_was_asked_to_stop_the_text_counts_as_such(self):
        logits = torch.tensor([9.0, 1.0])
        settings = {"eos": (0,), "temperature": 0.0, "min_tokens": 1, "ignore_eos": True}
        assert choose(logits, **settings).token_id == 0
        assert choose(logits, stop=(0,), **settings).token_id == 1

    def test_banned_tokens_and_bias_come_before_every_stage(self):
        logits = torch.tensor([9.0, 8.0, 1.0])
        assert choose(logits, temperature=0.0, banned_tokens=(0,)).token_id == 1
        assert choose(logits, temperature=0.0, logit_bias=((2, 8.5),)).token_id == 2
        assert choose(logits, temperature=0.0, logit_bias=((2, 99.0),), banned_tokens=(2,)).token_id == 0
        assert choose(logits, top_k=1, logit_bias=((0, float("-inf")),)).token_id == 1

    def test_ids_outside_the_vocabulary_do_nothing(self):
        odd = (999999, -1, 10**9)
        settings = {"banned_tokens": odd, "logit_bias": tuple((token, 5.0) for token in odd), "min_tokens": 1}
        assert choose(torch.tensor([1.0, 2.0]), eos=(2,), stop=odd, temperature=0.0, **settings).token_id == 1

    def test_a_huge_bias_decides_and_nothing_overflows(self):
        for value in (1e9, 1e300, float("inf")):
            assert set(draws(torch.tensor([1.0, 2.0, 3.0]), 20, temperature=0.5, logit_bias=((0, value),))) == {0}

    def test_padding_beyond_the_vocabulary_is_never_chosen(self):
        sampler = BatchSampler(2)
        row = SampleRow(sampler.prepare(Sampling(temperature=0.0), seed=0), (), 0)
        for padding in (9.0, float("nan")):
            assert sampler.choose(torch.tensor([[0.0, 1.0, padding]]), [row]) == [Choice(1)]


class Constraint:
    def __init__(self, answer) -> None:
        self._answer = answer

    def allowed(self, output):
        return self._answer(output)


class TestConstraints:
    def test_only_what_a_constraint_allows_is_chosen_and_it_sees_the_output_alone(self):
        seen = []

        def answer(output):
            seen.append(list(output))
            return torch.tensor([True, False, True])

        logits = torch.tensor([1.0, 9.0, 2.0])
        constraint = Constraint(answer)
        choice = choose(logits, (7, 7, 0, 2), prompt_length=2, temperature=0.0, constraint=constraint)
        assert choice.token_id == 2
        assert seen == [[0, 2]]
        assert 1 not in draws(logits, 50, temperature=9.0, constraint=constraint)

    def test_no_answer_allows_everything(self):
        nothing = Constraint(lambda _: None)
        assert choose(torch.tensor([1.0, 9.0]), temperature=0.0, constraint=nothing).token_id == 1

    @pytest.mark.parametrize(
        "answer",
        [
            lambda _: torch.ones(5, dtype=torch.bool),
            lambda _: torch.ones(1, 3, dtype=torch.bool),
            lambda _: torch.ones(3),
            lambda _: [True, True, True],
            lambda _: 1 / 0,
        ],
        ids=["too long", "two dimensions", "no booleans", "a list", "raises"],
    )
    def test_a_broken_constraint_fails_its_row_alone(self, answer):
        choices = in_company(torch.tensor([1.0, 9.0, 2.0]), Sampling(temperature=0.0, constraint=Constraint(answer)))
        assert choices[1].token_id is None
        assert "constraint" in (choices[1].error or "")

    def test_a_constraint_that_allows_nothing_ends_the_row_with_an_error(self):
        nothing = Constraint(lambda _: torch.zeros(3, dtype=torch.bool))
        choices = in_company(torch.tensor([1.0, 9.0, 2.0]), Sampling(constraint=nothing))
        assert choices[1].error == "no token is left to choose from"


def in_company(odd: torch.Tensor, settings: Sampling, history: tuple[int, ...] = ()) -> list[Choice]:
    """Choices of three rows, the middle one odd; the others must give what they give alone."""
    sampler = BatchSampler(odd.shape[0], (0,))
    sound = random_rows(4, rows=1, size=odd.shape[0])[0]
    rows = [
        SampleRow(sampler.prepare(sampling, seed=3, logprobs=1), history, 0)
        for sampling in (Sampling(temperature=0.7), settings, Sampling(temperature=0.0))
    ]
    choices = sampler.choose(torch.stack([sound, odd, sound]), rows)
    assert [choices[0], choices[2]] == [sampler.choose(sound[None], [rows[i]])[0] for i in (0, 2)]
    assert choices[0].error is choices[2].error is None
    return choices


class TestBadRows:
    @pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.1}])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("place", [0, 37, 299])
    def test_logits_that_are_not_numbers_fail_their_row_alone(self, settings, bad, place):
        odd = random_rows(5, size=300)[0]
        odd[place] = bad
        choices = in_company(odd, Sampling(**settings), (1, 2))
        assert choices[1] == Choice(None, "the model's output is not finite")

    @pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 5}])
    def test_logits_that_rule_everything_out_fail_their_row_alone(self, settings):
        choices = in_company(torch.full((300,), OUT), Sampling(**settings))
        assert choices[1] == Choice(None, "no token is left to choose from")

    @pytest.mark.parametrize(
        "settings",
        [
            {"banned_tokens": tuple(range(300))},
            {"logit_bias": tuple((token, OUT) for token in range(300))},
            {"banned_tokens": tuple(range(1, 300)), "min_tokens": 1},
        ],
        ids=["banned", "biased away", "only the end is left too early"],
    )
    def test_a_row_without_a_choice_ends_with_an_error(self, settings):
        for temperature in (0.0, 1.0):
            choices = in_company(random_rows(6, size=300)[0], Sampling(temperature=temperature, **settings))
            assert choices[1] == Choice(None, "no token is left to choose from")

    @pytest.mark.parametrize(
        "settings",
        [
            {"logit_bias": ((3, float("nan")),)},
            {"temperature": float("nan")},
            {"repetition_penalty": 0.0},
            {"top_p": float("nan")},
            {"top_p": 0.5, "smoothing_factor": float("nan")},
            {"top_k": 5, "repetition_penalty": float("nan"), "order": (SamplerStep.TOP_K, SamplerStep.REPETITION)},
        ],
        ids=str,
    )
    def test_settings_that_are_no_numbers_harm_nobody_else(self, settings):
        odd = random_rows(7, size=300)[0]
        odd[3] = 0.0
        in_company(odd, Sampling(**settings), (3, 4))

    def test_a_bad_row_does_not_harm_neighbours_that_share_its_settings(self):
        sampler = BatchSampler(300)
        rows = [SampleRow(sampler.prepare(Sampling(top_p=0.8), seed=row), (), 0) for row in range(4)]
        logits = random_rows(8, rows=4, size=300)
        alone = [sampler.choose(logits[i : i + 1], [rows[i]])[0] for i in range(4)]
        logits[2, 5] = float("nan")
        choices = sampler.choose(logits, rows)
        assert [choices[i] for i in (0, 1, 3)] == [alone[i] for i in (0, 1, 3)]
        assert choices[2].error is not None

    def test_a_group_that_raises_is_sampled_row_by_row(self, monkeypatch):
        """Whatever a row's settings make a formula do, its neighbours of the same stages are served."""
        from worker.engine.sampling import filters

        formula = filters.top_a

        def raises(logits, a, whole=None):
            if bool((a > 0.5).any()):
                raise IndexError("odd")
            return formula(logits, a, whole)

        monkeypatch.setattr(filters, "top_a", raises)
        sampler = BatchSampler(300)
        values = (0.1, 0.9, 0.2)
        rows = [SampleRow(sampler.prepare(Sampling(top_a=value), seed=1), (), 0) for value in values]
        choices = sampler.choose(random_rows(9, rows=3, size=300), rows)
        assert [choice.error for choice in choices] == [None, "IndexError: odd", None]

    def test_different_numbers_of_rows_are_the_callers_fault(self):
        with pytest.raises(ValueError, match="rows"):
            BatchSampler(5).choose(torch.zeros(2, 5), [])

    def test_no_rows_no_choices(self):
        assert BatchSampler(5).choose(torch.zeros(0, 5), []) == []


def test_the_penalty_holds_at_temperature_zero_too():
    logits = torch.tensor([2.0, 1.9])
    assert choose(logits, (0,), temperature=0.0).token_id == 0
    for penalty in ({"repetition_penalty": 2.0}, {"frequency_penalty": 0.2}, {"presence_penalty": 0.2}):
        assert choose(logits, (0,), temperature=0.0, **penalty).token_id == 1
    assert choose(logits, (0,), prompt_length=1, temperature=0.0, presence_penalty=0.2).token_id == 0
