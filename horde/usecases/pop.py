"""A worker asks for work: check in, claim, and where there is nothing, wait for it or say why."""

from __future__ import annotations

import functools
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from horde.admission.keys import User, authenticate, require_registered
from horde.db.database import Transaction
from horde.errors import bad_request, forbidden, unavailable
from horde.lifecycle.claim import Claimant, claim, fetch_again, is_claimed_under
from horde.lifecycle.release import release_undelivered
from horde.lifecycle.words import Kind
from horde.queue.candidates import Candidate, Popper, claim_first, count_skipped
from horde.queue.wakeup import Waiter
from horde.registry.check_in import Announcement, CheckedIn, check_in, register
from horde.registry.names import worker_name
from horde.usecases.context import Context
from horde.usecases.pricing import price_result

MOST_MODELS = 200
LONGEST_WAIT = 25.0
# A waiting poll looks again by itself this often: for what no announcement tells, such as another worker going offline.
LOOK_AGAIN = 5.0
# and asks this often whether its client is still there.
CLIENT_CHECK = 1.0
MOST_USEFUL_POLLS = 8
# Index ranges that one pop may look at: its friends times its models.
MOST_RANGES = 1000

LOCK_KEY = "SELECT pg_advisory_xact_lock(hashtextextended(%(key)s, 7001))"


@dataclass(frozen=True)
class Offer:
    """What a worker's pop says.

    Attributes:
        wait: seconds to wait for work, at most 25.
        amount: most jobs to hand out, all of one request.
    """

    name: str
    models: list[str]
    max_length: int
    max_context_length: int
    threads: int = 1
    amount: int = 1
    nsfw: bool = True
    priority_usernames: list[str] = field(default_factory=list)
    bridge_agent: str = "unknown:0:unknown"
    wait: float = 0.0
    idempotency_key: str | None = None
    address: str = ""


@dataclass(frozen=True)
class PoppedJob:
    """One job as its worker gets it; `ttl` in seconds."""

    id: uuid.UUID
    model: str
    ttl: int
    payload: dict[str, Any]
    seed: int
    slot: int


@dataclass(frozen=True)
class Popped:
    """The answer to a pop; without jobs, `skipped` says why the first in the queue were not for this worker."""

    jobs: list[PoppedJob] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


class _ClaimedMeanwhile(Exception):  # noqa: N818 not an error: the same pop was sent twice and the other was first
    """Roll back and answer what the other one claimed."""


def pop_text(context: Context, api_key: str, offer: Offer, *, client_gone: Callable[[], bool]) -> Popped:
    """Claim the first request that this worker may take.

    Args:
        client_gone: whether the caller has hung up; such a poll never takes a job.

    Raises:
        HordeError: 400, 401, 403; 403 `WorkerMaintenance` when only the owner's requests would be served and there are none.
    """
    user, worker, popper = _check_in(context, api_key, offer)
    claimant = Claimant(
        worker.id, worker_name(offer.name), user.id, claim_key=offer.idempotency_key, bridge_agent=offer.bridge_agent
    )
    jobs = _held_under_key(context, claimant)
    if not jobs:
        try:
            jobs = _claim_or_wait(context, offer, popper, claimant, worker.speed, client_gone)
        except _ClaimedMeanwhile:
            jobs = []
        # Another pop with this key may have claimed while this one looked: its jobs are this one's answer too.
        jobs = jobs or _held_under_key(context, claimant)
    if jobs:
        return Popped(list(jobs))
    if worker.maintenance:
        raise forbidden(_maintenance_message(worker), rc="WorkerMaintenance")
    skipped = context.database.read(lambda tx: count_skipped(tx, popper))
    return Popped(skipped=skipped)


def _maintenance_message(worker: CheckedIn) -> str:
    reason = worker.maintenance_message or "Its owner has paused it."
    return f"This worker is in maintenance mode: {reason}"


def _check_in(context: Context, api_key: str, offer: Offer) -> tuple[User, CheckedIn, Popper]:
    models = list(dict.fromkeys(offer.models))[:MOST_MODELS]
    if not models:
        raise bad_request("we cannot accept workers serving no model at all.", field="models")
    announcement = Announcement(
        name=worker_name(offer.name),
        kind=Kind.TEXT,
        models=models,
        max_length=offer.max_length,
        max_context_length=offer.max_context_length,
        threads=offer.threads,
        nsfw=offer.nsfw,
        bridge_agent=offer.bridge_agent,
    )

    def known(tx: Transaction) -> tuple[User, CheckedIn | None]:
        user = authenticate(tx, api_key)
        require_registered(user)
        return user, check_in(tx, user.id, announcement)

    user, worker = context.database.read(known)
    if worker is None:
        limited = context.settings.rate_limits == "on"
        context.database.run(lambda tx: register(tx, user.id, announcement, trusted=user.trusted, limited=limited))
        user, worker = context.database.read(known)
    if worker is None:
        raise unavailable("This worker was deleted at this very moment; try again.")
    popper = Popper(
        worker_id=worker.id,
        kind=Kind.TEXT,
        models=models,
        max_length=offer.max_length,
        max_context_length=offer.max_context_length,
        trusted=user.trusted,
        speed=worker.speed,
        friends=_friends(user, offer.priority_usernames)[: max(1, MOST_RANGES // len(models))],
    )
    return user, worker, popper


def _friends(user: User, usernames: Sequence[str]) -> list[int]:
    """The ids in `alias#id` names, the owner's first; raises HordeError 400 for a name of another form."""
    ids = [user.id]
    for username in usernames:
        _, _, number = username.rpartition("#")
        if not number.isascii() or not number.isdigit() or len(number) > 18:
            raise bad_request(
                f"{username!r} is not a username of the form alias#id.",
                rc="InvalidPriorityUsername",
                field="priority_usernames",
            )
        ids.append(int(number))
    return list(dict.fromkeys(ids))


def _claim_or_wait(
    context: Context,
    offer: Offer,
    popper: Popper,
    claimant: Claimant,
    speed: float | None,
    client_gone: Callable[[], bool],
) -> Sequence[PoppedJob]:
    def take(tx: Transaction, candidate: Candidate) -> Sequence[PoppedJob]:
        return _take(tx, context, candidate, offer, claimant, speed)

    until = time.monotonic() + min(offer.wait, LONGEST_WAIT)
    with ExitStack() as waits:
        may_wait = offer.wait > 0 and waits.enter_context(context.wakeups.place(_shares(context, offer, claimant)))
        woken = waits.enter_context(context.wakeups.waiting(popper.kind, popper.models))
        while True:
            if client_gone() or context.wakeups.closed:
                return []
            told = woken.take()
            jobs: Sequence[PoppedJob] = []
            try:
                jobs = claim_first(context.database, popper, take)
            finally:
                if not jobs:
                    context.wakeups.pass_on(woken, told)
            if jobs and client_gone():
                _hand_back(context, jobs)
                return []
            if jobs or not may_wait or time.monotonic() >= until:
                return jobs
            _wait(woken, until, client_gone)


def _shares(context: Context, offer: Offer, claimant: Claimant) -> dict[object, int]:
    """How many places a worker and its owner may hold: a few more than the worker has use for, and a quarter of all."""
    return {
        ("worker", claimant.id): min(offer.threads, MOST_USEFUL_POLLS) + 2,
        ("owner", claimant.owner_id): max(2, context.settings.max_waiting_polls // 4),
    }


def _wait(woken: Waiter, until: float, client_gone: Callable[[], bool]) -> None:
    again = min(until, time.monotonic() + LOOK_AGAIN * random.uniform(0.8, 1.2))  # noqa: S311 jitter
    while (left := again - time.monotonic()) > 0:
        if woken.wait(min(left, CLIENT_CHECK)) or client_gone():
            return


def _take(
    tx: Transaction, context: Context, candidate: Candidate, offer: Offer, claimant: Claimant, speed: float | None
) -> Sequence[PoppedJob]:
    if claimant.claim_key is not None:
        # A second pop with this key, sent while the first still runs, waits here and then finds what that one claimed.
        tx.execute(LOCK_KEY, {"key": f"{claimant.id}:{claimant.claim_key}"})
        if is_claimed_under(tx, claimant.id, claimant.claim_key):
            raise _ClaimedMeanwhile
    common = [model for model in offer.models if not candidate.models or model in candidate.models]
    model = random.choice(common)  # noqa: S311 any of them will do
    lease = context.terms.lease(max_length=candidate.max_length, tokens_per_second=speed, posts_progress=False)
    jobs = claim(tx, candidate.request_id, claimant, model=model, lease=lease, count=offer.amount)
    return [PoppedJob(job.id, model, job.lease, candidate.payload, job.seed, job.slot) for job in jobs]


def _held_under_key(context: Context, claimant: Claimant) -> Sequence[PoppedJob]:
    key = claimant.claim_key
    if key is None:
        return []
    held = context.database.run(lambda tx: fetch_again(tx, claimant.id, key))
    return [PoppedJob(job.id, job.model, job.ttl, job.payload, job.seed, job.slot) for job in held]


def _hand_back(context: Context, jobs: Sequence[PoppedJob]) -> None:
    """The caller hung up while we claimed: nobody will read the answer, so the jobs go back at once, without blame."""
    for job in jobs:
        settlement = context.database.run(functools.partial(release_undelivered, job_id=job.id, pricing=price_result))
        context.wakeups.announce(settlement.waits_for)
