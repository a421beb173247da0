"""AI Horde's payload, read; and texts, cleaned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.interface import Finished, FinishReason, SamplerStep, Sampling
from worker.formatting import OutputFormat
from worker.jobs import Job, UnreadableJob, read_pop, stored
from worker.text_parameters import BadPayloadError, read_format, read_request

S = SamplerStep
USUAL = (S.REPETITION, S.TOP_K, S.TOP_A, S.TAIL_FREE, S.TYPICAL, S.TOP_P, S.TEMPERATURE)


def test_a_bare_prompt_gets_the_documented_defaults():
    request = read_request("j", {"prompt": "hi"}, seed=3)
    assert (request.id, request.prompt, request.seed) == ("j", "hi", 3)
    assert (request.max_new_tokens, request.max_context, request.stop) == (80, 2048, ())
    assert request.sampling == Sampling(order=USUAL)


def test_every_documented_parameter_reaches_the_engine():
    payload = {
        "prompt": "p", "n": 1, "max_length": 100, "max_context_length": 1024, "temperature": 0.5, "top_p": 0.9,
        "top_k": 40, "top_a": 0.1, "tfs": 0.95, "typical": 0.8, "min_p": 0.05, "rep_pen": 1.1, "rep_pen_range": 256,
        "rep_pen_slope": 0.7, "smoothing_factor": 0.3, "dynatemp_range": 0.2, "dynatemp_exponent": 2,
        "sampler_order": [5, 6, 0, 1, 2, 3, 4], "stop_sequence": ["\nUser:", ""], "singleline": True,
        "use_default_badwordsids": True, "frmttriminc": True, "frmtrmblln": True, "frmtrmspch": False,
    }  # fmt: skip
    request = read_request("j", payload, 1)
    assert request.sampling == Sampling(
        temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, top_a=0.1, tail_free=0.95, typical=0.8,
        repetition_penalty=1.1, repetition_range=256, repetition_slope=0.7, smoothing_factor=0.3, dynatemp_range=0.2,
        dynatemp_exponent=2.0, ban_eos=True,
        order=(S.TEMPERATURE, S.REPETITION, S.TOP_K, S.TOP_A, S.TOP_P, S.TAIL_FREE, S.TYPICAL),
    )  # fmt: skip
    assert (request.max_new_tokens, request.max_context) == (100, 1024)
    assert request.stop == ("\nUser:", "\n")
    assert read_format(payload) == OutputFormat(True, True, False)


def test_an_order_with_strange_numbers_still_runs_every_stage_once():
    order = read_request("j", {"prompt": "", "sampler_order": [0, 0, 99, -1, 5]}, 0).sampling.order
    assert order[:2] == (S.TOP_K, S.TEMPERATURE)
    assert sorted(order) == sorted(S)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None), ("prompt", 5), ("max_length", 0), ("max_length", "80"), ("max_length", 80.5),
        ("max_length", True), ("temperature", float("nan")), ("top_p", float("inf")), ("top_k", []),
        ("stop_sequence", "x"), ("stop_sequence", ["a", 5]), ("sampler_order", {"a": 1}), ("singleline", "yes"),
        ("max_length", 1e300), ("max_length", 2**31 + 1), ("max_length", 10**400), ("max_context_length", -(10**400)),
        ("max_context_length", 1e10), ("top_k", 10**309), ("rep_pen_range", 1e12), ("temperature", 10**309),
        ("top_p", -(10**400)), ("rep_pen", 10**5000), ("top_k", 10**5000),
    ],
    ids=lambda value: "unwritable" if value == 10**5000 else None,
)  # fmt: skip
def test_a_senseless_value_is_named(field, value):
    with pytest.raises(BadPayloadError, match=field):
        read_request("j", {"prompt": "p", field: value}, 0)


def test_an_empty_pop_holds_no_job():
    assert read_pop({"id": None, "ids": [], "payload": {"max_length": 80}}) == []


def test_a_pop_answer_becomes_a_job_with_its_seed():
    [job] = read_pop({"id": "x", "ids": ["x"], "model": "m", "seed": 11, "payload": {"prompt": "p"}})
    assert isinstance(job, Job)
    assert (job.id, job.model, job.seed) == ("x", "m", 11)


def test_a_job_without_a_seed_gets_one_of_its_own():
    answer = {"id": "x", "payload": {"prompt": "p"}}
    seeds = {job.seed for _ in range(5) for job in read_pop(answer) if isinstance(job, Job)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_several_jobs_come_as_a_batch_or_as_a_list():
    assert [j.id for j in read_pop({"id": "x", "ids": ["x", "y"], "payload": {"prompt": "p"}})] == ["x", "y"]
    jobs = [{"id": "a", "payload": {"prompt": "1"}}, {"id": "b", "payload": {"prompt": "2"}}]
    read = read_pop({"id": "a", "ids": ["a", "b"], "payload": {"prompt": "1"}, "jobs": jobs})
    assert [j.request.prompt for j in read if isinstance(j, Job)] == ["1", "2"]


def test_jobs_share_what_is_computed_only_within_a_tenant():
    jobs = [
        {"id": "a", "payload": {"prompt": "1"}, "cache_salt": "s1"},
        {"id": "b", "payload": {"prompt": "1"}, "cache_salt": "s1"},
        {"id": "c", "payload": {"prompt": "1"}, "cache_salt": "s2"},
        {"id": "d", "payload": {"prompt": "1"}},
        {"id": "e", "payload": {"prompt": "1"}, "cache_salt": "job d"},
    ]
    salts = [j.request.cache_salt for j in read_pop({"id": "a", "jobs": jobs}) if isinstance(j, Job)]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert all(salts)


def test_a_batch_of_one_request_shares_even_where_no_salt_is_named():
    first, second = (read_pop({"id": i, "ids": [i, f"{i}2"], "payload": {"prompt": "p"}}) for i in ("x", "y"))
    salts = [job.request.cache_salt for job in [*first, *second] if isinstance(job, Job)]
    assert salts[0] == salts[1] != salts[2] == salts[3]


def test_a_job_that_cannot_be_read_keeps_its_id():
    [job] = read_pop({"id": "x", "payload": {"prompt": "p", "temperature": "hot"}})
    assert job == UnreadableJob("x", "text", "temperature is not a number")


def test_a_job_without_an_id_that_can_be_named_is_passed_over_and_the_others_are_read():
    payload = {"prompt": "p"}
    strange: list[Any] = [None, "", 0, -5, True, 1.5, [], {}, [["x"]], 10**400, 10**5000]
    jobs = [*({"id": value, "payload": payload} for value in strange), {"id": "good", "payload": payload}, None, "x"]
    assert [job.id for job in read_pop({"id": "good", "jobs": jobs})] == ["good"]
    assert [job.id for job in read_pop({"id": "x", "ids": [*strange, "x", "y", 7], "payload": payload})] == [
        "x",
        "y",
        "7",
    ]
    assert [read_pop({"id": value, "payload": payload}) for value in strange] == [[]] * len(strange)


def test_a_job_that_is_there_twice_counts_once():
    jobs = [{"id": "a", "payload": {"prompt": "1"}}] * 2
    assert [job.id for job in read_pop({"id": "a", "jobs": jobs})] == ["a"]
    assert [job.id for job in read_pop({"id": "a", "ids": ["a", "a"], "payload": {"prompt": "1"}})] == ["a"]


JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.sampled_from([10**309, -(10**400), 1e300, "\ud800", 2**31, -1, 0]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
PARAMETERS = (
    "prompt", "n", "max_length", "max_context_length", "temperature", "top_p", "top_k", "top_a", "tfs", "typical", "min_p",
    "rep_pen", "rep_pen_range", "rep_pen_slope", "smoothing_factor", "dynatemp_range", "dynatemp_exponent",
    "sampler_order", "stop_sequence", "singleline", "use_default_badwordsids", "frmttriminc", "frmtrmblln", "frmtrmspch",
)  # fmt: skip
PAYLOADS = JSON | st.builds(
    lambda prompt, fields: {**prompt, **fields},
    st.sampled_from([{}, {"prompt": "p"}]),
    st.dictionaries(st.sampled_from(PARAMETERS), JSON, max_size=3),
)
POPS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON | st.just("x"),
        "ids": JSON,
        "model": JSON,
        "seed": JSON,
        "cache_salt": JSON,
        "payload": PAYLOADS,
    },
)


@settings(max_examples=200, deadline=None)
@given(
    answer=st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    pop=POPS,
    jobs=st.none() | JSON | st.lists(POPS | JSON),
)
def test_whatever_a_broker_answers_is_read_as_jobs(answer, pop, jobs):
    found = read_pop({**answer, **pop, **({} if jobs is None else {"jobs": jobs})})
    for job in found:
        assert isinstance(job, Job | UnreadableJob)
        assert isinstance(job.id, str)
        assert job.id
        if isinstance(job, Job):
            assert 1 <= job.request.max_new_tokens <= 2**31


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Thr", "One. Two!"),
        ('He said "Yes." Then', 'He said "Yes."'),
        ("no end at all", "no end at all"),
        ("Done.", "Done."),
        ("これは文。途中", "これは文。"),
    ],
)
def test_an_unfinished_sentence_is_trimmed(text, expected):
    assert OutputFormat(trim_incomplete_sentence=True).apply(text) == expected


def test_blank_lines_and_special_characters_are_removed():
    assert OutputFormat(remove_blank_lines=True).apply("a\n\n\nb\nc") == "a\nb\nc"
    assert OutputFormat(remove_special_characters=True).apply("#a/@%}{+=~|^<>b") == "ab"
    assert OutputFormat().apply("  a\n\n#") == "  a\n\n#"


def test_token_ids_are_sent_only_where_they_are_the_text():
    [plain] = read_pop({"id": "x", "payload": {"prompt": "p"}})
    [trimmed] = read_pop({"id": "x", "payload": {"prompt": "p", "frmttriminc": True}})
    assert isinstance(plain, Job)
    assert isinstance(trimmed, Job)
    by_length = Finished("x", FinishReason.LENGTH, 3, 2)

    def result(job: Job, text: str, finished: Finished) -> dict[str, Any]:
        output = job.new_output()
        output.add((1, 2), text)
        return stored(job, output, finished).body()

    body = result(plain, "A. b", by_length)
    assert body["token_ids"] == [1, 2]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert (body["state"], body["finish_reason"], body["gen_metadata"]) == ("ok", "length", [])
    assert "token_ids" not in result(trimmed, "A. b", by_length)
    assert "token_ids" in result(trimmed, "A.", by_length)
    assert "token_ids" not in result(plain, "A", Finished("x", FinishReason.STOP, 3, 2, "."))
