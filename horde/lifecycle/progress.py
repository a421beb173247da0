"""Progress: a worker posts what its running jobs have produced; each post that names a job renews its lease.

Takes no request lock: it locks the jobs by id and writes only where they are processing.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.terms import PROGRESS_LEASE
from horde.lifecycle.words import CHARACTERS_KEPT_PER_TOKEN

LOCK_JOBS = Prepared("""
SELECT id, state, stored_by_cancel, posts_progress, ttl FROM jobs
WHERE id = ANY (%(jobs)s::uuid[]) AND owner_id = %(owner)s ORDER BY id FOR UPDATE
""")

# What is posted counts from the slot's first token, so a continued job starts with its prefix.
RENEW = Prepared("""
UPDATE jobs SET started_at = coalesce(jobs.started_at, horde_now()), lease_begun = horde_now(),
                lease_end = horde_now() + make_interval(secs => %(lease)s), ttl = %(lease)s
FROM jobs job JOIN slots ON slots.request_id = job.request_id AND slots.idx = job.slot_idx
JOIN requests ON requests.id = job.request_id LEFT JOIN progress ON progress.job_id = job.id
WHERE jobs.id = ANY (%(jobs)s::uuid[]) AND job.id = jobs.id AND jobs.state = 'processing'
RETURNING jobs.id, requests.max_length, coalesce(cardinality(progress.token_ids), cardinality(slots.prefix_token_ids), 0) AS tokens,
          coalesce(char_length(progress.text), char_length(slots.prefix_text), 0) AS characters
""")

APPEND = Prepared("""
INSERT INTO progress (job_id, token_ids, text, updated_at)
SELECT jobs.id, coalesce(slots.prefix_token_ids, '{}') || %(tokens)s::int[], coalesce(slots.prefix_text, '') || %(text)s::text, horde_now()
FROM jobs JOIN slots ON slots.request_id = jobs.request_id AND slots.idx = jobs.slot_idx
WHERE jobs.id = %(job)s AND jobs.state = 'processing'
ON CONFLICT (job_id) DO UPDATE SET token_ids = progress.token_ids || %(tokens)s::int[], text = progress.text || %(text)s::text,
                                   updated_at = horde_now()
WHERE cardinality(progress.token_ids) = %(held)s
""")


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
    """The answer for one job: tokens that the broker holds without a gap and its lease in seconds, or why the worker should stop."""

    job_id: uuid.UUID
    accepted: int = 0
    ttl: int = 0
    stop: str | None = None


@dataclass
class _Held:
    """What the broker holds of a slot's output, in tokens and characters, and how many tokens it may have."""

    tokens: int
    characters: int
    max_length: int


def post_progress(
    tx: Transaction, owner_id: int, chunks: Sequence[Chunk], *, lease: int = PROGRESS_LEASE
) -> list[Progressed]:
    """Take what is new of each chunk and renew the leases; repeats, reordering and gaps change nothing.

    A job claimed without `posts_progress` keeps its lease, and nothing of it is taken. Nothing is taken beyond what the order
    asked for.
    """
    jobs = [chunk.job_id for chunk in chunks]
    found = {row.id: row for row in tx.execute(LOCK_JOBS, {"jobs": jobs, "owner": owner_id})}
    running = [job for job, row in found.items() if row.state == "processing" and row.posts_progress]
    # Read in a statement after the one that may have waited for the locks: the latter sees what was there before its wait.
    rows = tx.execute(RENEW, {"jobs": running, "lease": lease}) if running else []
    held = {row.id: _Held(row.tokens, row.characters, row.max_length) for row in rows}
    answers = []
    for chunk in chunks:
        job = chunk.job_id
        if job in held:
            _append(tx, chunk, held[job])
            answers.append(Progressed(job, accepted=held[job].tokens, ttl=lease))
        elif job in found and found[job].state == "processing":
            # Claimed without the promise to post: its lease is a long one already, and nobody reads what is posted.
            answers.append(Progressed(job, ttl=found[job].ttl))
        else:
            answers.append(Progressed(job, stop=_why_stop(found.get(job))))
    return answers


def _append(tx: Transaction, chunk: Chunk, held: _Held) -> None:
    if chunk.offset > held.tokens or chunk.text_offset > held.characters:
        return
    fresh = list(chunk.token_ids)[held.tokens - chunk.offset : held.max_length - chunk.offset]
    if not fresh:
        return
    most = CHARACTERS_KEPT_PER_TOKEN * held.max_length
    text = chunk.text[held.characters - chunk.text_offset : most - chunk.text_offset]
    tx.execute(APPEND, {"job": chunk.job_id, "tokens": fresh, "text": text, "held": held.tokens})
    held.tokens += len(fresh)
    held.characters += len(text)


def _why_stop(job: Any) -> str:
    if job is None:
        return "stale"
    if job.state == "stored" and job.stored_by_cancel:
        return "cancelled"
    return str(job.state) if job.state in {"voided", "rejected"} else "stale"
