"""What libraries log, in the broker's own format and without what they know of requests.

A traceback is told as the types of its exceptions and the lines it passed: a message may quote a statement, a parameter
or a key.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from typing import Any

import structlog

from horde.api.errors import describe


class LibraryLogs(logging.Handler):
    """A handler of the root logger that writes through structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        error = record.exc_info[1] if record.exc_info else None
        told: dict[str, Any] = {"logger": record.name}
        if error is not None:
            told["error"] = describe(error)
            told["lines"] = "".join(traceback.format_tb(error.__traceback__))
        # Who logs must not fail at it, and what `logging` prints of a failure would quote the record.
        with suppress(Exception):
            structlog.get_logger(record.name).log(record.levelno, _message(record), **told)


def _message(record: logging.LogRecord) -> str:
    """The record's text, with the types of exceptions in place of what they say."""
    message = _without_words(record.msg)
    arguments = record.args
    if not arguments:
        return str(message)
    if isinstance(arguments, tuple):
        arguments = tuple(_without_words(argument) for argument in arguments)
    try:
        return str(message) % arguments
    except (TypeError, ValueError):
        return str(message)


def _without_words(value: Any) -> Any:
    return describe(value) if isinstance(value, BaseException) else value


def take_library_logs() -> None:
    """Have everything that is logged at WARNING and above written by `LibraryLogs`, once."""
    root = logging.getLogger()
    if not any(isinstance(handler, LibraryLogs) for handler in root.handlers):
        root.addHandler(LibraryLogs(logging.WARNING))
    # waitress logs a line for each client that hangs up and each queued task.
    for noisy in ("waitress", "waitress.queue", "flask-limiter"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
