"""How often one address or key may call which route: AI Horde's limits, except that a status may be read ten times a
second per request. Every limit is in `LIMITS`; a route that is not there has the default.

Workers that pop each second and clients that poll twice a second never meet a limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, request
from flask_limiter import Limiter

from horde.api.address import limit_key
from horde.api.identity import ANONYMOUS_KEY, given_key
from horde.errors import HordeError
from horde.settings import Settings

DEFAULT = "90/minute"


@dataclass(frozen=True)
class Limit:
    """`amount` calls by one caller; `caller` tells them apart, `unless` says where it does not apply."""

    amount: str
    caller: Callable[[], str]
    unless: Callable[[], bool] | None = None


def _by_address() -> str:
    return limit_key()


def _by_address_and_path() -> str:
    # Hashed, since a path is the caller's to choose and as long as it likes.
    return f"{limit_key()} {hashlib.sha256(request.path.encode()).hexdigest()[:32]}"


def _by_key() -> str:
    """The key's hash: limits may lie in Redis, and a key is a secret."""
    return hashlib.sha256((_key() or "").encode()).hexdigest()


def _key() -> str | None:
    try:
        return given_key()
    except HordeError:
        # Two keys that differ: the handler refuses them, and until then they are one caller's.
        return ""


def _anonymous() -> bool:
    return _key() in {ANONYMOUS_KEY, None}


def _registered() -> bool:
    return not _anonymous()


# One machine may hold many chats open at once; how many of them wait is bounded per user.
_CHAT = (
    Limit("60/second", _by_address),
    Limit("2/second", _by_address, unless=_registered),
    Limit("60/second", _by_key, unless=_anonymous),
)
_STATUS = (Limit("10/second", _by_address_and_path),)
_WORK = (Limit("60/second", _by_address),)

_ASK = (
    Limit("90/minute", _by_address),
    Limit("2/second", _by_address),
    Limit("2/second", _by_key, unless=_anonymous),
    Limit("60/second", _by_key, unless=_registered),
)

LIMITS: dict[str, tuple[Limit, ...]] = {
    "text.ask": _ASK,
    "chat.ask": _ASK,
    "chat.read_status": _STATUS,
    "chat.cancel": _STATUS,
    "text.read_status": _STATUS,
    "text.cancel": _STATUS,
    "text.pop": _WORK,
    "text.submit": _WORK,
    "chat_work.pop_chat": _WORK,
    "chat_work.submit_chat": _WORK,
    "openai_chat.complete": _CHAT,
    "openai_completions.complete": _CHAT,
    # Twenty a second from each worker that streams, and a user may have twenty of them at home.
    "progress.post": (Limit("400/second", _by_address),),
    "workers.change": (Limit("30/minute", _by_address),),
    # Tens of megabytes each.
    "registry.put_tokenizer": (Limit("10/minute", _by_address),),
    "registry.read_tokenizer": (Limit("30/minute", _by_address),),
}
LIMITED = ("text.", "chat.", "chat_work.", "progress.", "status.", "workers.", "users.", "registry.", "openai_")
UNLIMITED = frozenset({"status.read_heartbeat"})


def install_limits(app: Flask, settings: Settings) -> None:
    """Put the limits around the routes that `app` has by now; none with `rate_limits="off"`.

    When the storage does not answer, the counters of this process take over.
    """
    if settings.rate_limits == "off":
        return
    limiter = Limiter(
        limit_key,
        storage_uri=settings.rate_limit_storage,
        headers_enabled=True,
        strategy="fixed-window",
        in_memory_fallback_enabled=settings.rate_limit_storage != "memory://",
    )
    # Runs after the limiter's own hook, which rounds a fraction of a second down to "now".
    app.after_request(_never_at_once)
    limiter.init_app(app)
    for endpoint in list(app.view_functions):
        if not endpoint.startswith(LIMITED) or endpoint in UNLIMITED:
            continue
        view: Any = app.view_functions[endpoint]
        for limit in LIMITS.get(endpoint, (Limit(DEFAULT, _by_address),)):
            view = limiter.limit(limit.amount, key_func=limit.caller, exempt_when=limit.unless)(view)
        app.view_functions[endpoint] = view


def _never_at_once(response: Response) -> Response:
    if response.status_code == 429 and response.headers.get("Retry-After", "0") == "0":
        response.headers["Retry-After"] = "1"
    return response
