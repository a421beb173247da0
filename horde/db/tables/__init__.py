"""All tables, so that one import knows the whole schema."""

from __future__ import annotations

from horde.db.tables.accounts import SYSTEM_ACCOUNTS, Account, LedgerLine, User, UserTotals
from horde.db.tables.base import Base
from horde.db.tables.events import AbortHour, Event, SetAsideEvent, TotalsMinute, UnfoldedEvent
from horde.db.tables.models import ModelRevision, Tokenizer
from horde.db.tables.operation import Clock, Heartbeat, Leader, MaintenanceRun, Outage
from horde.db.tables.requests import IdempotencyKey, Job, Progress, QueueRow, Request, Slot
from horde.db.tables.workers import Worker, WorkerTotals

__all__ = [
    "SYSTEM_ACCOUNTS",
    "AbortHour",
    "Account",
    "Base",
    "Clock",
    "Event",
    "Heartbeat",
    "IdempotencyKey",
    "Job",
    "Leader",
    "LedgerLine",
    "MaintenanceRun",
    "ModelRevision",
    "Outage",
    "Progress",
    "QueueRow",
    "Request",
    "SetAsideEvent",
    "Slot",
    "Tokenizer",
    "TotalsMinute",
    "UnfoldedEvent",
    "User",
    "UserTotals",
    "Worker",
    "WorkerTotals",
]
