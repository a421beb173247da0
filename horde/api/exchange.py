"""One request and its answer, on top of waitress: read strictly, answered in a thread of its own.

A request that tells its length twice is refused, and one with a larger body than its route may take. What waitress
refuses by itself is JSON with CORS headers. The application may leave word what to do when the client hangs up or the
answer cannot be sent (`horde.api.undelivered`). An answer of unknown length is a stream: each piece leaves at once, and
who does not read on holds its thread back.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import orjson
import structlog
from waitress.channel import ClientDisconnected
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.task import ErrorTask, WSGITask
from waitress.utilities import Error

from horde.api.answers import JSON_TYPE
from horde.api.edge import CORS, SAFETY
from horde.api.errors import describe
from horde.api.undelivered import ON_GONE, ON_UNDELIVERED
from horde.usecases.models import MAX_TOKENIZER_BYTES

_FRAMING = re.compile(rb"^(content-length|transfer-encoding)[ \t]*:", re.IGNORECASE | re.MULTILINE)
log = structlog.get_logger("horde.connections")


# Method, beginning of the path -> bytes of a body. All others have the server's limit.
LARGE_BODIES = {("PUT", "/api/v2/tokenizers/"): MAX_TOKENIZER_BYTES + (1 << 20)}
# Each may lie in a file of that size before anybody has seen its key.
MOST_LARGE_BODIES = 16
RETRY_AFTER = 10


# waitress has no annotations: to a type checker whatever derives from it derives from anything, which the marks below admit.
class BusyError(Error):  # type: ignore[misc]
    """Too many large bodies arrive at once."""

    code = 503
    reason = "Service Unavailable"


class StrictParser(HTTPRequestParser):  # type: ignore[misc]
    """Refuses a request that tells its length twice: a proxy in front of us may have believed the other one. Lets a body
    be larger than others where `LARGE_BODIES` says so."""

    adj: Any
    error: Any
    _large: ClassVar[weakref.WeakSet[StrictParser]] = weakref.WeakSet()
    _too_many = False

    def received(self, data: bytes) -> int:
        """Take input; how many bytes of it belong to this request."""
        taken = int(super().received(data))
        if self._too_many:
            # Rather than "too large", which it is as long as no room is made for it.
            self.error = BusyError("too many large bodies at once")
            self.completed = True
        return taken

    def close(self) -> None:
        """The request is over."""
        super().close()
        self._large.discard(self)

    def parse_header(self, header_plus: bytes) -> None:
        """Read the head of a request; raises ParsingError, which is a 400 that ends the connection."""
        super().parse_header(header_plus)
        told = {name.lower() for name in _FRAMING.findall(header_plus)}
        if b"transfer-encoding" in told and (b"content-length" in told or self.version != "1.1"):
            raise ParsingError("The length of the request is ambiguous")
        if self.chunked or self.content_length >= self.adj.max_request_body_size:
            self._allow_large()

    def _allow_large(self) -> None:
        for (method, path), most in LARGE_BODIES.items():
            if self.command == method and self.path.startswith(path):
                if len(self._large) >= MOST_LARGE_BODIES:
                    self._too_many = True
                    return
                self._large.add(self)
                self.adj = copy.copy(self.adj)
                self.adj.max_request_body_size = most


class JsonRefusal(ErrorTask):  # type: ignore[misc]
    """What waitress refuses before the application sees it."""

    def execute(self) -> None:
        """Write it."""
        error = self.request.error
        self.status = f"{error.code} {error.reason}"
        body = orjson.dumps({"message": error.reason})
        self.response_headers.extend([("Content-Type", JSON_TYPE), *CORS, *SAFETY])
        if isinstance(error, BusyError):
            self.response_headers.append(("Retry-After", str(RETRY_AFTER)))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class Exchange(WSGITask):  # type: ignore[misc]
    """One request in its thread."""

    def get_environment(self) -> dict[str, Any]:
        """The WSGI environment."""
        environ: dict[str, Any] = super().get_environment()
        environ.setdefault(ON_UNDELIVERED, [])
        environ.setdefault(ON_GONE, self.channel.if_gone)
        return environ

    def service(self) -> None:
        """Answer the request."""
        cut_off = False
        try:
            super().service()
        except ClientDisconnected:
            cut_off = True
            raise
        finally:
            self.channel.over()
            remedies = (self.environ or {}).get(ON_UNDELIVERED)
            if remedies:
                self.channel.answered(remedies, cut_off=cut_off)

    def write(self, data: bytes) -> None:
        """Hand over a piece of the answer; waits while too much of it is unread.

        Raises:
            ClientDisconnected: nobody is there to read it.
        """
        if not self.wrote_header and self.content_length is None:
            self.channel.narrow()
        super().write(b"" if self.request.command == "HEAD" else data)

    def finish(self) -> None:
        """Write the end."""
        if self.request.command == "HEAD":
            self.write(b"")
            # The answer to a HEAD ends with its head, also where that promises chunks.
            self.chunked_response = False
        super().finish()


class Remedy:
    """Runs in a request's thread what the application left word of."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def service(self) -> None:
        """Do it."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 nobody is there to be told
            log.warning("remedy_failed", error=describe(error))

    def cancel(self) -> None:
        """The server ends: what a crash would leave is left."""
