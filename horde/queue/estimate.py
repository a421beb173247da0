"""Where a request stands, how long it may take, and whether anybody could serve it at all. Estimates, read without locks."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass

from horde.db.database import Prepared, Transaction
from horde.db.tables.workers import ONLINE_SECONDS
from horde.lifecycle.enqueue import queue_models
from horde.queue.filter import CAN_SERVE, SERVES_MODEL

# Rows ahead are counted no further than this: nobody tells place 1,000 from 2,000.
AHEAD_DEPTH = 1000
# What an unmeasured worker is taken to do, in tokens per second.
ASSUMED_SPEED = 10.0

ESTIMATE = Prepared("""
WITH ahead AS (
    SELECT q.request_id FROM unnest(%(models)s::text[]) AS named (model), LATERAL (
        SELECT request_id FROM queue
        WHERE kind = %(kind)s AND model = named.model AND rank < %(rank)s ORDER BY rank LIMIT %(depth)s) q
    GROUP BY q.request_id LIMIT %(depth)s),
load AS (
    SELECT count(*) AS requests, coalesce(sum(r.waiting::bigint * r.max_length), 0) AS tokens
    FROM ahead JOIN requests r ON r.id = ahead.request_id),
power AS (
    SELECT coalesce(sum(coalesce(w.speed, %(assumed)s) * w.threads), 0) AS speed
    FROM worker_offers w
    WHERE w.kind = %(kind)s AND w.last_check_in > horde_now() - make_interval(secs => %(online)s) AND NOT w.maintenance
      AND (%(any_model)s OR w.models && %(models)s::text[]))
SELECT load.requests, load.tokens::float AS tokens, power.speed::float AS speed FROM load, power
""")

# The same predicate as the claim's, asked of every worker online.
IS_POSSIBLE = Prepared(f"""
SELECT EXISTS (
    SELECT FROM worker_offers w, requests r
    WHERE r.id = %(request)s AND w.kind = r.kind AND w.last_check_in > horde_now() - interval '{ONLINE_SECONDS} seconds'
      AND {SERVES_MODEL} AND {CAN_SERVE})
""")


@dataclass(frozen=True)
class Estimate:
    """Requests ahead, this one included (0: nothing waits), and seconds until all is done."""

    position: int
    wait_seconds: int


def estimate(
    tx: Transaction,
    *,
    kind: str,
    models: Sequence[str],
    rank: dt.datetime,
    waiting: int,
    processing: int,
    max_length: int,
    oldest_running: float,
) -> Estimate:
    """Place and time from what waits ahead and what the workers online do together.

    Tokens ahead, its own included, over tokens per second of all who serve these models; no capacity counts as 1 token/s.
    What runs is taken to need its full length once more, less the time it has had.
    """
    parameters = {
        "kind": kind,
        "models": queue_models(models),
        "any_model": not models,
        "rank": rank,
        "depth": AHEAD_DEPTH,
        "assumed": ASSUMED_SPEED,
        "online": ONLINE_SECONDS,
    }
    row = tx.execute(ESTIMATE, parameters).one()
    speed = max(1.0, row.speed)
    seconds = 0.0
    if waiting:
        seconds = (row.tokens + waiting * max_length) / speed
    if processing:
        seconds += max(0.0, max_length / ASSUMED_SPEED - oldest_running)
    return Estimate(position=row.requests + 1 if waiting else 0, wait_seconds=math.ceil(seconds))


def is_possible(tx: Transaction, request_id: object) -> bool:
    """Whether some worker online could take the request."""
    return bool(tx.execute(IS_POSSIBLE, {"request": request_id}).scalar_one())
