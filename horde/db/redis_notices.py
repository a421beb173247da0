"""Words between broker processes through Redis: what `horde.db.notices` says, without a lock in the database.

Only a fan-out: nothing lies in Redis that could be missed. A Redis that goes away costs time and is found again when it is
back; until then whoever waits looks by itself.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import structlog

from horde.db.notices import RETRY_SECONDS, Notices

if TYPE_CHECKING:
    import redis

# Redis serves a publication within some microseconds; the pause only gathers what comes together.
TICK = 0.005
# How often the listener looks up from its connection, to see that the end has come or Redis gone.
LOOK_UP_SECONDS = 1.0
HEALTH_SECONDS = 10
TIMEOUT_SECONDS = 5
log = structlog.get_logger(__name__)


class RedisNotices(Notices):
    """By PUBLISH and SUBSCRIBE.

    Args:
        url: `redis://`, `rediss://` or `unix://`.

    Raises:
        ValueError: the URL is none of these, or the package `redis` is not installed.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError("HORDE_REDIS_URL is set, and the package redis is not installed") from error
        self._lost = (redis.RedisError, OSError)
        try:
            # Who waits for a lost server, and how long, is decided here and nowhere below.
            self._client: redis.Redis = redis.Redis.from_url(
                url,
                decode_responses=True,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=TIMEOUT_SECONDS,
                socket_timeout=TIMEOUT_SECONDS,
                socket_keepalive=True,
                health_check_interval=HEALTH_SECONDS,
            )
        except ValueError as error:
            raise ValueError(f"HORDE_REDIS_URL: {error}") from error
        self._own = secrets.token_hex(8)
        self._rung = threading.Event()

    def start(self) -> None:
        """Start the threads that listen and tell."""
        self._begin(self._listen_on, self._tell_on)

    def close(self) -> None:
        """Tell what is left and end the threads."""
        super().close()
        self._client.close()

    def _ring(self) -> None:
        self._rung.set()

    def _listen_on(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except self._lost as error:
                log.warning("notices.listener_lost", error=type(error).__name__)
                self._closed.wait(RETRY_SECONDS)

    def _listen(self) -> None:
        with closing(self._client.pubsub()) as subscription:  # type: ignore[no-untyped-call]
            subscription.subscribe(*self._heard)
            try:
                while not self._closed.is_set():
                    message = subscription.get_message(timeout=LOOK_UP_SECONDS)
                    if message is None:
                        continue
                    if message["type"] == "subscribe" and message["data"] == len(self._heard):
                        self.listening.set()
                    elif message["type"] == "message":
                        self._sort(message)
            finally:
                self.listening.clear()

    def _sort(self, message: dict[str, Any]) -> None:
        sender, _, payload = str(message["data"]).partition(" ")
        if sender != self._own:
            self._hear(str(message["channel"]), payload)

    def _tell_on(self) -> None:
        failing = ends = False
        while not ends:
            self._rung.wait()
            self._rung.clear()
            ends = self._closed.is_set()
            try:
                self._publish(farewell=ends)
                failing = False
                self._closed.wait(TICK)
            except self._lost as error:
                if not failing:
                    log.warning("notices.not_told", error=type(error).__name__)
                failing = True
                self._closed.wait(RETRY_SECONDS)
                self._rung.set()

    def _publish(self, *, farewell: bool) -> None:
        notices = self._take()
        if farewell:
            # A word of its own, which nobody heeds, has the listener look up.
            notices += [(channel, "") for channel in list(self._heard)[:1]]
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for channel, payload in notices:
                    pipeline.publish(channel, f"{self._own} {payload}")
                pipeline.execute()
        except self._lost:
            self._give_back((channel, payload) for channel, payload in notices if payload)
            raise
