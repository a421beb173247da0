"""How often one address or key may call which route: AI Horde's limits, except that a status may be read ten times a
second per request, and that `/v1`, where nobody polls, has its own. Every limit is in `LIMITS`; a route that is not
there has the default.

Workers that pop each second and clients that poll twice a second never meet a limit.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from flask import Flask, Response, request
from flask_limiter import Limiter, RequestLimit

from horde.api.address import limit_key
from horde.api.identity import ANONYMOUS_KEY, given_key
from horde.errors import HordeError
from horde.settings import Settings

DEFAULT = "90/minute"
log = structlog.get_logger("horde.api")


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


# Each of them is read and counted by its tokenizer before a rule can refuse it.
_CHAT = (
    Limit("40/second", _by_address),
    Limit("1200/minute", _by_address),
    Limit("2/second", _by_address, unless=_registered),
    Limit("90/minute", _by_address, unless=_registered),
    Limit("20/second", _by_key, unless=_anonymous),
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
        strategy="fixed-window",
        in_memory_fallback_enabled=settings.rate_limit_storage != "memory://",
    )
    limiter.init_app(app)
    for endpoint in list(app.view_functions):
        if not endpoint.startswith(LIMITED) or endpoint in UNLIMITED:
            continue
        view: Any = app.view_functions[endpoint]
        for limit in LIMITS.get(endpoint, (Limit(DEFAULT, _by_address),)):
            view = limiter.limit(limit.amount, key_func=limit.caller, exempt_when=limit.unless)(view)
        app.view_functions[endpoint] = view
    app.after_request(lambda response: _tell(response, limiter.current_limits))


def _tell(response: Response, limits: list[RequestLimit]) -> Response:
    """Say how much of the limit that ends first is left and, of a call that went beyond one, when the next may come.

    The library's own headers tell of one limit whether it binds or not, and of a time to come back on every answer.
    """
    if not limits:
        return response
    try:
        resets_at, left, amount = min(
            ((limit.window.reset_time, limit.remaining, limit.limit.amount) for limit in limits),
            # Of several that are used up, the one that stays so for longest.
            key=lambda found: (found[1], -found[0]),
        )
    except Exception as error:  # noqa: BLE001 the storage went away since it counted this call: nobody loses an answer by that
        log.warning("limits_not_told", error=type(error).__qualname__)
        return response
    response.headers["X-RateLimit-Limit"] = str(amount)
    response.headers["X-RateLimit-Remaining"] = str(left)
    response.headers["X-RateLimit-Reset"] = str(math.ceil(resets_at))
    if any(limit.breached for limit in limits):
        response.headers["Retry-After"] = str(max(1, math.ceil(resets_at - time.time())))
    return response
