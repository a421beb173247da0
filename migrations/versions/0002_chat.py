"""chat: what a request is pinned to, what a job carries, tokenizers and revisions of models

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_OFFERS = """
CREATE OR REPLACE VIEW worker_offers AS
SELECT w.id, w.kind, w.owner_id, w.models, w.max_length, w.max_context_length, w.threads, w.maintenance, owner.trusted,
       tokens_per_second(t.recent_tokens, t.recent_seconds) AS speed, w.last_check_in{more}
FROM workers w JOIN users owner ON owner.id = w.owner_id LEFT JOIN worker_totals t ON t.worker_id = w.id
WHERE w.deleted_at IS NULL
"""


def upgrade() -> None:
    op.add_column("requests", sa.Column("attached_by", sa.Integer(), server_default="0", nullable=False))
    op.add_column("requests", sa.Column("revision", sa.Text(), nullable=True))
    op.add_column(
        "requests", sa.Column("needs_progress", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    )
    op.add_column("slots", sa.Column("prefix_logprobs", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.add_column("jobs", sa.Column("tokenizer_revision", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("revision", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("token_ids", postgresql.ARRAY(sa.Integer()), nullable=True))
    op.add_column("jobs", sa.Column("logprobs", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.add_column("jobs", sa.Column("cached_tokens", sa.Integer(), nullable=True))
    op.add_column("progress", sa.Column("logprobs", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.add_column("workers", sa.Column("kinds", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False))
    op.add_column(
        "workers",
        sa.Column("manifests", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
    )
    op.add_column("workers", sa.Column("revisions", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False))
    op.execute("UPDATE workers SET kinds = ARRAY[kind]")
    # Each post rewrites the row of a job that runs: with room on its page no index has to follow.
    op.execute("ALTER TABLE progress SET (fillfactor = 50)")
    op.create_table(
        "tokenizers",
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("published_by", sa.BigInteger(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_tokenizers")),
    )
    op.create_table(
        "model_revisions",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("tokenizer_revision", sa.Text(), nullable=False),
        sa.Column("context_length", sa.Integer(), nullable=False),
        sa.Column("block_size", sa.Integer(), nullable=False),
        sa.Column("kv_bytes_per_token", sa.BigInteger(), nullable=False),
        sa.Column("capabilities", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("probe", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("published_by", sa.BigInteger(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("model", "revision", name=op.f("pk_model_revisions")),
    )
    for table in ("tokenizers", "model_revisions"):
        op.execute(
            f"CREATE TRIGGER {table}_stay BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW "
            f"EXECUTE FUNCTION refuse('{table} are append-only')"
        )
    op.execute(_OFFERS.format(more=", w.kinds, w.posts_progress, w.revisions, w.manifests"))


def downgrade() -> None:
    op.execute("DROP VIEW worker_offers")
    op.execute(_OFFERS.format(more=""))
    op.drop_table("model_revisions")
    op.drop_table("tokenizers")
    for table, columns in (
        ("workers", ("revisions", "manifests", "kinds")),
        ("progress", ("logprobs",)),
        ("jobs", ("cached_tokens", "logprobs", "token_ids", "revision", "tokenizer_revision")),
        ("slots", ("prefix_logprobs",)),
        ("requests", ("needs_progress", "revision", "attached_by")),
    ):
        for column in columns:
            op.drop_column(table, column)
    op.execute("ALTER TABLE progress RESET (fillfactor)")
