"""The process's last look at itself, taken by the heartbeat timer, so that asking for it costs nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Vitals:
    """Replaced field by field by the timer; read without a lock.

    Attributes:
        database_answers: whether the last heartbeat reached the database.
        queue: requests that wait.
        threads: threads that online workers offer.
        active_count: jobs that run.
    """

    database_answers: bool = True
    queue: int = 0
    threads: int = 0
    active_count: int = 0
