"""Counts, times and logs requests, by route template: never a path, a key, a prompt or a body.

Failures of the broker are logged as errors, refusals at `info`, also those by a rule with a status of 500 and above
(nobody serves the model, the deadline has passed, two workers failed), the rest at `debug`, since a busy broker answers
thousands of polls a second.
"""

from __future__ import annotations

from time import perf_counter

import structlog
from flask import Flask, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from horde.api.edge import REQUEST_ID, STARTED
from horde.api.errors import REFUSED_BY
from horde.errors import ErrorCode

_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
UNMATCHED = "unmatched"
# None: no rule refused it.
_FAILURES = frozenset({None, ErrorCode.BROKER_UNAVAILABLE})
log = structlog.get_logger("horde.requests")


def install_request_log(app: Flask, *, logs_all: bool) -> None:
    """Observe every request of `app`, and serve the figures at `/metrics`.

    Args:
        logs_all: whether the level of the log shows the requests that went well.
    """
    registry = CollectorRegistry()
    counted = Counter("horde_http_requests", "Requests answered", ["method", "route", "status"], registry=registry)
    timed = Histogram(
        "horde_http_request_seconds",
        "Time from the whole request to the answer; a long poll counts its wait",
        ["route"],
        buckets=_BUCKETS,
        registry=registry,
    )

    children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def observe(response: Response) -> Response:
        status, rule = response.status_code, request.url_rule
        labels = (_method(request.method), rule.rule if rule is not None else UNMATCHED, status)
        found = children.get(labels)
        if found is None:
            method, route, _ = labels
            found = children[labels] = counted.labels(method, route, str(status)), timed.labels(route)
        environ = request.environ
        seconds = perf_counter() - environ.get(STARTED, perf_counter())
        found[0].inc()
        found[1].observe(seconds)
        if status >= 400 or logs_all:
            failed = status >= 500 and environ.get(REFUSED_BY) in _FAILURES
            write = log.error if failed else log.info if status >= 400 else log.debug
            write(
                "request",
                method=labels[0],
                route=labels[1],
                status=status,
                milliseconds=round(seconds * 1000, 1),
                request_id=environ.get(REQUEST_ID),
            )
        return response

    app.after_request(observe)

    @app.get("/metrics")
    @app.doc(hide=True)  # type: ignore[attr-defined,untyped-decorator]
    def metrics() -> Response:
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


def _method(method: str) -> str:
    """A method anyone may make up, as a label."""
    return method if method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"} else "OTHER"
