"""Attachment: a client waits for this request on an open connection; its handler says so every few seconds."""

from __future__ import annotations

import uuid

from horde.db.database import Transaction
from horde.lifecycle.terms import ATTACHED_FOR

# Never in the past of a handler that lives: two handlers of one request do not shorten each other's term.
STAY_ATTACHED = """
UPDATE requests SET attached_until = greatest(attached_until, horde_now() + make_interval(secs => %(attached_for)s))
WHERE id = %(request)s AND attached_until IS NOT NULL AND outcome IS NULL
"""


def stay_attached(tx: Transaction, request_id: uuid.UUID) -> bool:
    """Move the end of the attachment ahead; False when the request has ended or is gone."""
    return tx.execute(STAY_ATTACHED, {"request": request_id, "attached_for": ATTACHED_FOR}).rowcount == 1
