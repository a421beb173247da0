"""Where a request stands, how long it may take, and whether anybody could serve it at all. Estimates, read without locks."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.db.tables.workers import CHAT_ONLINE_SECONDS, ONLINE_SECONDS
from horde.lifecycle.enqueue import queue_models
from horde.lifecycle.words import Kind
from horde.queue.filter import CAN_SERVE, SERVES_MODEL, TAKES_KIND

# Rows ahead are counted no further than this: nobody tells place 1,000 from 2,000.
AHEAD_DEPTH = 1000
# What an unmeasured worker is taken to do, in tokens per second.
ASSUMED_SPEED = 10.0
# What all workers together are taken to do at least.
SLOWEST = 1.0

_ESTIMATE = """
WITH ahead AS (
    SELECT q.request_id FROM unnest(%(models)s::text[]) AS named (model), LATERAL (
        SELECT request_id FROM queue
        WHERE kind = %(kind)s::text AND model = named.model AND rank < <rank> ORDER BY rank LIMIT %(depth)s) q
    GROUP BY q.request_id LIMIT %(depth)s),
load AS (
    SELECT count(*) AS requests, coalesce(sum(r.waiting::bigint * r.max_length), 0) AS tokens
    FROM ahead JOIN requests r ON r.id = ahead.request_id),
power AS (
    SELECT coalesce(sum(coalesce(w.speed, %(assumed)s) * w.threads), 0) AS speed
    FROM worker_offers w
    WHERE %(kind)s::text = ANY (w.kinds) AND w.last_check_in > horde_now() - make_interval(secs => %(online)s)
      AND NOT w.maintenance AND (%(any_model)s OR w.models && %(models)s::text[]))
SELECT load.requests, load.tokens::float AS tokens, power.speed::float AS speed FROM load, power
"""
ESTIMATE = Prepared(_ESTIMATE.replace("<rank>", "%(rank)s"))
# Of a request that is not there yet.
ESTIMATE_NEXT = Prepared(
    _ESTIMATE.replace("<rank>", "(SELECT horde_now()) + make_interval(secs => %(rank_offset)s::float)")
)

# The same predicate as the claim's, asked of every worker online.
IS_POSSIBLE = Prepared(f"""
SELECT EXISTS (
    SELECT FROM worker_offers w, requests r
    WHERE r.id = %(request)s AND {TAKES_KIND} AND w.last_check_in > horde_now() - interval '{ONLINE_SECONDS} seconds'
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
    row = tx.execute(ESTIMATE, {**_parameters(kind, models), "rank": rank}).one()
    seconds = 0.0
    if waiting:
        seconds = (row.tokens + waiting * max_length) / max(SLOWEST, row.speed)
    if processing:
        seconds += max(0.0, max_length / ASSUMED_SPEED - oldest_running)
    return Estimate(position=row.requests + 1 if waiting else 0, wait_seconds=math.ceil(seconds))


def estimate_wait(tx: Transaction, *, kind: str, model: str, rank_offset: float) -> float:
    """Seconds until all that waits ahead of a new request for `model` would be done by all workers online that serve it.

    Args:
        rank_offset: seconds that the new request's rank is moved by, as `horde.queue.rank` says.

    Its own tokens are not counted, nor what runs now; no capacity counts as 1 token/s.
    """
    row = tx.execute(ESTIMATE_NEXT, {**_parameters(kind, [model]), "rank_offset": rank_offset}).one()
    return float(row.tokens / max(SLOWEST, row.speed))


def _parameters(kind: str, models: Sequence[str]) -> dict[str, Any]:
    return {
        "kind": str(kind),
        "models": queue_models(models),
        "any_model": not models,
        "depth": AHEAD_DEPTH,
        "assumed": ASSUMED_SPEED,
        "online": CHAT_ONLINE_SECONDS if kind == Kind.CHAT else ONLINE_SECONDS,
    }


def is_possible(tx: Transaction, request_id: object) -> bool:
    """Whether some worker online could take the request."""
    return bool(tx.execute(IS_POSSIBLE, {"request": request_id}).scalar_one())
