"""The routes by which workers take chats and hand in what came of them, over HTTP."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from horde.api.horde_v2.chat_work_examples import POP, POPPED, SUBMIT, SUBMITTED
from horde.api.horde_v2.pop_answers import PopAnswer
from horde.api.horde_v2.text_answers import SubmitAnswer
from horde.lifecycle.enqueue import queue_keys
from horde.lifecycle.words import Kind
from horde.registry.revisions import revision_key
from tests.support.concurrency import eventually
from tests.support.live_broker import LiveBroker, live_broker
from tests.support.world import World

MANIFEST: dict[str, Any] = {
    "model_revision": "weights-1",
    "tokenizer_revision": "tokens-1",
    "context_length": 8192,
    "block_size": 16,
    "blocks": 512,
    "kv_bytes_per_token": 23040,
}
PAYLOAD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "prompt": "user: Hello\nassistant:",
    "prompt_token_ids": [1, 2, 3],
    "prompt_tokens": 3,
    "estimated": False,
    "max_new_tokens": 200,
    "stop": [],
    "logprobs": None,
    "sampling": {"temperature": 0},
    "tools": None,
    "response_format": None,
}
REVISION = revision_key("m", "weights-1", "tokens-1")


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def worker_key(broker: LiveBroker) -> str:
    return broker.user("Owner").api_key


def chat(broker: LiveBroker, **fields: Any) -> uuid.UUID:
    """A chat that was admitted, and announced."""
    values = {"payload": PAYLOAD, "max_length": 200, "revision": REVISION, "needs_progress": True, **fields}
    request = World(broker.context.database, broker.context.terms).request(kind=Kind.CHAT, **values)
    broker.context.wakeups.announce(queue_keys(Kind.CHAT, ["m"]))
    return request


def pop_body(**fields: Any) -> dict[str, Any]:
    return {
        "name": "worker",
        "models": ["m"],
        "manifests": {"m": MANIFEST},
        "max_length": 4096,
        "max_context_length": 8192,
        "progress": True,
        **fields,
    }


def pop(broker: LiveBroker, key: str, *, kind: str = "chat", **fields: Any) -> requests.Response:
    return broker.call("POST", f"generate/{kind}/pop", key=key, json=pop_body(**fields))


def submit(broker: LiveBroker, key: str, job_id: str, **fields: Any) -> requests.Response:
    body = {"id": job_id, "state": "ok", "generation": "text", "finish_reason": "stop", **fields}
    return broker.call("POST", "generate/chat/submit", key=key, json=body)


def popped(broker: LiveBroker, key: str, **fields: Any) -> str:
    """The id of the one job that there is."""
    answer = pop(broker, key, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def results(broker: LiveBroker) -> list[tuple[Any, ...]]:
    world = World(broker.context.database)
    return world.rows("SELECT state, reason, result, finish_reason, cached_tokens FROM jobs ORDER BY claimed_at, id")


# --- pop


def test_a_chat_goes_to_a_worker_and_back(broker: LiveBroker, worker_key: str) -> None:
    chat(broker)
    answer = pop(broker, worker_key).json()

    PopAnswer.model_validate(answer)
    (job,) = answer["jobs"]
    assert {**job, "id": "", "cache_salt": "", "seed": 0} == {
        "id": "",
        "kind": "chat",
        "model": "m",
        "model_revision": "weights-1",
        "tokenizer_revision": "tokens-1",
        "slot": 0,
        "seed": 0,
        "ttl": 60,
        "payload": PAYLOAD,
        "attached": False,
        "deadline": None,
        "cache_salt": "",
        "prefix_token_ids": [],
        "prefix_text": "",
    }
    assert {name: answer[name] for name in ("id", "model", "ttl", "seed", "slot", "payload")} == {
        name: job[name] for name in ("id", "model", "ttl", "seed", "slot", "payload")
    }
    assert answer["ids"] == [job["id"]]

    usage = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    paid = submit(broker, worker_key, job["id"], generation="Hi!", token_ids=[72, 105], usage=usage)
    assert paid.status_code == 200
    assert SubmitAnswer.model_validate(paid.json()).reward > 0
    assert results(broker) == [("stored", None, "Hi!", "stop", 1)]


def test_a_worker_takes_texts_and_chats_with_one_call(broker: LiveBroker, worker_key: str) -> None:
    broker.request(prompt="Once upon", models=["m"])
    chat(broker)
    answer = pop(broker, worker_key, kinds=["text", "chat"], slots=5).json()

    text, chat_job = answer["jobs"]
    assert (text["kind"], text["payload"]["prompt"], text["payload"]["max_context_length"]) == (
        "text",
        "Once upon",
        2048,
    )
    assert (chat_job["kind"], chat_job["payload"]) == ("chat", PAYLOAD)
    # They are of two requests: what stands outside `jobs` is the first one's.
    assert (answer["ids"], answer["payload"]) == ([text["id"]], text["payload"])
    assert broker.submit(worker_key, text["id"]).status_code == 200
    assert submit(broker, worker_key, chat_job["id"]).status_code == 200


def test_an_empty_pop_has_the_shape_of_a_full_one(broker: LiveBroker, worker_key: str) -> None:
    chat(broker, revision=revision_key("m", "weights-2", "tokens-1"))
    answer = pop(broker, worker_key)
    assert answer.status_code == 200
    assert answer.json() == {
        "payload": {},
        "id": None,
        "ids": [],
        "model": None,
        "ttl": None,
        "softprompt": None,
        "messages": [],
        "extra_source_images": None,
        "skipped": {"revision": 1},
    }


MANIFEST_FAULTS: list[tuple[str, Any]] = [
    ("model_revision", ""),
    ("model_revision", "x" * 129),
    ("model_revision", "two words"),
    ("model_revision", "é"),
    ("model_revision", "line\n"),
    ("model_revision", 1),
    ("tokenizer_revision", None),
    ("context_length", 0),
    ("context_length", 1 << 31),
    ("context_length", True),
    ("block_size", 0),
    ("blocks", 0),
    ("blocks", 1.5),
    ("kv_bytes_per_token", -1),
    ("kv_bytes_per_token", 1 << 63),
    ("capabilities", "tools"),
    ("capabilities", ["x"] * 33),
]


def test_a_manifest_that_cannot_be_is_refused_by_its_field(broker: LiveBroker, worker_key: str) -> None:
    for field, value in MANIFEST_FAULTS:
        answer = pop(broker, worker_key, manifests={"m": {**MANIFEST, field: value}})
        assert (answer.status_code, list(answer.json()["errors"])) == (400, [f"manifests.m.{field}"]), value


def test_a_manifest_says_everything_but_what_it_may_leave_out(broker: LiveBroker, worker_key: str) -> None:
    for field in MANIFEST:
        without = {name: given for name, given in MANIFEST.items() if name != field}
        answer = pop(broker, worker_key, manifests={"m": without})
        assert (answer.status_code, list(answer.json()["errors"])) == (400, [f"manifests.m.{field}"])
    assert (
        pop(broker, worker_key, manifests={"m": {**MANIFEST, "capabilities": ["tools"], "else": 1}}).status_code == 200
    )


POP_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"progress": False}, "progress"),
    ({"progress": None}, "progress"),
    ({"manifests": {}}, "manifests.m"),
    ({"manifests": []}, "manifests"),
    ({"manifests": None}, "manifests"),
    ({"manifests": {f"m{number}": MANIFEST for number in range(201)}}, "manifests"),
    ({"manifests": {"m": []}}, "manifests.m"),
    ({"models": ["m", "n"]}, "manifests.n"),
    ({"models": []}, "models"),
    ({"kinds": []}, "kinds"),
    ({"kinds": "chat"}, "kinds"),
    ({"kinds": ["image"]}, "kinds.0"),
    ({"kinds": ["chat"] * 9}, "kinds"),
]


def test_a_pop_for_chats_is_refused_by_its_field(broker: LiveBroker, worker_key: str) -> None:
    for changed, field in POP_FAULTS:
        answer = pop(broker, worker_key, **changed)
        assert (answer.status_code, list(answer.json()["errors"])) == (400, [field]), changed


def test_thousands_of_bad_manifests_get_a_short_refusal(broker: LiveBroker, worker_key: str) -> None:
    answer = pop(broker, worker_key, manifests={f"m{number}": 1 for number in range(50_000)})
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["manifests"])


def test_the_text_route_takes_texts_alone_and_may_be_told_of_revisions(broker: LiveBroker, worker_key: str) -> None:
    answer = pop(broker, worker_key, kind="text", kinds=["text", "chat"])
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["kinds.1"])

    chat(broker)
    broker.request(models=["m"])
    (job,) = pop(broker, worker_key, kind="text", kinds=["text"], slots=5).json()["jobs"]
    assert (job["kind"], job["model_revision"], job["tokenizer_revision"]) == ("text", "weights-1", "tokens-1")


def test_a_poll_whose_connection_is_dead_gets_no_chat_and_the_next_one_does(
    broker: LiveBroker, worker_key: str
) -> None:
    body = json.dumps(pop_body(wait=25)).encode()
    head = (
        f"POST /api/v2/generate/chat/pop HTTP/1.1\r\nHost: x\r\napikey: {worker_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((broker.host, broker.port)) as dead:
        dead.sendall(head.encode() + body)
        eventually(lambda: broker.context.places.taken == 1, "the poll waits")
    eventually(lambda: broker.context.places.taken == 0, "the poll has left")

    chat(broker)
    assert World(broker.context.database).scalar("SELECT count(*) FROM jobs") == 0
    assert popped(broker, worker_key, name="alive")


# --- submit


RESULT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"state": "rejected"}, "error_code"),
    ({"state": "rejected", "error_code": "no_capacity"}, "error_code"),
    ({"finish_reason": "cancelled"}, "finish_reason"),
    ({"finish_reason": None}, "finish_reason"),
    ({"token_ids": [1, -1]}, "token_ids.1"),
    ({"token_ids": [1, 2.5]}, "token_ids.1"),
    ({"token_ids": "12"}, "token_ids"),
    ({"logprobs": {}}, "logprobs"),
    ({"logprobs": [1]}, "logprobs.0"),
    ({"logprobs": [[1, -0.5]]}, "logprobs.0.2"),
    ({"logprobs": [["1", -0.5, []]]}, "logprobs.0.0"),
    ({"logprobs": [[1, None, []]]}, "logprobs.0.1"),
    ({"logprobs": [[1, -0.5, [[1]]]]}, "logprobs.0.2.0.1"),
    ({"logprobs": [[1, -0.5, [[1, -0.5]] * 21]]}, "logprobs.0.2"),
    ({"usage": []}, "usage"),
    ({"usage": {"cached_tokens": -1}}, "usage.cached_tokens"),
    ({"state": "done"}, "state"),
]


def test_a_result_that_makes_no_sense_is_refused_and_its_job_goes_on(broker: LiveBroker, worker_key: str) -> None:
    chat(broker)
    job = popped(broker, worker_key)
    for said, field in RESULT_FAULTS:
        answer = submit(broker, worker_key, job, **said)
        assert (answer.status_code, list(answer.json()["errors"])) == (400, [field]), said
    assert [state for state, *_ in results(broker)] == ["processing"]


def test_a_result_without_a_reason_why_it_ends_is_refused(broker: LiveBroker, worker_key: str) -> None:
    chat(broker)
    body = {"id": popped(broker, worker_key), "generation": "text"}
    answer = broker.call("POST", "generate/chat/submit", key=worker_key, json=body)
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["finish_reason"])


@pytest.mark.parametrize(
    ("said", "estimated", "state"),
    [
        ({"state": "released"}, False, "released"),
        ({"state": "faulted"}, False, "faulted"),
        ({"state": "rejected", "error_code": "unsupported_parameter"}, True, "rejected"),
        # Of what the broker has counted and checked it knows better.
        ({"state": "rejected", "error_code": "unsupported_parameter"}, False, "faulted"),
        ({"state": "censored", "finish_reason": "stop"}, False, "stored"),
    ],
)
def test_a_job_may_be_given_up(
    broker: LiveBroker, worker_key: str, said: dict[str, Any], estimated: bool, state: str
) -> None:
    chat(broker, payload={**PAYLOAD, "estimated": estimated})
    job = popped(broker, worker_key)
    body = {"id": job, "generation": "", **said}
    assert broker.call("POST", "generate/chat/submit", key=worker_key, json=body).status_code == 200
    assert [state for state, *_ in results(broker)] == [state]


def test_a_result_may_have_twenty_alternatives_to_each_of_its_tokens(broker: LiveBroker, worker_key: str) -> None:
    chat(broker, max_length=1000, payload={**PAYLOAD, "max_new_tokens": 1000, "logprobs": 20})
    token_ids = [number % 256 for number in range(1000)]
    logprobs = [[token, -0.5, [[other, -1.25] for other in range(20)]] for token in token_ids]
    answer = submit(
        broker, worker_key, popped(broker, worker_key), generation="x" * 1000, token_ids=token_ids, logprobs=logprobs
    )
    assert answer.status_code == 200, answer.text
    assert World(broker.context.database).scalar("SELECT logprobs FROM jobs") == logprobs


def test_who_calls_is_asked_as_for_texts(broker: LiveBroker, worker_key: str) -> None:
    chat(broker)
    job = popped(broker, worker_key)
    assert pop(broker, "nobody").status_code == 401
    assert pop(broker, "0000000000").status_code == 403
    other = broker.user().api_key
    for key, job_id, status, rc in (
        (other, job, 403, "WrongCredentials"),
        ("nobody", job, 401, "InvalidAPIKey"),
        (worker_key, str(uuid.uuid4()), 404, "InvalidJobID"),
        (worker_key, "x", 404, "InvalidJobID"),
    ):
        answer = submit(broker, key, job_id)
        assert (answer.status_code, answer.json()["rc"]) == (status, rc)
    assert submit(broker, worker_key, job).status_code == 200
    again = submit(broker, worker_key, job)
    assert (again.status_code, again.json()["rc"]) == (400, "DuplicateGen")


# --- examples


def test_the_examples_are_what_the_routes_read_and_say(broker: LiveBroker, worker_key: str) -> None:
    PopAnswer.model_validate(POPPED)
    SubmitAnswer.model_validate(SUBMITTED)
    paths = broker.session.get(f"{broker.url}/api/openapi.json").json()["paths"]
    for path, given, said in (("pop", POP, POPPED), ("submit", SUBMIT, SUBMITTED)):
        described = paths[f"/api/v2/generate/chat/{path}"]["post"]
        assert described["requestBody"]["content"]["application/json"]["example"] == given
        assert described["responses"]["200"]["content"]["application/json"]["example"] == said
    assert broker.call("POST", "generate/chat/pop", key=worker_key, json=POP | {"wait": 0}).status_code == 200
    answer = broker.call("POST", "generate/chat/submit", key=worker_key, json=SUBMIT)
    assert (answer.status_code, answer.json()["rc"]) == (404, "InvalidJobID")
