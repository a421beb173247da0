"""Jobs on their way to a worker: claimed, found again under the key of a pop, or taken back when nobody reads the answer."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Transaction
from horde.lifecycle.claim import Claimant, claim, fetch_again, is_claimed_under
from horde.lifecycle.release import release_undelivered
from horde.lifecycle.terms import Terms
from horde.queue.candidates import Candidate
from horde.usecases.cache_salt import cache_salt
from horde.usecases.context import Context
from horde.usecases.pricing import pricing

LOCK_KEY = "SELECT pg_advisory_xact_lock(hashtextextended(%(key)s, 7001))"


@dataclass(frozen=True)
class PoppedJob:
    """One job as its worker gets it.

    Attributes:
        request_id: never shown to a worker: who knows it may cancel the request.
        ttl: the lease in seconds.
        model_revision, tokenizer_revision: what the worker announced for this model with its pop, if it did.
        deadline: seconds from now after which nobody wants the result.
        prefix_token_ids, prefix_text: what the client has of this slot's output already; the worker goes on behind it.
        attached: whether a client waits on an open connection for what is posted.
        cache_salt: as `horde.usecases.cache_salt` makes it.
    """

    id: uuid.UUID
    request_id: uuid.UUID
    kind: str
    model: str
    ttl: int
    payload: dict[str, Any]
    seed: int
    slot: int
    attached: bool
    cache_salt: str
    model_revision: str | None = None
    tokenizer_revision: str | None = None
    deadline: float | None = None
    prefix_token_ids: list[int] = field(default_factory=list)
    prefix_text: str = ""


class ClaimedMeanwhile(Exception):  # noqa: N818 not an error: the same pop was sent twice and the other was first
    """Roll back and answer what the other one claimed."""


def stop_if_claimed(tx: Transaction, claimant: Claimant) -> None:
    """Raise ClaimedMeanwhile when this worker holds jobs under the key of its pop."""
    if claimant.claim_key is not None:
        # A second pop with this key, sent while the first still runs, waits here and then finds what that one claimed.
        tx.execute(LOCK_KEY, {"key": f"{claimant.id}:{claimant.claim_key}"})
        if is_claimed_under(tx, claimant.id, claimant.claim_key):
            raise ClaimedMeanwhile


def take(
    tx: Transaction,
    candidate: Candidate,
    claimant: Claimant,
    *,
    models: Sequence[str],
    speed: float | None,
    terms: Terms,
    count: int,
) -> Sequence[PoppedJob]:
    """Claim up to `count` slots of a request that was chosen, for one of the worker's `models`."""
    common = [model for model in models if _may_run(candidate, claimant, model)]
    model = random.choice(common)  # noqa: S311 any of them will do
    lease = terms.lease(
        max_length=candidate.max_length, tokens_per_second=speed, posts_progress=claimant.posts_progress
    )
    jobs = claim(tx, candidate.request_id, claimant, model=model, lease=lease, count=count)
    return [
        PoppedJob(
            id=job.id,
            request_id=candidate.request_id,
            kind=candidate.kind,
            model=model,
            ttl=job.lease,
            payload=candidate.payload,
            seed=job.seed,
            slot=job.slot,
            attached=candidate.attached,
            cache_salt=cache_salt(candidate.tenant, claimant.id),
            model_revision=job.model_revision,
            tokenizer_revision=job.tokenizer_revision,
            deadline=job.deadline_in,
            prefix_token_ids=list(job.prefix_token_ids or ()),
            prefix_text=job.prefix_text or "",
        )
        for job in jobs
    ]


def _may_run(candidate: Candidate, claimant: Claimant, model: str) -> bool:
    """Whether the request may run on this model of the worker: one that it names, in the revision that it is pinned to."""
    if candidate.models and model not in candidate.models:
        return False
    served = claimant.served.get(model)
    return candidate.revision is None or (served is not None and served.key == candidate.revision)


def held_under_key(context: Context, claimant: Claimant) -> Sequence[PoppedJob]:
    """What a pop with this key was answered before, as far as it still runs, in that order; nothing without a key."""
    key = claimant.claim_key
    if key is None:
        return []
    held = context.database.run(lambda tx: fetch_again(tx, claimant.id, key))
    return [
        PoppedJob(
            id=job.id,
            request_id=job.request_id,
            kind=job.kind,
            model=job.model,
            ttl=job.ttl,
            payload=job.payload,
            seed=job.seed,
            slot=job.slot,
            attached=job.attached,
            cache_salt=cache_salt(job.tenant, claimant.id),
            model_revision=job.model_revision,
            tokenizer_revision=job.tokenizer_revision,
            deadline=job.deadline_in,
            prefix_token_ids=list(job.prefix_token_ids or ()),
            prefix_text=job.prefix_text or "",
        )
        for job in held
    ]


def hand_back(context: Context, jobs: Sequence[PoppedJob]) -> None:
    """Nobody will read the answer that these jobs were to go out with, so they go back at once, without blame.

    One that settled meanwhile, or that a pop with the same key was given, is left alone.
    """
    for job in jobs:
        settlement = context.database.run(
            functools.partial(release_undelivered, job_id=job.id, pricing=pricing(context))
        )
        context.wakeups.announce(settlement.waits_for)
