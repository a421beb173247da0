"""What the horde as a whole is doing: queue, workers, throughput. Reads that no transition waits for.

What waits is counted exactly up to 10,000 requests. Of a longer queue the 10,000 that expire first are looked at, and taken to
be like the rest; how many there are in all is what the database's own statistics say, which follow within a minute or so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horde.db.database import Transaction
from horde.db.tables.workers import ONLINE_SECONDS

# These are asked every few seconds by every process, and by anybody: their cost must not grow with the queue.
COUNTED = 10_000

# `scale`: how many requests each that was looked at stands for.
_WAITING = """
looked_at AS MATERIALIZED (
    SELECT kind, models, waiting, max_length FROM requests WHERE outcome IS NULL AND waiting > 0
    ORDER BY expires_at, id LIMIT %(counted)s),
whole AS (
    SELECT CASE WHEN (SELECT count(*) FROM looked_at) < %(counted)s THEN 1.0
                ELSE greatest(1.0, reltuples / %(counted)s) END AS scale
    FROM pg_class WHERE oid = 'ix_requests_open_expiry'::regclass)
"""

# The past minute is the last full one and what of the current one is folded: close enough, and it costs one index scan.
PERFORMANCE = f"""
WITH {_WAITING},
queue AS (
    SELECT count(*) FILTER (WHERE kind = 'image') * scale AS images,
           count(*) FILTER (WHERE kind IN ('text', 'chat')) * scale AS texts,
           coalesce(sum(waiting::bigint * max_length) FILTER (WHERE kind IN ('text', 'chat')), 0) * scale AS tokens
    FROM looked_at RIGHT JOIN whole ON true GROUP BY scale)
SELECT
    queue.images::bigint AS queued_requests, queue.texts::bigint AS queued_text_requests, queue.tokens::bigint AS queued_tokens,
    (SELECT coalesce(sum(tokens), 0) FROM totals_minute WHERE minute > horde_now() - interval '2 minutes'
        AND minute <= horde_now() - interval '1 minute') AS past_minute_tokens,
    (SELECT count(*) FROM (SELECT FROM jobs WHERE state = 'processing' LIMIT %(counted)s) AS running) AS processing,
    workers.*
FROM queue, (
    SELECT count(*) FILTER (WHERE kind = 'image') AS worker_count,
           count(*) FILTER (WHERE kind IN ('text', 'chat')) AS text_worker_count,
           coalesce(sum(threads) FILTER (WHERE kind = 'image'), 0) AS thread_count,
           coalesce(sum(threads) FILTER (WHERE kind IN ('text', 'chat')), 0) AS text_thread_count
    FROM worker_offers WHERE last_check_in > horde_now() - make_interval(secs => %(online)s)) AS workers
"""

# What each model's workers offer, and what waits for it.
MODELS = f"""
WITH {_WAITING},
offered AS (
    SELECT model, sum(w.threads) AS count, avg(w.speed) AS performance, sum(coalesce(w.speed, 0) * w.threads) AS speed
    FROM worker_offers w, unnest(w.models) AS model
    WHERE %(kind)s::text = ANY (w.kinds) AND w.last_check_in > horde_now() - make_interval(secs => %(online)s)
      AND NOT w.maintenance
    GROUP BY model),
queued AS (
    SELECT model, sum(waiting) * scale AS jobs, sum(waiting::bigint * max_length) * scale AS tokens
    FROM looked_at, whole, unnest(models) AS model WHERE kind = %(kind)s GROUP BY model, scale)
SELECT coalesce(offered.model, queued.model) AS name, coalesce(offered.count, 0)::int AS count_,
       coalesce(offered.performance, 0)::float AS performance, coalesce(offered.speed, 0)::float AS speed,
       coalesce(queued.jobs, 0)::bigint AS jobs, coalesce(queued.tokens, 0)::float AS tokens
FROM offered FULL JOIN queued ON queued.model = offered.model
WHERE coalesce(offered.model, queued.model) <> '*'
ORDER BY 2 DESC, 1
"""


def read_performance(tx: Transaction) -> Any:
    """One row of counts, by the names of AI Horde's `status/performance`."""
    return tx.execute(PERFORMANCE, {"online": ONLINE_SECONDS, "counted": COUNTED}).one()


def read_models(tx: Transaction, kind: str) -> Sequence[Any]:
    """A row per model that is offered or waited for."""
    return tx.execute(MODELS, {"kind": kind, "online": ONLINE_SECONDS, "counted": COUNTED}).all()
