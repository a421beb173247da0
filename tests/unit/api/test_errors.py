"""Every failure is JSON in the dialect of the API, says nothing it should not, and carries what browsers need."""

from __future__ import annotations

import pytest
import sqlalchemy.exc
from apiflask import APIFlask
from structlog.testing import capture_logs

from horde.errors import ErrorCode, HordeError, bad_request, unavailable

SECRET = "canary-prompt-and-key"
JSON_TYPE = "application/json; charset=utf-8"


def failing(app: APIFlask, error: Exception) -> None:
    def fail() -> None:
        raise error

    app.add_url_rule("/fail", "fail", fail)


def test_an_error_has_message_and_rc(app: APIFlask) -> None:
    failing(app, bad_request("No.", rc="MissingPrompt", field="prompt"))
    answer = app.test_client().get("/fail")
    assert (answer.status_code, answer.content_type) == (400, JSON_TYPE)
    assert answer.json == {"message": "No.", "rc": "MissingPrompt", "errors": {"prompt": "No."}}


def test_an_unavailable_broker_says_when_to_come_back(app: APIFlask) -> None:
    failing(app, unavailable(retry_after=1.2))
    answer = app.test_client().get("/fail")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_of_the_closed_list_is_rendered(app: APIFlask, code: ErrorCode) -> None:
    failing(app, HordeError(code, "said", rc="Name"))
    answer = app.test_client().get("/fail")
    assert answer.status_code >= 400
    assert answer.json == {"message": "said", "rc": "Name"}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SECRET),
        ValueError(SECRET),
        RecursionError(SECRET),
        sqlalchemy.exc.DataError("INSERT ...", {"prompt": SECRET}, Exception(SECRET)),
        KeyError(SECRET),
    ],
)
def test_an_unexpected_error_is_generic_outside_and_located_inside(app: APIFlask, error: Exception) -> None:
    failing(app, error)
    with capture_logs() as logs:
        answer = app.test_client().get("/fail", headers={"apikey": SECRET})
    assert (answer.status_code, answer.content_type) == (500, JSON_TYPE)
    assert answer.json is not None
    assert SECRET not in answer.text
    assert type(error).__name__ not in answer.text
    (entry,) = [entry for entry in logs if entry["event"] == "unexpected_error"]
    assert type(error).__name__ in entry["error"]
    assert "in fail" in entry["lines"]
    assert SECRET not in str(logs)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/nothing", 404),
        ("GET", "/api/v2/", 404),
        ("GET", "/api/v2/workers/", 404),
        ("GET", "/api/v2/generate/text/pop", 405),
        ("PUT", "/api/v2/find_user", 405),
        ("POST", "/api/v2/generate/text/async", 415),
        ("BREW", "/api/v2/find_user", 405),
        ("GET", "/api/v2/find_user", 401),
        ("GET", "/%00", 404),
        ("GET", "/api/v2/workers/name/%00", 404),
        ("GET", "/api/v2/workers/%ff%fe", 404),
        ("GET", "/api/v2/status/models?type=%00", 400),
        ("GET", "/api/v2/status/models?type=audio", 400),
        ("GET", "/api/v2/status/models?min_count=99999999999999999999", 400),
        ("GET", "/api/v2/status/models?type=text&model_state=odd", 400),
        ("GET", "/api/v2/workers?type=odd", 400),
    ],
)
def test_a_refusal_is_json_that_any_page_may_read(app: APIFlask, method: str, path: str, status: int) -> None:
    answer = app.test_client().open(path, method=method)
    assert (answer.status_code, answer.content_type) == (status, JSON_TYPE)
    assert isinstance(answer.json["message"], str)
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Credentials" not in answer.headers


def test_a_method_that_is_not_allowed_names_those_that_are(app: APIFlask) -> None:
    assert "POST" in app.test_client().get("/api/v2/generate/text/pop").headers["Allow"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_a_body_that_is_not_declared_as_json_is_a_415(app: APIFlask, kind: str) -> None:
    answer = app.test_client().post("/api/v2/generate/text/async", data=b'{"prompt": "x"}', content_type=kind)
    assert answer.status_code == 415


@pytest.mark.parametrize("body", [b"null", b"[]", b'"x"', b"1", b"true"])
def test_a_body_that_is_no_object_is_refused(app: APIFlask, body: bytes) -> None:
    answer = app.test_client().post("/api/v2/generate/text/async", data=body, content_type="application/json")
    assert (answer.status_code, list(answer.json["errors"])) == (400, [""])


def test_the_body_is_looked_at_before_the_key(app: APIFlask) -> None:
    client = app.test_client()
    bad = client.post("/api/v2/generate/text/async", json={"prompt": 5}, headers={"apikey": "nobody"})
    assert list(bad.json["errors"]) == ["prompt"]
    missing = client.post("/api/v2/generate/text/async", json={"prompt": "x"})
    assert missing.status_code == 400
    assert missing.json["message"] == "Input payload validation failed"
    assert list(missing.json["errors"]) == ["apikey"]
    assert "rc" not in missing.json


def test_two_keys_that_differ_are_a_401_and_a_key_in_the_query_is_none(app: APIFlask) -> None:
    client = app.test_client()
    both = client.post(
        "/api/v2/generate/text/async", json={"prompt": "x"}, headers={"apikey": "a", "Authorization": "Bearer b"}
    )
    assert (both.status_code, both.json["rc"]) == (401, "InvalidAPIKey")
    query = client.post("/api/v2/generate/text/async?apikey=0000000000", json={"prompt": "x"})
    assert list(query.json["errors"]) == ["apikey"]


@pytest.mark.parametrize("key", ["", " ", "with space", "ü", "x" * 256])
def test_an_idempotency_key_is_visible_ascii(app: APIFlask, key: str) -> None:
    answer = app.test_client().post(
        "/api/v2/generate/text/async",
        json={"prompt": "x"},
        headers={"apikey": "0000000000", "Idempotency-Key": key.encode().decode("latin-1")},
    )
    assert (answer.status_code, list(answer.json["errors"])) == (400, ["Idempotency-Key"])


@pytest.mark.parametrize("field", ["webhook", "style", "extra_source_images"])
def test_what_cannot_be_honoured_is_refused_and_not_ignored(app: APIFlask, field: str) -> None:
    value = [{"image": "x"}] if field == "extra_source_images" else "https://example.org/"
    answer = app.test_client().post(
        "/api/v2/generate/text/async", json={"prompt": "x", field: value}, headers={"apikey": "0000000000"}
    )
    assert answer.status_code in {400, 404}


@pytest.mark.parametrize(
    "spelling",
    [
        "{5b0c2f0a-0000-4000-8000-000000000000}",
        "5b0c2f0a000040008000000000000000",
        "urn:uuid:5b0c2f0a-0000-4000-8000-000000000000",
        "5b0c2f0a-0000-4000-8000-00000000000",
        "%2e%2e",
        "1",
        "99999999999999999999",
    ],
)
def test_another_spelling_of_an_id_is_no_id(app: APIFlask, spelling: str) -> None:
    client = app.test_client()
    for path, rc in (("generate/text/status", "RequestNotFound"), ("workers", "WorkerNotFound")):
        answer = client.get(f"/api/v2/{path}/{spelling}")
        assert (answer.status_code, answer.json["rc"]) == (404, rc)


@pytest.mark.parametrize("given", ["a-b_c.D9", "x" * 64])
def test_a_tame_request_id_is_given_back(app: APIFlask, given: str) -> None:
    assert app.test_client().get("/nothing", headers={"X-Request-Id": given}).headers["X-Request-Id"] == given


@pytest.mark.parametrize("given", ["x" * 65, "a b", "a;b", "%0d%0a", "ü".encode().decode("latin-1"), "<b>", ""])
def test_any_other_request_id_is_replaced(app: APIFlask, given: str) -> None:
    found = app.test_client().get("/nothing", headers={"X-Request-Id": given}).headers["X-Request-Id"]
    assert found != given
    assert found.isalnum()


def test_figures_know_route_templates_and_no_paths(app: APIFlask) -> None:
    client = app.test_client()
    client.get(f"/api/v2/workers/name/{SECRET}%00")
    client.get(f"/{SECRET}")
    client.open("/", method=SECRET.upper())
    figures = client.get("/metrics").text
    assert 'route="/api/v2/workers/name/<any_text:name>"' in figures
    assert 'route="unmatched"' in figures
    assert SECRET not in figures.lower()
