"""What an engine refuses before anything runs, and how it fits prompts into the context."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.worker.tiny_model import EOS, make_tiny_model
from worker.engine.intake import Intake
from worker.engine.interface import GenerationRequest, RequestRefusedError, Sampling

LOADED = make_tiny_model(context_length=64)
INTAKE = Intake(LOADED, 64)


def request(prompt: str | tuple[int, ...] = "hello", **fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"id": "a", "prompt": prompt, "max_new_tokens": 8, "seed": 1, **fields})


def refusal(given: GenerationRequest) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as caught:
        INTAKE.read(given)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")), ("temperature", -0.5), ("temperature", float("inf")), ("top_k", -1),
        ("top_p", 1.01), ("top_p", -0.1), ("min_p", 2.0), ("typical", float("nan")), ("tail_free", -1.0),
        ("top_a", -1.0), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_range", -1),
        ("repetition_slope", -1.0), ("frequency_penalty", float("inf")), ("presence_penalty", float("nan")),
        ("dynatemp_range", -1.0), ("dynatemp_exponent", float("inf")), ("smoothing_factor", -1.0), ("min_tokens", -1),
        ("logit_bias", ((999_999, 5.0),)), ("logit_bias", ((-1, 5.0),)), ("logit_bias", ((5, float("nan")),)),
        ("logit_bias", (("AI", -100.0),)), ("logit_bias", ((5, float("inf")),)),
        ("banned_tokens", (257,)), ("banned_tokens", (-1,)), ("banned_tokens", (True,)), ("banned_tokens", (1.5,)),
    ],
)  # fmt: skip
def test_a_senseless_setting_is_refused_by_its_name(field, value):
    error = refusal(request(sampling=dataclasses.replace(Sampling(), **{field: value})))
    assert error.code == "invalid_request"
    assert field in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0), ("n", 0), ("n", 65), ("logprobs", -1), ("logprobs", 1000), ("stop_token_ids", (10**9,)),
        ("stop_token_ids", (-1,)), ("prefix", (257,)), ("prompt", (5, 257)), ("prompt", (-1,)),
    ],
)  # fmt: skip
def test_a_senseless_request_is_refused_by_the_name_of_its_field(field, value):
    error = refusal(request(**{field: value}))
    assert error.code == "invalid_request"
    assert field in str(error)


def test_a_prefix_and_several_samples_do_not_go_together():
    assert "prefix" in str(refusal(request(prefix=(1,), n=2)))


def test_a_large_finite_bias_is_no_fault():
    INTAKE.read(request(sampling=Sampling(logit_bias=((5, 1e9), (6, -100.0)))))


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, 2**70])
def test_any_integer_is_a_seed(seed):
    INTAKE.read(request(seed=seed))


def test_an_empty_prompt_becomes_the_token_that_texts_begin_with():
    assert INTAKE.read(request("")).prompt == [EOS]
    assert INTAKE.read(request(())).prompt == [EOS]


def test_text_that_is_no_unicode_is_refused():
    assert refusal(request("\ud800")).code == "invalid_request"


@pytest.mark.parametrize(("length", "fits"), [(55, True), (56, True), (57, False), (64, False), (65, False)])
def test_prompt_and_output_must_fit_the_context_together(length, fits):
    given = request((7,) * length)
    if fits:
        assert len(INTAKE.read(given).prompt) == length
    else:
        error = refusal(given)
        assert error.code == "context_length_exceeded"
        assert "64" in str(error)
        assert str(length) in str(error)


def test_a_prompt_one_short_of_the_context_leaves_room_for_one_token():
    assert INTAKE.read(request((7,) * 63, max_new_tokens=1)).max_new_tokens == 1
    assert refusal(request((7,) * 63, max_new_tokens=2)).code == "context_length_exceeded"


def test_a_wished_context_cuts_the_prompt_from_its_left():
    prepared = INTAKE.read(request(tuple(range(100)), max_context=40))
    assert prepared.prompt == list(range(68, 100))
    assert prepared.max_new_tokens == 8
