"""A worker reports on a job: its result, a fault, a release, a rejection."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from typing import Any

from horde.admission.keys import hash_key
from horde.db.database import Prepared, Transaction
from horde.errors import HordeError, bad_request, forbidden, invalid_key, not_found
from horde.kudos.prices import HUNDREDTHS, estimate_tokens
from horde.lifecycle.fault import fault
from horde.lifecycle.reject import reject
from horde.lifecycle.release import release
from horde.lifecycle.settle import Settlement
from horde.lifecycle.store import Result, store
from horde.lifecycle.words import CHARACTERS_KEPT_PER_TOKEN, ResultState, Verdict
from horde.usecases.context import Context
from horde.usecases.pricing import price_result

# The job first, then the key, then whose job it is: workers rely on that order of errors.
FIND_JOB = Prepared("""
SELECT j.owner_id, r.max_length, u.id AS user_id
FROM jobs j JOIN requests r ON r.id = j.request_id LEFT JOIN users u ON u.key_hash = %(hash)s AND u.deleted_at IS NULL
WHERE j.id = %(job)s
""")


@dataclass(frozen=True)
class Submission:
    """What a worker says of its job.

    Attributes:
        state: `ok`, `censored`, `csam`, `faulted`, `released` or `rejected`.
        error_code: why, for `rejected`.
    """

    job_id: uuid.UUID
    state: str
    text: str = ""
    seed: int | None = None
    gen_metadata: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    error_code: str | None = None
    idempotency_key: str | None = None


def submit_text(context: Context, api_key: str, submission: Submission) -> float:
    """Settle the job as reported; returns the reward in kudos.

    Of a text, 100 characters for each token of the order's `max_length` are kept. A repeat with the first call's idempotency
    key is answered as that was, whatever it says.

    Raises:
        HordeError: 404 `InvalidJobID`, 401, 403 `WrongCredentials`, 400 `DuplicateGen` or `AbortedGen`; nothing is changed then.
    """
    job = context.database.read(
        lambda tx: tx.execute(FIND_JOB, {"job": submission.job_id, "hash": hash_key(api_key)}).one_or_none()
    )
    if job is None:
        raise _no_such_job(submission.job_id)
    if job.user_id is None:
        raise invalid_key()
    if job.user_id != job.owner_id:
        raise forbidden("wrong credentials: this job was given to another user's worker.", rc="WrongCredentials")
    kept = submission.text[: CHARACTERS_KEPT_PER_TOKEN * job.max_length]
    submission = dataclasses.replace(submission, text=kept)
    settlement = context.database.run(lambda tx: _settle(tx, context, submission))
    context.wakeups.announce(settlement.waits_for)
    return _answer(submission, settlement)


def _settle(tx: Transaction, context: Context, submission: Submission) -> Settlement:
    job, key = submission.job_id, submission.idempotency_key
    match submission.state:
        case "faulted":
            return fault(tx, job, pricing=price_result, key=key)
        case "released":
            return release(tx, job, pricing=price_result, key=key)
        case "rejected":
            code = submission.error_code or ""
            return reject(tx, job, code, broker_knows_better=False, pricing=price_result, key=key)
        case _:
            return store(tx, job, _result(submission), pricing=price_result, terms=context.terms, key=key)


def _result(submission: Submission) -> Result:
    censored = any(entry.get("value") == "csam" for entry in submission.gen_metadata)
    return Result(
        text=submission.text,
        # No tokenizer of this model is known here, so nobody's own count is believed.
        tokens=estimate_tokens(submission.text),
        seed=submission.seed,
        state=ResultState.CSAM if censored else ResultState(submission.state),
        finish_reason=submission.finish_reason,
        metadata=submission.gen_metadata,
    )


def _answer(submission: Submission, settlement: Settlement) -> float:
    match settlement.verdict:
        case Verdict.SETTLED | Verdict.ACKNOWLEDGED:
            return settlement.reward / HUNDREDTHS
        case Verdict.REPEATED:
            return float((settlement.answer or {}).get("reward", 0)) / HUNDREDTHS
        case Verdict.DUPLICATE:
            raise bad_request(f"Processing Job with ID {submission.job_id} was already submitted.", rc="DuplicateGen")
        case Verdict.ABORTED:
            raise bad_request(
                f"Processing Job with ID {submission.job_id} was aborted and its result is no longer wanted. "
                "Please check your worker speed and its connection.",
                rc="AbortedGen",
            )
        case _:
            raise _no_such_job(submission.job_id)


def _no_such_job(job_id: uuid.UUID) -> HordeError:
    return not_found(f"Processing Job with ID {job_id} does not exist.", rc="InvalidJobID")
