"""the whole schema

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "abort_hours",
        sa.Column("hour", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("request_kind", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.BigInteger(), nullable=False),
        sa.Column("worker_name", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("hour", "worker_id", "model", "reason", "request_kind", name=op.f("pk_abort_hours")),
    )
    op.create_table(
        "clock",
        sa.Column("id", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("ahead", postgresql.INTERVAL(), server_default=sa.text("'0 seconds'"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_clock_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clock")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("request_kind", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("slot_idx", sa.SmallInteger(), nullable=True),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=True),
        sa.Column("worker_name", sa.Text(), nullable=True),
        sa.Column("owner_id", sa.BigInteger(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("price", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reward", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("timings", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(
        "ix_events_aborts",
        "events",
        ["worker_id", "at"],
        unique=False,
        postgresql_where=sa.text("kind = 'faulted' AND reason <> 'release_cap'"),
    )
    op.create_index("ix_events_request", "events", ["request_id", "id"], unique=False)
    op.create_table(
        "events_set_aside",
        sa.Column("event_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_events_set_aside")),
    )
    op.create_table(
        "events_unfolded",
        sa.Column("event_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_events_unfolded")),
    )
    op.create_table(
        "heartbeat",
        sa.Column("id", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("beat_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_heartbeat_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_heartbeat")),
    )
    op.create_table(
        "leader",
        sa.Column("id", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("holder", sa.Uuid(), nullable=True),
        sa.Column("term", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("until", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_leader_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
    )
    op.create_table(
        "maintenance_runs",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("did", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_maintenance_runs")),
    )
    op.create_table(
        "outages",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("begun", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("ended", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outages")),
    )
    op.create_index(op.f("ix_outages_begun"), "outages", ["begun"], unique=False)
    op.create_table(
        "requests",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("client_agent", sa.Text(), server_default="unknown:0:unknown", nullable=False),
        sa.Column("payload", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("expires_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("deadline", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("rank", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("models", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("max_length", sa.Integer(), nullable=False),
        sa.Column("max_context_length", sa.Integer(), nullable=False),
        sa.Column("trusted_workers", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("slow_workers", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("nsfw", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("worker_ids", postgresql.ARRAY(sa.UUID()), server_default="{}", nullable=False),
        sa.Column("worker_blacklist", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("tried_workers", postgresql.ARRAY(sa.UUID()), server_default="{}", nullable=False),
        sa.Column("n", sa.SmallInteger(), nullable=False),
        sa.Column("waiting", sa.SmallInteger(), nullable=False),
        sa.Column("processing", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("stored", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("faulted", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("restarted", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("last_settled_faulted", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("charged", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("outcome_reason", sa.Text(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("outcome_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("done_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("attached_until", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(outcome = 'cancelled') = (outcome_reason IS NOT NULL)", name=op.f("ck_requests_reason_of_a_cancel")
        ),
        sa.CheckConstraint(
            "(outcome = 'rejected') = (error_code IS NOT NULL)", name=op.f("ck_requests_code_of_a_rejection")
        ),
        sa.CheckConstraint("kind IN ('text', 'chat', 'image')", name=op.f("ck_requests_kind")),
        sa.CheckConstraint(
            "outcome IN ('completed', 'cancelled', 'faulted', 'rejected')", name=op.f("ck_requests_outcome")
        ),
        sa.CheckConstraint(
            "outcome_reason IN ('client', 'disconnect', 'expired', 'deadline', 'admin')",
            name=op.f("ck_requests_outcome_reason"),
        ),
        sa.CheckConstraint(
            "(done_at IS NOT NULL) = (outcome IS NOT NULL AND processing = 0)", name=op.f("ck_requests_done")
        ),
        sa.CheckConstraint("(outcome IS NULL) = (outcome_at IS NULL)", name=op.f("ck_requests_time_of_outcome")),
        sa.CheckConstraint(
            "n = waiting + processing + stored OR outcome IS NOT NULL", name=op.f("ck_requests_counts_add_up")
        ),
        sa.CheckConstraint(
            "n >= 1 AND waiting >= 0 AND processing >= 0 AND stored >= 0 AND waiting + processing + stored <= n",
            name=op.f("ck_requests_counts"),
        ),
        sa.CheckConstraint("outcome IS NULL OR waiting = 0", name=op.f("ck_requests_nothing_waits_after_an_outcome")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
    )
    op.create_index(
        "ix_requests_attached",
        "requests",
        ["attached_until", "id"],
        unique=False,
        postgresql_where=sa.text("outcome IS NULL AND attached_until IS NOT NULL"),
    )
    op.create_index(
        "ix_requests_done", "requests", ["done_at", "id"], unique=False, postgresql_where=sa.text("done_at IS NOT NULL")
    )
    op.create_index(
        "ix_requests_open_deadline",
        "requests",
        ["deadline", "id"],
        unique=False,
        postgresql_where=sa.text("outcome IS NULL AND deadline IS NOT NULL"),
    )
    op.create_index(
        "ix_requests_open_expiry",
        "requests",
        ["expires_at", "id"],
        unique=False,
        postgresql_where=sa.text("outcome IS NULL AND waiting > 0"),
    )
    op.create_index(
        "ix_requests_user_waiting",
        "requests",
        ["user_id"],
        unique=False,
        postgresql_where=sa.text("waiting > 0"),
        postgresql_include=["waiting"],
    )
    op.create_table(
        "totals_minute",
        sa.Column("minute", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("request_kind", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("results", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("minute", "request_kind", "model", name=op.f("pk_totals_minute")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("trusted", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("moderator", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("admin", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("flagged", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("public_workers", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("concurrency", sa.Integer(), server_default="30", nullable=False),
        sa.Column("contact", sa.Text(), nullable=True),
        sa.Column("deleted_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("char_length(name) BETWEEN 1 AND 100", name=op.f("ck_users_name")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_users_key_hash")),
    )
    op.create_table(
        "accounts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("user_id", sa.BigInteger(), nullable=True),
        sa.Column("balance", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reserved", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("floor", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(kind = 'user') = (user_id IS NOT NULL)", name=op.f("ck_accounts_owner")),
        sa.CheckConstraint("kind IN ('user', 'mint', 'horde', 'write_off')", name=op.f("ck_accounts_kind")),
        sa.CheckConstraint("reserved >= 0", name=op.f("ck_accounts_reserved")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_accounts_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("user_id", name=op.f("uq_accounts_user_id")),
    )
    op.create_index(
        "uq_accounts_system", "accounts", ["kind"], unique=True, postgresql_where=sa.text("user_id IS NULL")
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("answer", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_idempotency_keys_request_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("user_id", "scope", "route", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_request_id"), "idempotency_keys", ["request_id"], unique=False)
    op.create_table(
        "queue",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("rank", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name=op.f("fk_queue_request_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("kind", "model", "rank", "request_id", name=op.f("pk_queue")),
    )
    op.create_index("ix_queue_request", "queue", ["request_id"], unique=False)
    op.create_index("ix_queue_user", "queue", ["user_id", "kind", "model", "rank", "request_id"], unique=False)
    op.create_table(
        "slots",
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("idx", sa.SmallInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("releases", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("prefix_token_ids", postgresql.ARRAY(sa.Integer()), nullable=True),
        sa.Column("prefix_text", sa.Text(), nullable=True),
        sa.CheckConstraint("state IN ('waiting', 'processing', 'stored', 'dropped')", name=op.f("ck_slots_state")),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name=op.f("fk_slots_request_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("request_id", "idx", name=op.f("pk_slots")),
    )
    op.create_table(
        "user_totals",
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("results", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("spent", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("fulfilled", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens_generated", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("earned", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_user_totals_user_id")),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_user_totals")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("deleted_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("last_check_in", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("models", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("max_length", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_context_length", sa.Integer(), server_default="0", nullable=False),
        sa.Column("threads", sa.Integer(), server_default="1", nullable=False),
        sa.Column("nsfw", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("posts_progress", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("bridge_agent", sa.Text(), server_default="unknown:0:unknown", nullable=False),
        sa.Column("uptime", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("info", sa.Text(), nullable=True),
        sa.Column("maintenance", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("maintenance_message", sa.Text(), nullable=True),
        sa.Column("aborts_forgiven_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('text', 'chat', 'image')", name=op.f("ck_workers_kind")),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_workers_owner_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_index(
        "ix_workers_online", "workers", ["last_check_in"], unique=False, postgresql_where=sa.text("deleted_at IS NULL")
    )
    op.create_index(op.f("ix_workers_owner_id"), "workers", ["owner_id"], unique=False)
    op.create_index("uq_workers_name", "workers", ["name"], unique=True, postgresql_where=sa.text("deleted_at IS NULL"))
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("slot_idx", sa.SmallInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("worker_name", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_revision", sa.Text(), nullable=True),
        sa.Column("bridge_agent", sa.Text(), server_default="unknown:0:unknown", nullable=False),
        sa.Column("posts_progress", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("claim_key", sa.Text(), nullable=True),
        sa.Column("refetched", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("claimed_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("lease_begun", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("lease_end", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("ttl", sa.Integer(), nullable=False),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("settled_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("result_state", sa.Text(), nullable=True),
        sa.Column("result_seed", sa.BigInteger(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("gen_metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=True),
        sa.Column("price", sa.BigInteger(), nullable=True),
        sa.Column("reward", sa.BigInteger(), nullable=True),
        sa.Column("stored_by_cancel", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("acknowledged", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("settle_key", sa.Text(), nullable=True),
        sa.Column("settle_answer", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint("(state = 'processing') = (settled_at IS NULL)", name=op.f("ck_jobs_settled_at")),
        sa.CheckConstraint("state <> 'stored' OR result IS NOT NULL", name=op.f("ck_jobs_stored_has_a_result")),
        sa.CheckConstraint(
            "state IN ('processing', 'stored', 'faulted', 'released', 'rejected', 'voided')", name=op.f("ck_jobs_state")
        ),
        sa.ForeignKeyConstraint(
            ["request_id", "slot_idx"], ["slots.request_id", "slots.idx"], name="fk_jobs_slot", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(
        "ix_jobs_claim_key",
        "jobs",
        ["worker_id", "claim_key"],
        unique=False,
        postgresql_where=sa.text("state = 'processing' AND claim_key IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_lease", "jobs", ["lease_end", "id"], unique=False, postgresql_where=sa.text("state = 'processing'")
    )
    op.create_index("ix_jobs_request", "jobs", ["request_id", "slot_idx"], unique=False)
    op.create_index(
        "uq_jobs_one_processing",
        "jobs",
        ["request_id", "slot_idx"],
        unique=True,
        postgresql_where=sa.text("state = 'processing'"),
    )
    op.create_index(
        "uq_jobs_one_stored",
        "jobs",
        ["request_id", "slot_idx"],
        unique=True,
        postgresql_where=sa.text("state = 'stored'"),
    )
    op.create_table(
        "ledger",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("entry_id", sa.Uuid(), nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=True),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger")),
    )
    op.create_index(op.f("ix_ledger_account_id"), "ledger", ["account_id"], unique=False)
    op.create_index(op.f("ix_ledger_entry_id"), "ledger", ["entry_id"], unique=False)
    op.create_index(op.f("ix_ledger_event_id"), "ledger", ["event_id"], unique=False)
    op.create_table(
        "worker_totals",
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("claimed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("fulfilled", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("aborted", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("earned", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("recent_tokens", sa.Float(), server_default="0", nullable=False),
        sa.Column("recent_seconds", sa.Float(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_worker_totals_worker_id")),
        sa.PrimaryKeyConstraint("worker_id", name=op.f("pk_worker_totals")),
    )
    op.create_table(
        "progress",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("token_ids", postgresql.ARRAY(sa.Integer()), server_default="{}", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("updated_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_progress_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_progress")),
    )
    op.get_bind().exec_driver_sql(Path(__file__).with_name("0001_rules.sql").read_text().replace("%", "%%"))


def downgrade() -> None:
    op.execute("DROP VIEW worker_offers")
    op.drop_table("progress")
    op.drop_table("worker_totals")
    op.drop_table("ledger")
    op.drop_table("jobs")
    op.drop_table("workers")
    op.drop_table("user_totals")
    op.drop_table("slots")
    op.drop_table("queue")
    op.drop_table("idempotency_keys")
    op.drop_table("accounts")
    op.drop_table("users")
    op.drop_table("totals_minute")
    op.drop_table("requests")
    op.drop_table("outages")
    op.drop_table("maintenance_runs")
    op.drop_table("leader")
    op.drop_table("heartbeat")
    op.drop_table("events_unfolded")
    op.drop_table("events_set_aside")
    op.drop_table("events")
    op.drop_table("clock")
    op.drop_table("abort_hours")
    for function in (
        "tokens_per_second(double precision, double precision)",
        "faded(double precision, double precision, bigint)",
        "run_seconds(jsonb)",
        "refuse_waiting_after_outcome()",
        "refuse()",
        "without_outages(timestamptz, timestamptz)",
        "horde_now()",
    ):
        op.execute(f"DROP FUNCTION {function}")
