"""One-row tables the broker runs on: the clock's offset, the heartbeat, outages, the maintenance leader."""

from __future__ import annotations

import datetime as dt
import uuid

from sqlalchemy import CheckConstraint, Identity, SmallInteger, text
from sqlalchemy.dialects.postgresql import INTERVAL
from sqlalchemy.orm import Mapped, mapped_column

from horde.db.tables.base import Base, BigInt, Timestamp


class Clock(Base):
    """What `horde_now()` adds to the statement's time; zero but in tests."""

    __tablename__ = "clock"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, server_default="1")
    ahead: Mapped[dt.timedelta] = mapped_column(INTERVAL, server_default=text("'0 seconds'"))

    __table_args__ = (CheckConstraint("id = 1", "one_row"),)


class Heartbeat(Base):
    """Last moment at which some broker was alive."""

    __tablename__ = "heartbeat"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, server_default="1")
    beat_at: Mapped[Timestamp]

    __table_args__ = (CheckConstraint("id = 1", "one_row"),)


class Outage(Base):
    """A time in which no broker was alive; leases are longer by it."""

    __tablename__ = "outages"

    id: Mapped[BigInt] = mapped_column(Identity(), primary_key=True)
    begun: Mapped[Timestamp] = mapped_column(index=True)
    ended: Mapped[Timestamp]


class Leader(Base):
    """Who runs the maintenance passes; held by a random id per process for a term, by the database's clock."""

    __tablename__ = "leader"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, server_default="1")
    holder: Mapped[uuid.UUID | None]
    term: Mapped[BigInt] = mapped_column(server_default="0")
    until: Mapped[Timestamp | None]

    __table_args__ = (CheckConstraint("id = 1", "one_row"),)


class MaintenanceRun(Base):
    """The last run of each maintenance job: when, how long, how much it did."""

    __tablename__ = "maintenance_runs"

    job: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[Timestamp]
    seconds: Mapped[float]
    did: Mapped[BigInt]
