"""The text routes as clients and workers of AI Horde use them, over HTTP, on a real database."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.api.horde_v2.pop_answers import PAYLOAD_DEFAULTS, PopAnswer
from horde.api.horde_v2.status import ModelAnswer, PerformanceAnswer
from horde.api.horde_v2.text_answers import AcceptedAnswer, StatusAnswer, SubmitAnswer
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def worker_key(broker: LiveBroker) -> str:
    return broker.user("Owner").api_key


def test_a_text_goes_from_the_client_to_the_worker_and_back(broker: LiveBroker, worker_key: str) -> None:
    asked = broker.ask({"prompt": "Once upon", "params": {"max_length": 20, "temperature": 0.5}, "models": ["m"]})
    assert asked.status_code == 202
    AcceptedAnswer.model_validate(asked.json())
    request_id = asked.json()["id"]

    waiting = StatusAnswer.model_validate(broker.status(request_id))
    assert (waiting.waiting, waiting.done, waiting.generations) == (1, False, [])

    job = broker.pop_job(worker_key)
    assert job["ids"] == [job["id"]]
    assert job["model"] == "m"
    assert job["payload"] == {**PAYLOAD_DEFAULTS, "prompt": "Once upon", "n": 1, "max_length": 20, "temperature": 0.5}
    assert StatusAnswer.model_validate(broker.status(request_id)).processing == 1

    paid = broker.submit(worker_key, job["id"], generation=" a time", seed=7)
    assert paid.status_code == 200
    assert SubmitAnswer.model_validate(paid.json()).reward > 0

    done = StatusAnswer.model_validate(broker.status(request_id))
    assert (done.done, done.finished, done.waiting, done.queue_position) == (True, 1, 0, 0)
    (generation,) = done.generations
    assert (generation.text, generation.seed, generation.state, generation.model) == (" a time", 7, "ok", "m")
    assert generation.worker_name == "worker"
    assert generation.gen_metadata == []


def test_the_answers_hold_aihordes_fields_and_no_others(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    job = broker.pop_job(worker_key)
    assert set(job) == {
        "payload", "id", "ids", "model", "ttl", "softprompt", "messages", "extra_source_images", "skipped",
    }  # fmt: skip
    assert set(broker.status(request_id)) == {
        "finished", "processing", "restarted", "waiting", "done", "faulted", "wait_time", "queue_position", "kudos",
        "is_possible", "generations",
    }  # fmt: skip
    assert set(broker.submit(worker_key, job["id"]).json()) == {"reward"}
    (generation,) = broker.status(request_id)["generations"]
    assert set(generation) == {"worker_id", "worker_name", "model", "state", "text", "seed", "gen_metadata"}


def test_an_empty_pop_has_the_shape_of_a_full_one(broker: LiveBroker, worker_key: str) -> None:
    answer = broker.pop(worker_key)
    assert answer.status_code == 200
    assert answer.json() == {
        "payload": {
            "max_context_length": 2048,
            "max_length": 80,
            "min_p": 0.0,
            "smoothing_factor": 0.0,
            "dynatemp_range": 0.0,
            "dynatemp_exponent": 1.0,
        },
        "id": None,
        "ids": [],
        "model": None,
        "ttl": None,
        "softprompt": None,
        "messages": [],
        "extra_source_images": None,
        "skipped": {},
    }


def test_a_worker_that_knows_our_fields_is_told_seed_and_slot(broker: LiveBroker, worker_key: str) -> None:
    broker.request(params={"n": 2})
    job = PopAnswer.model_validate(broker.pop_job(worker_key, wait=0, amount=2))
    assert job.jobs is not None
    assert [entry.id for entry in job.jobs] == job.ids
    assert [entry.slot for entry in job.jobs] == [0, 1]
    assert job.seed == job.jobs[0].seed


def test_a_poll_is_answered_as_soon_as_work_comes(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(broker.pop(worker_key, wait=25)))
    waiting.start()
    while broker.context.places.taken == 0:
        pass
    request_id = broker.request()
    waiting.join(10)
    assert answers, "the poll was not woken"
    assert answers[0].json()["id"]
    assert broker.status(request_id)["processing"] == 1


def test_only_documented_parameters_reach_a_worker(broker: LiveBroker, worker_key: str) -> None:
    params = {
        "temperature": 1, "soft_prompt": "x", "genkey": "A", "model": "evil", "id": "x", "quiet": False, "__proto__": {},
        "gui_settings": False, "streaming": True, "can_abort": False, "mirostat": 2, "grammar": "root", "sampler_seed": 5,
        **{f"unknown{number}": number for number in range(500)},
    }  # fmt: skip
    broker.request(params=params)
    payload = broker.pop_job(worker_key)["payload"]
    assert set(payload) == {"prompt", "n", "temperature", *PAYLOAD_DEFAULTS}


TEXTS = [
    "👩‍👩‍👧‍👦",
    "e\u0301 is not \u00e9",
    "line\u2028sep \ufeff \u202e",
    "a\r\nb\nc\r",
    "\U0002070e \U0010ffff",
    "  spaces at both ends  ",
    "</script>\"\\'",
]


def test_text_comes_through_byte_by_byte(broker: LiveBroker, worker_key: str) -> None:
    for text in TEXTS:
        request_id = broker.request(prompt=text)
        job = broker.pop_job(worker_key)
        assert job["payload"]["prompt"] == text
        broker.submit(worker_key, job["id"], generation=text)
        assert broker.status(request_id)["generations"][0]["text"] == text


def test_a_prompt_of_nearly_a_mebibyte_comes_through(broker: LiveBroker, worker_key: str) -> None:
    # Sent as UTF-8: four bytes a character. As \u escapes it would be three times too large.
    text = "\U0010ffff" * 260_000
    body = f'{{"prompt": "{text}"}}'.encode()
    asked = broker.call(
        "POST", "generate/text/async", key=ANONYMOUS, data=body, headers={"Content-Type": "application/json"}
    )
    assert asked.status_code == 202, asked.text
    assert broker.pop_job(worker_key)["payload"]["prompt"] == text


def test_a_nul_or_half_a_surrogate_from_a_worker_never_leaves_a_job_unfinishable(
    broker: LiveBroker, worker_key: str
) -> None:
    request_id = broker.request(params={"n": 3})
    texts = []
    for generation in ("a\x00b", "a\ud800b"):
        job = broker.pop_job(worker_key)
        assert broker.submit(worker_key, job["id"], generation=generation).json()["reward"] > 0
        texts.append("a\ufffdb")
    job = broker.pop_job(worker_key)
    note = {"type": "censorship", "value": "csam", "ref": "x\x00y"}
    assert broker.submit(worker_key, job["id"], gen_metadata=[note]).status_code == 200
    status = broker.status(request_id)
    assert status["done"]
    assert [generation["text"] for generation in status["generations"]][:2] == texts
    assert status["generations"][2]["gen_metadata"] == [{**note, "ref": "x\ufffdy"}]
    assert status["generations"][2]["state"] == "csam"


def test_a_nul_from_a_client_is_refused_by_name(broker: LiveBroker) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": "a\0b"},
        "params.stop_sequence.0": {"prompt": "x", "params": {"stop_sequence": ["a\0b"]}},
        "models.0": {"prompt": "x", "models": ["a\0b"]},
        "params.unknown.deep.0": {"prompt": "x", "params": {"unknown": {"deep": ["a\0b"]}}},
    }
    for field, body in bodies.items():
        answer = broker.ask(body)
        assert (answer.status_code, answer.json()["rc"]) == (400, "NulByteInPayload")
        assert list(answer.json()["errors"]) == [field]


REFUSED_ORDERS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": ""}, "prompt", "MissingPrompt"),
    ({"params": {}}, "prompt", None),
    ({"prompt": "x", "params": {"max_length": 100, "max_context_length": 99}}, "params.max_context_length", "TokenOverflow"),
    ({"prompt": "x", "params": {"sampler_order": [0, 0, 99]}}, "params.sampler_order", "MissingFullSamplerOrder"),
    (
        {"prompt": "x", "params": {"stop_sequence": [str(number) for number in range(129)]}},
        "params.stop_sequence",
        "TooManyStopSequences",
    ),
    ({"prompt": "x", "params": {"stop_sequence": ["x" * 2001]}}, "params.stop_sequence", "ExcessiveStopSequence"),
    ({"prompt": "x", "params": {"n": 2}, "disable_batching": True}, "disable_batching", "RequiresTrust"),
    ({"prompt": "x", "workers": ["not-a-uuid"]}, "workers.0", None),
    *(({"prompt": "x", "params": {"max_length": value}}, "params.max_length", None) for value in (0, 1, 15, 4097, -1)),
    *(({"prompt": "x", "params": {"max_length": value}}, "params.max_length", None) for value in ("80", 80.5, None, True)),
    *(({"prompt": "x", "params": {"max_context_length": value}}, "params.max_context_length", None) for value in (79, 1048577)),
    *(({"prompt": "x", "params": {"n": value}}, "params.n", None) for value in (0, 21, 2**31, 2**63, 2**64)),
    *(({"prompt": "x", "params": {"top_p": value}}, "params.top_p", None) for value in (0, 0.0009)),
    ({"prompt": "x", "params": {"temperature": 5.01}}, "params.temperature", None),
]  # fmt: skip


def test_an_order_out_of_bounds_is_refused_by_name_and_nothing_is_queued(broker: LiveBroker) -> None:
    for body, field, rc in REFUSED_ORDERS:
        answer = broker.ask(body)
        assert answer.status_code == 400, body
        assert list(answer.json()["errors"]) == [field], body
        assert answer.json()["message"]
        assert answer.json().get("rc") == rc, body
    performance = PerformanceAnswer.model_validate(broker.call("GET", "status/performance").json())
    assert performance.queued_text_requests == 0


def test_an_order_at_its_bounds_is_accepted(broker: LiveBroker) -> None:
    for params in (
        {},
        {"max_length": 16},
        {"max_length": 80.0},
        {"n": 20},
        {"temperature": 5.0},
        {"max_context_length": 80},
        {"max_length": 4096, "max_context_length": 1048576},
    ):
        assert broker.ask({"prompt": " ", "params": params}).status_code == 202, params


def test_a_worker_that_nobody_knows_is_a_404(broker: LiveBroker) -> None:
    answer = broker.ask({"prompt": "x", "workers": [str(uuid.uuid4())]})
    assert (answer.status_code, answer.json()["rc"]) == (404, "WorkerNotFound")


def test_what_nobody_can_serve_is_accepted_with_a_warning(broker: LiveBroker) -> None:
    answer = broker.ask({"prompt": "x", "models": ["no/such"]})
    assert answer.status_code == 202
    accepted = AcceptedAnswer.model_validate(answer.json())
    assert accepted.message
    assert accepted.warnings
    assert broker.status(answer.json()["id"])["is_possible"] is False


def test_a_dry_run_tells_a_price_and_queues_nothing(broker: LiveBroker) -> None:
    answer = broker.ask({"prompt": "x", "dry_run": True})
    assert (answer.status_code, set(answer.json())) == (200, {"kudos"})
    assert broker.call("GET", "status/performance").json()["queued_text_requests"] == 0


def test_the_same_order_under_one_idempotency_key_is_one_request(broker: LiveBroker) -> None:
    key = {"Idempotency-Key": "abc"}
    user = broker.user().api_key
    first = broker.ask({"prompt": "x", "params": {"max_length": 20}}, key=user, headers=key)
    again = broker.ask({"params": {"max_length": 20.0}, "prompt": "x", "unknown": 1}, key=user, headers=key)
    assert first.json()["id"] == again.json()["id"]
    assert again.status_code == 202
    other = broker.ask({"prompt": "y"}, key=user, headers=key)
    assert (other.status_code, other.json()["rc"]) == (422, "IdempotencyKeyConflict")
    assert broker.ask({"prompt": "y"}, key=broker.user().api_key, headers=key).status_code == 202


def test_a_repeated_order_is_told_the_same_warnings(broker: LiveBroker) -> None:
    body, key = {"prompt": "x", "models": ["no/such"]}, {"Idempotency-Key": "abc"}
    user = broker.user().api_key
    first, again = broker.ask(body, key=user, headers=key), broker.ask(body, key=user, headers=key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["message"]
    assert first.json()["warnings"]
    assert again.json() == first.json()


def test_the_same_pop_under_one_idempotency_key_gives_the_same_job(broker: LiveBroker, worker_key: str) -> None:
    broker.request()
    broker.request()
    key = {"Idempotency-Key": "pop-1"}
    first, again = broker.pop(worker_key, headers=key).json(), broker.pop(worker_key, headers=key).json()
    assert first["id"]
    assert first["id"] == again["id"]
    assert first["payload"] == again["payload"]
    assert broker.pop(worker_key, headers={"Idempotency-Key": "pop-2"}).json()["id"] not in {None, first["id"]}


def test_a_key_that_nobody_holds_is_a_401_everywhere(broker: LiveBroker) -> None:
    held = broker.user().api_key
    for key in (
        "nobody",
        "0000000000x",
        "00000000",
        "",
        "ü" * 30,
        "x" * 10_000,
        held[:-1],
        held[:-1] + "!",
        held + "x",
    ):
        spelled = key.encode().decode("latin-1")
        for answer in (broker.ask(key=spelled), broker.pop(spelled)):
            assert (answer.status_code, answer.json()["rc"]) == (401, "InvalidAPIKey"), key
        assert broker.submit(spelled, str(uuid.uuid4())).status_code == 404


def test_a_bearer_token_is_a_key_too(broker: LiveBroker) -> None:
    key = broker.user("Bob").api_key
    for header in (f"Bearer {key}", f"bearer {key}", f"Bearer  {key}"):
        found = broker.call("GET", "find_user", headers={"Authorization": header})
        assert found.json()["username"].startswith("Bob#"), header
    doubled = broker.call("GET", "find_user", headers={"Authorization": f"Bearer {key}, Bearer {key}"})
    assert doubled.status_code == 404


def test_the_anonymous_key_may_ask_and_not_work(broker: LiveBroker) -> None:
    assert broker.ask().status_code == 202
    answer = broker.pop(ANONYMOUS)
    assert (answer.status_code, answer.json()["rc"]) == (403, "AnonForbiddenWorker")


def test_a_missing_key_is_a_400_of_the_input(broker: LiveBroker) -> None:
    for answer in (
        broker.ask(key=None),
        broker.call("POST", "generate/text/pop", json={"name": "w", "models": ["m"]}),
        broker.call("POST", "generate/text/submit", json={"id": str(uuid.uuid4()), "generation": ""}),
    ):
        assert answer.status_code == 400
        assert list(answer.json()["errors"]) == ["apikey"]


def test_a_submit_is_judged_by_job_then_key_then_owner(broker: LiveBroker, worker_key: str) -> None:
    for unknown in (str(uuid.uuid4()), "not-a-uuid", ""):
        answer = broker.submit("nobody", unknown)
        assert (answer.status_code, answer.json()["rc"]) == (404, "InvalidJobID")
        assert "Processing Job with ID" in answer.json()["message"]
        assert "does not exist" in answer.json()["message"]
    request_id = broker.request()
    job = broker.pop_job(worker_key)["id"]
    assert broker.submit("nobody", request_id).status_code == 404
    assert broker.submit("nobody", job).status_code == 401
    stranger = broker.submit(broker.user("Stranger").api_key, job)
    assert (stranger.status_code, stranger.json()["rc"]) == (403, "WrongCredentials")
    assert broker.submit(worker_key, job).status_code == 200


def test_a_job_is_settled_once(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    job = broker.pop_job(worker_key)["id"]
    assert broker.submit(worker_key, job, generation="first").status_code == 200
    again = broker.submit(worker_key, job, generation="second")
    assert (again.status_code, again.json()["rc"]) == (400, "DuplicateGen")
    assert "already submitted" in again.json()["message"]
    assert broker.status(request_id)["generations"][0]["text"] == "first"


def test_the_second_fault_ends_a_request_and_a_late_result_is_not_wanted(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    for _ in range(2):
        job = broker.pop_job(worker_key)["id"]
        answer = broker.submit(worker_key, job, state="faulted", generation="faulted", seed=-1)
        assert (answer.status_code, answer.json()["reward"]) == (200, 0)
    status = broker.status(request_id)
    assert (status["faulted"], status["done"], status["restarted"]) == (True, True, 2)
    late = broker.submit(worker_key, job)
    assert (late.status_code, late.json()["rc"]) == (400, "AbortedGen")
    assert "Please check your worker speed" in late.json()["message"]


def test_a_released_job_comes_again_and_blames_nobody(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    job = broker.pop_job(worker_key)["id"]
    answer = broker.call("POST", "generate/text/submit", key=worker_key, json={"id": job, "state": "released"})
    assert (answer.status_code, answer.json()["reward"]) == (200, 0)
    assert broker.status(request_id)["waiting"] == 1
    assert broker.pop_job(worker_key)["id"] != job
    (worker,) = broker.call("GET", "workers", params={"type": "text"}).json()
    assert worker["uncompleted_jobs"] == 0


def test_a_rejected_request_ends_with_its_reason(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    job = broker.pop_job(worker_key)["id"]
    answer = broker.submit(worker_key, job, state="rejected", error_code="context_length_exceeded")
    assert answer.status_code == 200
    status = StatusAnswer.model_validate(broker.status(request_id))
    assert (status.faulted, status.done, status.error_code) == (True, True, "context_length_exceeded")


def test_a_cancel_answers_the_status_after_it_and_running_work_still_arrives(
    broker: LiveBroker, worker_key: str
) -> None:
    request_id = broker.request(params={"n": 2})
    job = broker.pop_job(worker_key)["id"]
    cancelled = StatusAnswer.model_validate(broker.call("DELETE", f"generate/text/status/{request_id}").json())
    assert (cancelled.waiting, cancelled.processing, cancelled.cancelled, cancelled.done) == (0, 1, True, False)
    assert broker.submit(worker_key, job, generation="kept").json()["reward"] > 0
    status = broker.status(request_id)
    assert (status["done"], status["cancelled"], status["generations"][0]["text"]) == (True, True, "kept")
    again = broker.call("DELETE", f"generate/text/status/{request_id}")
    assert again.json() == status
    assert broker.pop(worker_key).json()["id"] is None


def test_an_id_in_upper_case_is_the_same_id_and_a_job_is_no_request(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    assert broker.status(request_id.upper())["waiting"] == 1
    job = broker.pop_job(worker_key)["id"]
    for verb in ("GET", "DELETE"):
        for unknown in (job, str(uuid.uuid4())):
            answer = broker.call(verb, f"generate/text/status/{unknown}")
            assert (answer.status_code, answer.json()["rc"]) == (404, "RequestNotFound")


def test_a_result_keeps_the_model_of_its_pop(broker: LiveBroker, worker_key: str) -> None:
    names = ["koboldcpp/gemma-31B", "agents/other"]
    request_id = broker.request(models=names)
    job = broker.pop_job(worker_key, models=[names[0]], threads=2)
    assert job["model"] == names[0]
    broker.pop(worker_key, models=[names[1]], threads=2)
    broker.submit(worker_key, job["id"])
    (generation,) = broker.status(request_id)["generations"]
    assert (generation["model"], generation["worker_name"]) == (names[0], "worker")


def test_any_name_of_a_model_works(broker: LiveBroker, worker_key: str) -> None:
    for model in ("a/b", "with space", "100%2Fpercent", "..", "ünï", "x" * 255):
        request_id = broker.request(models=[model])
        assert broker.pop_job(worker_key, models=[model])["model"] == model
        assert broker.status(request_id)["is_possible"] is True
        listed = [ModelAnswer.model_validate(entry) for entry in broker.call("GET", "status/models?type=text").json()]
        assert [entry.name for entry in listed] == [model]


def test_a_pop_that_makes_no_sense_is_refused_by_name(broker: LiveBroker, worker_key: str) -> None:
    changes: list[dict[str, Any]] = [
        {"priority_usernames": ["nobody"]}, {"models": []}, {"wait": 26}, {"threads": 51}, {"amount": 0},
    ]  # fmt: skip
    for change in changes:
        answer = broker.pop(worker_key, **change)
        assert answer.status_code == 400
        assert list(answer.json()["errors"]) == list(change)


def test_a_pop_says_why_it_gets_nothing(broker: LiveBroker, worker_key: str) -> None:
    broker.request(params={"max_length": 500, "max_context_length": 2000})
    skipped = broker.pop(worker_key, max_length=100).json()["skipped"]
    assert skipped["max_length"] == 1
