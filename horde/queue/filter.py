"""The pop filter as SQL: one predicate for the claim, the retry rule, the skipped counts and `is_possible`.

`w` is a worker's offer (the view `worker_offers`, or the parameters of a pop), `r` a request.
"""

from __future__ import annotations

from horde.db.tables.workers import ONLINE_SECONDS, SLOW_BELOW

# Reason of `skipped` -> the condition under which a worker may take the request as far as this reason goes.
CONDITIONS: dict[str, str] = {
    "worker_id": "(r.worker_ids = '{}' OR (w.id = ANY (r.worker_ids)) <> r.worker_blacklist)",
    "untrusted": "(NOT r.trusted_workers OR w.trusted)",
    "max_context_length": "r.max_context_length <= w.max_context_length",
    "max_length": "r.max_length <= w.max_length",
    "performance": f"(r.slow_workers OR coalesce(w.speed, {SLOW_BELOW}) >= {SLOW_BELOW})",
    "maintenance": "(NOT w.maintenance OR w.owner_id = r.user_id)",
    "revision": "(r.revision IS NULL OR r.revision = ANY (w.revisions))",
    "progress": "(NOT r.needs_progress OR w.posts_progress)",
}

TAKES_KIND = "r.kind = ANY (w.kinds)"
SERVES_MODEL = "(r.models = '{}' OR r.models && w.models)"

CAN_SERVE = "(" + " AND ".join(CONDITIONS.values()) + ")"

# A queue row says by its being there that slots wait and no outcome is set; this is what it does not say.
IS_WANTED = """(r.expires_at > (SELECT horde_now())
  AND (r.attached_until IS NULL OR r.attached_until > (SELECT horde_now())))"""

# What a claim asks again of the row that it has locked. The sum keeps the planner off the partial indexes: the row is known by id.
IS_OPEN = f"(r.waiting + 0 > 0 AND r.outcome IS NULL AND {IS_WANTED})"

# A worker that faulted or released a request gets it again only when nobody else who is online could serve it.
MAY_RETRY = f"""(NOT w.id = ANY (r.tried_workers) OR NOT EXISTS (
    SELECT FROM worker_offers o
    WHERE o.id <> w.id AND NOT o.id = ANY (r.tried_workers) AND {TAKES_KIND.replace("w.", "o.")}
      AND o.last_check_in > horde_now() - interval '{ONLINE_SECONDS} seconds'
      AND {SERVES_MODEL.replace("w.", "o.")} AND {CAN_SERVE.replace("w.", "o.")}))"""

# A pop's own words: its models and their revisions count, not those of the worker's last check-in. Whether the worker is paused or
# deleted is asked of its row each time: a long poll would know it as it was when it began.
OFFER = """
SELECT id, owner_id, maintenance, %(models)s::text[] AS models, %(max_length)s::int AS max_length,
       %(max_context_length)s::int AS max_context_length, %(trusted)s::bool AS trusted, %(speed)s::float AS speed,
       %(posts_progress)s::bool AS posts_progress, %(revisions)s::text[] AS revisions
FROM workers WHERE id = %(worker)s AND deleted_at IS NULL
"""
