"""A worker asks for work: check in, claim, and where there is nothing, wait for it or say why."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from horde.admission.keys import User, authenticate, require_registered
from horde.db.database import Transaction
from horde.errors import bad_request, forbidden, unavailable
from horde.lifecycle.claim import Claimant, Served
from horde.lifecycle.words import Kind
from horde.queue.candidates import Candidate, Popper, claim_first, count_skipped
from horde.queue.wakeup import Waiter
from horde.registry.check_in import Announcement, CheckedIn, check_in, register
from horde.registry.names import worker_name
from horde.registry.revisions import Manifest, revision_key
from horde.usecases.context import Context
from horde.usecases.hand_out import ClaimedMeanwhile, PoppedJob, hand_back, held_under_key, stop_if_claimed, take

__all__ = ["Manifest", "Offer", "Popped", "PoppedJob", "pop"]

MOST_MODELS = 200
LONGEST_WAIT = 25.0
# A waiting poll looks again by itself this often: for what no announcement tells, such as another worker going offline.
LOOK_AGAIN = 5.0
# and asks this often whether its client is still there.
CLIENT_CHECK = 1.0
MOST_USEFUL_POLLS = 8
# Index ranges that one pop may look at: its friends times its kinds and models.
MOST_RANGES = 1000


@dataclass(frozen=True)
class Offer:
    """What a worker's pop says.

    Attributes:
        kinds: what it takes with this one pop, of `text` and `chat`.
        manifests: of its models, by their names; who takes `chat` gives one for each.
        wait: seconds to wait for work, at most 25.
        amount: most jobs to hand out, all of one request, where there are no `slots`.
        slots: most jobs to hand out, of as many requests as that needs.
        progress: whether this worker posts progress; it gets short leases, which each post renews.
    """

    name: str
    models: list[str]
    max_length: int
    max_context_length: int
    kinds: Sequence[str] = (Kind.TEXT,)
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    threads: int = 1
    amount: int = 1
    slots: int | None = None
    progress: bool = False
    nsfw: bool = True
    priority_usernames: list[str] = field(default_factory=list)
    bridge_agent: str = "unknown:0:unknown"
    wait: float = 0.0
    idempotency_key: str | None = None
    address: str = ""


@dataclass(frozen=True)
class Popped:
    """The answer to a pop; without jobs, `skipped` says why the first in the queue were not for this worker."""

    jobs: list[PoppedJob] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


def pop(context: Context, api_key: str, offer: Offer, *, client_gone: Callable[[], bool]) -> Popped:
    """Claim the first request that this worker may take; with `slots` the first few, as many as it has room for.

    Requests of all its kinds stand in one line, by rank.

    Args:
        client_gone: whether the caller has hung up; such a poll never takes a job.

    Raises:
        HordeError: 400, 401, 403; 403 `WorkerMaintenance` when only the owner's requests would be served and there are none.
    """
    models = _checked_models(offer)
    user, worker, popper = _check_in(context, api_key, offer, models)
    claimant = Claimant(
        worker.id,
        worker_name(offer.name),
        user.id,
        posts_progress=offer.progress,
        claim_key=offer.idempotency_key,
        bridge_agent=offer.bridge_agent,
        served={
            model: Served(manifest.model_revision, manifest.tokenizer_revision, _key(model, manifest))
            for model, manifest in _manifests(offer, models).items()
        },
    )
    jobs = held_under_key(context, claimant)
    if not jobs:
        try:
            jobs = _claim_or_wait(context, offer, popper, claimant, worker.speed, client_gone)
        except ClaimedMeanwhile:
            jobs = []
        # Another pop with this key may have claimed while this one looked: its jobs are this one's answer too.
        jobs = jobs or held_under_key(context, claimant)
    if jobs:
        return Popped(list(jobs))
    if worker.maintenance:
        raise forbidden(_maintenance_message(worker), rc="WorkerMaintenance")
    skipped = context.database.read(lambda tx: count_skipped(tx, popper))
    return Popped(skipped=skipped)


def _maintenance_message(worker: CheckedIn) -> str:
    reason = worker.maintenance_message or "Its owner has paused it."
    return f"This worker is in maintenance mode: {reason}"


def _checked_models(offer: Offer) -> list[str]:
    """The models that count, each once; raises HordeError 400 where the offer does not hold together."""
    models = list(dict.fromkeys(offer.models))[:MOST_MODELS]
    if not models:
        raise bad_request("we cannot accept workers serving no model at all.", field="models")
    if Kind.CHAT in offer.kinds:
        if not offer.progress:
            raise bad_request("A worker that takes chats posts progress: `progress` has to be true.", field="progress")
        for model in models:
            if model not in offer.manifests:
                raise bad_request(
                    "A worker that takes chats gives a manifest for each of its models.", field=f"manifests.{model}"
                )
    return models


def _manifests(offer: Offer, models: Sequence[str]) -> dict[str, Manifest]:
    return {model: offer.manifests[model] for model in models if model in offer.manifests}


def _key(model: str, manifest: Manifest) -> str:
    return revision_key(model, manifest.model_revision, manifest.tokenizer_revision)


def _check_in(context: Context, api_key: str, offer: Offer, models: Sequence[str]) -> tuple[User, CheckedIn, Popper]:
    manifests = _manifests(offer, models)
    announcement = Announcement(
        name=worker_name(offer.name),
        kind=Kind.TEXT,
        models=models,
        max_length=offer.max_length,
        max_context_length=offer.max_context_length,
        threads=offer.threads,
        nsfw=offer.nsfw,
        posts_progress=offer.progress,
        bridge_agent=offer.bridge_agent,
        kinds=offer.kinds,
        manifests=manifests,
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
        kinds=list(dict.fromkeys(offer.kinds)),
        models=models,
        max_length=offer.max_length,
        max_context_length=offer.max_context_length,
        trusted=user.trusted,
        speed=worker.speed,
        friends=_friends(user, offer.priority_usernames),
        posts_progress=offer.progress,
        revisions=[_key(model, manifest) for model, manifest in manifests.items()],
    )
    most_friends = max(1, MOST_RANGES // len(popper.queue_keys()))
    return user, worker, dataclasses.replace(popper, friends=popper.friends[:most_friends])


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
    most = offer.amount if offer.slots is None else offer.slots

    def claim(tx: Transaction, candidate: Candidate, count: int) -> Sequence[PoppedJob]:
        if count == most:
            # Nothing is taken yet: what is found under the key is not this pop's own.
            stop_if_claimed(tx, claimant)
        return take(tx, candidate, claimant, models=popper.models, speed=speed, terms=context.terms, count=count)

    until = time.monotonic() + min(offer.wait, LONGEST_WAIT)
    with ExitStack() as waits:
        may_wait = offer.wait > 0 and waits.enter_context(context.places.place(_shares(context, offer, claimant)))
        woken = waits.enter_context(context.wakeups.waiting(popper.queue_keys()))
        while True:
            if client_gone() or context.wakeups.closed:
                return []
            told = woken.take()
            jobs: Sequence[PoppedJob] = []
            try:
                jobs = claim_first(context.database, popper, claim, most=most, several=offer.slots is not None)
            finally:
                if not jobs:
                    context.wakeups.pass_on(woken, told)
            if jobs and client_gone():
                hand_back(context, jobs)
                return []
            if jobs or not may_wait or time.monotonic() >= until:
                return jobs
            _wait(woken, until, client_gone)


def _shares(context: Context, offer: Offer, claimant: Claimant) -> dict[object, int]:
    """How many places a worker and its owner may hold: a few more than the worker has use for, and a quarter of all."""
    return {
        ("polls",): context.places.most_polls,
        ("worker", claimant.id): min(offer.threads, MOST_USEFUL_POLLS) + 2,
        ("owner", claimant.owner_id): max(2, context.settings.max_waiting_polls // 4),
    }


def _wait(woken: Waiter, until: float, client_gone: Callable[[], bool]) -> None:
    again = min(until, time.monotonic() + LOOK_AGAIN * random.uniform(0.8, 1.2))  # noqa: S311 jitter
    while (left := again - time.monotonic()) > 0:
        if woken.wait(min(left, CLIENT_CHECK)) or client_gone():
            return
