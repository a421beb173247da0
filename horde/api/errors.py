"""Every error as JSON, in the dialect of its path: AI Horde's `{"message", "rc"}`, on failed validation `{"message", "errors"}`;
under `/v1` OpenAI's, which is in `horde.api.openai_errors`.

Nothing of a request gets into an answer or a log line here: an unexpected exception is logged by its type and the
lines it passed, never by its message, which may quote a prompt or a statement's parameters.
"""

from __future__ import annotations

import math
import traceback
from typing import Any

import structlog
from flask import Flask, Response, request
from flask_limiter import RateLimitExceeded
from werkzeug.exceptions import HTTPException

from horde.api.answers import answer
from horde.api.openai_errors import (
    INTERNAL_ERROR,
    error_object,
    horde_error_object,
    internal_error_object,
    invalid_input_object,
    retry_headers,
    speaks_openai,
)
from horde.api.strict_json import BodyError
from horde.errors import ErrorCode, HordeError

VALIDATION_FAILED = "Input payload validation failed"
NUL_IN_BODY = "NulByteInPayload"
# In the environment of a request: the code of the rule that refused it.
REFUSED_BY = "horde.refused_by"
log = structlog.get_logger("horde.api")


class InvalidInputError(Exception):
    """A 400 that names fields: `errors` maps dotted paths to what is wrong with them."""

    def __init__(self, errors: dict[str, str], *, message: str = VALIDATION_FAILED, rc: str | None = None) -> None:
        super().__init__(message)
        self.errors = errors
        self.message = message
        self.rc = rc


def error_body(error: HordeError) -> dict[str, Any]:
    """`HordeError` on the wire of AI Horde."""
    body: dict[str, Any] = {"message": error.message, "rc": error.rc}
    if error.errors:
        body["errors"] = error.errors
    return body


def install_error_handlers(app: Flask) -> None:
    """Make every failure of `app` JSON."""
    app.register_error_handler(HordeError, _horde_error)
    app.register_error_handler(InvalidInputError, _invalid_input)
    app.register_error_handler(BodyError, _bad_body)
    app.register_error_handler(RateLimitExceeded, _rate_limited)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected)


def _openai() -> bool:
    return speaks_openai(request.path)


def _horde_error(error: HordeError) -> Response:
    request.environ[REFUSED_BY] = error.code
    if _openai():
        headers = retry_headers(error.code, error.status, error.retry_after)
        return answer(horde_error_object(error), error.status, headers)
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return answer(error_body(error), error.status, headers)


def _invalid_input(error: InvalidInputError) -> Response:
    if _openai():
        return answer(invalid_input_object(error.errors, error.message), 400)
    body: dict[str, Any] = {"errors": error.errors, "message": error.message}
    if error.rc:
        body["rc"] = error.rc
    return answer(body, 400)


def _bad_body(error: BodyError) -> Response:
    rc = NUL_IN_BODY if error.nul else None
    if error.errors or _openai():
        message = VALIDATION_FAILED if error.errors else error.message
        return _invalid_input(InvalidInputError(error.errors, message=message, rc=rc))
    return answer({"message": error.message, **({"rc": rc} if rc else {})}, 400)


def _rate_limited(error: RateLimitExceeded) -> Response:
    # `Retry-After` is added where the limits are, which know when.
    return _said(ErrorCode.RATE_LIMIT_EXCEEDED, str(error.description), 429, {})


def _http_error(error: HTTPException) -> Response:
    status = error.code or 500
    if error.response is not None:
        status = error.response.status_code
        return _said(_code(status), error.name, status, {})
    headers = {name: value for name, value in error.get_headers() if name != "Content-Type"}
    return _said(_code(status), _MESSAGES.get(status, error.name), status, headers)


def _said(code: str, message: str, status: int, headers: dict[str, str]) -> Response:
    """A failure that no rule of the horde made: AI Horde's dialect has no name for it."""
    if not _openai():
        return answer({"message": message}, status, headers)
    if code != ErrorCode.RATE_LIMIT_EXCEEDED:
        headers = headers | retry_headers(code, status)
    return answer(error_object(code, message), status, headers)


def _code(status: int) -> str:
    if status == 404:
        return ErrorCode.NOT_FOUND
    return ErrorCode.INVALID_REQUEST if status < 500 else INTERNAL_ERROR


_MESSAGES = {
    404: "There is nothing at this address",
    405: "This address does not answer to that method",
    413: "The body is larger than this route takes",
    415: "The body has to be JSON, with `Content-Type: application/json`",
}


def _unexpected(error: Exception) -> Response:
    log_unexpected(error, method=request.method, route=request.url_rule.rule if request.url_rule else None)
    if _openai():
        return answer(internal_error_object(), 500, retry_headers(INTERNAL_ERROR, 500))
    return answer({"message": "The broker failed at this; the fault is on its side.", "rc": "InternalError"}, 500)


def log_unexpected(error: Exception, *, method: str, route: str | None) -> None:
    """Tell the log of a fault of ours, and nothing of what was asked."""
    log.error(
        "unexpected_error",
        method=method,
        route=route,
        error=describe(error),
        sqlstate=_sqlstate(error),
        lines="".join(traceback.format_tb(error.__traceback__)),
    )


def describe(error: BaseException) -> str:
    """The types of an exception and of its causes."""
    names = []
    current: BaseException | None = error
    while current is not None:
        names.append(f"{type(current).__module__}.{type(current).__qualname__}")
        current = current.__cause__ or current.__context__
    return " <- ".join(names)


def _sqlstate(error: Exception) -> str | None:
    code = getattr(getattr(error, "orig", None), "pgcode", None)
    return code if isinstance(code, str) else None
