"""Cancel: by the client, a disconnect, an admin, or maintenance. Nothing waits any more; what runs may finish."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from enum import StrEnum

from horde.db.database import Transaction
from horde.lifecycle.events import Event, append
from horde.lifecycle.posted import read_posted
from horde.lifecycle.rows import LockedRequest, ProcessingJob, lock_processing_jobs, lock_request, read_job
from horde.lifecycle.settle import Change, conclude, drop_waiting, update_request
from horde.lifecycle.store import Price, Pricing, Result, write_result
from horde.lifecycle.words import CancelReason, JobState, Outcome

# Maintenance chose the request by an old read; each condition is asked again after the lock.
IS_DUE: dict[CancelReason, str] = {
    CancelReason.EXPIRED: "SELECT expires_at <= horde_now() AND waiting > 0 AS due FROM requests WHERE id = %(request)s",
    CancelReason.DEADLINE: "SELECT deadline <= horde_now() AS due FROM requests WHERE id = %(request)s",
    CancelReason.DISCONNECT: """
        SELECT without_outages(attached_until - make_interval(secs => 30), attached_until) <= horde_now() AS due
        FROM requests WHERE id = %(request)s""",
}


class Cancelled(StrEnum):
    """What a cancel came to."""

    DONE = "done"
    ALREADY_ENDED = "already_ended"
    NOT_DUE = "not_due"
    GONE = "gone"


def cancel(tx: Transaction, request_id: uuid.UUID, reason: CancelReason, *, pricing: Pricing) -> Cancelled:
    """Cancel a request; after another outcome, or a second time, it changes nothing."""
    return _cancel(tx, request_id, reason, pricing=pricing, is_due=lambda: True)


def cancel_if_due(tx: Transaction, request_id: uuid.UUID, reason: CancelReason, *, pricing: Pricing) -> Cancelled:
    """The same from maintenance, if after the lock and by the database's clock the reason still holds.

    `EXPIRED` needs a waiting slot, `DISCONNECT` is a lapsed attachment.
    """

    def is_due() -> bool:
        return bool(tx.execute(IS_DUE[reason], {"request": request_id}).scalar_one())

    return _cancel(tx, request_id, reason, pricing=pricing, is_due=is_due)


def _cancel(
    tx: Transaction, request_id: uuid.UUID, reason: CancelReason, *, pricing: Pricing, is_due: Callable[[], bool]
) -> Cancelled:
    request = lock_request(tx, request_id)
    if request is None:
        return Cancelled.GONE
    if request.outcome is not None:
        return Cancelled.ALREADY_ENDED
    jobs = lock_processing_jobs(tx, request_id)
    if not is_due():
        return Cancelled.NOT_DUE
    cancel_locked(tx, request, jobs, reason, pricing=pricing)
    return Cancelled.DONE


def cancel_locked(
    tx: Transaction,
    request: LockedRequest,
    jobs: list[ProcessingJob],
    reason: CancelReason,
    *,
    pricing: Pricing,
    besides: Change | None = None,
) -> None:
    """Cancel a locked request without outcome whose processing jobs are `jobs`, all locked.

    Of an attached request, unless it expired, each job whose worker posts progress is stored at once with its output so far:
    its client has gone, and what was delivered is paid.
    """
    drop_waiting(tx, request.id)
    change = dataclasses.replace(
        besides or Change(), waiting=-request.waiting, outcome=Outcome.CANCELLED, outcome_reason=reason
    )
    if request.attached and reason is not CancelReason.EXPIRED:
        for job in jobs:
            if job.posts_progress:
                _store_posted(tx, job, pricing)
                # The latest to settle is this one, not the one that brought the cancel about.
                change = dataclasses.replace(change, last_faulted=None)
    update_request(tx, request.id, change)
    event = Event(
        "cancelled",
        request_id=request.id,
        request_kind=request.kind,
        user_id=request.user_id,
        reason=reason.value,
        outcome=Outcome.CANCELLED,
    )
    append(tx, event)


def _store_posted(tx: Transaction, locked: ProcessingJob, pricing: Pricing) -> None:
    job = read_job(tx, locked.id)
    assert job is not None, "a locked job is there"
    posted = read_posted(tx, job.id)
    # Ids alone prove nothing: as in a result, they count where they are what the text is made of.
    tokens = min(len(posted.token_ids), pricing.count(job, posted.text, posted.token_ids))
    result = Result(
        text=posted.text,
        tokens=tokens,
        finish_reason="cancelled",
        token_ids=posted.token_ids,
        logprobs=posted.logprobs,
        prefix_tokens=posted.share_of(tokens, posted.text, posted.token_ids),
    )
    # Paid for is what was delivered; earned is what this attempt added to it.
    price = pricing.price(job, result) if result.tokens else Price(0, 0)
    run_ms = write_result(tx, job, result, price, by_cancel=True)
    assert run_ms is not None, "a locked processing job is stored"
    change = Change(processing=-1, stored=1, price=price.price, last_faulted=False)
    conclude(
        tx,
        job,
        JobState.STORED,
        "stored",
        change,
        reason="cancelled",
        reward=price.reward,
        tokens=result.own_tokens,
        run_ms=run_ms,
    )
