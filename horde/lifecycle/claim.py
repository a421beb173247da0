"""Claim: a worker takes waiting slots of one request; a job in state `processing` comes into being for each."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.terms import EXPIRY_AFTER_LEASE

# Of a request `r`: whose prompts may share what a worker has computed. One user's may; the anonymous account is shared by
# strangers, so that there each request is on its own. Secret, and no worker's to see.
TENANT = "coalesce((SELECT u.key_hash FROM users u WHERE u.id = r.user_id AND u.id <> 0), r.id::text)"

# The compare-and-set of a claim. The caller chose the request by a read that may be old by now: everything that
# allows the claim is asked of the row again here, under its lock.
TAKE_FROM_REQUEST = Prepared("""
UPDATE requests
SET waiting = waiting - least(waiting, %(count)s::int)::smallint, processing = processing + least(waiting, %(count)s::int)::smallint,
    expires_at = least(greatest(expires_at, horde_now() + make_interval(secs => %(lease)s::float + %(after_lease)s::float)), deadline)
WHERE id = %(request)s AND waiting > 0 AND outcome IS NULL AND expires_at > horde_now()
  AND (attached_until IS NULL OR attached_until > horde_now())
  AND (revision IS NULL OR revision = %(revision)s) AND (NOT needs_progress OR %(posts_progress)s)
RETURNING waiting, user_id, kind, extract(epoch FROM horde_now() - created_at) * 1000 AS queue_ms,
          extract(epoch FROM deadline - horde_now())::float AS deadline_in
""")

# The rest in one round trip: the statement above took the lock, so nothing here waits and one snapshot serves all parts.
BEGIN_JOBS = Prepared("""
WITH chosen AS (
    SELECT idx, row_number() OVER (ORDER BY idx) AS place FROM slots
    WHERE request_id = %(request)s AND state = 'waiting' ORDER BY idx LIMIT %(count)s),
slot AS (
    UPDATE slots SET state = 'processing' FROM chosen WHERE request_id = %(request)s AND slots.idx = chosen.idx
    RETURNING slots.idx, seed, prefix_token_ids, prefix_text, chosen.place),
job AS (
    INSERT INTO jobs (id, request_id, slot_idx, state, worker_id, worker_name, owner_id, model, model_revision,
                      tokenizer_revision, revision, bridge_agent, posts_progress, claim_key, claimed_at, lease_begun, lease_end, ttl)
    SELECT (%(jobs)s::uuid[])[place], %(request)s, idx, 'processing', %(worker)s, %(worker_name)s, %(owner)s, %(model)s,
           %(model_revision)s, %(tokenizer_revision)s, %(revision)s, %(bridge_agent)s, %(posts_progress)s, %(claim_key)s,
           horde_now(), horde_now(), horde_now() + make_interval(secs => %(lease)s), %(lease)s
    FROM slot RETURNING id, slot_idx),
left_queue AS (DELETE FROM queue WHERE %(none_left)s AND request_id = %(request)s),
event AS (
    INSERT INTO events (at, kind, request_kind, request_id, slot_idx, job_id, user_id, worker_id, worker_name, owner_id, model, timings)
    SELECT horde_now(), 'claimed', %(kind)s, %(request)s, slot_idx, id, %(user)s, %(worker)s, %(worker_name)s, %(owner)s, %(model)s,
           %(timings)s
    FROM job RETURNING id),
unfolded AS (INSERT INTO events_unfolded (event_id) SELECT id FROM event)
SELECT job.id, slot.idx, slot.seed, slot.prefix_token_ids, slot.prefix_text FROM job JOIN slot ON slot.idx = job.slot_idx ORDER BY slot.idx
""")

# By id, like everybody who wants several jobs; whoever hands undelivered jobs back meanwhile waits here, or is waited for.
LOCK_CLAIMED_UNDER = """
SELECT id FROM jobs WHERE worker_id = %(worker)s AND claim_key = %(key)s AND state = 'processing' ORDER BY id FOR UPDATE
"""

FETCH_AGAIN = f"""
UPDATE jobs j SET refetched = true
FROM slots s, requests r
WHERE j.id = ANY (%(jobs)s::uuid[]) AND j.state = 'processing'
  AND s.request_id = j.request_id AND s.idx = j.slot_idx AND r.id = j.request_id
RETURNING j.id, j.request_id, j.model, j.model_revision, j.tokenizer_revision, j.ttl, j.slot_idx, j.claimed_at, s.seed,
          s.prefix_token_ids, s.prefix_text, r.kind, r.payload, extract(epoch FROM r.deadline - horde_now())::float AS deadline_in,
          r.attached_until IS NOT NULL AS attached, {TENANT} AS tenant
"""

CLAIMED_UNDER = """
SELECT EXISTS (SELECT FROM jobs WHERE worker_id = %(worker)s AND claim_key = %(key)s AND state = 'processing')
"""


@dataclass(frozen=True)
class Served:
    """One model as a worker serves it; `key` stands for the model and both revisions (see `Request.revision`)."""

    model_revision: str
    tokenizer_revision: str
    key: str


@dataclass(frozen=True)
class Claimant:
    """The worker as its jobs remember it.

    Attributes:
        served: what it announced of its models, by their names.
        claim_key: the `Idempotency-Key` of its pop.
    """

    id: uuid.UUID
    name: str
    owner_id: int
    posts_progress: bool = False
    served: Mapping[str, Served] = field(default_factory=dict)
    claim_key: str | None = None
    bridge_agent: str = "unknown:0:unknown"


@dataclass(frozen=True)
class ClaimedJob:
    """A fresh attempt; `id` fences off every other one at the same slot.

    Attributes:
        prefix_token_ids, prefix_text: what its client has of the slot already; None: nothing.
        deadline_in: seconds until nobody wants the result; None: no such moment.
    """

    id: uuid.UUID
    slot: int
    seed: int
    lease: int
    prefix_token_ids: list[int] | None
    prefix_text: str | None
    model_revision: str | None
    tokenizer_revision: str | None
    deadline_in: float | None


@dataclass(frozen=True)
class HeldJob:
    """A job that was claimed before and still runs; `tenant` as in `TENANT`, the rest as in `ClaimedJob`."""

    id: uuid.UUID
    request_id: uuid.UUID
    kind: str
    model: str
    ttl: int
    slot: int
    seed: int
    payload: dict[str, Any]
    attached: bool
    tenant: str
    prefix_token_ids: list[int] | None
    prefix_text: str | None
    model_revision: str | None
    tokenizer_revision: str | None
    deadline_in: float | None


def is_claimed_under(tx: Transaction, worker_id: uuid.UUID, key: str) -> bool:
    """Whether this worker still holds what a pop with this `Idempotency-Key` claimed."""
    return bool(tx.execute(CLAIMED_UNDER, {"worker": worker_id, "key": key}).scalar_one())


def fetch_again(tx: Transaction, worker_id: uuid.UUID, key: str) -> list[HeldJob]:
    """What this worker's pop with this `Idempotency-Key` claimed and still holds, in the order of the claim: its answer was lost.

    The jobs are marked, so that the first call, which may only now notice that its client has gone, does not hand them back.
    """
    jobs = tx.execute(LOCK_CLAIMED_UNDER, {"worker": worker_id, "key": key}).scalars()
    if not jobs:
        return []
    rows = sorted(
        tx.execute(FETCH_AGAIN, {"jobs": jobs}), key=lambda row: (row.claimed_at, row.request_id, row.slot_idx)
    )
    return [
        HeldJob(
            id=row.id,
            request_id=row.request_id,
            kind=row.kind,
            model=row.model,
            ttl=row.ttl,
            slot=row.slot_idx,
            seed=row.seed,
            payload=row.payload,
            attached=row.attached,
            tenant=row.tenant,
            prefix_token_ids=row.prefix_token_ids,
            prefix_text=row.prefix_text,
            model_revision=row.model_revision,
            tokenizer_revision=row.tokenizer_revision,
            deadline_in=row.deadline_in,
        )
        for row in rows
    ]


def claim(
    tx: Transaction,
    request_id: uuid.UUID,
    worker: Claimant,
    *,
    model: str,
    lease: int,
    count: int = 1,
    new_id: Callable[[], uuid.UUID] = uuid.uuid4,
) -> Sequence[ClaimedJob]:
    """Take up to `count` waiting slots, lowest index first, for `lease` seconds; empty when none may be taken any more.

    A request that is pinned to a revision is taken only for a `model` that `worker` serves in just that one.
    """
    served = worker.served.get(model)
    taken = tx.execute(
        TAKE_FROM_REQUEST,
        {
            "request": request_id,
            "count": count,
            "lease": lease,
            "after_lease": EXPIRY_AFTER_LEASE,
            "revision": served.key if served else None,
            "posts_progress": worker.posts_progress,
        },
    ).one_or_none()
    if taken is None:
        return []
    rows = tx.execute(
        BEGIN_JOBS,
        {
            "request": request_id,
            "kind": taken.kind,
            "user": taken.user_id,
            "worker": worker.id,
            "worker_name": worker.name,
            "owner": worker.owner_id,
            "model": model,
            "model_revision": served.model_revision if served else None,
            "tokenizer_revision": served.tokenizer_revision if served else None,
            "revision": served.key if served else None,
            "bridge_agent": worker.bridge_agent,
            "posts_progress": worker.posts_progress,
            "claim_key": worker.claim_key,
            "lease": lease,
            "count": count,
            "jobs": [new_id() for _ in range(count)],
            "none_left": taken.waiting == 0,
            "timings": json.dumps({"queue_ms": int(taken.queue_ms)}),
        },
    )
    return [
        ClaimedJob(
            id=row.id,
            slot=row.idx,
            seed=row.seed,
            lease=lease,
            prefix_token_ids=row.prefix_token_ids,
            prefix_text=row.prefix_text,
            model_revision=served.model_revision if served else None,
            tokenizer_revision=served.tokenizer_revision if served else None,
            deadline_in=taken.deadline_in,
        )
        for row in rows
    ]
