"""What every use case works with: settings, the database, and what wakes those that wait. Made once per process."""

from __future__ import annotations

from dataclasses import dataclass, field

from horde.db.database import Database
from horde.db.notices import DatabaseNotices, Notices
from horde.db.redis_notices import RedisNotices
from horde.lifecycle.attach import stay_attached
from horde.lifecycle.terms import Terms
from horde.queue.wakeup import WakeUps
from horde.registry.tokenizers import Tokenizers
from horde.settings import Settings
from horde.streams.hub import Streams
from horde.usecases.places import Places
from horde.usecases.vitals import Vitals


@dataclass(frozen=True)
class Context:
    """One broker process."""

    settings: Settings
    database: Database
    terms: Terms
    notices: Notices
    wakeups: WakeUps
    streams: Streams
    places: Places
    tokenizers: Tokenizers = field(default_factory=Tokenizers)
    vitals: Vitals = field(default_factory=Vitals)

    @classmethod
    def create(cls, settings: Settings) -> Context:
        """A context for `settings`, whose database must be migrated.

        Raises:
            ValueError: without a database URL, or with a Redis URL that cannot be used.
        """
        if not settings.database_url:
            raise ValueError("HORDE_DATABASE_URL is not set")
        database = Database(
            settings.database_url, pool=settings.database_pool, pool_wait=settings.database_pool_wait_seconds
        )
        terms = Terms(
            expiry=settings.request_expiry_seconds,
            retention=settings.retention_seconds,
            fixed_lease=settings.job_ttl_seconds,
        )
        notices: Notices = RedisNotices(settings.redis_url) if settings.redis_url else DatabaseNotices(database.url)
        return cls(
            settings=settings,
            database=database,
            terms=terms,
            notices=notices,
            wakeups=WakeUps(notices),
            streams=Streams(
                database, notices, renew=lambda requests: database.run(lambda tx: stay_attached(tx, requests))
            ),
            places=Places(settings.max_waiting_polls),
        )

    def start(self) -> None:
        """Hear what other processes tell, and hand out what clients wait for."""
        self.notices.start()
        self.streams.start()

    def stop_waiting(self) -> None:
        """Wake every waiting poll and stream; none waits from here on. Does not block."""
        self.wakeups.close()
        self.streams.stop()

    def close(self) -> None:
        """Wake whoever waits, tell the other processes what is left to tell, close the connections."""
        self.stop_waiting()
        self.streams.close()
        self.notices.close()
        self.database.close()
