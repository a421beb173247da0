"""The fold of events into ledger and statistics, and what follows from the figures: a dropper is put into maintenance."""

from __future__ import annotations

from horde.db.database import Transaction
from horde.kudos.ledger import fold_into_ledger
from horde.registry.workers import pause_droppers
from horde.statistics.fold import claim_unfolded, fold_into_statistics, is_abort
from horde.usecases.context import Context

BATCH = 500


def fold(context: Context) -> int:
    """Fold everything that is unfolded now, a batch a transaction; how many events."""
    count = 0
    while True:
        folded = context.database.run(lambda tx: fold_batch(tx, max_aborts=context.settings.max_aborts_per_hour))
        count += folded
        if folded < BATCH:
            return count


def fold_batch(tx: Transaction, *, max_aborts: int) -> int:
    """Claim one batch and count it everywhere, in this transaction."""
    events = claim_unfolded(tx, BATCH)
    if not events:
        return 0
    fold_into_ledger(tx, events)
    fold_into_statistics(tx, events)
    droppers = sorted({event.worker_id for event in events if is_abort(event)})
    if droppers:
        message = (
            f"It dropped more than {max_aborts} jobs within an hour, too many. "
            "Look at its log, then clear maintenance to go on."
        )
        pause_droppers(tx, droppers, most=max_aborts, message=message)
    return len(events)
