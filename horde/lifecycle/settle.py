"""What every settlement shares: the compare-and-set on the job, and its effects on slot, counters and outcome.

The callers are the transitions (`store`, `fault`, `release`, `reject`, `cancel`), which hold the request's lock.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle import events
from horde.lifecycle.enqueue import queue_keys
from horde.lifecycle.rows import JobFacts, LockedRequest, ProcessingJob, read_job
from horde.lifecycle.words import CancelReason, FaultReason, JobState, Outcome, Verdict

# The compare-and-set: of any number of reports about one job, the one that finds it processing settles it.
SETTLE_JOB = Prepared("""
UPDATE jobs SET state = %(state)s, settled_at = horde_now(), reason = %(reason)s, settle_key = %(key)s, settle_answer = %(answer)s
WHERE id = %(job)s AND state = 'processing'
RETURNING extract(epoch FROM horde_now() - claimed_at) * 1000 AS run_ms
""")

# The same, for maintenance: by the database's clock, in the statement that changes the job.
SETTLE_STALE_JOB = """
UPDATE jobs SET state = 'faulted', settled_at = horde_now(), reason = 'stale'
WHERE id = %(job)s AND state = 'processing' AND without_outages(lease_begun, lease_end) < horde_now()
RETURNING extract(epoch FROM horde_now() - claimed_at) * 1000 AS run_ms
"""

CLASSIFY = (
    "SELECT state, reward, stored_by_cancel, acknowledged, settle_key, settle_answer FROM jobs WHERE id = %(job)s"
)

MOVE_SLOT = """
UPDATE slots SET state = %(slot_state)s, releases = releases + %(release)s
WHERE request_id = %(request)s AND idx = %(slot)s AND state = 'processing'
"""

# A fail-over goes on after what the client already has: what was contiguous when the attempt settled. Where nobody is attached
# nobody has anything, and any worker may begin anew. Only the same model goes on with the same text, and only a worker that
# posts goes on with a stream.
KEEP_PREFIX = """
WITH kept AS (
    UPDATE slots SET prefix_token_ids = progress.token_ids, prefix_text = progress.text, prefix_logprobs = progress.logprobs
    FROM progress, requests r
    WHERE progress.job_id = %(job)s AND slots.request_id = %(request)s AND slots.idx = %(slot)s AND progress.token_ids <> '{}'
      AND r.id = slots.request_id AND r.attached_until IS NOT NULL
    RETURNING slots.request_id)
UPDATE requests r SET needs_progress = true, revision = coalesce(r.revision, jobs.revision)
FROM kept, jobs WHERE r.id = kept.request_id AND jobs.id = %(job)s
"""

DROP_WAITING = "UPDATE slots SET state = 'dropped' WHERE request_id = %(request)s AND state = 'waiting'"

LEAVE_QUEUE = "DELETE FROM queue WHERE request_id = %(request)s"

ENTER_QUEUE = """
INSERT INTO queue (kind, model, rank, request_id, user_id)
SELECT kind, model, rank, id, user_id
FROM requests, unnest(CASE WHEN models = '{}' THEN ARRAY['*'] ELSE models END) AS model
WHERE id = %(request)s
ON CONFLICT DO NOTHING
"""

UPDATE_REQUEST = """
UPDATE requests
SET waiting = waiting + %(waiting)s, processing = processing + %(processing)s, stored = stored + %(stored)s,
    faulted = faulted + %(faulted)s, restarted = restarted + %(restarted)s, charged = charged + %(price)s,
    last_settled_faulted = coalesce(%(last_faulted)s, last_settled_faulted),
    tried_workers = CASE WHEN %(tried)s::uuid IS NULL OR %(tried)s::uuid = ANY (tried_workers)
                         THEN tried_workers ELSE tried_workers || %(tried)s::uuid END,
    expires_at = CASE WHEN %(expiry)s::float IS NULL THEN expires_at
                      ELSE least(greatest(expires_at, horde_now() + make_interval(secs => %(expiry)s)), deadline) END,
    outcome = coalesce(outcome, %(outcome)s::text), outcome_reason = coalesce(outcome_reason, %(outcome_reason)s),
    error_code = coalesce(error_code, %(error_code)s),
    outcome_at = CASE WHEN outcome IS NULL AND %(outcome)s::text IS NOT NULL THEN horde_now() ELSE outcome_at END,
    done_at = CASE WHEN done_at IS NULL AND coalesce(outcome, %(outcome)s::text) IS NOT NULL AND processing + %(processing)s = 0
                   THEN horde_now() ELSE done_at END
WHERE id = %(request)s
"""

# What a settled job does to its slot, its request and the record, in one round trip. The request's lock was taken by a
# statement before this one, so nothing here waits and one snapshot serves all parts.
CONCLUDE = Prepared(f"""
WITH slot AS ({MOVE_SLOT}), request AS ({UPDATE_REQUEST}), event AS ({events.INSERT_EVENT})
INSERT INTO events_unfolded (event_id) SELECT id FROM event
""")

OVERDUE = "SELECT deadline <= horde_now() AS deadline, expires_at <= horde_now() AS expired FROM requests WHERE id = %(request)s"


@dataclass(frozen=True)
class Settlement:
    """What a report about a job came to.

    Attributes:
        reward: hundredths of a kudos, for a stored job.
        answer: the first answer, for a repeated call.
        put_back: whether a slot waits again.
        waits_for: (kind, model) of the queue rows under which it does.
        request_id: the request that changed, if one did.
        attached: whether clients wait for it on open connections.
    """

    verdict: Verdict
    reward: int = 0
    answer: dict[str, Any] | None = None
    put_back: bool = False
    waits_for: Sequence[tuple[str, str]] = ()
    outcome: Outcome | None = None
    request_id: uuid.UUID | None = None
    attached: bool = False


@dataclass(frozen=True)
class Change:
    """What a transition does to its request's row, besides the job; counters are differences."""

    waiting: int = 0
    processing: int = 0
    stored: int = 0
    faulted: int = 0
    restarted: int = 0
    price: int = 0
    last_faulted: bool | None = None
    tried: uuid.UUID | None = None
    expiry: float | None = None
    outcome: Outcome | None = None
    outcome_reason: CancelReason | None = None
    error_code: str | None = None


def _row_parameters(request_id: uuid.UUID, change: Change) -> dict[str, Any]:
    return {
        "request": request_id,
        **change.__dict__,
        "outcome": change.outcome.value if change.outcome else None,
        "outcome_reason": change.outcome_reason.value if change.outcome_reason else None,
    }


def update_request(tx: Transaction, request_id: uuid.UUID, change: Change) -> None:
    """Apply `change`; an outcome that is set already stays, and `done_at` follows from outcome and counters."""
    tx.execute(UPDATE_REQUEST, _row_parameters(request_id, change))


def conclude(
    tx: Transaction,
    job: JobFacts,
    state: JobState,
    slot_state: str,
    change: Change,
    *,
    reason: FaultReason | str | None = None,
    reward: int = 0,
    tokens: int = 0,
    run_ms: float,
) -> None:
    """The effects of a job that just settled as `state`: its slot moves on, its request changes, the event is appended."""
    event = settlement_event(
        state,
        job,
        reason=reason,
        outcome=change.outcome,
        price=change.price,
        reward=reward,
        tokens=tokens,
        run_ms=run_ms,
    )
    tx.execute(
        CONCLUDE,
        {
            **_row_parameters(job.request_id, change),
            "slot": job.slot_idx,
            "slot_state": slot_state,
            "release": int(state is JobState.RELEASED and slot_state == "waiting"),
            **event.parameters(),
        },
    )


def classify(tx: Transaction, job_id: uuid.UUID, key: str | None) -> Settlement:
    """Say why the compare-and-set found no processing job; changes nothing."""
    row = tx.execute(CLASSIFY, {"job": job_id}).one_or_none()
    if row is None:
        return Settlement(Verdict.GONE)
    if key is not None and row.settle_key == key:
        return Settlement(Verdict.REPEATED, reward=row.reward or 0, answer=row.settle_answer)
    if row.state == JobState.STORED:
        return Settlement(Verdict.DUPLICATE, reward=row.reward or 0)
    if row.state == JobState.PROCESSING:
        return Settlement(Verdict.NOT_DUE)
    return Settlement(Verdict.ABORTED)


def drop_slot(tx: Transaction, job: JobFacts) -> None:
    """The slot of a settled job will not be tried again."""
    tx.execute(MOVE_SLOT, {"request": job.request_id, "slot": job.slot_idx, "slot_state": "dropped", "release": 0})


def settled(request: LockedRequest, *, reward: int = 0, outcome: Outcome | None = None) -> Settlement:
    """A report that settled a job of this request, which has `outcome` by it."""
    return Settlement(Verdict.SETTLED, reward=reward, outcome=outcome, request_id=request.id, attached=request.attached)


def put_back(
    tx: Transaction,
    request: LockedRequest,
    job: JobFacts,
    state: JobState,
    change: Change,
    *,
    reason: FaultReason | str,
    run_ms: float,
) -> Settlement:
    """The slot waits again, with its index, seed and prefix; its request is in the queue at its old rank."""
    if job.posts_progress:
        tx.execute(KEEP_PREFIX, {"job": job.id, "request": job.request_id, "slot": job.slot_idx})
    conclude(tx, job, state, "waiting", dataclasses.replace(change, waiting=1), reason=reason, run_ms=run_ms)
    tx.execute(ENTER_QUEUE, {"request": job.request_id})
    return dataclasses.replace(settled(request), put_back=True, waits_for=queue_keys(job.kind, job.models))


def drop_waiting(tx: Transaction, request_id: uuid.UUID) -> None:
    """Nothing of this request waits any more."""
    tx.execute(DROP_WAITING, {"request": request_id})
    tx.execute(LEAVE_QUEUE, {"request": request_id})


def overdue(tx: Transaction, request_id: uuid.UUID) -> CancelReason | None:
    """Whether a locked request is past its deadline or expiry, by the database's clock."""
    row = tx.execute(OVERDUE, {"request": request_id}).one()
    if row.deadline:
        return CancelReason.DEADLINE
    return CancelReason.EXPIRED if row.expired else None


def void(tx: Transaction, jobs: Sequence[ProcessingJob]) -> None:
    """Settle locked jobs as voided: their request has just ended, and nobody is to blame."""
    for locked in jobs:
        row = tx.execute(
            SETTLE_JOB, {"job": locked.id, "state": "voided", "reason": None, "key": None, "answer": None}
        ).one()
        job = read_job(tx, locked.id)
        assert job is not None, "a locked job is there"
        conclude(tx, job, JobState.VOIDED, "dropped", Change(processing=-1), run_ms=row.run_ms)


def settlement_event(
    kind: JobState,
    job: JobFacts,
    *,
    reason: FaultReason | str | None = None,
    outcome: Outcome | None = None,
    price: int = 0,
    reward: int = 0,
    tokens: int = 0,
    run_ms: float,
) -> events.Event:
    """The event of a job that left `processing`."""
    return events.Event(
        kind.value,
        request_id=job.request_id,
        request_kind=job.kind,
        user_id=job.user_id,
        slot=job.slot_idx,
        job_id=job.id,
        worker_id=job.worker_id,
        worker_name=job.worker_name,
        owner_id=job.owner_id,
        model=job.model,
        reason=str(reason) if reason is not None else None,
        outcome=outcome,
        price=price,
        reward=reward,
        tokens=tokens,
        timings={"run_ms": int(run_ms)},
    )
