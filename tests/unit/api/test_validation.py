"""What a field takes, and how a refusal names it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from horde.api.horde_v2.text_bodies import TextPop, TextRequest, TextSubmit
from horde.api.validation import refusals


def refused(model: type, body: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)  # type: ignore[attr-defined]
    return refusals(caught.value, "in the JSON body")


def order(**params: Any) -> TextRequest:
    return TextRequest.model_validate({"prompt": "x", "params": params})


@pytest.mark.parametrize("spelled", [b"80", b"80.0", b"8e1"])
def test_a_whole_number_is_an_integer_however_it_is_written(spelled: bytes) -> None:
    params = order(**orjson.loads(b'{"max_length": ' + spelled + b"}")).params
    assert params == {"max_length": 80}
    assert type(params["max_length"]) is int


@pytest.mark.parametrize("value", [True, "80", 80.5, None, [80], {}])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    assert list(refused(TextRequest, {"prompt": "x", "params": {"max_length": value}})) == ["params.max_length"]


BOUNDS = {
    "n": (1, 20, 1),
    "max_length": (16, 4096, 1),
    "max_context_length": (80, 1048576, 1),
    "temperature": (0, 5, 0.01),
    "top_p": (0.001, 1, 0.0001),
    "top_k": (0, 200, 1),
    "top_a": (0, 1, 0.01),
    "tfs": (0, 1, 0.01),
    "typical": (0, 1, 0.01),
    "min_p": (0, 1, 0.01),
    "rep_pen": (1, 3, 0.01),
    "rep_pen_range": (0, 4096, 1),
    "rep_pen_slope": (0, 10, 0.01),
    "smoothing_factor": (0, 10, 0.01),
    "dynatemp_range": (0, 5, 0.01),
    "dynatemp_exponent": (0, 5, 0.01),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_parameter_is_taken_at_its_bounds_and_refused_beyond_them(name: str) -> None:
    least, most, step = BOUNDS[name]
    assert order(**{name: least}).params == {name: least}
    assert order(**{name: most}).params == {name: most}
    assert list(refused(TextRequest, {"prompt": "x", "params": {name: least - step}})) == [f"params.{name}"]
    assert list(refused(TextRequest, {"prompt": "x", "params": {name: most + step}})) == [f"params.{name}"]


def test_a_refusal_speaks_of_the_value_and_the_bound() -> None:
    errors = refused(TextRequest, {"prompt": "x", "params": {"max_length": 5, "n": 21}})
    assert errors == {
        "params.max_length": "5 is less than the minimum of 16",
        "params.n": "21 is greater than the maximum of 20",
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "null is not of type 'integer'"),
        ("5", "the string is not of type 'integer'"),
        ([5], "the array is not of type 'integer'"),
        ({}, "the object is not of type 'integer'"),
        (True, "true is not of type 'integer'"),
        (5.5, "5.5 is not of type 'integer'"),
    ],
)
def test_a_refusal_speaks_of_the_kind_of_value_in_the_words_of_json(value: Any, said: str) -> None:
    assert refused(TextRequest, {"prompt": "x", "params": {"max_length": value}}) == {"params.max_length": said}
    null = refused(TextRequest, {"prompt": "x", "deadline_seconds": None})
    assert null == {"deadline_seconds": "null is not allowed here"}


def test_a_refusal_repeats_no_text_of_the_user() -> None:
    errors = refused(TextRequest, {"prompt": ["my secret"], "params": {"temperature": "my secret"}, "models": [1]})
    assert "secret" not in str(errors)


def test_only_documented_parameters_that_were_given_are_kept() -> None:
    unknown = {f"unknown{number}": number for number in range(500)}
    given = {
        "temperature": 1,
        "soft_prompt": "x",
        "genkey": "A",
        "model": "evil",
        "id": "1",
        "quiet": False,
        "__proto__": {},
    }
    assert order(**given, **unknown).params == {"temperature": 1.0}
    assert order().params == {}


@pytest.mark.parametrize(
    "field", ["params", "models", "workers", "prompt", "slow_workers", "deadline_seconds", "webhook"]
)
def test_an_explicit_null_is_refused(field: str) -> None:
    assert field in refused(TextRequest, {"prompt": "x", field: None})


def test_a_field_that_may_be_left_out_reads_as_none() -> None:
    assert TextRequest(prompt="x").deadline_seconds is None


@pytest.mark.parametrize("stops", [[""], [5], [None], "x", [["x"]]])
def test_stops_are_texts_that_are_not_empty(stops: Any) -> None:
    assert next(iter(refused(TextRequest, {"prompt": "x", "params": {"stop_sequence": stops}}))).startswith(
        "params.stop_sequence"
    )


def test_a_worker_id_that_is_no_uuid_is_refused() -> None:
    assert list(refused(TextRequest, {"prompt": "x", "workers": ["not-a-uuid"]})) == ["workers.0"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wait", 25.1),
        ("wait", -1),
        ("threads", 0),
        ("threads", 51),
        ("amount", 21),
        ("max_length", 0),
        ("models", [""]),
    ],
)
def test_a_pop_out_of_bounds_is_refused(field: str, value: Any) -> None:
    assert next(iter(refused(TextPop, {"name": "w", field: value}))).startswith(field)


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2**64, 1.5])
def test_a_seed_that_does_not_fit_is_refused_by_name(seed: float) -> None:
    assert list(refused(TextSubmit, {"id": "x", "generation": "", "seed": seed})) == ["seed"]


def test_a_result_needs_its_text_and_a_release_does_not() -> None:
    assert refused(TextSubmit, {"id": "x"})
    assert TextSubmit.model_validate({"id": "x", "state": "released"}).generation is None
