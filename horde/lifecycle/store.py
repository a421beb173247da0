"""Submit ok: the result is kept, the client charged, the worker paid; once per job."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.rows import JobFacts, lock_job_request
from horde.lifecycle.settle import Change, Settlement, classify, conclude
from horde.lifecycle.terms import Terms
from horde.lifecycle.words import JobState, Outcome, ResultState, Verdict

STORE_JOB = Prepared("""
UPDATE jobs SET state = 'stored', settled_at = horde_now(), result = %(text)s, result_state = %(result_state)s,
    result_seed = %(seed)s, finish_reason = %(finish_reason)s, gen_metadata = %(metadata)s, tokens = %(tokens)s,
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
    """What a worker made of a slot.

    Attributes:
        seed: the seed it used; None: the slot's.
        tokens: how many it generated, as the caller counted them.
    """

    text: str
    tokens: int
    seed: int | None = None
    state: ResultState = ResultState.OK
    finish_reason: str | None = None
    metadata: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Price:
    """Hundredths of a kudos: what the client pays and what of it the worker's owner gets."""

    price: int
    reward: int


Pricing = Callable[[JobFacts, Result], Price]


def store(
    tx: Transaction, job_id: uuid.UUID, result: Result, *, pricing: Pricing, terms: Terms, key: str | None = None
) -> Settlement:
    """Settle a processing job as stored; a job that is not processing is left as it is and said what it is."""
    locked = lock_job_request(tx, job_id)
    if locked is None:
        return Settlement(Verdict.GONE)
    request, job = locked
    result = dataclasses.replace(result, tokens=min(result.tokens, job.max_length))
    price = pricing(job, result)
    run_ms = write_result(tx, job, result, price, key=key)
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
    conclude(tx, job, JobState.STORED, "stored", change, reward=price.reward, tokens=result.tokens, run_ms=run_ms)
    return Settlement(Verdict.SETTLED, reward=price.reward, outcome=change.outcome)


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
