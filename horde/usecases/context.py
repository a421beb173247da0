"""What every use case works with: settings, the database, the wake-up of waiting polls. Made once per process."""

from __future__ import annotations

from dataclasses import dataclass, field

from horde.db.database import Database
from horde.lifecycle.terms import Terms
from horde.queue.wakeup import WakeUps
from horde.settings import Settings
from horde.usecases.vitals import Vitals


@dataclass(frozen=True)
class Context:
    """One broker process."""

    settings: Settings
    database: Database
    terms: Terms
    wakeups: WakeUps
    vitals: Vitals = field(default_factory=Vitals)

    @classmethod
    def create(cls, settings: Settings) -> Context:
        """A context for `settings`, whose database must be migrated; raises ValueError without a database URL."""
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
        return cls(settings, database, terms, WakeUps(database.url, most_waiting=settings.max_waiting_polls))

    def close(self) -> None:
        """Wake every waiting poll, stop listening, close the connections."""
        self.wakeups.close()
        self.database.close()
