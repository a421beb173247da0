"""Fault: a worker reports that it failed, or maintenance finds its lease over. An abort of that worker.

The second faulted job ends its request, in the transaction that reports it; before that the slot is put back.
"""

from __future__ import annotations

import dataclasses
import json
import uuid

from horde.db.database import Transaction
from horde.lifecycle.cancel import cancel_locked
from horde.lifecycle.events import append
from horde.lifecycle.kinds import RULES
from horde.lifecycle.rows import JobFacts, LockedRequest, ProcessingJob, lock_job_request, lock_processing_jobs
from horde.lifecycle.settle import (
    SETTLE_JOB,
    SETTLE_STALE_JOB,
    Change,
    Settlement,
    classify,
    conclude,
    drop_slot,
    drop_waiting,
    overdue,
    put_back,
    settled,
    settlement_event,
    void,
)
from horde.lifecycle.store import Pricing
from horde.lifecycle.words import FAULTED_GENERATIONS_LIMIT, FaultReason, JobState, Outcome, Verdict


def fault(
    tx: Transaction,
    job_id: uuid.UUID,
    *,
    pricing: Pricing,
    key: str | None = None,
    reason: FaultReason = FaultReason.REPORTED,
) -> Settlement:
    """A worker reports a fault, or its result was found to be one: then `reason` says why, to a repeat under the key as well."""
    return _fault(tx, job_id, reason, pricing=pricing, key=key)


def fault_stale(tx: Transaction, job_id: uuid.UUID, *, pricing: Pricing) -> Settlement:
    """Maintenance found a lease over; it is asked again, by the database's clock, in the statement that changes the job."""
    return _fault(tx, job_id, FaultReason.STALE, pricing=pricing, key=None)


def _fault(tx: Transaction, job_id: uuid.UUID, reason: FaultReason, *, pricing: Pricing, key: str | None) -> Settlement:
    locked = lock_job_request(tx, job_id)
    if locked is None:
        return Settlement(Verdict.GONE)
    request, job = locked
    jobs = lock_processing_jobs(tx, request.id)
    statement = SETTLE_STALE_JOB if reason is FaultReason.STALE else SETTLE_JOB
    answer = json.dumps({"reward": 0} if reason is FaultReason.REPORTED else {"reward": 0, "reason": reason.value})
    row = tx.execute(
        statement, {"job": job_id, "state": "faulted", "reason": reason.value, "key": key, "answer": answer}
    ).one_or_none()
    if row is None:
        return classify(tx, job_id, key)
    return after_fault(tx, request, job, jobs, reason, pricing=pricing, run_ms=row.run_ms)


def after_fault(
    tx: Transaction,
    request: LockedRequest,
    job: JobFacts,
    jobs: list[ProcessingJob],
    reason: FaultReason,
    *,
    pricing: Pricing,
    run_ms: float,
) -> Settlement:
    """What follows a job that just settled as faulted: end, put back, or nothing if the request has ended already."""
    faults = request.faulted + 1
    change = Change(processing=-1, faulted=1, restarted=1, last_faulted=True)
    if request.outcome is not None:
        conclude(tx, job, JobState.FAULTED, "dropped", change, reason=reason, run_ms=run_ms)
        return settled(request)
    others = [other for other in jobs if other.id != job.id]
    if faults >= FAULTED_GENERATIONS_LIMIT or not RULES[request.kind].restarts(request.n, request.stored, faults):
        drop_waiting(tx, request.id)
        change = dataclasses.replace(change, waiting=-request.waiting, outcome=Outcome.FAULTED)
        conclude(tx, job, JobState.FAULTED, "dropped", change, reason=reason, run_ms=run_ms)
        void(tx, others)
        return settled(request, outcome=Outcome.FAULTED)
    late = overdue(tx, request.id)
    if late is None:
        change = dataclasses.replace(change, tried=job.worker_id)
        return put_back(tx, request, job, JobState.FAULTED, change, reason=reason, run_ms=run_ms)
    # Nobody waits for another attempt: what would be a put-back is the cancel that maintenance was about to do.
    append(tx, settlement_event(JobState.FAULTED, job, reason=reason, run_ms=run_ms))
    drop_slot(tx, job)
    cancel_locked(tx, request, others, late, pricing=pricing, besides=change)
    return settled(request, outcome=Outcome.CANCELLED)
