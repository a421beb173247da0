"""What the horde as a whole is doing: queue, workers, throughput. Reads that no transition waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horde.db.database import Transaction
from horde.db.tables.workers import ONLINE_SECONDS

# The past minute is the last full one and what of the current one is folded: close enough, and it costs one index scan.
PERFORMANCE = """
SELECT
    (SELECT count(*) FROM requests WHERE outcome IS NULL AND waiting > 0 AND kind = 'image') AS queued_requests,
    (SELECT count(*) FROM requests WHERE outcome IS NULL AND waiting > 0 AND kind IN ('text', 'chat')) AS queued_text_requests,
    (SELECT coalesce(sum(waiting::bigint * max_length), 0) FROM requests
     WHERE outcome IS NULL AND waiting > 0 AND kind IN ('text', 'chat')) AS queued_tokens,
    (SELECT coalesce(sum(tokens), 0) FROM totals_minute WHERE minute > horde_now() - interval '2 minutes'
        AND minute <= horde_now() - interval '1 minute') AS past_minute_tokens,
    (SELECT count(*) FROM jobs WHERE state = 'processing') AS processing,
    count(*) FILTER (WHERE kind = 'image') AS worker_count,
    count(*) FILTER (WHERE kind IN ('text', 'chat')) AS text_worker_count,
    coalesce(sum(threads) FILTER (WHERE kind = 'image'), 0) AS thread_count,
    coalesce(sum(threads) FILTER (WHERE kind IN ('text', 'chat')), 0) AS text_thread_count
FROM worker_offers WHERE last_check_in > horde_now() - make_interval(secs => %(online)s)
"""

# What each model's workers offer, and what waits for it.
MODELS = """
WITH offered AS (
    SELECT model, sum(w.threads) AS count, avg(w.speed) AS performance, sum(coalesce(w.speed, 0) * w.threads) AS speed
    FROM worker_offers w, unnest(w.models) AS model
    WHERE w.kind = %(kind)s AND w.last_check_in > horde_now() - make_interval(secs => %(online)s) AND NOT w.maintenance
    GROUP BY model),
queued AS (
    SELECT q.model, sum(r.waiting) AS jobs, sum(r.waiting::bigint * r.max_length) AS tokens
    FROM queue q JOIN requests r ON r.id = q.request_id WHERE q.kind = %(kind)s GROUP BY q.model)
SELECT coalesce(offered.model, queued.model) AS name, coalesce(offered.count, 0)::int AS count_,
       coalesce(offered.performance, 0)::float AS performance, coalesce(offered.speed, 0)::float AS speed,
       coalesce(queued.jobs, 0)::int AS jobs, coalesce(queued.tokens, 0)::float AS tokens
FROM offered FULL JOIN queued ON queued.model = offered.model
WHERE coalesce(offered.model, queued.model) <> '*'
ORDER BY 2 DESC, 1
"""


def read_performance(tx: Transaction) -> Any:
    """One row of counts, by the names of AI Horde's `status/performance`."""
    return tx.execute(PERFORMANCE, {"online": ONLINE_SECONDS}).one()


def read_models(tx: Transaction, kind: str) -> Sequence[Any]:
    """A row per model that is offered or waited for."""
    return tx.execute(MODELS, {"kind": kind, "online": ONLINE_SECONDS}).all()
