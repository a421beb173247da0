"""Workers: what they offer (written at their check-in) and what they have done (folded from events)."""

from __future__ import annotations

import uuid

from sqlalchemy import CheckConstraint, Float, ForeignKey, Index, Integer, text
from sqlalchemy.orm import Mapped, mapped_column

from horde.db.tables.base import Base, BigInt, Json, Texts, Timestamp, one_of
from horde.db.tables.requests import KINDS

# A worker is online while its last check-in is no older.
ONLINE_SECONDS = 300
# For chat it is so for less long: somebody watches, and such a worker pops or posts at least every half minute.
CHAT_ONLINE_SECONDS = 60
# Tokens per second below which a worker is slow; one that was never measured is not.
SLOW_BELOW = 5.0


class Worker(Base):
    """A worker by its name, unique among those not deleted. Its row is never joined by a settlement."""

    __tablename__ = "workers"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    kind: Mapped[str]
    owner_id: Mapped[BigInt] = mapped_column(ForeignKey("users.id"), index=True)
    created_at: Mapped[Timestamp]
    deleted_at: Mapped[Timestamp | None]

    # As of the last check-in.
    last_check_in: Mapped[Timestamp]
    models: Mapped[Texts] = mapped_column(server_default="{}")
    max_length: Mapped[int] = mapped_column(Integer, server_default="0")
    max_context_length: Mapped[int] = mapped_column(Integer, server_default="0")
    threads: Mapped[int] = mapped_column(Integer, server_default="1")
    nsfw: Mapped[bool] = mapped_column(server_default=text("true"))
    posts_progress: Mapped[bool] = mapped_column(server_default=text("false"))
    bridge_agent: Mapped[str] = mapped_column(server_default="unknown:0:unknown")
    # What it takes with one pop: its own kind, or text and chat.
    kinds: Mapped[Texts] = mapped_column(server_default="{}")
    # Model -> manifest, and the key of each model's revisions (see `horde.registry.revisions`).
    manifests: Mapped[Json] = mapped_column(server_default="{}")
    revisions: Mapped[Texts] = mapped_column(server_default="{}")
    uptime: Mapped[BigInt] = mapped_column(server_default="0")

    # Set by its owner or the horde.
    info: Mapped[str | None]
    maintenance: Mapped[bool] = mapped_column(server_default=text("false"))
    maintenance_message: Mapped[str | None]
    # Aborts before this moment no longer count towards maintenance: its owner has seen them.
    aborts_forgiven_at: Mapped[Timestamp | None]

    __table_args__ = (
        CheckConstraint(one_of("kind", *KINDS), "kind"),
        Index("uq_workers_name", "name", unique=True, postgresql_where=text("deleted_at IS NULL")),
        Index("ix_workers_online", "last_check_in", postgresql_where=text("deleted_at IS NULL")),
    )


class WorkerTotals(Base):
    """A worker's figures, folded from events. Speed is recent tokens over seconds, older jobs weighing less; empty ones not at all."""

    __tablename__ = "worker_totals"

    worker_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("workers.id"), primary_key=True)
    claimed: Mapped[BigInt] = mapped_column(server_default="0")
    fulfilled: Mapped[BigInt] = mapped_column(server_default="0")
    aborted: Mapped[BigInt] = mapped_column(server_default="0")
    tokens: Mapped[BigInt] = mapped_column(server_default="0")
    earned: Mapped[BigInt] = mapped_column(server_default="0")
    recent_tokens: Mapped[float] = mapped_column(Float, server_default="0")
    recent_seconds: Mapped[float] = mapped_column(Float, server_default="0")
