"""What of a request is logged, and how loudly: only a failure of the broker is an error."""

from __future__ import annotations

from typing import Any

import pytest
from apiflask import APIFlask
from structlog.testing import capture_logs

from horde.errors import STATUS, ErrorCode, HordeError, unavailable


def logged(app: APIFlask, error: Exception) -> list[dict[str, Any]]:
    """The lines about a request that fails by `error`."""

    def fail() -> None:
        raise error

    app.add_url_rule("/fail", "fail", fail)
    with capture_logs() as lines:
        app.test_client().get("/fail")
    return [dict(line) for line in lines if line["event"] == "request"]


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.BROKER_UNAVAILABLE])
def test_what_a_rule_refuses_is_no_error_of_the_broker(app: APIFlask, code: ErrorCode) -> None:
    [line] = logged(app, HordeError(code, "said", rc="Name"))
    assert (line["log_level"], line["status"], line["route"]) == ("info", STATUS[code], "/fail")


@pytest.mark.parametrize(("error", "status"), [(unavailable(), 503), (RuntimeError("a fault"), 500)])
def test_what_the_broker_fails_at_is_an_error(app: APIFlask, error: Exception, status: int) -> None:
    [line] = logged(app, error)
    assert (line["log_level"], line["status"]) == ("error", status)
