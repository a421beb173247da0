"""Workers as they are shown: what they offer and what they have done, the events not folded yet included."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from horde.db.database import Transaction
from horde.db.tables.workers import ONLINE_SECONDS

# `fresh` are the worker's unfolded events: a read shows a settlement at once.
READ_WORKERS = """
SELECT w.id, w.name, w.kind, w.kinds, w.owner_id, w.models, w.max_length, w.max_context_length, w.threads, w.nsfw, w.bridge_agent,
       w.uptime, w.info, w.maintenance, w.maintenance_message, w.created_at, owner.name AS owner_name, owner.trusted, owner.flagged,
       owner.public_workers, w.last_check_in > horde_now() - make_interval(secs => %(online)s) AS online,
       coalesce(t.fulfilled, 0) + coalesce(fresh.fulfilled, 0) AS fulfilled,
       coalesce(t.aborted, 0) + coalesce(fresh.aborted, 0) AS aborted,
       coalesce(t.tokens, 0) + coalesce(fresh.tokens, 0) AS tokens,
       coalesce(t.earned, 0) + coalesce(fresh.earned, 0) AS earned,
       tokens_per_second(coalesce(t.recent_tokens, 0) + coalesce(fresh.measured_tokens, 0),
                         coalesce(t.recent_seconds, 0) + coalesce(fresh.measured_seconds, 0)) AS speed
FROM workers w
JOIN users owner ON owner.id = w.owner_id
LEFT JOIN worker_totals t ON t.worker_id = w.id
LEFT JOIN (
    SELECT e.worker_id, count(*) FILTER (WHERE e.kind = 'stored') AS fulfilled,
           count(*) FILTER (WHERE e.kind = 'faulted' AND e.reason <> 'release_cap') AS aborted,
           sum(e.tokens) AS tokens, sum(e.reward) AS earned,
           sum(e.tokens) FILTER (WHERE e.kind = 'stored' AND e.tokens > 0 AND run_seconds(e.timings) > 0) AS measured_tokens,
           sum(run_seconds(e.timings)) FILTER (WHERE e.kind = 'stored' AND e.tokens > 0) AS measured_seconds
    FROM events_unfolded u JOIN events e ON e.id = u.event_id WHERE e.worker_id IS NOT NULL GROUP BY e.worker_id
) fresh ON fresh.worker_id = w.id
WHERE w.deleted_at IS NULL AND {which}
ORDER BY w.created_at, w.id
"""

_BY = {
    "id": "w.id = %(value)s",
    "name": "w.name = %(value)s",
    "owner": "w.owner_id = %(value)s",
    "online": """w.last_check_in > horde_now() - make_interval(secs => %(online)s)
        AND (%(value)s::text IS NULL OR w.kind = %(value)s OR %(value)s = ANY (w.kinds))""",
}

SERVED_BY_TRUSTED = """
SELECT DISTINCT model FROM worker_offers w, unnest(w.models) AS model
WHERE %(kind)s::text = ANY (w.kinds) AND w.trusted AND NOT w.maintenance
  AND w.last_check_in > horde_now() - make_interval(secs => %(online)s)
"""

SET_MAINTENANCE = """
UPDATE workers SET maintenance = %(on)s, maintenance_message = CASE WHEN %(on)s THEN %(message)s END,
                   aborts_forgiven_at = CASE WHEN %(on)s THEN aborts_forgiven_at ELSE horde_now() END
WHERE id = %(worker)s AND deleted_at IS NULL
"""

SET_MESSAGE = """
UPDATE workers SET maintenance_message = %(message)s WHERE id = %(worker)s AND maintenance AND deleted_at IS NULL
"""

SET_INFO = "UPDATE workers SET info = %(info)s WHERE id = %(worker)s AND deleted_at IS NULL"

# Counted from the events themselves: what the fold has not seen counts as well.
PAUSE_DROPPERS = """
UPDATE workers SET maintenance = true, maintenance_message = %(message)s
WHERE id = ANY (%(workers)s) AND NOT maintenance AND deleted_at IS NULL AND %(most)s < (
    SELECT count(*) FROM events e
    WHERE e.worker_id = workers.id AND e.kind = 'faulted' AND e.reason <> 'release_cap'
      AND e.at > greatest(horde_now() - interval '1 hour', workers.aborts_forgiven_at))
RETURNING id, name
"""


def read_workers(tx: Transaction, by: str, value: Any = None) -> Sequence[Any]:
    """Rows of workers by `id`, `name`, `owner` (user id), or those `online` (of a kind or taking it, or None for all)."""
    statement = READ_WORKERS.format(which=_BY[by])
    return tx.execute(statement, {"value": value, "online": ONLINE_SECONDS}).all()


def served_by_trusted(tx: Transaction, kind: str) -> list[str]:
    """Models of a kind that workers of trusted owners serve now."""
    return list(tx.execute(SERVED_BY_TRUSTED, {"kind": kind, "online": ONLINE_SECONDS}).scalars())


def set_maintenance(tx: Transaction, worker_id: uuid.UUID, *, on: bool, message: str | None) -> None:
    """Set or clear maintenance; clearing it forgives the aborts so far."""
    tx.execute(SET_MAINTENANCE, {"worker": worker_id, "on": on, "message": message})


def set_maintenance_message(tx: Transaction, worker_id: uuid.UUID, message: str) -> bool:
    """Say something else about a worker in maintenance; False when it is in none."""
    return tx.execute(SET_MESSAGE, {"worker": worker_id, "message": message}).rowcount == 1


def set_info(tx: Transaction, worker_id: uuid.UUID, info: str) -> None:
    """Set the text that a worker's page shows."""
    tx.execute(SET_INFO, {"worker": worker_id, "info": info})


def pause_droppers(tx: Transaction, worker_ids: Sequence[uuid.UUID], *, most: int, message: str) -> Sequence[Any]:
    """Put those of the workers into maintenance that had more than `most` aborts within an hour; who was."""
    return tx.execute(PAUSE_DROPPERS, {"workers": list(worker_ids), "most": most, "message": message}).all()
