"""The one error type: raised by use cases and rooms, rendered by the API in its own dialect.

`code` is from the closed list of native error codes; `rc` is the name AI Horde's clients know.
Whether a client should retry is a property of the code, not of the place that raised it.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The closed list; each value has one HTTP status and one answer to "should I retry?"."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_API_KEY = "invalid_api_key"
    INSUFFICIENT_KUDOS = "insufficient_kudos"
    PERMISSION_DENIED = "permission_denied"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    CONCURRENCY_EXCEEDED = "concurrency_exceeded"
    NO_CAPACITY = "no_capacity"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    GENERATION_FAULTED = "generation_faulted"
    BROKER_UNAVAILABLE = "broker_unavailable"
    CANCELLED = "cancelled"


STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.UNSUPPORTED_PARAMETER: 400,
    ErrorCode.INVALID_API_KEY: 401,
    ErrorCode.INSUFFICIENT_KUDOS: 403,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.IDEMPOTENCY_CONFLICT: 422,
    ErrorCode.RATE_LIMIT_EXCEEDED: 429,
    ErrorCode.CONCURRENCY_EXCEEDED: 429,
    ErrorCode.NO_CAPACITY: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.GENERATION_FAULTED: 502,
    ErrorCode.BROKER_UNAVAILABLE: 503,
    # Told as an event where a stream has begun; the status is for whoever has had nothing yet.
    ErrorCode.CANCELLED: 409,
}

RETRYABLE = frozenset(
    {
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.CONCURRENCY_EXCEEDED,
        ErrorCode.NO_CAPACITY,
        ErrorCode.BROKER_UNAVAILABLE,
    }
)


class HordeError(Exception):
    """An answer the caller should see.

    Args:
        code: one of `ErrorCode`; fixes the HTTP status.
        message: a sentence for the person who reads it; names the field where there is one.
        rc: AI Horde's name for it (appendix of the wire contract), when it has one.
        errors: dotted field path -> what is wrong with it.
        retry_after: seconds, for retryable codes.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        rc: str,
        errors: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.rc = rc
        self.errors = errors
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        """HTTP status of this error."""
        return STATUS[self.code]

    @property
    def param(self) -> str | None:
        """The field of the body at fault, without the place within it; None where there is none."""
        return next(iter(self.errors)).partition(".")[0] if self.errors else None

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.code in RETRYABLE


def bad_request(message: str, *, rc: str = "BadRequest", field: str | None = None) -> HordeError:
    """A 400; `field` is the dotted path of the input at fault."""
    return HordeError(ErrorCode.INVALID_REQUEST, message, rc=rc, errors={field: message} if field else None)


def forbidden(message: str, *, rc: str = "Forbidden") -> HordeError:
    """A 403."""
    return HordeError(ErrorCode.PERMISSION_DENIED, message, rc=rc)


def not_found(message: str, *, rc: str) -> HordeError:
    """A 404."""
    return HordeError(ErrorCode.NOT_FOUND, message, rc=rc)


def invalid_key() -> HordeError:
    """The 401 for a key nobody holds."""
    return HordeError(
        ErrorCode.INVALID_API_KEY,
        "No user matches this API key. Create one with `horde user create`.",
        rc="InvalidAPIKey",
    )


def unavailable(
    message: str = "The broker cannot reach its database; try again shortly.", *, retry_after: float = 2.0
) -> HordeError:
    """A 503 with `Retry-After`."""
    return HordeError(ErrorCode.BROKER_UNAVAILABLE, message, rc="Unavailable", retry_after=retry_after)
