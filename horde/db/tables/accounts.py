"""Users, their keys, and the accounts that kudos move between. Kudos are integers of a hundredth."""

from __future__ import annotations

import uuid

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, Integer, text
from sqlalchemy.orm import Mapped, mapped_column

from horde.db.tables.base import Base, BigInt, Timestamp, one_of

# Accounts that belong to nobody: where new kudos come from, what the horde keeps, and what a floor left unpaid.
SYSTEM_ACCOUNTS = ("mint", "horde", "write_off")


class User(Base):
    """Somebody with a key; id 0 is the anonymous account."""

    __tablename__ = "users"

    id: Mapped[BigInt] = mapped_column(Identity(always=False), primary_key=True)
    name: Mapped[str]
    key_hash: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[Timestamp]
    trusted: Mapped[bool] = mapped_column(server_default=text("false"))
    moderator: Mapped[bool] = mapped_column(server_default=text("false"))
    admin: Mapped[bool] = mapped_column(server_default=text("false"))
    flagged: Mapped[bool] = mapped_column(server_default=text("false"))
    public_workers: Mapped[bool] = mapped_column(server_default=text("false"))
    concurrency: Mapped[int] = mapped_column(Integer, server_default="30")
    contact: Mapped[str | None]
    deleted_at: Mapped[Timestamp | None]

    __table_args__ = (CheckConstraint("char_length(name) BETWEEN 1 AND 100", "name"),)


class Account(Base):
    """A balance. Settlements reach it through the fold only; whatever must not overdraw updates it conditionally."""

    __tablename__ = "accounts"

    id: Mapped[BigInt] = mapped_column(Identity(always=False), primary_key=True)
    kind: Mapped[str]
    user_id: Mapped[BigInt | None] = mapped_column(ForeignKey("users.id"), unique=True)
    balance: Mapped[BigInt] = mapped_column(server_default="0")
    reserved: Mapped[BigInt] = mapped_column(server_default="0")
    floor: Mapped[BigInt | None]

    __table_args__ = (
        CheckConstraint(one_of("kind", "user", *SYSTEM_ACCOUNTS), "kind"),
        CheckConstraint("(kind = 'user') = (user_id IS NOT NULL)", "owner"),
        CheckConstraint("reserved >= 0", "reserved"),
        Index("uq_accounts_system", "kind", unique=True, postgresql_where=text("user_id IS NULL")),
    )


class LedgerLine(Base):
    """One movement on one account; the lines of an entry sum to zero, and so does the whole table. Append-only."""

    __tablename__ = "ledger"

    id: Mapped[BigInt] = mapped_column(Identity(), primary_key=True)
    entry_id: Mapped[uuid.UUID] = mapped_column(index=True)
    event_id: Mapped[BigInt | None] = mapped_column(index=True)
    # No foreign key: accounts are never deleted, and its check would take as long as all the rest of a fold.
    account_id: Mapped[BigInt] = mapped_column(index=True)
    amount: Mapped[BigInt]
    reason: Mapped[str]
    created_at: Mapped[Timestamp]


class UserTotals(Base):
    """What a user has asked for and delivered so far, folded from events."""

    __tablename__ = "user_totals"

    user_id: Mapped[BigInt] = mapped_column(ForeignKey("users.id"), primary_key=True)
    requests: Mapped[BigInt] = mapped_column(server_default="0")
    results: Mapped[BigInt] = mapped_column(server_default="0")
    tokens: Mapped[BigInt] = mapped_column(server_default="0")
    spent: Mapped[BigInt] = mapped_column(server_default="0")
    fulfilled: Mapped[BigInt] = mapped_column(server_default="0")
    tokens_generated: Mapped[BigInt] = mapped_column(server_default="0")
    earned: Mapped[BigInt] = mapped_column(server_default="0")
