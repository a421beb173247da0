"""What an engine refuses before anything runs, and how it fits prompts into the context."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.engine.paged_scenes import make_engine, one_thread
from tests.worker.engine.paged_scenes import request as usual_request
from tests.worker.engine.paged_scenes import run as run_all
from tests.worker.tiny_model import EOS, make_tiny_model
from worker.engine.intake import Intake
from worker.engine.interface import Engine, Failed, GenerationRequest, RequestRefusedError, SamplerStep, Sampling
from worker.engine.paged import PagedEngine
from worker.engine.reference import ReferenceEngine

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


HUGE = 10**400
UNWRITABLE = 10**5000  # Python refuses to turn it into text


def name_of(value: object) -> str | None:
    return "unwritable" if value == UNWRITABLE else None


@pytest.mark.parametrize("value", ["5", None, True, 1.0, [], {}, b"5", HUGE, -HUGE, UNWRITABLE], ids=name_of)
@pytest.mark.parametrize("field", ["max_new_tokens", "n", "priority", "logprobs", "max_context"])
def test_a_count_that_is_none_is_refused_by_its_name(field, value):
    if value is None and field in {"logprobs", "max_context"}:
        INTAKE.read(request(**{field: None}))
        return
    error = refusal(request(**{field: value}))
    assert error.code == "invalid_request"
    assert field in str(error)


@pytest.mark.parametrize("value", ["5", None, True, 1.5])
def test_a_seed_is_an_integer(value):
    assert "seed" in str(refusal(request(seed=value)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5), ("id", []), ("cache_salt", None), ("cache_salt", b"x"), ("stop", "abc"), ("stop", None), ("stop", 5),
        ("stop", (5,)), ("stop", (None,)), ("stop_token_ids", 5), ("stop_token_ids", "5"), ("stop_token_ids", (True,)),
        ("stop_token_ids", (1.0,)), ("stop_token_ids", (UNWRITABLE,)), ("prefix", b"abc"), ("prefix", None),
        ("prefix", ("a",)), ("prompt", None), ("prompt", 5), ("prompt", b"bytes"), ("prompt", bytearray(b"b")),
        ("prompt", {1: 2}), ("prompt", (1, "a")), ("prompt", (1, None)), ("prompt", (False,)), ("prompt", (UNWRITABLE,)),
        ("sampling", None), ("sampling", {"temperature": 1}),
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_refused_by_its_name(field, value):
    error = refusal(request(**{field: value}))
    assert error.code == "invalid_request"
    assert field in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("order", None), ("order", "top_k"), ("order", ("top_k",)), ("order", (5,)), ("constraint", 5),
        ("constraint", lambda output: None), ("logit_bias", 5), ("logit_bias", {5: 1.0}), ("logit_bias", (5,)),
        ("logit_bias", ((5,),)), ("logit_bias", ((5, 1, 1),)), ("logit_bias", ((True, 1.0),)),
        ("logit_bias", ((5, None),)), ("logit_bias", ((5, True),)), ("logit_bias", ((5, "1"),)),
        ("logit_bias", ((5, HUGE),)), ("logit_bias", ((UNWRITABLE, 1.0),)), ("logit_bias", ("ab",)),
        ("banned_tokens", 5), ("banned_tokens", "5"), ("banned_tokens", (UNWRITABLE,)),
        ("ban_eos", None), ("ban_eos", 1), ("ignore_eos", "no"),
        *((field, value) for field in ("top_k", "repetition_range", "min_tokens")
          for value in (None, "5", True, 1.5, 1.0, HUGE, UNWRITABLE)),
        *((field, value) for field in ("temperature", "top_p", "repetition_penalty", "presence_penalty")
          for value in (None, "0.5", True, HUGE, -HUGE, UNWRITABLE, 1j)),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_setting_of_another_type_is_refused_by_its_name(field, value):
    error = refusal(request(sampling=dataclasses.replace(Sampling(), **{field: value})))
    assert error.code == "invalid_request"
    assert field in str(error)


def test_lists_do_where_tuples_are_declared():
    lists = Sampling(banned_tokens=[1], logit_bias=[[5, 1]], order=list(SamplerStep))  # type: ignore[arg-type]
    INTAKE.read(request([1, 2], stop=["a"], stop_token_ids=[3], prefix=[4], sampling=lists))


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


# -- whatever comes, an engine goes on ------------------------------------------------------------------------------------

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 300), st.integers(), st.floats(), st.text(max_size=5),
        st.binary(max_size=3), st.sampled_from([HUGE, -HUGE, 2**31, 2**63, 1e300, 1e-300, 5e-324, 1j]),
        st.sampled_from(SamplerStep), st.just(object()), st.sampled_from(["\ud800", "", "top_k"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=6,
)  # fmt: skip
# Of the right type, so that they get far.
PLAUSIBLE = st.one_of(
    ANYTHING,
    st.floats(0, 1),
    st.integers(0, 300),
    st.lists(st.integers(0, 256), max_size=4).map(tuple),
    st.lists(st.tuples(st.integers(0, 256), st.floats(allow_nan=False)), max_size=3).map(tuple),
    st.lists(st.sampled_from(SamplerStep), max_size=9).map(tuple),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
)
OWN_FIELDS = [field.name for field in dataclasses.fields(GenerationRequest)]
SAMPLING_FIELDS = [field.name for field in dataclasses.fields(Sampling)]
WARM = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}
NEIGHBOUR = usual_request("neighbour", "A neighbour", max_new_tokens=6, sampling=Sampling(**WARM))


@pytest.fixture(scope="module")
def engines():
    with one_thread():
        engine = make_engine(context_length=64, tokens=512)
        alone = run_all(make_engine(context_length=64, tokens=512), NEIGHBOUR).outcomes
        yield engine, ReferenceEngine(make_tiny_model(context_length=64), max_batch=8), alone


def try_to_add(engine: Engine, strange: GenerationRequest) -> bool:
    """Whether it was taken; where not, nothing may have changed."""
    before = engine.running
    refused: list[RequestRefusedError] = []
    try:
        engine.add(strange)
    except RequestRefusedError as error:
        refused.append(error)
    for each in refused:
        assert each.code in {"invalid_request", "context_length_exceeded"}
        assert str(each)
        assert engine.running == before
    return not refused


def to_its_end(engine: Engine) -> None:
    for _ in range(100):
        if not engine.running:
            return
        for event in engine.step():
            assert not isinstance(event, Failed) or event.message
    pytest.fail("it never ends")


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    own=st.dictionaries(st.sampled_from(OWN_FIELDS), PLAUSIBLE, max_size=2),
    sampled=st.dictionaries(st.sampled_from(SAMPLING_FIELDS), PLAUSIBLE, max_size=3),
)
def test_any_value_in_any_field_is_refused_or_runs_to_an_end_and_harms_no_neighbour(engines, own, sampled):
    engine, reference, alone = engines
    sampling = Sampling(**{**WARM, **sampled})
    strange = GenerationRequest(
        **{"id": "a", "prompt": "hello", "max_new_tokens": 4, "seed": 1, "sampling": sampling, **own}
    )
    taken = try_to_add(engine, strange)
    try:
        done = run_all(engine, NEIGHBOUR)
        assert done.texts["neighbour", 0].outcome == alone["neighbour", 0]
    finally:
        engine.abort("neighbour")
        if taken:
            engine.abort(strange.id)
    engine.check()
    assert engine.running == 0
    statistics = engine.statistics()
    assert statistics.blocks_free == statistics.blocks_total
    if try_to_add(reference, strange) and strange.n <= 2:
        to_its_end(reference)
    if not isinstance(strange.id, list | dict):
        reference.abort(strange.id)


def test_a_request_that_cannot_be_made_ready_leaves_the_engine_as_it_was(monkeypatch):
    """Whatever may go wrong in there one day."""
    engine = make_engine(context_length=64, tokens=512)

    def fails(*_: Any, **__: Any) -> None:
        raise ArithmeticError("one day")

    with monkeypatch.context() as patched:
        patched.setattr(PagedEngine, "_settings", fails)
        with pytest.raises(ArithmeticError):
            engine.add(usual_request("a"))
    assert engine.running == 0
    assert engine.step() == []
    engine.check()
    assert run_all(engine, usual_request("a", max_new_tokens=2)).tokens("a")
