"""The outermost layer of the application: what every answer carries, whoever made it.

CORS for any origin, also on errors and before Flask has seen the request; preflights; `nosniff`; the node's name; the
request's id. Works on WSGI, so that nothing inside can forget it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

from horde.api.broker import Broker

STARTED, REQUEST_ID = "horde.started", "horde.request_id"
_REFLECTED = re.compile(r"[A-Za-z0-9._-]{1,64}")

CORS = [
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Allow-Methods", "POST, GET, OPTIONS, PUT, DELETE, PATCH"),
    (
        "Access-Control-Allow-Headers",
        (
            "Accept, Content-Type, Content-Length, Accept-Encoding, X-CSRF-Token, apikey, Authorization, Client-Agent, "
            "X-Fields, X-Forwarded-For, X-Request-Id, Idempotency-Key, Proxied-For, Proxy-Authorization, "
            # What OpenAI's SDK sends with each call, from a page too.
            "OpenAI-Organization, OpenAI-Project, X-Stainless-Arch, X-Stainless-Helper-Method, X-Stainless-Lang, "
            "X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Retry-Count, X-Stainless-Runtime, "
            "X-Stainless-Runtime-Version, X-Stainless-Timeout"
        ),
    ),
    (
        "Access-Control-Expose-Headers",
        (
            "Horde-Node, Retry-After, X-Horde-Request-Id, X-Request-Id, X-Should-Retry, "
            "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset"
        ),
    ),
]
SAFETY = [("X-Content-Type-Options", "nosniff")]
_PREFLIGHT = [*CORS, ("Access-Control-Max-Age", "86400"), *SAFETY]


class Edge:
    """A WSGI application around another."""

    def __init__(self, inner: WSGIApplication, broker: Broker) -> None:
        self._inner = inner
        self._broker = broker

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        if environ["REQUEST_METHOD"] == "OPTIONS":
            start_response("204 NO CONTENT", [*_PREFLIGHT, ("Horde-Node", self._broker.node)])
            return []
        given = environ.get("HTTP_X_REQUEST_ID", "")
        request_id = given if _REFLECTED.fullmatch(given) else uuid.uuid4().hex
        environ[STARTED] = perf_counter()
        environ[REQUEST_ID] = request_id
        extra = [*CORS, *SAFETY, ("Horde-Node", self._broker.node), ("X-Request-Id", request_id)]

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
            return start_response(status, headers + extra, exc_info)

        return self._inner(environ, start)
