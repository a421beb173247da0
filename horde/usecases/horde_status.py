"""What the horde is doing: heartbeat, performance, models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horde.statistics import totals
from horde.usecases.context import Context

ETA_WITHOUT_CAPACITY = 10_000


@dataclass(frozen=True)
class Heartbeat:
    """This process as it saw itself a few seconds ago."""

    queue: int
    threads: int
    active_count: int
    db_connection: bool


@dataclass(frozen=True)
class ModelView:
    """A model that workers offer or requests wait for.

    Attributes:
        count: threads that serve it.
        performance: mean tokens per second of its workers.
        queued: tokens that wait.
        jobs: results that wait.
        eta: seconds until what waits is done; 10,000 when nobody serves it.
    """

    name: str
    count: int
    performance: float
    queued: float
    jobs: float
    eta: int
    type: str


def heartbeat(context: Context) -> Heartbeat:
    """The last look of the heartbeat timer; asks nothing."""
    vitals = context.vitals
    return Heartbeat(vitals.queue, vitals.threads, vitals.active_count, vitals.database_answers)


def read_performance(context: Context) -> dict[str, int]:
    """AI Horde's `status/performance`; figures of what this horde does not do are 0."""
    row = context.database.read(totals.read_performance)
    return {
        "queued_requests": row.queued_requests,
        "queued_text_requests": row.queued_text_requests,
        "worker_count": row.worker_count,
        "text_worker_count": row.text_worker_count,
        "thread_count": row.thread_count,
        "text_thread_count": row.text_thread_count,
        "queued_megapixelsteps": 0,
        "past_minute_megapixelsteps": 0,
        "queued_forms": 0,
        "interrogator_count": 0,
        "interrogator_thread_count": 0,
        "queued_tokens": int(row.queued_tokens),
        "past_minute_tokens": int(row.past_minute_tokens),
    }


def list_models(
    context: Context, kind: str, *, min_count: int | None = None, max_count: int | None = None
) -> list[ModelView]:
    """Models of a kind, those with the most threads first, within the given counts of threads."""
    rows = context.database.read(lambda tx: totals.read_models(tx, kind))
    return [
        ModelView(
            name=row.name,
            count=row.count_,
            performance=round(row.performance, 1),
            queued=row.tokens,
            jobs=float(row.jobs),
            eta=_eta(row.tokens, row.speed, row.count_),
            type=kind,
        )
        for row in rows
        if (min_count is None or row.count_ >= min_count) and (max_count is None or row.count_ <= max_count)
    ]


def _eta(tokens: float, speed: float, threads: int) -> int:
    if threads == 0:
        return ETA_WITHOUT_CAPACITY
    return min(ETA_WITHOUT_CAPACITY, math.ceil(tokens / max(1.0, speed)))
