"""Submit ok: the result is kept, the client charged, the worker paid; once per job.

A client that waits has what was posted, so a result that does not begin with it is none.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.posted import NOTHING_POSTED, Posted, read_posted
from horde.lifecycle.rows import JobFacts, lock_job, lock_job_request
from horde.lifecycle.settle import Change, Settlement, classify, conclude, settled
from horde.lifecycle.terms import Terms
from horde.lifecycle.words import JobState, Outcome, ResultState, Verdict

STORE_JOB = Prepared("""
UPDATE jobs SET state = 'stored', settled_at = horde_now(), result = %(text)s, result_state = %(result_state)s,
    result_seed = %(seed)s, finish_reason = %(finish_reason)s, gen_metadata = %(metadata)s, tokens = %(tokens)s,
    token_ids = %(token_ids)s, logprobs = %(logprobs)s, cached_tokens = %(cached_tokens)s,
    price = %(price)s, reward = %(reward)s, stored_by_cancel = %(by_cancel)s, settle_key = %(key)s, settle_answer = %(answer)s
WHERE id = %(job)s AND state = 'processing'
RETURNING extract(epoch FROM horde_now() - claimed_at) * 1000 AS run_ms
""")

# A job that a cancel stored: its worker's own submit is answered with the settlement's reward, the first time.
ACKNOWLEDGE = """
UPDATE jobs SET acknowledged = true, settle_key = %(key)s,
                settle_answer = json_build_object('reward', reward)::jsonb
WHERE id = %(job)s AND state = 'stored' AND stored_by_cancel AND NOT acknowledged
RETURNING reward
"""


@dataclass(frozen=True)
class Result:
    """What became of a slot: its whole output, with what attempts before this one made of it.

    Attributes:
        tokens: how many the client gets, as the caller counted them.
        seed: the seed that was used; None: the slot's.
        token_ids: None where the worker did not tell.
        logprobs: as `store` is given them, one entry for each token behind the prefix; as it keeps them, for each token.
        cached_tokens: how many of the prompt were computed already.
        prefix_tokens: how many of `tokens` attempts before this one made; found by `store`.
    """

    text: str
    tokens: int
    seed: int | None = None
    state: ResultState = ResultState.OK
    finish_reason: str | None = None
    metadata: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] | None = None
    logprobs: list[Any] | None = None
    cached_tokens: int | None = None
    prefix_tokens: int = 0

    @property
    def own_tokens(self) -> int:
        """How many the worker of this attempt made."""
        return max(0, self.tokens - self.prefix_tokens)


@dataclass(frozen=True)
class Price:
    """Hundredths of a kudos: what the client pays and what of it the worker's owner gets."""

    price: int
    reward: int


@dataclass(frozen=True)
class Pricing:
    """What the caller makes of an output. Both are called with the request locked, so they wait for nothing.

    Attributes:
        price: of a result with its tokens counted.
        count: tokens of the text and the ids that were posted of a job whose worker can be asked for no more.
    """

    price: Callable[[JobFacts, Result], Price]
    count: Callable[[JobFacts, str, Sequence[int]], int]


def store(
    tx: Transaction, job_id: uuid.UUID, result: Result, *, pricing: Pricing, terms: Terms, key: str | None = None
) -> Settlement:
    """Settle a processing job as stored; a job that is not processing is left as it is and said what it is.

    A result that contradicts what was posted, or lacks the logprobs that were asked for, changes nothing: see `Verdict`.
    """
    locked = lock_job_request(tx, job_id)
    if locked is None:
        return Settlement(Verdict.GONE)
    request, job = locked
    posted = NOTHING_POSTED
    if request.attached and lock_job(tx, job_id) == JobState.PROCESSING:
        posted = read_posted(tx, job_id)
    whole = _whole(job, result, posted)
    if whole is None:
        # What a job that has settled is told does not depend on what is said of it now.
        still_runs = lock_job(tx, job_id) == JobState.PROCESSING
        return Settlement(Verdict.CONTRADICTED) if still_runs else _acknowledge_or_classify(tx, job_id, key)
    price = pricing.price(job, whole)
    run_ms = write_result(tx, job, whole, price, key=key)
    if run_ms is None:
        return _acknowledge_or_classify(tx, job_id, key)
    ends = request.outcome is None and request.waiting == 0 and request.processing == 1
    change = Change(
        processing=-1,
        stored=1,
        price=price.price,
        last_faulted=False,
        expiry=terms.expiry,
        outcome=Outcome.COMPLETED if ends else None,
    )
    conclude(tx, job, JobState.STORED, "stored", change, reward=price.reward, tokens=whole.own_tokens, run_ms=run_ms)
    return settled(request, reward=price.reward, outcome=change.outcome)


def _whole(job: JobFacts, result: Result, posted: Posted) -> Result | None:
    """The result as it is kept, no longer than ordered; None when it does not go on from what was posted."""
    ids, logprobs = result.token_ids, None
    refused = result.state is not ResultState.OK
    if not refused and not posted.is_continued_by(result.text, ids):
        return None
    if job.payload.get("logprobs") is not None and not refused:
        if ids is None or result.logprobs is None or posted.prefix_tokens + len(result.logprobs) != len(ids):
            return None
        # What was posted is what the client has, so of that nothing changes any more.
        told = posted.logprobs or []
        logprobs = [*told, *result.logprobs[len(told) - posted.prefix_tokens :]][: job.max_length]
    tokens, ids = min(result.tokens, job.max_length), ids if ids is None else ids[: job.max_length]
    return dataclasses.replace(
        result,
        tokens=tokens,
        token_ids=ids,
        logprobs=logprobs,
        prefix_tokens=posted.share_of(tokens, result.text, ids),
    )


def write_result(
    tx: Transaction, job: JobFacts, result: Result, price: Price, *, key: str | None = None, by_cancel: bool = False
) -> float | None:
    """The compare-and-set of a stored job; milliseconds since the claim, or None if it is not processing."""
    row = tx.execute(
        STORE_JOB,
        {
            "job": job.id,
            "text": result.text,
            "result_state": result.state.value,
            "seed": result.seed,
            "finish_reason": result.finish_reason,
            "metadata": json.dumps(result.metadata),
            "tokens": result.tokens,
            "token_ids": result.token_ids,
            "logprobs": json.dumps(result.logprobs) if result.logprobs is not None else None,
            "cached_tokens": result.cached_tokens,
            "price": price.price,
            "reward": price.reward,
            "by_cancel": by_cancel,
            "key": key,
            "answer": json.dumps({"reward": price.reward}),
        },
    ).one_or_none()
    if row is None:
        return None
    return float(row.run_ms)


def _acknowledge_or_classify(tx: Transaction, job_id: uuid.UUID, key: str | None) -> Settlement:
    row = tx.execute(ACKNOWLEDGE, {"job": job_id, "key": key}).one_or_none()
    if row is not None:
        return Settlement(Verdict.ACKNOWLEDGED, reward=row.reward)
    return classify(tx, job_id, key)
