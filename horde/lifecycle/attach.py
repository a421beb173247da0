"""Attachment: clients wait for a request on open connections, and their handlers say so every few seconds.

The last connection to go cancels the request; if its broker dies instead, the attachment lapses and maintenance cancels.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from horde.db.database import Transaction
from horde.lifecycle.cancel import cancel_locked
from horde.lifecycle.rows import lock_processing_jobs, lock_request
from horde.lifecycle.store import Pricing
from horde.lifecycle.terms import ATTACHED_FOR, EXPIRY_AFTER_LEASE, PROGRESS_LEASE
from horde.lifecycle.words import CancelReason

# A stream that runs longer than it might have waited has not expired: should its worker be lost then, it goes on elsewhere.
# Never in the past of a handler that lives: two handlers of one request do not shorten each other's term. By id, so that two
# processes that follow the same requests meet in the same order.
STAY_ATTACHED = """
WITH kept AS (
    SELECT id FROM requests WHERE id = ANY (%(requests)s::uuid[]) AND attached_until IS NOT NULL AND outcome IS NULL
    ORDER BY id FOR UPDATE)
UPDATE requests SET attached_until = greatest(attached_until, horde_now() + make_interval(secs => %(attached_for)s)),
    expires_at = CASE WHEN processing = 0 THEN expires_at
                      ELSE least(greatest(expires_at, horde_now() + make_interval(secs => %(running_for)s)), deadline) END
FROM kept WHERE requests.id = kept.id
"""

# Who joins renews the attachment too: nobody else may be alive to do it.
JOIN = """
UPDATE requests SET attached_by = attached_by + 1,
                    attached_until = greatest(attached_until, horde_now() + make_interval(secs => %(attached_for)s))
WHERE id = %(request)s AND attached_until IS NOT NULL AND outcome IS NULL
"""

LEAVE = (
    "UPDATE requests SET attached_by = attached_by - 1 WHERE id = %(request)s AND attached_by > 0 RETURNING attached_by"
)

LET_GO = """
UPDATE requests SET attached_by = attached_by - 1,
                    attached_until = greatest(attached_until, horde_now() + make_interval(secs => %(attached_for)s))
WHERE id = %(request)s AND attached_by > 0 AND outcome IS NULL
"""


def stay_attached(tx: Transaction, request_ids: Sequence[uuid.UUID]) -> None:
    """Move the end of these attachments ahead; what has ended, is gone or was never attached stays as it is."""
    running_for = PROGRESS_LEASE + EXPIRY_AFTER_LEASE
    tx.execute(STAY_ATTACHED, {"requests": list(request_ids), "attached_for": ATTACHED_FOR, "running_for": running_for})


def join(tx: Transaction, request_id: uuid.UUID) -> bool:
    """One connection more waits for an attached request; False when it has ended or is gone."""
    return tx.execute(JOIN, {"request": request_id, "attached_for": ATTACHED_FOR}).rowcount == 1


def leave(tx: Transaction, request_id: uuid.UUID, *, pricing: Pricing) -> bool:
    """One connection fewer waits; True when it was the last and cancelled the request. After an outcome it changes nothing."""
    request = lock_request(tx, request_id)
    if request is None or request.outcome is not None:
        return False
    if tx.execute(LEAVE, {"request": request_id}).scalar_one_or_none() != 0:
        return False
    jobs = lock_processing_jobs(tx, request_id)
    cancel_locked(tx, request, jobs, CancelReason.DISCONNECT, pricing=pricing)
    return True


def let_go(tx: Transaction, request_id: uuid.UUID) -> None:
    """One connection fewer waits, and not because its client wants no more: until the attachment lapses it may come back."""
    tx.execute(LET_GO, {"request": request_id, "attached_for": ATTACHED_FOR})
