"""A user's figures: the folded row plus the events not folded yet."""

from __future__ import annotations

from typing import Any

from horde.db.database import Transaction

# As many ids of waiting requests as an answer holds.
MOST_ACTIVE = 100

READ_USER_TOTALS = """
WITH fresh AS (
    SELECT e.* FROM events_unfolded u JOIN events e ON e.id = u.event_id
    WHERE e.user_id = %(user)s OR e.owner_id = %(user)s)
SELECT u.created_at, extract(epoch FROM horde_now() - u.created_at)::bigint AS age, u.contact,
    coalesce(t.requests, 0) + (SELECT count(*) FROM fresh WHERE kind = 'enqueued' AND user_id = %(user)s) AS requests,
    coalesce(t.tokens, 0)
        + (SELECT coalesce(sum(tokens), 0) FROM fresh WHERE kind = 'stored' AND user_id = %(user)s) AS tokens,
    coalesce(t.results, 0) + (SELECT count(*) FROM fresh WHERE kind = 'stored' AND user_id = %(user)s) AS results,
    coalesce(t.spent, 0) + (SELECT coalesce(sum(price), 0) FROM fresh WHERE user_id = %(user)s) AS spent,
    coalesce(t.fulfilled, 0) + (SELECT count(*) FROM fresh WHERE kind = 'stored' AND owner_id = %(user)s) AS fulfilled,
    coalesce(t.tokens_generated, 0)
        + (SELECT coalesce(sum(tokens), 0) FROM fresh WHERE kind = 'stored' AND owner_id = %(user)s) AS tokens_generated,
    coalesce(t.earned, 0) + (SELECT coalesce(sum(reward), 0) FROM fresh WHERE owner_id = %(user)s) AS earned,
    ARRAY(SELECT id FROM requests WHERE user_id = %(user)s AND waiting > 0 AND kind = 'text' AND %(registered)s
          ORDER BY created_at LIMIT %(most)s) AS active
FROM users u LEFT JOIN user_totals t ON t.user_id = u.id WHERE u.id = %(user)s
"""


def read_user_totals(tx: Transaction, user_id: int, *, registered: bool) -> Any:
    """One row of counts, and the ids of waiting requests; none of the anonymous account, whose requests are not one person's."""
    return tx.execute(READ_USER_TOTALS, {"user": user_id, "registered": registered, "most": MOST_ACTIVE}).one()
