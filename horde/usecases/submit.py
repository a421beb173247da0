"""A worker reports on a job: its result, a fault, a release, a rejection."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from typing import Any

from horde.admission.keys import hash_key
from horde.db.database import Prepared, Transaction
from horde.errors import HordeError, bad_request, forbidden, invalid_key, not_found
from horde.kudos.prices import HUNDREDTHS
from horde.lifecycle.fault import fault
from horde.lifecycle.reject import reject
from horde.lifecycle.release import release
from horde.lifecycle.settle import Settlement
from horde.lifecycle.store import Result, store
from horde.lifecycle.words import CHARACTERS_KEPT_PER_TOKEN, FaultReason, ResultState, Verdict
from horde.usecases.context import Context
from horde.usecases.counting import count_tokens
from horde.usecases.pricing import pricing

# The job first, then the key, then whose job it is: workers rely on that order of errors.
FIND_JOB = Prepared("""
SELECT j.owner_id, j.tokenizer_revision, r.max_length, r.payload - '{messages,prompt}'::text[] AS payload, u.id AS user_id
FROM jobs j JOIN requests r ON r.id = j.request_id LEFT JOIN users u ON u.key_hash = %(hash)s AND u.deleted_at IS NULL
WHERE j.id = %(job)s
""")


@dataclass(frozen=True)
class Submission:
    """What a worker says of its job.

    Attributes:
        state: `ok`, `censored`, `csam`, `faulted`, `released` or `rejected`.
        text, token_ids: the slot's whole output, with a prefix that the job was given.
        logprobs: one entry for each token behind the prefix: `[id, logprob, [[id, logprob], ...]]`.
        cached_tokens: of the prompt, found computed already.
        error_code: why, for `rejected`.
    """

    job_id: uuid.UUID
    state: str
    text: str = ""
    seed: int | None = None
    gen_metadata: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[Any] | None = None
    cached_tokens: int | None = None
    error_code: str | None = None
    idempotency_key: str | None = None


def submit(context: Context, api_key: str, submission: Submission) -> float:
    """Settle the job as reported; returns the reward in kudos.

    Of a text, 100 characters for each token of the order's `max_length` are kept. A repeat with the first call's idempotency
    key is answered as that was, whatever it says. A result that does not go on from what was posted is a fault of the worker.

    Raises:
        HordeError: 404 `InvalidJobID`, 401, 403 `WrongCredentials`, 400 `DuplicateGen` or `AbortedGen`, with nothing changed;
            400 `ContradictsProgress`, with the job faulted.
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
    # Loaded and counted before the transaction: a tokenizer takes its time, and the request must not be locked meanwhile.
    # Whatever is said of this job may end the request, and what was posted of its others is counted then.
    revision = job.tokenizer_revision
    tokenizer = context.tokenizers.load(context.database, revision) if revision else None
    result = None
    if submission.state in set(ResultState):
        tokens = count_tokens(tokenizer, submission.text, submission.token_ids, job.payload)
        result = _result(submission, job.payload, tokens)
    settlement = context.database.run(lambda tx: _settle(tx, context, submission, result, job.payload))
    context.wakeups.announce(settlement.waits_for)
    if settlement.attached and settlement.request_id is not None:
        context.streams.announce([settlement.request_id])
    return _answer(submission, settlement)


def _settle(
    tx: Transaction, context: Context, submission: Submission, result: Result | None, payload: dict[str, Any]
) -> Settlement:
    job, key, priced = submission.job_id, submission.idempotency_key, pricing(context)
    match submission.state:
        case "faulted":
            return fault(tx, job, pricing=priced, key=key)
        case "released":
            return release(tx, job, pricing=priced, key=key)
        case "rejected":
            code = submission.error_code or ""
            # Counted with the very tokenizer of the model, so that the prompt is known to fit; and what else the order asks
            # for was looked at before it was let in.
            counted = payload.get("estimated") is False
            return reject(tx, job, code, broker_knows_better=counted, pricing=priced, key=key)
        case _:
            assert result is not None
            settlement = store(tx, job, result, pricing=priced, terms=context.terms, key=key)
            if settlement.verdict is not Verdict.CONTRADICTED:
                return settlement
            faulted = fault(tx, job, pricing=priced, key=key, reason=FaultReason.CONTRADICTED)
            return dataclasses.replace(faulted, verdict=Verdict.CONTRADICTED)


def _result(submission: Submission, payload: dict[str, Any], tokens: int) -> Result:
    censored = any(entry.get("value") == "csam" for entry in submission.gen_metadata)
    cached = submission.cached_tokens
    return Result(
        text=submission.text,
        tokens=tokens,
        seed=submission.seed,
        state=ResultState.CSAM if censored else ResultState(submission.state),
        finish_reason=submission.finish_reason,
        metadata=submission.gen_metadata,
        token_ids=submission.token_ids,
        logprobs=submission.logprobs,
        cached_tokens=None if cached is None else min(cached, payload.get("prompt_tokens", 0)),
    )


def _answer(submission: Submission, settlement: Settlement) -> float:
    match settlement.verdict:
        case Verdict.SETTLED | Verdict.ACKNOWLEDGED:
            return settlement.reward / HUNDREDTHS
        case Verdict.REPEATED:
            answer = settlement.answer or {}
            if answer.get("reason") == FaultReason.CONTRADICTED:
                raise _contradicted(submission.job_id)
            return float(answer.get("reward", 0)) / HUNDREDTHS
        case Verdict.DUPLICATE:
            raise bad_request(f"Processing Job with ID {submission.job_id} was already submitted.", rc="DuplicateGen")
        case Verdict.ABORTED:
            raise bad_request(
                f"Processing Job with ID {submission.job_id} was aborted and its result is no longer wanted. "
                "Please check your worker speed and its connection.",
                rc="AbortedGen",
            )
        case Verdict.CONTRADICTED:
            raise _contradicted(submission.job_id)
        case _:
            raise _no_such_job(submission.job_id)


def _contradicted(job_id: uuid.UUID) -> HordeError:
    return bad_request(
        f"The result of job {job_id} does not go on from what was posted of it: `generation` and `token_ids` have to begin "
        "with that, and `logprobs`, where they were asked for, to be one a token behind the prefix. The job has faulted.",
        rc="ContradictsProgress",
        field="generation",
    )


def _no_such_job(job_id: uuid.UUID) -> HordeError:
    return not_found(f"Processing Job with ID {job_id} does not exist.", rc="InvalidJobID")
