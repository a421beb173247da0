"""What maintenance may have to do: plain reads without locks, paged by key. Whoever acts on a row asks again."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterator

from horde.db.database import Database
from horde.lifecycle.terms import START_WITHIN

PAGE = 200

# Outages only make a lease longer, so the index on its plain end finds all that can be over.
STALE = """
SELECT lease_end AS at, id FROM jobs
WHERE state = 'processing' AND lease_end < horde_now() AND (lease_end, id) > (%(at)s, %(id)s)
ORDER BY lease_end, id LIMIT %(page)s
"""

UNSTARTED = """
SELECT lease_end AS at, id FROM jobs
WHERE state = 'processing' AND posts_progress AND started_at IS NULL
  AND claimed_at + make_interval(secs => %(start_within)s) < horde_now() AND (lease_end, id) > (%(at)s, %(id)s)
ORDER BY lease_end, id LIMIT %(page)s
"""

EXPIRED = """
SELECT expires_at AS at, id FROM requests
WHERE outcome IS NULL AND waiting > 0 AND expires_at <= horde_now() AND (expires_at, id) > (%(at)s, %(id)s)
ORDER BY expires_at, id LIMIT %(page)s
"""

PAST_DEADLINE = """
SELECT deadline AS at, id FROM requests
WHERE outcome IS NULL AND deadline IS NOT NULL AND deadline <= horde_now() AND (deadline, id) > (%(at)s, %(id)s)
ORDER BY deadline, id LIMIT %(page)s
"""

LAPSED = """
SELECT attached_until AS at, id FROM requests
WHERE outcome IS NULL AND attached_until IS NOT NULL AND attached_until <= horde_now()
  AND (attached_until, id) > (%(at)s, %(id)s)
ORDER BY attached_until, id LIMIT %(page)s
"""


def pages(database: Database, statement: str) -> Iterator[uuid.UUID]:
    """Ids that `statement` finds, a page at a time; a row that cannot be dealt with never hides the rest."""
    at, last = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), uuid.UUID(int=0)
    while True:
        parameters = {"at": at, "id": last, "page": PAGE, "start_within": START_WITHIN}
        rows = database.read(_page(statement, parameters))
        for row in rows:
            yield row[1]
        if len(rows) < PAGE:
            return
        at, last = rows[-1][0], rows[-1][1]


def _page(statement: str, parameters: dict[str, object]) -> Callable[..., list[tuple[dt.datetime, uuid.UUID]]]:
    return lambda tx: [tuple(row) for row in tx.execute(statement, parameters)]
