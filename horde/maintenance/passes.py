"""One pass: finds what is due by plain reads and calls the same transitions as everybody, one short transaction each."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from sqlalchemy.exc import DBAPIError

from horde.db.database import Transaction
from horde.errors import HordeError
from horde.lifecycle import due
from horde.lifecycle.cancel import Cancelled, cancel_if_due
from horde.lifecycle.fault import fault_stale
from horde.lifecycle.outages import beat
from horde.lifecycle.release import release_unstarted
from horde.lifecycle.retention import BATCH, delete_old
from horde.lifecycle.settle import Settlement
from horde.lifecycle.words import CancelReason, Verdict
from horde.usecases.context import Context
from horde.usecases.pricing import ready_to_price

T = TypeVar("T")

log = structlog.get_logger(__name__)

RECORD_RUN = """
INSERT INTO maintenance_runs AS m (job, started_at, seconds, did) VALUES (%(job)s, horde_now(), %(seconds)s, %(did)s)
ON CONFLICT (job) DO UPDATE SET started_at = excluded.started_at, seconds = excluded.seconds, did = excluded.did
"""


@dataclass
class Done:
    """How many a pass dealt with, by what it did to them."""

    stale: int = 0
    unstarted: int = 0
    cancelled: int = 0
    deleted: int = 0

    def total(self) -> int:
        """All of them."""
        return self.stale + self.unstarted + self.cancelled + self.deleted


def run_pass(context: Context, *, may_go_on: Callable[[], bool] = lambda: True) -> Done:
    """Everything that is due now.

    Args:
        may_go_on: asked before each step; a leader that lost its lease meanwhile stops there.
    """
    # A pass beats first: an outage that has just ended must be on record before anyone is called stale.
    context.database.run(beat)
    done = Done()
    done.stale = _settle(context, due.STALE, fault_stale, may_go_on)
    done.unstarted = _settle(context, due.UNSTARTED, release_unstarted, may_go_on)
    for statement, reason in (
        (due.PAST_DEADLINE, CancelReason.DEADLINE),
        (due.EXPIRED, CancelReason.EXPIRED),
        (due.LAPSED, CancelReason.DISCONNECT),
    ):
        done.cancelled += _cancel(context, statement, reason, may_go_on)
    done.deleted = _delete(context, may_go_on)
    return done


def _settle(
    context: Context,
    statement: str,
    transition: Callable[..., Settlement],
    may_go_on: Callable[[], bool],
) -> int:
    count = 0
    for job_id in due.pages(context.database, statement):
        if not may_go_on():
            break
        settlement = _one(functools.partial(_settled, context, job_id, transition, job_id=job_id))
        if settlement is not None and settlement.verdict is Verdict.SETTLED:
            count += 1
            context.wakeups.announce(settlement.waits_for)
            if settlement.attached and settlement.request_id is not None:
                context.streams.announce([settlement.request_id])
    return count


def _cancel(context: Context, statement: str, reason: CancelReason, may_go_on: Callable[[], bool]) -> int:
    count = 0
    for request_id in due.pages(context.database, statement):
        if not may_go_on():
            break
        cancelled = functools.partial(
            _settled, context, request_id, cancel_if_due, request_id=request_id, reason=reason
        )
        if _one(cancelled) is Cancelled.DONE:
            count += 1
            context.streams.announce([request_id])
    return count


def _delete(context: Context, may_go_on: Callable[[], bool]) -> int:
    count = 0
    while may_go_on():
        deleted = _one(lambda: context.database.run(lambda tx: delete_old(tx, context.terms))) or 0
        count += deleted
        if deleted < BATCH:
            break
    return count


def _settled(context: Context, some_id: uuid.UUID, transition: Callable[..., T], **arguments: object) -> T:
    """One short transaction, in which what was posted may have to be counted."""
    priced = ready_to_price(context, some_id)
    return context.database.run(lambda tx: transition(tx, pricing=priced, **arguments))


def _one(step: Callable[[], T]) -> T | None:
    """One step; a row that fails is logged and does not keep the rest waiting."""
    try:
        return step()
    except (HordeError, DBAPIError) as error:
        # The type only: what PostgreSQL says of a refused row may hold somebody's prompt.
        log.warning("maintenance.step_failed", error=type(error).__name__)
        return None


def record_run(tx: Transaction, job: str, seconds: float, did: int) -> None:
    """Keep when a maintenance job last ran, how long it took and how much it did."""
    tx.execute(RECORD_RUN, {"job": job, "seconds": seconds, "did": did})
