"""The API's description is whole, and the page that shows it needs nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from apiflask import APIFlask

ROUTES = {
    ("post", "/api/v2/generate/text/async"),
    ("get", "/api/v2/generate/text/status/{request_id}"),
    ("delete", "/api/v2/generate/text/status/{request_id}"),
    ("post", "/api/v2/generate/text/pop"),
    ("post", "/api/v2/generate/text/submit"),
    ("post", "/api/v2/generate/chat/async"),
    ("get", "/api/v2/generate/chat/status/{request_id}"),
    ("delete", "/api/v2/generate/chat/status/{request_id}"),
    ("post", "/api/v2/generate/chat/pop"),
    ("post", "/api/v2/generate/chat/submit"),
    ("post", "/api/v2/generate/progress"),
    ("get", "/api/v2/status/heartbeat"),
    ("get", "/api/v2/status/models"),
    ("get", "/api/v2/status/performance"),
    ("get", "/api/v2/workers"),
    ("get", "/api/v2/workers/{worker_id}"),
    ("put", "/api/v2/workers/{worker_id}"),
    ("get", "/api/v2/workers/name/{name}"),
    ("get", "/api/v2/find_user"),
    ("put", "/api/v2/tokenizers/{revision}"),
    ("get", "/api/v2/tokenizers/{revision}"),
    ("put", "/api/v2/models/{name}/revisions/{revision}"),
    ("get", "/api/v2/models/{name}/revisions/{revision}"),
    ("get", "/api/v2/models/{name}"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
}


@pytest.fixture
def description(app: APIFlask) -> dict[str, Any]:
    answer = app.test_client().get("/api/openapi.json")
    assert answer.content_type == "application/json; charset=utf-8"
    found: dict[str, Any] = answer.json
    return found


def test_the_description_tells_of_both_doors(description: dict[str, Any]) -> None:
    said = description["info"]["description"]
    assert [word for word in ("/v1", "/api/v2", "OpenAI", "chat", "stream", "text") if word not in said] == []


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_route_is_described_and_nothing_else(description: dict[str, Any]) -> None:
    assert description["openapi"].startswith("3.1")
    described = {(method, path) for path, methods in description["paths"].items() for method in methods}
    assert described == ROUTES


def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    found = set(references(description))
    assert found
    for reference in found:
        at: Any = description
        for key in reference.removeprefix("#/").split("/"):
            at = at[key]


def test_every_schema_is_json_schema(description: dict[str, Any]) -> None:
    for name, schema in description["components"]["schemas"].items():
        assert jsonschema_rs.meta.is_valid(schema), name


def test_a_route_with_a_body_says_how_it_refuses_one(description: dict[str, Any]) -> None:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            assert operation["operationId"], path
            assert operation["summary"], path
            if "requestBody" in operation:
                assert {"400", "413", "415", "429", "503"} <= set(operation["responses"]), (method, path)


def test_bounds_and_defaults_come_from_the_code_and_null_is_not_offered(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    params = schemas["TextRequest.TextParams"]["properties"]
    assert params["max_length"] == {"maximum": 4096, "minimum": 16, "title": "Max Length", "type": "integer"}
    assert schemas["TextRequest"]["properties"]["slow_workers"]["default"] is True
    assert schemas["TextRequest"]["required"] == ["prompt"]
    assert "null" not in str(schemas["TextRequest"])
    assert description["components"]["securitySchemes"]["apikey"]["name"] == "apikey"


@pytest.mark.parametrize("path", ["/api", "/api/"])
def test_the_page_allows_no_script_but_its_own(app: APIFlask, path: str) -> None:
    answer = app.test_client().get(path)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in answer.text
    assert not re.search(r"\son\w+=|style=", answer.text)


def test_the_page_and_its_parts_load_nothing_from_elsewhere(app: APIFlask) -> None:
    client = app.test_client()
    page = client.get("/api").text
    parts = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"/api/explorer.js", "/api/explorer.css", "/api/openapi.json"} <= set(parts)
    for part in parts:
        found = client.get(part)
        assert found.status_code == 200
        assert "://" not in found.text.replace("http://www.w3.org", "") or part.endswith(".json")
        assert found.headers["X-Content-Type-Options"] == "nosniff"


def test_the_script_never_writes_markup(app: APIFlask) -> None:
    script = app.test_client().get("/api/explorer.js").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
