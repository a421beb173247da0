"""Release: a job is handed back without blame (worker shut down, revision mismatch, claim never started)."""

from __future__ import annotations

import dataclasses
import uuid

from horde.db.database import Transaction
from horde.lifecycle.cancel import cancel_locked
from horde.lifecycle.events import append
from horde.lifecycle.fault import after_fault
from horde.lifecycle.rows import lock_job_request, lock_processing_jobs
from horde.lifecycle.settle import (
    SETTLE_JOB,
    Change,
    Settlement,
    classify,
    conclude,
    drop_slot,
    overdue,
    put_back,
    settled,
    settlement_event,
)
from horde.lifecycle.store import Pricing
from horde.lifecycle.terms import START_WITHIN
from horde.lifecycle.words import RELEASES_PER_SLOT, FaultReason, JobState, Outcome, Verdict

READ_RELEASES = "SELECT releases FROM slots WHERE request_id = %(request)s AND idx = %(slot)s"

# From maintenance: a claim of a worker that posts progress, which no post has named in time.
RELEASE_UNSTARTED = """
UPDATE jobs SET state = %(state)s, settled_at = horde_now(), reason = %(reason)s
WHERE id = %(job)s AND state = 'processing' AND posts_progress AND started_at IS NULL
  AND without_outages(claimed_at, claimed_at + make_interval(secs => %(start_within)s)) < horde_now()
RETURNING extract(epoch FROM horde_now() - claimed_at) * 1000 AS run_ms
"""


# From the pop itself, whose client hung up while it claimed; unless a pop with the same key has been given the job since.
RELEASE_UNDELIVERED = """
UPDATE jobs SET state = %(state)s, settled_at = horde_now(), reason = %(reason)s
WHERE id = %(job)s AND state = 'processing' AND NOT refetched
RETURNING extract(epoch FROM horde_now() - claimed_at) * 1000 AS run_ms
"""


def release(tx: Transaction, job_id: uuid.UUID, *, pricing: Pricing, key: str | None = None) -> Settlement:
    """A worker hands its job back."""
    return _release(tx, job_id, SETTLE_JOB, "handed_back", pricing=pricing, key=key)


def release_unstarted(tx: Transaction, job_id: uuid.UUID, *, pricing: Pricing) -> Settlement:
    """Maintenance found a claim that never started; asked again in the statement that changes the job."""
    return _release(tx, job_id, RELEASE_UNSTARTED, "not_started", pricing=pricing, key=None)


def release_undelivered(tx: Transaction, job_id: uuid.UUID, *, pricing: Pricing) -> Settlement:
    """Nobody reads the answer that this job was to go out with."""
    return _release(tx, job_id, RELEASE_UNDELIVERED, "not_delivered", pricing=pricing, key=None)


def _release(
    tx: Transaction, job_id: uuid.UUID, statement: str, reason: str, *, pricing: Pricing, key: str | None
) -> Settlement:
    locked = lock_job_request(tx, job_id)
    if locked is None:
        return Settlement(Verdict.GONE)
    request, job = locked
    jobs = lock_processing_jobs(tx, request.id)
    releases = tx.execute(READ_RELEASES, {"request": request.id, "slot": job.slot_idx}).scalar_one()
    capped = request.outcome is None and releases >= RELEASES_PER_SLOT
    state = JobState.FAULTED if capped else JobState.RELEASED
    row = tx.execute(
        statement,
        {
            "job": job_id,
            "state": state.value,
            "reason": FaultReason.RELEASE_CAP.value if capped else reason,
            "key": key,
            "answer": '{"reward": 0}',
            "start_within": START_WITHIN,
        },
    ).one_or_none()
    if row is None:
        return classify(tx, job_id, key)
    if capped:
        return after_fault(tx, request, job, jobs, FaultReason.RELEASE_CAP, pricing=pricing, run_ms=row.run_ms)
    change = Change(processing=-1, restarted=1, last_faulted=False)
    if request.outcome is not None:
        conclude(tx, job, JobState.RELEASED, "dropped", change, reason=reason, run_ms=row.run_ms)
        return settled(request)
    late = overdue(tx, request.id)
    if late is None:
        change = dataclasses.replace(change, tried=job.worker_id)
        return put_back(tx, request, job, JobState.RELEASED, change, reason=reason, run_ms=row.run_ms)
    append(tx, settlement_event(JobState.RELEASED, job, reason=reason, run_ms=row.run_ms))
    drop_slot(tx, job)
    others = [other for other in jobs if other.id != job.id]
    cancel_locked(tx, request, others, late, pricing=pricing, besides=change)
    return settled(request, outcome=Outcome.CANCELLED)
