"""Enqueue: a request comes into being with n waiting slots, its seeds and its rank fixed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.terms import ATTACHED_FOR, Terms
from horde.lifecycle.words import Kind

# Inserts only, nothing waits for a lock, so one statement may do it all.
ENQUEUE = Prepared("""
WITH request AS (
    INSERT INTO requests (id, kind, user_id, client_agent, payload, created_at, expires_at, deadline, rank, models, max_length,
        max_context_length, trusted_workers, slow_workers, nsfw, worker_ids, worker_blacklist, n, waiting, charged, revision,
        needs_progress, attached_by, attached_until)
    VALUES (%(id)s, %(kind)s, %(user)s, %(client_agent)s, %(payload)s, horde_now(),
        least(horde_now() + make_interval(secs => %(expiry)s), horde_now() + make_interval(secs => %(deadline_in)s)),
        horde_now() + make_interval(secs => %(deadline_in)s), horde_now() + make_interval(secs => %(rank_offset)s),
        %(models)s, %(max_length)s, %(max_context_length)s, %(trusted_workers)s, %(slow_workers)s, %(nsfw)s,
        %(worker_ids)s::uuid[], %(worker_blacklist)s, %(n)s, %(n)s, %(tax)s,
        %(revision)s, %(needs_progress)s, CASE WHEN %(attached)s THEN 1 ELSE 0 END,
        CASE WHEN %(attached)s THEN horde_now() + make_interval(secs => %(attached_for)s) END)
    RETURNING id, rank, user_id, created_at),
slots AS (
    INSERT INTO slots (request_id, idx, state, seed)
    SELECT request.id, seeds.ordinality - 1, 'waiting', seeds.seed
    FROM request, unnest(%(seeds)s::bigint[]) WITH ORDINALITY AS seeds (seed, ordinality)),
queue AS (
    INSERT INTO queue (kind, model, rank, request_id, user_id)
    SELECT %(kind)s, model, request.rank, request.id, request.user_id FROM request, unnest(%(queue_models)s::text[]) AS model),
event AS (
    INSERT INTO events (at, kind, request_kind, request_id, user_id, price)
    SELECT created_at, 'enqueued', %(kind)s, id, user_id, %(tax)s FROM request RETURNING id)
INSERT INTO events_unfolded (event_id) SELECT id FROM event
""")

ANY_MODEL = "*"


@dataclass(frozen=True)
class NewRequest:
    """A request as admission let it in.

    Attributes:
        payload: what a worker gets, by the names it knows.
        seeds: one per wanted result.
        rank_offset: seconds added to the time of enqueue to give its place in the queue.
        deadline: seconds from now after which nobody wants the result; None: none.
        attached: a client waits for it on an open connection.
        revision: the key of the one model revision it may run on (see `Request.revision`); None: any.
        needs_progress: only a worker that posts progress may take it.
        tax: hundredths of a kudos charged for the request itself.
    """

    id: uuid.UUID
    kind: Kind
    user_id: int
    payload: dict[str, Any]
    seeds: Sequence[int]
    max_length: int
    max_context_length: int
    rank_offset: float = 0.0
    models: Sequence[str] = ()
    worker_ids: Sequence[uuid.UUID] = ()
    worker_blacklist: bool = False
    trusted_workers: bool = False
    slow_workers: bool = True
    nsfw: bool = False
    deadline: float | None = None
    attached: bool = False
    revision: str | None = None
    needs_progress: bool = False
    tax: int = 0
    client_agent: str = "unknown:0:unknown"


def enqueue(tx: Transaction, new: NewRequest, terms: Terms) -> None:
    """Write the request, its slots and its queue rows."""
    tx.execute(
        ENQUEUE,
        {
            "id": new.id,
            "kind": new.kind.value,
            "user": new.user_id,
            "client_agent": new.client_agent,
            "payload": json.dumps(new.payload),
            "expiry": terms.expiry,
            "deadline_in": new.deadline,
            "rank_offset": new.rank_offset,
            "models": list(new.models),
            "queue_models": queue_models(new.models),
            "max_length": new.max_length,
            "max_context_length": new.max_context_length,
            "trusted_workers": new.trusted_workers,
            "slow_workers": new.slow_workers,
            "nsfw": new.nsfw,
            "worker_ids": list(new.worker_ids),
            "worker_blacklist": new.worker_blacklist,
            "n": len(new.seeds),
            "seeds": list(new.seeds),
            "revision": new.revision,
            "needs_progress": new.needs_progress,
            "attached": new.attached,
            "attached_for": ATTACHED_FOR,
            "tax": new.tax,
        },
    )


def queue_keys(kind: Kind, models: Sequence[str]) -> list[tuple[str, str]]:
    """(kind, model) of each of its queue rows."""
    return [(kind.value, model) for model in queue_models(models)]


def queue_models(models: Sequence[str]) -> list[str]:
    """The names under which a request queues: each model once, or `*` when it names none."""
    return sorted(set(models)) or [ANY_MODEL]
