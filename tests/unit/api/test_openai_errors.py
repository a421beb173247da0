"""Every failure under `/v1` is told in OpenAI's shape, says who is to try again, and leaves the other dialect alone."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import pytest
from apiflask import APIFlask

from horde.api.broker import broker_of
from horde.api.validation import MAX_BODY_BYTES
from horde.app import create_app
from horde.errors import RETRYABLE, STATUS, ErrorCode, HordeError, bad_request, unavailable
from horde.settings import Settings

CHAT = "/v1/chat/completions"
SECRET = "canary-prompt-and-key"
KEY = {"Authorization": "Bearer 0000000000"}
JSON_TYPE = "application/json; charset=utf-8"
TYPES = {
    "insufficient_kudos": "insufficient_quota",
    "rate_limit_exceeded": "rate_limit_error",
    "concurrency_exceeded": "rate_limit_error",
    "no_capacity": "server_error",
    "deadline_exceeded": "server_error",
    "generation_faulted": "server_error",
    "broker_unavailable": "server_error",
}


def failing(app: APIFlask, error: Exception, path: str = "/v1/fail") -> None:
    def fail() -> None:
        raise error

    app.add_url_rule(path, path, fail)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_status_and_type_and_says_whether_to_try_again(app: APIFlask, code: ErrorCode) -> None:
    failing(app, HordeError(code, "said", rc="Name", errors={"params.max_length": "too large"}))
    answer = app.test_client().get("/v1/fail")
    assert (answer.status_code, answer.content_type) == (STATUS[code], JSON_TYPE)
    kind = TYPES.get(code, "invalid_request_error")
    assert answer.json == {"error": {"message": "said", "type": kind, "param": "params", "code": code}}
    if code in RETRYABLE:
        assert int(answer.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in answer.headers
    else:
        assert "Retry-After" not in answer.headers
        tried_by_status = STATUS[code] in {408, 409, 429} or STATUS[code] >= 500
        assert (answer.headers.get("x-should-retry") == "false") is tried_by_status


def test_an_unavailable_broker_says_when_to_come_back(app: APIFlask) -> None:
    failing(app, unavailable(retry_after=1.2))
    answer = app.test_client().get("/v1/fail")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")


def test_an_error_without_a_field_has_a_param_that_is_null(app: APIFlask) -> None:
    failing(app, bad_request("No."))
    assert app.test_client().get("/v1/fail").json["error"]["param"] is None


def test_a_fault_of_the_broker_is_generic_and_not_worth_a_retry(app: APIFlask) -> None:
    failing(app, RuntimeError(SECRET))
    answer = app.test_client().get("/v1/fail")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert answer.json["error"]["type"] == "server_error"
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v1/", 404, "not_found"),
        ("GET", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "invalid_request"),
        ("DELETE", "/v1/models", 405, "invalid_request"),
        ("GET", "/v1/%00", 404, "not_found"),
    ],
)
def test_an_address_that_does_not_answer_says_so(app: APIFlask, method: str, path: str, status: int, code: str) -> None:
    answer = app.test_client().open(path, method=method, headers=KEY)
    assert (answer.status_code, answer.content_type) == (status, JSON_TYPE)
    assert (answer.json["error"]["code"], answer.json["error"]["type"]) == (code, "invalid_request_error")
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert ("POST" in answer.headers["Allow"]) if path == CHAT else True


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'"x"', b"1", b"\xff", b'{"model": NaN}', b"[" * 100])
def test_a_body_that_is_no_object_is_a_400(app: APIFlask, body: bytes) -> None:
    answer = app.test_client().post(CHAT, data=body, content_type="application/json", headers=KEY)
    assert answer.status_code == 400
    assert answer.json["error"]["code"] == "invalid_request"
    assert answer.json["error"]["message"]


def test_a_body_of_another_type_is_a_415(app: APIFlask) -> None:
    answer = app.test_client().post(CHAT, data=b"{}", content_type="text/plain", headers=KEY)
    assert (answer.status_code, answer.json["error"]["code"]) == (415, "invalid_request")


def test_a_body_that_is_too_large_is_a_413(app: APIFlask) -> None:
    data = b'{"x":"' + b"x" * MAX_BODY_BYTES + b'"}'
    answer = app.test_client().post(CHAT, data=data, content_type="application/json", headers=KEY)
    assert (answer.status_code, answer.json["error"]["code"]) == (413, "invalid_request")


def test_a_compressed_body_is_not_taken_for_json(app: APIFlask) -> None:
    headers = {**KEY, "Content-Encoding": "gzip"}
    answer = app.test_client().post(CHAT, data=gzip.compress(b"{}"), content_type="application/json", headers=headers)
    assert answer.status_code == 400


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/v1/models/a/b"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "Basic x"}, {"apikey": ""}])
def test_no_key_is_a_401_whatever_else_is_wrong(app: APIFlask, path: str, headers: dict[str, str]) -> None:
    method = "GET" if "models" in path else "POST"
    answer = app.test_client().open(path, method=method, data=b"{", headers=headers)
    assert answer.status_code == 401
    assert answer.json["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_two_keys_that_differ_are_a_401(app: APIFlask) -> None:
    answer = app.test_client().get("/v1/models", headers={"apikey": "a", "Authorization": "Bearer b"})
    assert (answer.status_code, answer.json["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer k"}, {"apikey": "k"}, {"authorization": "bearer k"}])
def test_a_key_may_stand_in_either_header(app: APIFlask, headers: dict[str, str]) -> None:
    answer = app.test_client().get("/v1/models", headers=headers)
    assert answer.json["error"]["code"] == "broker_unavailable"


@pytest.mark.parametrize("key", ["", " ", "with space", "x" * 256])
def test_an_idempotency_key_is_visible_ascii(app: APIFlask, key: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    answer = app.test_client().post(CHAT, json=body, headers={**KEY, "Idempotency-Key": key})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("path", ["/v1x", "/v11/models", "/api/v2/v1/models", "/API/v2/nothing"])
def test_other_addresses_keep_their_dialect(app: APIFlask, path: str) -> None:
    answer = app.test_client().get(path)
    assert answer.status_code == 404
    assert set(answer.json) == {"message"}


@pytest.fixture
def limited() -> Iterator[APIFlask]:
    made = create_app(Settings(database_url="postgresql://nobody@127.0.0.1:1/none", rate_limits="on"))
    yield made
    broker_of(made).context.close()


def test_a_rate_limit_says_when_to_come_back(limited: APIFlask) -> None:
    client = limited.test_client()
    answers = [client.post(CHAT, data=b"{", content_type="application/json", headers=KEY) for _ in range(5)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    for answer in refused:
        assert answer.json["error"]["code"] == "rate_limit_exceeded"
        assert answer.json["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in answer.headers


def test_who_has_a_key_may_open_many_chats_in_a_second(limited: APIFlask) -> None:
    client = limited.test_client()
    headers = {"Authorization": "Bearer someone"}
    answers = [client.post(CHAT, data=b"{", content_type="application/json", headers=headers) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {400}


def test_a_page_of_another_origin_may_send_what_the_sdk_sends(app: APIFlask) -> None:
    answer = app.test_client().options(CHAT)
    allowed = {name.strip().lower() for name in answer.headers["Access-Control-Allow-Headers"].split(",")}
    assert {"authorization", "content-type", "idempotency-key", "x-stainless-lang", "x-stainless-os"} <= allowed
    exposed = {name.strip().lower() for name in answer.headers["Access-Control-Expose-Headers"].split(",")}
    assert {"x-horde-request-id", "retry-after", "x-should-retry"} <= exposed
