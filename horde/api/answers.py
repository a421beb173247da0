"""How an answer leaves: strict JSON as UTF-8, written by orjson."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from flask import Response

JSON_TYPE = "application/json; charset=utf-8"


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; dates and UUIDs are written as text."""
    response = Response(orjson.dumps(body), status, content_type=JSON_TYPE)
    if headers:
        response.headers.extend(headers)
    return response
