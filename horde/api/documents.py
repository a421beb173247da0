"""What the API's description (OpenAPI 3.1) says beside the routes themselves."""

from __future__ import annotations

from typing import Any

TITLE = "Horde"
DESCRIPTION = """A broker that lets volunteers lend their GPUs. There are two doors:

- `/v1`, as OpenAI's API: a chat or a completion, as a whole or with `stream` as server-sent events, while the connection
  is open. Whoever hangs up has cancelled. The key goes into `Authorization: Bearer`.
- `/api/v2`, as AI Horde's: ask for a text or a chat, poll the status, read the result. The key goes into `apikey`. Workers
  pop jobs here, post what they have written, and submit results.

Bodies are strict JSON of at most 1 MiB, 64 levels and 10,000 arrays and objects.
Unknown fields are ignored. Every answer may be read from any origin."""

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Error",
    "required": ["message"],
    "properties": {
        "message": {"type": "string", "description": "a sentence for people"},
        "rc": {"type": "string", "description": "the name of the error; absent where no rule of the horde refused"},
        "errors": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "dotted path of a field -> what is wrong with it",
        },
    },
}

OPENAI_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "OpenAIError",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "a sentence for people"},
                "type": {"type": "string", "description": "the family of the error, as OpenAI names it"},
                "param": {"type": ["string", "null"], "description": "the field of the body that is at fault"},
                "code": {"type": "string", "description": "the name of the error, from a closed list"},
            },
        }
    },
}

KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "a key of this horde, as OpenAI's clients send it"},
    "apikey": {
        "type": "apiKey",
        "in": "header",
        "name": "apikey",
        "description": "`0000000000` is anonymous: it may ask, not work",
    },
}

_SAID = {
    400: "The input is not acceptable; `errors` names the fields",
    401: "Nobody holds this key",
    403: "Not allowed",
    404: "Not found",
    413: "The body is larger than 1 MiB",
    415: "The body is not declared as JSON",
    409: "The request was cancelled from elsewhere",
    422: "The Idempotency-Key was used for another body",
    429: "Too often, or too much at once; see `Retry-After`",
    502: "Two workers failed at it",
    503: "The broker cannot reach its database, or nobody serves what is asked for now; see `Retry-After`",
    504: "Its deadline has passed",
}


def failures(*statuses: int) -> dict[int, Any]:
    """The failures of a route; those that any route may have come by themselves."""
    taken = {*statuses, 503}
    if 400 in taken:
        taken |= {413, 415}
    return {status: _SAID[status] for status in sorted(taken)}


def openai_failures(*statuses: int) -> dict[int, Any]:
    """The failures of a route under `/v1`, in that dialect."""
    shape = {"application/json": {"schema": OPENAI_ERROR_SCHEMA}}
    return {status: {"description": said, "content": dict(shape)} for status, said in failures(*statuses).items()}


def describe_api(config: Any) -> None:
    """Settings of APIFlask's generator."""
    config["OPENAPI_VERSION"] = "3.1.0"
    config["DESCRIPTION"] = DESCRIPTION
    config["HTTP_ERROR_SCHEMA"] = ERROR_SCHEMA
    config["VALIDATION_ERROR_SCHEMA"] = ERROR_SCHEMA
    config["VALIDATION_ERROR_STATUS_CODE"] = 400
    config["VALIDATION_ERROR_DESCRIPTION"] = _SAID[400]
    config["SECURITY_SCHEMES"] = KEY_SCHEMES
    config["AUTO_404_RESPONSE"] = False
    config["AUTO_SERVERS"] = False
