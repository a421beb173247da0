"""The fold of events into ledger and statistics, and what follows from the figures: a dropper is put into maintenance.

One event that cannot be counted does not keep the others waiting: its batch is halved down to it, and it is set aside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import structlog
from sqlalchemy.exc import DBAPIError

from horde.db.database import Transaction
from horde.kudos.ledger import fold_into_ledger
from horde.registry.workers import pause_droppers
from horde.statistics.fold import claim_unfolded, fold_into_statistics, is_abort, set_aside
from horde.usecases.context import Context

log = structlog.get_logger(__name__)

BATCH = 500

# Classes of SQLSTATE that say that a value fits nowhere or refers to nothing. Any other error (a lost connection, a missing
# table) is no event's fault: the fold fails with it and is tried again with the next tick.
FAULTS_OF_DATA = frozenset({"22", "23", "54", "P0"})


class UnfoldableError(Exception):
    """One of these events cannot be counted; nothing of them has been. The cause is the error that said so."""

    def __init__(self, event_ids: Sequence[int]) -> None:
        super().__init__(f"one of {len(event_ids)} events cannot be folded")
        self.event_ids = event_ids


def fold(context: Context) -> int:
    """Fold everything that is unfolded now, a batch a transaction; how many events."""
    count, most = 0, BATCH
    while True:
        work = functools.partial(fold_batch, max_aborts=context.settings.max_aborts_per_hour, most=most)
        try:
            folded = context.database.run(work)
        except UnfoldableError as failure:
            if len(failure.event_ids) == 1:
                _set_aside(context, failure)
            most = max(1, len(failure.event_ids) // 2)
            continue
        count += folded
        if folded < most:
            return count
        most = min(BATCH, 2 * most)


def fold_batch(tx: Transaction, *, max_aborts: int, most: int | None = None) -> int:
    """Claim one batch and count it everywhere, in this transaction.

    Raises:
        UnfoldableError: when an event of the batch is at fault.
    """
    events = claim_unfolded(tx, BATCH if most is None else most)
    if not events:
        return 0
    try:
        fold_into_ledger(tx, events)
        fold_into_statistics(tx, events)
    except (DBAPIError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, DBAPIError) and not _is_fault_of_data(error):
            raise
        raise UnfoldableError([event.id for event in events]) from error
    droppers = sorted({event.worker_id for event in events if is_abort(event)})
    if droppers:
        message = (
            f"It dropped more than {max_aborts} jobs within an hour, too many. "
            "Look at its log, then clear maintenance to go on."
        )
        pause_droppers(tx, droppers, most=max_aborts, message=message)
    return len(events)


def _is_fault_of_data(error: DBAPIError) -> bool:
    return (getattr(error.orig, "pgcode", None) or "")[:2] in FAULTS_OF_DATA


def _set_aside(context: Context, failure: UnfoldableError) -> None:
    (event_id,) = failure.event_ids
    error = type(failure.__cause__).__name__
    context.database.run(lambda tx: set_aside(tx, event_id, error))
    # The type only: what the database says of a refused row may hold somebody's data.
    log.error("fold.event_set_aside", event_id=event_id, error=error)
