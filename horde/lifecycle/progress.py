"""Progress: a worker posts what its running jobs have produced; each post that names a job renews its lease.

Takes no request lock: it locks the jobs by id and writes only where they are processing.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Transaction
from horde.lifecycle.terms import PROGRESS_LEASE

LOCK_JOBS = """
SELECT id, state, stored_by_cancel, posts_progress FROM jobs
WHERE id = ANY (%(jobs)s::uuid[]) AND owner_id = %(owner)s ORDER BY id FOR UPDATE
"""

RENEW = """
UPDATE jobs SET started_at = coalesce(started_at, horde_now()), lease_begun = horde_now(),
                lease_end = horde_now() + make_interval(secs => %(lease)s), ttl = %(lease)s
WHERE id = ANY (%(jobs)s::uuid[]) AND state = 'processing'
"""

# What is posted counts from the slot's first token, so a continued job starts with its prefix.
BEGIN = """
INSERT INTO progress (job_id, token_ids, text, updated_at)
SELECT jobs.id, coalesce(slots.prefix_token_ids, '{}'), coalesce(slots.prefix_text, ''), horde_now()
FROM jobs JOIN slots ON slots.request_id = jobs.request_id AND slots.idx = jobs.slot_idx
WHERE jobs.id = %(job)s AND jobs.state = 'processing'
ON CONFLICT DO NOTHING
"""

READ = "SELECT cardinality(token_ids) AS accepted, char_length(text) AS characters FROM progress WHERE job_id = %(job)s"

APPEND = """
UPDATE progress SET token_ids = progress.token_ids || %(tokens)s::int[], text = progress.text || %(text)s, updated_at = horde_now()
FROM jobs
WHERE progress.job_id = %(job)s AND jobs.id = progress.job_id AND jobs.state = 'processing'
  AND cardinality(progress.token_ids) = %(accepted)s
"""


@dataclass(frozen=True)
class Chunk:
    """Output of one job; offsets count from the slot's first token and character. Without tokens it is a sign of life."""

    job_id: uuid.UUID
    offset: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    text_offset: int = 0


@dataclass(frozen=True)
class Progressed:
    """The answer for one job: tokens that the broker holds without a gap, or why the worker should stop."""

    job_id: uuid.UUID
    accepted: int = 0
    ttl: int = 0
    stop: str | None = None


def post_progress(
    tx: Transaction, owner_id: int, chunks: Sequence[Chunk], *, lease: int = PROGRESS_LEASE
) -> list[Progressed]:
    """Take what is new of each chunk and renew the leases; repeats, reordering and gaps change nothing.

    A job claimed without `posts_progress` keeps its lease, and nothing of it is taken.
    """
    jobs = [chunk.job_id for chunk in chunks]
    found = {row.id: row for row in tx.execute(LOCK_JOBS, {"jobs": jobs, "owner": owner_id})}
    running = [job for job in jobs if job in found and found[job].state == "processing" and found[job].posts_progress]
    if running:
        tx.execute(RENEW, {"jobs": running, "lease": lease})
    answers = []
    for chunk in chunks:
        if chunk.job_id in running:
            answers.append(Progressed(chunk.job_id, accepted=_append(tx, chunk), ttl=lease))
        else:
            answers.append(Progressed(chunk.job_id, stop=_why_stop(found.get(chunk.job_id))))
    return answers


def _append(tx: Transaction, chunk: Chunk) -> int:
    tx.execute(BEGIN, {"job": chunk.job_id})
    held = tx.execute(READ, {"job": chunk.job_id}).one()
    accepted = int(held.accepted)
    fresh = list(chunk.token_ids)[max(0, accepted - chunk.offset) :]
    if chunk.offset > accepted or not fresh:
        return accepted
    text = chunk.text[max(0, held.characters - chunk.text_offset) :]
    tx.execute(APPEND, {"job": chunk.job_id, "tokens": fresh, "text": text, "accepted": accepted})
    return accepted + len(fresh)


def _why_stop(job: Any) -> str | None:
    if job is None:
        return "stale"
    if job.state == "processing":
        # Claimed without the promise to post: its lease is a long one already, and nobody reads what is posted.
        return None
    if job.state == "stored" and job.stored_by_cancel:
        return "cancelled"
    return str(job.state) if job.state in {"voided", "rejected"} else "stale"
