"""Events: one row per transition, append-only, with no foreign keys so that they outlive what they tell of.

`events_unfolded` names those that have not reached the figures yet; the fold deletes them as it counts them. Those that it
cannot count stay there and are named in `events_set_aside` too, so that it passes over them.
"""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import Identity, Index, Integer, SmallInteger, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.db.tables.base import Base, BigInt, Timestamp


class Event(Base):
    """What happened, when, to which request and job, with the worker as it was at the claim."""

    __tablename__ = "events"

    id: Mapped[BigInt] = mapped_column(Identity(), primary_key=True)
    at: Mapped[Timestamp]
    kind: Mapped[str]
    request_kind: Mapped[str]
    request_id: Mapped[uuid.UUID]
    slot_idx: Mapped[int | None] = mapped_column(SmallInteger)
    job_id: Mapped[uuid.UUID | None]
    user_id: Mapped[BigInt]
    worker_id: Mapped[uuid.UUID | None]
    worker_name: Mapped[str | None]
    owner_id: Mapped[BigInt | None]
    model: Mapped[str | None]
    reason: Mapped[str | None]
    # The outcome that this very transition gave its request.
    outcome: Mapped[str | None]
    price: Mapped[BigInt] = mapped_column(server_default="0")
    reward: Mapped[BigInt] = mapped_column(server_default="0")
    tokens: Mapped[int] = mapped_column(Integer, server_default="0")
    timings: Mapped[dict[str, Any] | None] = mapped_column(JSONB)

    __table_args__ = (
        Index("ix_events_request", "request_id", "id"),
        # An abort: a fault its worker is blamed for.
        Index(
            "ix_events_aborts", "worker_id", "at", postgresql_where=text("kind = 'faulted' AND reason <> 'release_cap'")
        ),
    )


class UnfoldedEvent(Base):
    """An event whose figures are still to be counted."""

    __tablename__ = "events_unfolded"

    event_id: Mapped[BigInt] = mapped_column(primary_key=True, autoincrement=False)


class SetAsideEvent(Base):
    """An unfolded event that the fold could not count, when that was and the type of the error.

    Whoever has mended the cause deletes the row: the fold then takes the event again.
    """

    __tablename__ = "events_set_aside"

    event_id: Mapped[BigInt] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[Timestamp]
    error: Mapped[str]


class AbortHour(Base):
    """Aborts and jobs taken, by hour, worker, model and reason."""

    __tablename__ = "abort_hours"

    hour: Mapped[Timestamp] = mapped_column(primary_key=True)
    worker_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str] = mapped_column(primary_key=True)
    request_kind: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[BigInt]
    worker_name: Mapped[str]
    count: Mapped[BigInt] = mapped_column(server_default="0")


class TotalsMinute(Base):
    """Results and tokens delivered, by minute, kind and model."""

    __tablename__ = "totals_minute"

    minute: Mapped[Timestamp] = mapped_column(primary_key=True)
    request_kind: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    results: Mapped[BigInt] = mapped_column(server_default="0")
    tokens: Mapped[BigInt] = mapped_column(server_default="0")
