"""Reject: the request itself is at fault; it ends with an error code and nobody is blamed."""

from __future__ import annotations

import dataclasses
import uuid
from enum import StrEnum

from horde.db.database import Transaction
from horde.lifecycle.fault import fault
from horde.lifecycle.rows import lock_job_request, lock_processing_jobs
from horde.lifecycle.settle import SETTLE_JOB, Change, Settlement, classify, conclude, drop_waiting, settled, void
from horde.lifecycle.store import Pricing
from horde.lifecycle.words import JobState, Outcome, Verdict


class Rejection(StrEnum):
    """The only errors a worker may name; any other is a fault."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"


def reject(
    tx: Transaction,
    job_id: uuid.UUID,
    error_code: str,
    *,
    broker_knows_better: bool,
    pricing: Pricing,
    key: str | None = None,
) -> Settlement:
    """A worker says that no worker could serve this request.

    Args:
        broker_knows_better: the broker has an exact count or capability of its own and let the request in: then, as with any
            other code, the worker is wrong and this is a fault.
    """
    if broker_knows_better or error_code not in set(Rejection):
        return fault(tx, job_id, pricing=pricing, key=key)
    locked = lock_job_request(tx, job_id)
    if locked is None:
        return Settlement(Verdict.GONE)
    request, job = locked
    jobs = lock_processing_jobs(tx, request.id)
    row = tx.execute(
        SETTLE_JOB, {"job": job_id, "state": "rejected", "reason": error_code, "key": key, "answer": '{"reward": 0}'}
    ).one_or_none()
    if row is None:
        return classify(tx, job_id, key)
    change = Change(processing=-1, last_faulted=False)
    if request.outcome is not None:
        conclude(tx, job, JobState.REJECTED, "dropped", change, reason=error_code, run_ms=row.run_ms)
        return settled(request)
    drop_waiting(tx, request.id)
    change = dataclasses.replace(change, waiting=-request.waiting, outcome=Outcome.REJECTED, error_code=error_code)
    conclude(tx, job, JobState.REJECTED, "dropped", change, reason=error_code, run_ms=row.run_ms)
    void(tx, [other for other in jobs if other.id != job.id])
    return settled(request, outcome=Outcome.REJECTED)
