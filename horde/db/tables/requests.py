"""Requests, their slots, and the attempts (jobs) at them: one lifecycle for text, chat and image.

State columns are written by `horde.lifecycle` only; CHECKs and triggers (see the migrations) refuse what its rules do not allow.
"""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, Integer, SmallInteger, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.db.tables.base import Base, BigInt, Json, Texts, Timestamp, Uuids, one_of

KINDS = ("text", "chat", "image")
OUTCOMES = ("completed", "cancelled", "faulted", "rejected")
CANCEL_REASONS = ("client", "disconnect", "expired", "deadline", "admin")
SLOT_STATES = ("waiting", "processing", "stored", "dropped")
JOB_STATES = ("processing", "stored", "faulted", "released", "rejected", "voided")


class Request(Base):
    """What a client asked for: n results of one kind."""

    __tablename__ = "requests"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    kind: Mapped[str]
    # No foreign key: its check would lock the row of a user with every request, the anonymous one above all.
    user_id: Mapped[BigInt]
    client_agent: Mapped[str] = mapped_column(server_default="unknown:0:unknown")
    payload: Mapped[Json]
    created_at: Mapped[Timestamp]
    expires_at: Mapped[Timestamp]
    deadline: Mapped[Timestamp | None]
    rank: Mapped[Timestamp]

    # What a worker must offer to take it.
    models: Mapped[Texts]
    max_length: Mapped[int] = mapped_column(Integer)
    max_context_length: Mapped[int] = mapped_column(Integer)
    trusted_workers: Mapped[bool] = mapped_column(server_default=text("false"))
    slow_workers: Mapped[bool] = mapped_column(server_default=text("true"))
    nsfw: Mapped[bool] = mapped_column(server_default=text("false"))
    worker_ids: Mapped[Uuids] = mapped_column(server_default="{}")
    worker_blacklist: Mapped[bool] = mapped_column(server_default=text("false"))
    # Workers that faulted or released it; they come last for the retry.
    tried_workers: Mapped[Uuids] = mapped_column(server_default="{}")

    # Counters, equal to the rows they count at every commit.
    n: Mapped[int] = mapped_column(SmallInteger)
    waiting: Mapped[int] = mapped_column(SmallInteger)
    processing: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    stored: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    faulted: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    restarted: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    last_settled_faulted: Mapped[bool] = mapped_column(server_default=text("false"))
    charged: Mapped[BigInt] = mapped_column(server_default="0")

    outcome: Mapped[str | None]
    outcome_reason: Mapped[str | None]
    error_code: Mapped[str | None]
    outcome_at: Mapped[Timestamp | None]
    done_at: Mapped[Timestamp | None]

    # A client waits on an open connection until this moment; NULL: nobody is attached.
    attached_until: Mapped[Timestamp | None]
    # How many connections wait for it; the last one to leave cancels it.
    attached_by: Mapped[int] = mapped_column(Integer, server_default="0")

    # What it was counted with (see `horde.registry.revisions`): only a worker that serves just this takes it. NULL: any.
    revision: Mapped[str | None]
    # Only a worker that posts progress takes it.
    needs_progress: Mapped[bool] = mapped_column(server_default=text("false"))

    __table_args__ = (
        CheckConstraint(one_of("kind", *KINDS), "kind"),
        CheckConstraint("n = waiting + processing + stored OR outcome IS NOT NULL", "counts_add_up"),
        CheckConstraint(
            "n >= 1 AND waiting >= 0 AND processing >= 0 AND stored >= 0 AND waiting + processing + stored <= n",
            "counts",
        ),
        CheckConstraint("outcome IS NULL OR waiting = 0", "nothing_waits_after_an_outcome"),
        CheckConstraint(one_of("outcome", *OUTCOMES), "outcome"),
        CheckConstraint("(outcome = 'cancelled') = (outcome_reason IS NOT NULL)", "reason_of_a_cancel"),
        CheckConstraint(one_of("outcome_reason", *CANCEL_REASONS), "outcome_reason"),
        CheckConstraint("(outcome = 'rejected') = (error_code IS NOT NULL)", "code_of_a_rejection"),
        CheckConstraint("(outcome IS NULL) = (outcome_at IS NULL)", "time_of_outcome"),
        CheckConstraint("(done_at IS NOT NULL) = (outcome IS NOT NULL AND processing = 0)", "done"),
        Index(
            "ix_requests_user_waiting", "user_id", postgresql_where=text("waiting > 0"), postgresql_include=["waiting"]
        ),
        Index("ix_requests_open_expiry", "expires_at", "id", postgresql_where=text("outcome IS NULL AND waiting > 0")),
        Index(
            "ix_requests_open_deadline",
            "deadline",
            "id",
            postgresql_where=text("outcome IS NULL AND deadline IS NOT NULL"),
        ),
        Index(
            "ix_requests_attached",
            "attached_until",
            "id",
            postgresql_where=text("outcome IS NULL AND attached_until IS NOT NULL"),
        ),
        Index("ix_requests_done", "done_at", "id", postgresql_where=text("done_at IS NOT NULL")),
    )


class Slot(Base):
    """One wanted result of a request."""

    __tablename__ = "slots"

    request_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True)
    idx: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    state: Mapped[str]
    seed: Mapped[BigInt]
    releases: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    # What a streamed client already has: the next attempt goes on after it.
    prefix_token_ids: Mapped[list[int] | None] = mapped_column(ARRAY(Integer))
    prefix_text: Mapped[str | None]
    prefix_logprobs: Mapped[list[Any] | None] = mapped_column(JSONB)

    __table_args__ = (CheckConstraint(one_of("state", *SLOT_STATES), "state"),)


class Job(Base):
    """One attempt by one worker at one slot; its id fences off every other attempt."""

    __tablename__ = "jobs"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    request_id: Mapped[uuid.UUID]
    slot_idx: Mapped[int] = mapped_column(SmallInteger)
    state: Mapped[str]

    # The worker as it was at the claim; a later rename or deletion changes nothing here.
    worker_id: Mapped[uuid.UUID]
    worker_name: Mapped[str]
    owner_id: Mapped[BigInt]
    model: Mapped[str]
    model_revision: Mapped[str | None]
    tokenizer_revision: Mapped[str | None]
    # Both as one key, see `Request.revision`.
    revision: Mapped[str | None]
    bridge_agent: Mapped[str] = mapped_column(server_default="unknown:0:unknown")
    posts_progress: Mapped[bool] = mapped_column(server_default=text("false"))
    claim_key: Mapped[str | None]
    # A later pop with the claim's key was answered with this job: it is with its worker after all.
    refetched: Mapped[bool] = mapped_column(server_default=text("false"))

    claimed_at: Mapped[Timestamp]
    lease_begun: Mapped[Timestamp]
    lease_end: Mapped[Timestamp]
    ttl: Mapped[int] = mapped_column(Integer)
    started_at: Mapped[Timestamp | None]
    settled_at: Mapped[Timestamp | None]

    result: Mapped[str | None]
    result_state: Mapped[str | None]
    result_seed: Mapped[BigInt | None]
    finish_reason: Mapped[str | None]
    gen_metadata: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB)
    reason: Mapped[str | None]
    tokens: Mapped[int | None] = mapped_column(Integer)
    # Of the slot's whole output, a prefix included.
    token_ids: Mapped[list[int] | None] = mapped_column(ARRAY(Integer))
    logprobs: Mapped[list[Any] | None] = mapped_column(JSONB)
    # Prompt tokens that the worker found computed already.
    cached_tokens: Mapped[int | None] = mapped_column(Integer)
    price: Mapped[BigInt | None]
    reward: Mapped[BigInt | None]
    # Stored by the cancel of an attached request: its worker's first own submit is still answered with the reward.
    stored_by_cancel: Mapped[bool] = mapped_column(server_default=text("false"))
    acknowledged: Mapped[bool] = mapped_column(server_default=text("false"))
    settle_key: Mapped[str | None]
    settle_answer: Mapped[dict[str, Any] | None] = mapped_column(JSONB)

    __table_args__ = (
        ForeignKeyConstraint(
            ["request_id", "slot_idx"], ["slots.request_id", "slots.idx"], name="fk_jobs_slot", ondelete="CASCADE"
        ),
        CheckConstraint(one_of("state", *JOB_STATES), "state"),
        CheckConstraint("(state = 'processing') = (settled_at IS NULL)", "settled_at"),
        CheckConstraint("state <> 'stored' OR result IS NOT NULL", "stored_has_a_result"),
        Index(
            "uq_jobs_one_processing",
            "request_id",
            "slot_idx",
            unique=True,
            postgresql_where=text("state = 'processing'"),
        ),
        Index("uq_jobs_one_stored", "request_id", "slot_idx", unique=True, postgresql_where=text("state = 'stored'")),
        Index("ix_jobs_request", "request_id", "slot_idx"),
        Index("ix_jobs_lease", "lease_end", "id", postgresql_where=text("state = 'processing'")),
        Index(
            "ix_jobs_claim_key",
            "worker_id",
            "claim_key",
            postgresql_where=text("state = 'processing' AND claim_key IS NOT NULL"),
        ),
    )


class Progress(Base):
    """Output of a running job so far, as posted by its worker."""

    __tablename__ = "progress"

    job_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    token_ids: Mapped[list[int]] = mapped_column(ARRAY(Integer), server_default="{}")
    text: Mapped[str] = mapped_column(server_default="")
    # One entry a token, where they were asked for.
    logprobs: Mapped[list[Any] | None] = mapped_column(JSONB)
    updated_at: Mapped[Timestamp]


class QueueRow(Base):
    """A request under one model it may run on (`*`: it names none); exists only while slots wait."""

    __tablename__ = "queue"

    kind: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[Timestamp] = mapped_column(primary_key=True)
    request_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True)
    user_id: Mapped[BigInt]

    __table_args__ = (
        Index("ix_queue_user", "user_id", "kind", "model", "rank", "request_id"),
        Index("ix_queue_request", "request_id"),
    )


class IdempotencyKey(Base):
    """A request that was made under a client's key: the same key and body give the same request again."""

    __tablename__ = "idempotency_keys"

    user_id: Mapped[BigInt] = mapped_column(primary_key=True)
    # The client's address for the anonymous account, which strangers share; empty for everyone else.
    scope: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_hash: Mapped[str]
    request_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("requests.id", ondelete="CASCADE"), index=True)
    answer: Mapped[Json]
