"""The HTTP client: a look at the key, pop, progress, submit, and what is published of a model; each call is made once, and
a failure says whether trying again makes sense.

An instance belongs to one thread.
"""

from __future__ import annotations

import json
import time
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import requests

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
# A post of progress is one of many, and claims end while it hangs.
_PROGRESS_SECONDS = 10.0
# Nobody is kept from leaving by a broker that is away.
_LEAVING_SECONDS = 3.0
# A tokenizer has megabytes, and a home connection sends slowly.
_UPLOAD_SECONDS = 300.0
_UNAVAILABLE = frozenset({408, 425, 429})
# Reasons to be turned away that pass by themselves or when somebody acts; every other 403 is final.
_PASSING = frozenset({"WorkerMaintenance", "WorkerFlaggedMaintenance", "TimeoutIP", "TooManyNewIPs"})

Kind = Literal["text", "chat"]


class BrokerUnavailableError(Exception):
    """No usable answer; the same call with the same key may succeed later. `retry_after`: seconds, if it was said."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PausedError(Exception):
    """The broker gives this worker nothing for now; the message is for its owner."""


class TurnedAwayError(Exception):
    """The broker will not work with this worker as it is set up; the message is for its owner."""


class NoProgressRouteError(Exception):
    """This broker does not take progress, as AI Horde's own does not."""


class NoChatRouteError(Exception):
    """This broker hands out no chat, as AI Horde's own does not."""


class NotPublishedError(Exception):
    """The broker does not take this from us; the message says why. `permitted` is False where it takes nothing of ours."""

    def __init__(self, message: str, *, permitted: bool) -> None:
        super().__init__(message)
        self.permitted = permitted


class JobGoneError(Exception):
    """The broker takes nothing more for this job: unknown, already settled, or not ours."""


def normalise_url(url: str) -> str:
    """The broker's address without a trailing `/`, `/api` or `/api/v2`.

    Raises:
        ValueError: not an http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:7001")
    return url.rstrip("/").removesuffix("/v2").removesuffix("/api").rstrip("/")


class BrokerClient:
    """Talks to one broker as one worker.

    Args:
        url: as `normalise_url` takes it.
        api_key: sent as a header and kept nowhere else.
        agent: `name:version:contact`.
    """

    def __init__(self, url: str, api_key: str, agent: str) -> None:
        self.url = normalise_url(url)
        self._answered: set[Kind] = set()
        self._progress_taken = False
        self._session = requests.Session()
        self._session.headers.update({"apikey": api_key, "Client-Agent": agent})

    def check_key(self) -> None:
        """Ask whose key this is; whatever the answer, if not that it is nobody's, pops will tell more.

        Raises:
            BrokerUnavailableError: no usable answer.
            TurnedAwayError: nobody's.
        """
        answer = self._call("GET", "find_user", _ANSWER_SECONDS)
        message, rc = _error(answer)
        if answer.status_code == 401 or (answer.status_code == 404 and rc == "UserNotFound"):
            raise TurnedAwayError(_unknown_key(message))

    def pop(self, body: dict[str, Any], idempotency_key: str, kind: Kind = "text") -> dict[str, Any]:
        """Ask for work; `body["wait"]` is how long the broker may take.

        Raises:
            BrokerUnavailableError: try again, with the same key: the broker may have answered, and the answer got lost.
            PausedError: try again later.
            NoChatRouteError: do not try again with `chat`.
            TurnedAwayError: do not try again.
        """
        patience = float(body.get("wait", 0)) + _ANSWER_SECONDS
        answer = self._call("POST", f"generate/{kind}/pop", patience, body, idempotency_key)
        if answer.status_code == 200:
            content = _json_object(answer)
            self._answered.add(kind)
            return content
        message, rc = _error(answer)
        if kind == "chat" and answer.status_code in {404, 405} and not rc and kind not in self._answered:
            raise NoChatRouteError(f"{self.url} hands out no chat")
        if answer.status_code == 403 and (rc in _PASSING or "maintenance mode" in message.lower()):
            raise PausedError(message)
        if answer.status_code == 401:
            raise TurnedAwayError(_unknown_key(message))
        if answer.status_code == 404 and kind in self._answered:
            # It was a broker a moment ago: a proxy speaks while the broker restarts.
            raise BrokerUnavailableError(f"404 from {self.url}: {message}")
        if answer.status_code == 404:
            raise TurnedAwayError(
                f"{self.url} answers, but has no {answer.url.removeprefix(self.url)}: is it a broker?"
            )
        raise TurnedAwayError(f"{message} ({rc or answer.status_code})")

    def post_progress(self, body: dict[str, Any], patience: float = _PROGRESS_SECONDS) -> dict[str, Any]:
        """Tell how far the jobs held are; the answer says which of them to stop.

        Raises:
            BrokerUnavailableError: not taken; the next post may be.
            NoProgressRouteError: do not try again.
        """
        patience = _LEAVING_SECONDS if body.get("leaving") else _PROGRESS_SECONDS
        answer = self._call("POST", "generate/progress", patience, body)
        if answer.status_code == 200:
            content = _json_object(answer)
            self._progress_taken = True
            return content
        message, rc = _error(answer)
        if answer.status_code in {404, 405} and not rc and not self._progress_taken:
            raise NoProgressRouteError(f"{self.url} takes no progress")
        raise BrokerUnavailableError(f"{message} ({rc or answer.status_code})")

    def submit(self, body: dict[str, Any], idempotency_key: str, kind: Kind = "text") -> float:
        """Deliver a result, a fault or a release; the reward, in kudos.

        Raises:
            BrokerUnavailableError: try again, with the same key.
            JobGoneError: do not try again.
        """
        answer = self._call("POST", f"generate/{kind}/submit", _ANSWER_SECONDS, body, idempotency_key)
        if answer.status_code == 200:
            reward = _json_object(answer).get("reward", 0)
            return float(reward) if isinstance(reward, int | float) else 0.0
        message, rc = _error(answer)
        if not rc and answer.status_code == 404:
            # A broker names the reason; this is a proxy in front of one.
            raise BrokerUnavailableError(f"404 from {self.url}: {message}")
        raise JobGoneError(f"{message} ({rc or answer.status_code})")

    def has_tokenizer(self, revision: str) -> bool:
        """Whether the broker knows this one.

        Raises:
            BrokerUnavailableError: try again.
            NotPublishedError: it keeps none.
        """
        return self._is_there(f"tokenizers/{revision}", revision)

    def put_tokenizer(self, revision: str, body: bytes) -> None:
        """Publish a tokenizer; `body` is canonical JSON.

        Raises:
            BrokerUnavailableError: try again.
            NotPublishedError: do not.
        """
        self._publish(f"tokenizers/{revision}", body)

    def has_model_revision(self, model: str, revision: str) -> bool:
        """Whether the broker knows this one.

        Raises:
            BrokerUnavailableError: try again.
            NotPublishedError: it keeps none.
        """
        return self._is_there(_model_route(model, revision), revision)

    def put_model_revision(self, model: str, revision: str, body: bytes) -> None:
        """Publish what a model's revision is; `body` is JSON.

        Raises:
            BrokerUnavailableError: try again.
            NotPublishedError: do not.
        """
        self._publish(_model_route(model, revision), body)

    def close(self) -> None:
        """Let go of the connection."""
        self._session.close()

    def _is_there(self, route: str, revision: str) -> bool:
        # What is asked about may have megabytes, and only whether it is there matters.
        answer = self._call("GET", route, _ANSWER_SECONDS, headers={"If-None-Match": f'"{revision}"'}, stream=True)
        with answer:
            if answer.status_code != 404:
                return answer.status_code in {200, 304}
            _, rc = _error(answer)
        if not rc:
            raise NotPublishedError(f"{self.url} has no register of models", permitted=False)
        return False

    def _publish(self, route: str, body: bytes) -> None:
        answer = self._call("PUT", route, _UPLOAD_SECONDS, body)
        if answer.status_code not in {200, 201}:
            message, rc = _error(answer)
            permitted = answer.status_code not in {401, 403}
            raise NotPublishedError(f"{message} ({rc or answer.status_code})", permitted=permitted)

    def _call(
        self,
        method: str,
        route: str,
        patience: float,
        body: dict[str, Any] | bytes | None = None,
        key: str | None = None,
        *,
        headers: dict[str, str] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        headers = dict(headers or {})
        if key is not None:
            headers["Idempotency-Key"] = key
        if body is not None:
            headers["Content-Type"] = "application/json"
        if isinstance(body, dict):
            # Without spaces: results with log probabilities come near what a broker takes in one body.
            body = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
        try:
            answer = self._session.request(
                method,
                f"{self.url}/api/v2/{route}",
                data=body,
                headers=headers,
                timeout=(min(_CONNECT_SECONDS, patience), patience),
                allow_redirects=False,
                stream=stream,
            )
            if answer.status_code != 200:
                # Read to its end here, where a connection that breaks off has its place.
                _ = answer.content
        except requests.RequestException as error:
            raise BrokerUnavailableError(f"no answer from {self.url} ({_cause(error)})") from error
        if answer.status_code >= 500 or answer.status_code in _UNAVAILABLE:
            message, _ = _error(answer)
            raise BrokerUnavailableError(f"{answer.status_code} from {self.url}: {message}", _retry_after(answer))
        return answer


def _model_route(model: str, revision: str) -> str:
    """A name may have slashes of its own: those stay."""
    return f"models/{quote(model)}/revisions/{revision}"


def _unknown_key(message: str) -> str:
    return f"the broker does not know this API key: {message}"


def _json_object(answer: requests.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except (ValueError, RecursionError) as error:
        raise BrokerUnavailableError("the answer is not JSON; is something else in front of the broker?") from error
    if not isinstance(content, dict):
        raise BrokerUnavailableError("the answer is not a JSON object")
    return content


def _error(answer: requests.Response) -> tuple[str, str]:
    """Message (with the fields at fault) and rc of an error body; a plain one where the body is not JSON."""
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return answer.reason or "no explanation", ""
    message = str(content.get("message") or answer.reason)
    errors = content.get("errors")
    if isinstance(errors, dict) and errors:
        message += ": " + "; ".join(f"{field}: {problem}" for field, problem in errors.items())
    return message, str(content.get("rc") or "")


def _retry_after(answer: requests.Response) -> float | None:
    """`Retry-After` in seconds, from either of its forms; None when absent or unreadable."""
    value = answer.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _cause(error: requests.RequestException) -> str:
    """What went wrong, without addresses of objects and chains of wrapped errors."""
    if isinstance(error, requests.Timeout):
        return "timed out"
    text = str(error)
    for known in ("Connection refused", "Connection reset", "Remote end closed", "Name or service not known"):
        if known in text:
            return known.lower()
    return type(error).__name__
