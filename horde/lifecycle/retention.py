"""Retention: a request that has been done long enough is deleted; events, ledger and statistics stay."""

from __future__ import annotations

from horde.db.database import Transaction
from horde.lifecycle.terms import Terms

# A job whose lease still runs keeps its request: a worker that submits in time is never told that it does not exist.
DELETE_OLD = """
DELETE FROM requests WHERE id IN (
    SELECT id FROM requests
    WHERE done_at IS NOT NULL AND done_at <= horde_now() - make_interval(secs => %(retention)s)
      AND NOT EXISTS (SELECT FROM jobs WHERE jobs.request_id = requests.id
                      AND without_outages(jobs.lease_begun, jobs.lease_end) > horde_now())
    ORDER BY done_at, id LIMIT %(batch)s FOR UPDATE SKIP LOCKED)
"""

BATCH = 200


def delete_old(tx: Transaction, terms: Terms) -> int:
    """Delete one batch; how many went. Their slots, jobs, progress and keys go with them."""
    return tx.execute(DELETE_OLD, {"retention": terms.retention, "batch": BATCH}).rowcount
