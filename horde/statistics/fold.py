"""The fold: claims unfolded events and counts them into the figures, once, in one transaction.

`claim_unfolded` deletes the marks it returns; if the transaction fails, they are there again. Two folds at once claim
different events. Nothing here depends on the order of ids, which become visible out of order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from horde.db.database import Transaction

# Older jobs weigh less in a worker's speed: after 10 jobs a job counts for a third. Empty results say nothing about it.
SPEED_MEMORY = 0.9

CLAIM_UNFOLDED = """
WITH claimed AS (
    DELETE FROM events_unfolded WHERE event_id IN (
        SELECT u.event_id FROM events_unfolded u
        WHERE NOT EXISTS (SELECT FROM events_set_aside a WHERE a.event_id = u.event_id)
        ORDER BY u.event_id LIMIT %(batch)s FOR UPDATE OF u SKIP LOCKED)
    RETURNING event_id)
SELECT e.id, e.at, e.kind, e.request_kind, e.user_id, e.worker_id, e.worker_name, e.owner_id, e.model, e.reason, e.price, e.reward,
       e.tokens, run_seconds(e.timings) AS seconds
FROM claimed JOIN events e ON e.id = claimed.event_id ORDER BY e.id
"""

SET_ASIDE = """
INSERT INTO events_set_aside (event_id, at, error) VALUES (%(event)s, horde_now(), %(error)s) ON CONFLICT DO NOTHING
"""

ADD_WORKER_TOTALS = """
WITH new AS (
    SELECT * FROM unnest(%(ids)s::uuid[], %(claimed)s::bigint[], %(fulfilled)s::bigint[], %(aborted)s::bigint[],
                         %(tokens)s::bigint[], %(earned)s::bigint[], %(measured)s::bigint[], %(recent_tokens)s::float[],
                         %(recent_seconds)s::float[])
         AS new (id, claimed, fulfilled, aborted, tokens, earned, measured, recent_tokens, recent_seconds))
INSERT INTO worker_totals AS t (worker_id, claimed, fulfilled, aborted, tokens, earned, recent_tokens, recent_seconds)
SELECT id, claimed, fulfilled, aborted, tokens, earned, recent_tokens, recent_seconds
FROM new WHERE EXISTS (SELECT FROM workers WHERE workers.id = new.id)
ORDER BY id
ON CONFLICT (worker_id) DO UPDATE SET claimed = t.claimed + excluded.claimed, fulfilled = t.fulfilled + excluded.fulfilled,
    aborted = t.aborted + excluded.aborted, tokens = t.tokens + excluded.tokens, earned = t.earned + excluded.earned,
    recent_tokens = excluded.recent_tokens
        + faded(t.recent_tokens, %(memory)s, (SELECT measured FROM new WHERE new.id = t.worker_id)),
    recent_seconds = excluded.recent_seconds
        + faded(t.recent_seconds, %(memory)s, (SELECT measured FROM new WHERE new.id = t.worker_id))
"""

ADD_USER_TOTALS = """
INSERT INTO user_totals AS t (user_id, requests, results, tokens, spent, fulfilled, tokens_generated, earned)
SELECT id, requests, results, tokens, spent, fulfilled, tokens_generated, earned
FROM unnest(%(ids)s::bigint[], %(requests)s::bigint[], %(results)s::bigint[], %(tokens)s::bigint[], %(spent)s::bigint[],
            %(fulfilled)s::bigint[], %(tokens_generated)s::bigint[], %(earned)s::bigint[])
     AS new (id, requests, results, tokens, spent, fulfilled, tokens_generated, earned)
ORDER BY id
ON CONFLICT (user_id) DO UPDATE SET requests = t.requests + excluded.requests, results = t.results + excluded.results,
    tokens = t.tokens + excluded.tokens, spent = t.spent + excluded.spent, fulfilled = t.fulfilled + excluded.fulfilled,
    tokens_generated = t.tokens_generated + excluded.tokens_generated, earned = t.earned + excluded.earned
"""

ADD_ABORT_HOURS = """
INSERT INTO abort_hours AS t (hour, worker_id, model, reason, request_kind, owner_id, worker_name, count)
SELECT * FROM unnest(%(hours)s::timestamptz[], %(workers)s::uuid[], %(models)s::text[], %(reasons)s::text[], %(kinds)s::text[],
                     %(owners)s::bigint[], %(names)s::text[], %(counts)s::bigint[])
ON CONFLICT (hour, worker_id, model, reason, request_kind) DO UPDATE SET count = t.count + excluded.count
"""

ADD_MINUTES = """
INSERT INTO totals_minute AS t (minute, request_kind, model, results, tokens)
SELECT * FROM unnest(%(minutes)s::timestamptz[], %(kinds)s::text[], %(models)s::text[], %(results)s::bigint[], %(tokens)s::bigint[])
ON CONFLICT (minute, request_kind, model) DO UPDATE SET results = t.results + excluded.results, tokens = t.tokens + excluded.tokens
"""


def claim_unfolded(tx: Transaction, batch: int = 500) -> Sequence[Any]:
    """Take up to `batch` unfolded events for this transaction."""
    return tx.execute(CLAIM_UNFOLDED, {"batch": batch}).all()


def set_aside(tx: Transaction, event_id: int, error: str) -> None:
    """Let the folds pass over an event until its row in `events_set_aside` is deleted; reads show it as unfolded meanwhile."""
    tx.execute(SET_ASIDE, {"event": event_id, "error": error})


def is_abort(event: Any) -> bool:
    """Whether an event is a fault that its worker is blamed for."""
    return bool(event.kind == "faulted" and event.reason != "release_cap")


def fold_into_statistics(tx: Transaction, events: Sequence[Any]) -> None:
    """Count claimed events into worker, user, hour and minute totals."""
    _fold_workers(tx, [event for event in events if event.worker_id is not None])
    _fold_users(tx, events)
    _fold_hours(tx, [event for event in events if event.kind == "claimed" or is_abort(event)])
    _fold_minutes(tx, [event for event in events if event.kind == "stored"])


def _sums(fields: Sequence[str]) -> defaultdict[Any, dict[str, float]]:
    return defaultdict(lambda: dict.fromkeys(fields, 0))


def _columns(sums: dict[Any, dict[str, float]], fields: Sequence[str]) -> dict[str, list[float]]:
    return {field: [total[field] for total in sums.values()] for field in fields}


def _fold_workers(tx: Transaction, events: Iterable[Any]) -> None:
    fields = ("claimed", "fulfilled", "aborted", "tokens", "earned", "measured", "recent_tokens", "recent_seconds")
    sums = _sums(fields)
    for event in events:
        total = sums[event.worker_id]
        total["claimed"] += event.kind == "claimed"
        total["aborted"] += is_abort(event)
        if event.kind == "stored":
            total["fulfilled"] += 1
            total["tokens"] += event.tokens
            total["earned"] += event.reward
            if event.tokens > 0 and event.seconds > 0:
                total["measured"] += 1
                total["recent_tokens"] = total["recent_tokens"] * SPEED_MEMORY + event.tokens
                total["recent_seconds"] = total["recent_seconds"] * SPEED_MEMORY + event.seconds
    if sums:
        tx.execute(ADD_WORKER_TOTALS, {"ids": list(sums), "memory": SPEED_MEMORY, **_columns(sums, fields)})


def _fold_users(tx: Transaction, events: Iterable[Any]) -> None:
    fields = ("requests", "results", "tokens", "spent", "fulfilled", "tokens_generated", "earned")
    sums = _sums(fields)
    for event in events:
        asked = sums[event.user_id]
        asked["requests"] += event.kind == "enqueued"
        asked["spent"] += event.price
        if event.kind == "stored":
            asked["results"] += 1
            asked["tokens"] += event.tokens
            served = sums[event.owner_id]
            served["fulfilled"] += 1
            served["tokens_generated"] += event.tokens
            served["earned"] += event.reward
    if sums:
        tx.execute(ADD_USER_TOTALS, {"ids": list(sums), **_columns(sums, fields)})


def _fold_hours(tx: Transaction, events: Iterable[Any]) -> None:
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    who: dict[tuple[Any, ...], tuple[int, str]] = {}
    for event in events:
        hour = event.at.replace(minute=0, second=0, microsecond=0)
        reason = "taken" if event.kind == "claimed" else event.reason
        key = (hour, event.worker_id, event.model, reason, event.request_kind)
        counts[key] += 1
        who[key] = (event.owner_id, event.worker_name)
    if not counts:
        return
    ordered = sorted(counts, key=str)
    hours, workers, models, reasons, kinds = (list(column) for column in zip(*ordered, strict=True))
    tx.execute(
        ADD_ABORT_HOURS,
        {
            "hours": hours,
            "workers": workers,
            "models": models,
            "reasons": reasons,
            "kinds": kinds,
            "owners": [who[key][0] for key in ordered],
            "names": [who[key][1] for key in ordered],
            "counts": [counts[key] for key in ordered],
        },
    )


def _fold_minutes(tx: Transaction, events: Iterable[Any]) -> None:
    results: dict[tuple[Any, ...], int] = defaultdict(int)
    tokens: dict[tuple[Any, ...], int] = defaultdict(int)
    for event in events:
        key = (event.at.replace(second=0, microsecond=0), event.request_kind, event.model)
        results[key] += 1
        tokens[key] += event.tokens
    if not results:
        return
    ordered = sorted(results, key=str)
    minutes, kinds, models = (list(column) for column in zip(*ordered, strict=True))
    tx.execute(
        ADD_MINUTES,
        {
            "minutes": minutes,
            "kinds": kinds,
            "models": models,
            "results": [results[key] for key in ordered],
            "tokens": [tokens[key] for key in ordered],
        },
    )
