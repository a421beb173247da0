"""The few calls of the broker's API that `horde ask` and `horde status` make, with errors as sentences."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import click
import requests

CLIENT_AGENT = "horde-cli:0.1:unknown"
TIMEOUT = (5, 30)
# A broker that restarts is back within this; a request it has accepted is still there then.
PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 1.0


class BrokerError(click.ClickException):
    """The broker refused (`status` is HTTP's), or can't be reached; the message is for the person who asked."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BrokerClient:
    """A session with one broker; a context manager.

    Args:
        url: e.g. `http://127.0.0.1:7001`.
        api_key: sent as header `apikey`.
    """

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.headers.update({"apikey": api_key, "Client-Agent": CLIENT_AGENT})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def get(self, path: str) -> Any:
        """GET a path under `/api/v2/`.

        Raises:
            BrokerError: refused or unreachable.
        """
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST a JSON body; `BrokerError` as with `get`. Made once: repeated, it might do its work twice."""
        return self._call("POST", path, body)

    def delete(self, path: str) -> Any:
        """DELETE; `BrokerError` as with `get`."""
        return self._call("DELETE", path)

    def get_patiently(self, path: str, on_away: Callable[[str], None]) -> Any:
        """GET, and while the broker is away, busy or restarting, again for up to a minute.

        Args:
            on_away: told before each further try what keeps us waiting.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._call("GET", path)
            except _AwayError as error:
                if time.monotonic() + error.retry_after > deadline:
                    raise
                on_away(f"The broker {error.state}; trying again")
                time.sleep(error.retry_after)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = self._session.request(method, f"{self.url}/api/v2/{path}", json=body, timeout=TIMEOUT)
        except requests.exceptions.InvalidURL as error:
            raise BrokerError(f"{self.url} is not the URL of a broker.") from error
        except (requests.ConnectionError, requests.Timeout) as error:
            raise _AwayError(
                f"No broker answers at {self.url}. Is `horde up` running?", RETRY_SECONDS, "does not answer"
            ) from error
        except requests.RequestException as error:
            raise BrokerError(f"{self.url} is not the URL of a broker ({error}).") from error
        try:
            content = answer.json()
        except ValueError:
            content = None
        if answer.ok and content is not None:
            return content
        message = _message(answer, content)
        if answer.status_code in {429, 503}:
            raise _AwayError(message, _retry_after(answer), "is busy")
        raise BrokerError(message, answer.status_code)


class _AwayError(BrokerError):
    """The same call may succeed in `retry_after` seconds; `state` is what follows "The broker"."""

    def __init__(self, message: str, retry_after: float, state: str) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.state = state


def _message(answer: requests.Response, content: Any) -> str:
    if not isinstance(content, dict) or "message" not in content:
        return f"{answer.url} answered {answer.status_code}, and not as a broker does."
    details = content.get("errors")
    # A single fault's sentence may be the whole message already.
    if isinstance(details, dict) and any(str(problem) not in str(content["message"]) for problem in details.values()):
        return f"{content['message']}: " + "; ".join(f"{name}: {problem}" for name, problem in details.items())
    return str(content["message"])


def _retry_after(answer: requests.Response) -> float:
    try:
        return min(max(float(answer.headers.get("Retry-After", "")), RETRY_SECONDS), 30.0)
    except ValueError:
        return RETRY_SECONDS
