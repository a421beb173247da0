"""Locks, in the one order everything here takes them: the request, then its processing jobs by id."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.words import Kind

_REQUEST = """
r.id AS request_id, r.kind, r.user_id, r.n, r.waiting, r.processing, r.stored, r.faulted, r.outcome,
r.attached_until IS NOT NULL AS attached
"""

# What of a job does not change while it runs, so that reading it needs no lock.
_JOB = """
j.id AS job_id, j.slot_idx, j.worker_id, j.worker_name, j.owner_id, j.model, j.bridge_agent, j.posts_progress,
j.tokenizer_revision, owner.trusted AS owner_trusted, r.max_length, r.models, r.payload
"""

LOCK_REQUEST = f"SELECT {_REQUEST} FROM requests r WHERE r.id = %(request)s FOR UPDATE"

# The job is joined as it was before the wait for the lock, which is enough for its constant part.
LOCK_JOB_REQUEST = Prepared(f"""
SELECT {_REQUEST}, {_JOB}
FROM requests r JOIN jobs j ON j.request_id = r.id JOIN users owner ON owner.id = j.owner_id
WHERE j.id = %(job)s FOR UPDATE OF r
""")

# By id, so that two transactions that want several jobs meet in the same order.
LOCK_PROCESSING_JOBS = """
SELECT id, slot_idx, posts_progress FROM jobs
WHERE request_id = %(request)s AND state = 'processing' ORDER BY id FOR UPDATE
"""

LOCK_JOB = Prepared("SELECT state FROM jobs WHERE id = %(job)s FOR UPDATE")

READ_JOB = f"""
SELECT r.id AS request_id, r.kind, r.user_id, {_JOB}
FROM jobs j JOIN requests r ON r.id = j.request_id JOIN users owner ON owner.id = j.owner_id WHERE j.id = %(job)s
"""


@dataclass(frozen=True)
class LockedRequest:
    """A request row under our lock: nobody else changes it until we commit."""

    id: uuid.UUID
    kind: Kind
    user_id: int
    n: int
    waiting: int
    processing: int
    stored: int
    faulted: int
    outcome: str | None
    attached: bool


@dataclass(frozen=True)
class JobFacts:
    """The constant part of a job and its request: what prices, events and authorisation are made from."""

    id: uuid.UUID
    request_id: uuid.UUID
    slot_idx: int
    worker_id: uuid.UUID
    worker_name: str
    owner_id: int
    model: str
    bridge_agent: str
    posts_progress: bool
    owner_trusted: bool
    kind: Kind
    user_id: int
    max_length: int
    models: list[str]
    payload: dict[str, Any]
    tokenizer_revision: str | None


@dataclass(frozen=True)
class ProcessingJob:
    """A processing job under our lock."""

    id: uuid.UUID
    slot_idx: int
    posts_progress: bool


def lock_request(tx: Transaction, request_id: uuid.UUID) -> LockedRequest | None:
    """Lock the request; None when it is gone."""
    row = tx.execute(LOCK_REQUEST, {"request": request_id}).one_or_none()
    return None if row is None else _locked(row)


def lock_job_request(tx: Transaction, job_id: uuid.UUID) -> tuple[LockedRequest, JobFacts] | None:
    """Lock the request of a job; None when the job or its request is gone."""
    row = tx.execute(LOCK_JOB_REQUEST, {"job": job_id}).one_or_none()
    return None if row is None else (_locked(row), _facts(row))


def lock_processing_jobs(tx: Transaction, request_id: uuid.UUID) -> list[ProcessingJob]:
    """Lock all processing jobs of a request that is locked already."""
    rows = tx.execute(LOCK_PROCESSING_JOBS, {"request": request_id})
    return [ProcessingJob(row.id, row.slot_idx, row.posts_progress) for row in rows]


def lock_job(tx: Transaction, job_id: uuid.UUID) -> str:
    """Lock one job of a request that is locked already; its state."""
    return str(tx.execute(LOCK_JOB, {"job": job_id}).scalar_one())


def read_job(tx: Transaction, job_id: uuid.UUID) -> JobFacts | None:
    """The constant facts of a job; None when it is gone."""
    row = tx.execute(READ_JOB, {"job": job_id}).one_or_none()
    return None if row is None else _facts(row)


def _locked(row: Any) -> LockedRequest:
    return LockedRequest(
        id=row.request_id,
        kind=Kind(row.kind),
        user_id=row.user_id,
        n=row.n,
        waiting=row.waiting,
        processing=row.processing,
        stored=row.stored,
        faulted=row.faulted,
        outcome=row.outcome,
        attached=row.attached,
    )


def _facts(row: Any) -> JobFacts:
    return JobFacts(
        id=row.job_id,
        request_id=row.request_id,
        slot_idx=row.slot_idx,
        worker_id=row.worker_id,
        worker_name=row.worker_name,
        owner_id=row.owner_id,
        model=row.model,
        bridge_agent=row.bridge_agent,
        posts_progress=row.posts_progress,
        owner_trusted=row.owner_trusted,
        kind=Kind(row.kind),
        user_id=row.user_id,
        max_length=row.max_length,
        models=row.models,
        payload=row.payload,
        tokenizer_revision=row.tokenizer_revision,
    )
