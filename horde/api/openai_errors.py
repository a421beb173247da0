"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, for every path under `/v1`.

`code` is from the closed list of `horde.errors`. OpenAI's SDKs try again by the status alone, so what no repeat can
mend says `x-should-retry: false` where its status would have them try.
"""

from __future__ import annotations

import math
from typing import Any

from horde.errors import RETRYABLE, ErrorCode, HordeError

PREFIX = "/v1"
# A fault of ours: no code of the list, since no client can expect it.
INTERNAL_ERROR = "internal_error"
DEFAULT_RETRY_SECONDS = 5.0

_TYPES: dict[str, str] = {
    ErrorCode.INSUFFICIENT_KUDOS: "insufficient_quota",
    ErrorCode.RATE_LIMIT_EXCEEDED: "rate_limit_error",
    ErrorCode.CONCURRENCY_EXCEEDED: "rate_limit_error",
    ErrorCode.NO_CAPACITY: "server_error",
    ErrorCode.DEADLINE_EXCEEDED: "server_error",
    ErrorCode.GENERATION_FAULTED: "server_error",
    ErrorCode.BROKER_UNAVAILABLE: "server_error",
    INTERNAL_ERROR: "server_error",
}
_RETRIED = frozenset({409, 429})


def speaks_openai(path: str) -> bool:
    """Whether a failure at this path is told in OpenAI's dialect."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_object(code: str, message: str, *, param: str | None = None) -> dict[str, Any]:
    """The body of an error; also the last event of a stream that fails."""
    said = {"message": message, "type": _TYPES.get(code, "invalid_request_error"), "param": param, "code": code}
    return {"error": said}


def horde_error_object(error: HordeError) -> dict[str, Any]:
    """`HordeError` on this wire."""
    return error_object(error.code, error.message, param=error.param)


def internal_error_object() -> dict[str, Any]:
    """What is said of a fault of ours: nothing but that it is one."""
    return error_object(INTERNAL_ERROR, "The broker failed at this; the fault is on its side.")


def retry_headers(code: str, status: int, retry_after: float | None = None) -> dict[str, str]:
    """When to try again, or that it is of no use.

    Args:
        retry_after: seconds; None for those that are usual.
    """
    if code in RETRYABLE:
        return {"Retry-After": str(math.ceil(DEFAULT_RETRY_SECONDS if retry_after is None else retry_after))}
    if status in _RETRIED or status >= 500:
        return {"x-should-retry": "false"}
    return {}


def invalid_input_object(errors: dict[str, str], message: str) -> dict[str, Any]:
    """Refused input: the first of the fields at fault, which is the one that `param` names.

    Args:
        errors: dotted path -> what is wrong with it; empty when the body is not readable at all.
    """
    for path, said in errors.items():
        shown = f"{path}: {said}" if path else said
        return error_object(ErrorCode.INVALID_REQUEST, shown, param=path.partition(".")[0] or None)
    return error_object(ErrorCode.INVALID_REQUEST, message)
