"""What is known of models: their revisions, and tokenizers by the hash of what they are. Rows are added and never changed."""

from __future__ import annotations

from sqlalchemy import Integer, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from horde.db.tables.base import Base, BigInt, Json, Texts, Timestamp


class Tokenizer(Base):
    """A tokenizer with its chat template; `revision` is the SHA-256 of `body` before it was compressed (zlib)."""

    __tablename__ = "tokenizers"

    revision: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    published_by: Mapped[BigInt]
    created_at: Mapped[Timestamp]


class ModelRevision(Base):
    """A model's weights under a name, as a trusted worker's owner or an admin published them; lengths are tokens."""

    __tablename__ = "model_revisions"

    model: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[str] = mapped_column(primary_key=True)
    tokenizer_revision: Mapped[str]
    context_length: Mapped[int] = mapped_column(Integer)
    block_size: Mapped[int] = mapped_column(Integer)
    kv_bytes_per_token: Mapped[BigInt]
    capabilities: Mapped[Texts] = mapped_column(server_default="{}")
    # A fixed prompt and what comes of it: `prompt`, `token_ids`, `output_token_ids`.
    probe: Mapped[Json | None]
    published_by: Mapped[BigInt]
    created_at: Mapped[Timestamp]
