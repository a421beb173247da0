"""Progress: a worker posts what its running jobs have produced; a post that names a job keeps its lease alive.

Takes no request lock: it locks the jobs by id and writes only where they are processing. Posts come many times a second, so
nothing is written that need not be: output in one statement for all jobs, a lease when it is some seconds old.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.terms import PROGRESS_LEASE, RENEW_AFTER
from horde.lifecycle.words import CHARACTERS_KEPT_PER_TOKEN

# A row is rewritten whole, so a long one less often: after a pause of so many seconds for each token that it holds, which are more
# with their logprobs. What comes sooner is not taken, and its worker sends it again with what came since.
LONG_OUTPUT = 500
PAUSE, PAUSE_WITH_LOGPROBS = 2e-5, 2.5e-4

LOCK_JOBS = Prepared("""
SELECT id, state, stored_by_cancel, posts_progress, ttl, ceil(extract(epoch FROM lease_end - horde_now()))::int AS left_of_lease,
       started_at IS NULL OR lease_begun < horde_now() - make_interval(secs => %(renew_after)s) AS due
FROM jobs WHERE id = ANY (%(jobs)s::uuid[]) AND owner_id = %(owner)s ORDER BY id FOR UPDATE
""")

# What is posted counts from the slot's first token, so a continued job starts with its prefix. The payload may be long, and is
# looked into for a job's first output only.
READ_HELD = Prepared("""
SELECT jobs.id, jobs.request_id, requests.attached_until IS NOT NULL AS attached, requests.max_length,
       jobs.tokenizer_revision,
       coalesce(cardinality(progress.token_ids), cardinality(slots.prefix_token_ids), 0) AS tokens,
       coalesce(char_length(progress.text), char_length(slots.prefix_text), 0) AS characters,
       extract(epoch FROM horde_now() - progress.updated_at)::float AS age,
       CASE WHEN progress.job_id IS NOT NULL THEN progress.logprobs IS NOT NULL
            WHEN jobs.id = ANY (%(bringing)s::uuid[]) THEN requests.payload ->> 'logprobs' IS NOT NULL END AS wants_logprobs
FROM jobs JOIN slots ON slots.request_id = jobs.request_id AND slots.idx = jobs.slot_idx
JOIN requests ON requests.id = jobs.request_id LEFT JOIN progress ON progress.job_id = jobs.id
WHERE jobs.id = ANY (%(jobs)s::uuid[]) AND jobs.state = 'processing'
""")

RENEW = Prepared("""
UPDATE jobs SET started_at = coalesce(started_at, horde_now()), lease_begun = horde_now(),
                lease_end = horde_now() + make_interval(secs => %(lease)s), ttl = %(lease)s
WHERE id = ANY (%(jobs)s::uuid[]) AND state = 'processing'
""")

# The tokens of all jobs stand in one array, each job's between its `first` and its `last`. The locks on the jobs keep every
# other writer of these rows away, so what is read here is what is there.
APPEND = Prepared("""
INSERT INTO progress (job_id, token_ids, text, logprobs, updated_at)
SELECT jobs.id, coalesce(held.token_ids, slots.prefix_token_ids, '{}') || (%(tokens)s::int[])[new.first:new.last],
       coalesce(held.text, slots.prefix_text, '') || new.text,
       coalesce(held.logprobs, slots.prefix_logprobs, '[]') || new.logprobs::jsonb, horde_now()
FROM unnest(%(jobs)s::uuid[], %(firsts)s::int[], %(lasts)s::int[], %(texts)s::text[], %(logprobs)s::text[])
     AS new (job_id, first, last, text, logprobs)
JOIN jobs ON jobs.id = new.job_id JOIN slots ON slots.request_id = jobs.request_id AND slots.idx = jobs.slot_idx
LEFT JOIN progress held ON held.job_id = jobs.id
WHERE jobs.state = 'processing'
ON CONFLICT (job_id) DO UPDATE SET token_ids = excluded.token_ids, text = excluded.text, logprobs = excluded.logprobs,
                                   updated_at = excluded.updated_at
""")


@dataclass(frozen=True)
class Chunk:
    """Output of one job; offsets count from the slot's first token and character. Without tokens it is a sign of life.

    Attributes:
        logprobs: one entry a token, where the order asked for them.
    """

    job_id: uuid.UUID
    offset: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    text_offset: int = 0
    logprobs: Sequence[Any] | None = None


@dataclass(frozen=True)
class Progressed:
    """The answer for one job: tokens that the broker holds without a gap and what is left of its lease in seconds, or why to stop.

    Attributes:
        announce: the request that has new output, where a client waits for it.
    """

    job_id: uuid.UUID
    accepted: int = 0
    ttl: int = 0
    stop: str | None = None
    announce: uuid.UUID | None = None


@dataclass
class _Held:
    """What the broker holds of a slot's output, in tokens and characters, how many tokens it may have, and what is new.

    Attributes:
        age: seconds since what is held was written; None: nothing is.
        vocabulary: token ids are below it; None where that is not known.
    """

    job_id: uuid.UUID
    request_id: uuid.UUID
    attached: bool
    tokens: int
    characters: int
    max_length: int
    wants_logprobs: bool
    age: float | None
    vocabulary: int | None
    fresh_tokens: list[int] = field(default_factory=list)
    fresh_text: str = ""
    fresh_logprobs: list[Any] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        """Take what of a chunk goes on from what is held; not at all a chunk behind a gap, one without the
        logprobs asked for, or one with ids that are none: no worker could go on from them."""
        if chunk.offset > self.tokens or chunk.text_offset > self.characters or self._is_written_too_often():
            return
        if self.wants_logprobs and len(chunk.logprobs or ()) != len(chunk.token_ids):
            return
        if self.vocabulary is not None and max(chunk.token_ids, default=0) >= self.vocabulary:
            return
        kept = slice(self.tokens - chunk.offset, self.max_length - chunk.offset)
        fresh = list(chunk.token_ids)[kept]
        if not fresh:
            return
        most = CHARACTERS_KEPT_PER_TOKEN * self.max_length
        text = chunk.text[self.characters - chunk.text_offset : most - chunk.text_offset]
        self.fresh_tokens += fresh
        self.fresh_text += text
        if self.wants_logprobs:
            self.fresh_logprobs += list(chunk.logprobs or ())[kept]
        self.tokens += len(fresh)
        self.characters += len(text)

    def _is_written_too_often(self) -> bool:
        if self.age is None or self.tokens <= LONG_OUTPUT or self.fresh_tokens:
            return False
        return self.age < self.tokens * (PAUSE_WITH_LOGPROBS if self.wants_logprobs else PAUSE)


def post_progress(
    tx: Transaction,
    owner_id: int,
    chunks: Sequence[Chunk],
    *,
    lease: int = PROGRESS_LEASE,
    vocabulary: Callable[[str], int | None] = lambda _: None,
) -> list[Progressed]:
    """Take what is new of each chunk and renew the leases that are due; repeats, reordering and gaps change nothing.

    A job claimed without `posts_progress` keeps its lease, and nothing of it is taken. Nothing is taken beyond what the order
    asked for.

    Args:
        vocabulary: how many token ids the tokenizer of a revision has; None where that is not known at once.
    """
    jobs = [chunk.job_id for chunk in chunks]
    locked = tx.execute(LOCK_JOBS, {"jobs": jobs, "owner": owner_id, "renew_after": min(RENEW_AFTER, lease / 4)})
    found = {row.id: row for row in locked}
    running = [job for job, row in found.items() if row.state == "processing" and row.posts_progress]
    held = _read_held(tx, running, chunks, vocabulary) if running else {}
    due = [job for job in held if found[job].due]
    if due:
        tx.execute(RENEW, {"jobs": due, "lease": lease})
    answers = []
    for chunk in chunks:
        job = chunk.job_id
        if job in held:
            held[job].take(chunk)
            ttl = lease if found[job].due else found[job].left_of_lease
            answers.append(Progressed(job, held[job].tokens, ttl, announce=_announced(held[job])))
        elif job in found and found[job].state == "processing":
            # Claimed without the promise to post: its lease is a long one already, and nobody reads what is posted.
            answers.append(Progressed(job, ttl=found[job].ttl))
        else:
            answers.append(Progressed(job, stop=_why_stop(found.get(job))))
    _append(tx, [one for one in held.values() if one.fresh_tokens])
    return answers


def _read_held(
    tx: Transaction, jobs: Sequence[uuid.UUID], chunks: Iterable[Chunk], vocabulary: Callable[[str], int | None]
) -> dict[uuid.UUID, _Held]:
    # Read in a statement after the one that may have waited for the locks: the latter sees what was there before its wait.
    bringing = [chunk.job_id for chunk in chunks if chunk.token_ids]
    return {
        row.id: _Held(
            job_id=row.id,
            request_id=row.request_id,
            attached=row.attached,
            tokens=row.tokens,
            characters=row.characters,
            max_length=row.max_length,
            wants_logprobs=bool(row.wants_logprobs),
            age=row.age,
            vocabulary=vocabulary(row.tokenizer_revision) if row.tokenizer_revision else None,
        )
        for row in tx.execute(READ_HELD, {"jobs": jobs, "bringing": bringing})
    }


def _append(tx: Transaction, brought: Sequence[_Held]) -> None:
    if not brought:
        return
    tokens: list[int] = []
    firsts, lasts = [], []
    for held in brought:
        firsts.append(len(tokens) + 1)
        tokens += held.fresh_tokens
        lasts.append(len(tokens))
    tx.execute(
        APPEND,
        {
            "jobs": [held.job_id for held in brought],
            "tokens": tokens,
            "firsts": firsts,
            "lasts": lasts,
            "texts": [held.fresh_text for held in brought],
            "logprobs": [json.dumps(held.fresh_logprobs) if held.wants_logprobs else None for held in brought],
        },
    )


def _announced(held: _Held) -> uuid.UUID | None:
    return held.request_id if held.attached and held.fresh_tokens else None


def _why_stop(job: Any) -> str:
    if job is None:
        return "stale"
    if job.state == "stored" and job.stored_by_cancel:
        return "cancelled"
    return str(job.state) if job.state in {"voided", "rejected"} else "stale"
