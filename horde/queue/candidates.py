"""Which requests a worker's pop gets: the first by rank that it may take, its owner's and friends' first."""

from __future__ import annotations

import functools
import itertools
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from horde.db.database import Database, Prepared, Transaction
from horde.errors import unavailable
from horde.lifecycle.claim import TENANT
from horde.lifecycle.enqueue import ANY_MODEL
from horde.lifecycle.words import Kind
from horde.queue.filter import CAN_SERVE, CONDITIONS, IS_OPEN, IS_WANTED, MAY_RETRY, OFFER

T = TypeVar("T")

# How many rows per kind and model are looked at: more than one, since others may hold locks on the first.
DEPTH = 10
SKIPPED_DEPTH = 200
LOCK_WAIT = "2s"
TRIES_WITHOUT_WAITING = 2
CONTENTION_SECONDS = 5.0

_PER_MODEL = f"""
    SELECT q.request_id
    FROM queue q JOIN requests r ON r.id = q.request_id
    WHERE <whose> AND q.kind = offered.kind AND q.model = offered.model AND {IS_WANTED} AND {CAN_SERVE} AND {MAY_RETRY}
    ORDER BY <order> q.rank, q.request_id LIMIT %(depth)s"""
_OF_ALL = _PER_MODEL.replace("<whose>", "true").replace("<order>", "")
# One user in an array: with a plain `=` the planner sees no need for the user in the order, and where the statistics show
# one user's flood it would walk everybody's rows by the other index to find none of this one.
_OF_FRIEND = _PER_MODEL.replace("<whose>", "q.user_id = ANY (ARRAY[friend.id])").replace("<order>", "q.user_id,")

_OFFERED = "unnest(%(queue_kinds)s::text[], %(queue_models)s::text[]) AS offered (kind, model)"

# One index scan per kind and model (and friend), each stopping after `depth` rows: the cost does not grow with the queue.
_CANDIDATES = f"""
WITH w AS ({OFFER}),
candidates AS (
    SELECT found.* FROM w, unnest(%(friends)s::bigint[]) AS friend (id), {_OFFERED}, LATERAL ({_OF_FRIEND}) found
    UNION ALL
    SELECT found.* FROM w, {_OFFERED}, LATERAL ({_OF_ALL}) found)
"""

# Ids in an array, not a join: a plan made while the queue was short would look for the candidates once per request.
# `r` is asked again after the lock (its row may have changed since), so IS_OPEN stands here a second time.
CHOOSE = Prepared(f"""{_CANDIDATES}
SELECT r.id, r.models, r.revision, r.max_length, r.max_context_length, r.payload, r.kind, r.attached_until IS NOT NULL AS attached,
       {TENANT} AS tenant
FROM requests r WHERE r.id = ANY (ARRAY(SELECT request_id FROM candidates)) AND {IS_OPEN}
ORDER BY r.user_id <> ALL (%(friends)s::bigint[]), r.rank, r.id LIMIT 1 FOR UPDATE OF r
""")
CHOOSE_UNLOCKED = Prepared(f"{CHOOSE} SKIP LOCKED")

LOOK = Prepared(f"{_CANDIDATES} SELECT EXISTS (SELECT FROM candidates)")

SKIPPED = Prepared(f"""
WITH w AS ({OFFER})
SELECT CASE {" ".join(f"WHEN NOT {condition} THEN '{reason}'" for reason, condition in CONDITIONS.items())} END AS reason,
       count(*) AS skipped
FROM w, LATERAL (
    SELECT first.request_id FROM {_OFFERED}, LATERAL (
        SELECT q.rank, q.request_id FROM queue q WHERE q.kind = offered.kind AND q.model = offered.model
        ORDER BY q.rank, q.request_id LIMIT %(depth)s) first
    GROUP BY first.request_id ORDER BY min(first.rank) LIMIT %(depth)s) ahead
JOIN requests r ON r.id = ahead.request_id
GROUP BY 1
""")


@dataclass(frozen=True)
class Popper:
    """Who asks for work, as this pop says and as the registry knows.

    Attributes:
        kinds: what it takes with this one pop.
        friends: users whose requests come first: the owner and `priority_usernames`.
        speed: tokens per second, None until measured.
        revisions: keys of the revisions of its models that it announced; a request that is pinned to one needs it among them.
    """

    worker_id: uuid.UUID
    kinds: Sequence[str]
    models: Sequence[str]
    max_length: int
    max_context_length: int
    trusted: bool
    speed: float | None
    friends: Sequence[int] = field(default_factory=list)
    posts_progress: bool = False
    revisions: Sequence[str] = field(default_factory=list)

    def queue_keys(self) -> list[tuple[str, str]]:
        """(kind, model) of each stretch of the queue that it looks at. A chat always names its model."""
        keys = [(str(kind), model) for kind in self.kinds for model in self.models]
        keys += [(str(kind), ANY_MODEL) for kind in self.kinds if kind != Kind.CHAT]
        return list(dict.fromkeys(keys))

    def parameters(self, depth: int) -> dict[str, Any]:
        """By the names of the statements above."""
        keys = self.queue_keys()
        return {
            "worker": self.worker_id,
            "models": list(self.models),
            "queue_kinds": [kind for kind, _ in keys],
            "queue_models": [model for _, model in keys],
            "max_length": self.max_length,
            "max_context_length": self.max_context_length,
            "trusted": self.trusted,
            "speed": self.speed,
            "posts_progress": self.posts_progress,
            "revisions": list(self.revisions),
            "friends": list(self.friends),
            "depth": depth,
        }


@dataclass(frozen=True)
class Candidate:
    """A request locked for this transaction, and what of it the claim and the answer need; `tenant` as in `TENANT`."""

    request_id: uuid.UUID
    kind: str
    models: list[str]
    revision: str | None
    max_length: int
    max_context_length: int
    payload: dict[str, Any]
    attached: bool
    tenant: str


def choose(tx: Transaction, popper: Popper, *, wait_for_locks: bool = False) -> Candidate | None:
    """Lock the first request that the popper may take; rows that others hold are passed over, unless told to wait for them."""
    statement = CHOOSE if wait_for_locks else CHOOSE_UNLOCKED
    if wait_for_locks:
        tx.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
    row = tx.execute(statement, popper.parameters(DEPTH)).one_or_none()
    if row is None:
        return None
    return Candidate(
        request_id=row.id,
        kind=row.kind,
        models=row.models,
        revision=row.revision,
        max_length=row.max_length,
        max_context_length=row.max_context_length,
        payload=row.payload,
        attached=row.attached,
        tenant=row.tenant,
    )


def claim_first(
    database: Database,
    popper: Popper,
    take: Callable[[Transaction, Candidate, int], Sequence[T]],
    *,
    most: int,
    several: bool = False,
) -> Sequence[T]:
    """Choose and take; nothing is answered only when a look without locks finds nothing that the popper may take.

    Several workers may want one request at once: who finds it locked tries again, from the third time on by waiting for it.

    Args:
        take: claims up to so many slots of the request that was chosen.
        most: slots to take at most.
        several: of as many requests as that needs, in the order of the queue and in one transaction; else of the first alone.

    Raises:
        HordeError: 503, when even that took too long.
    """
    give_up = time.monotonic() + CONTENTION_SECONDS
    for attempt in itertools.count():
        wait = attempt >= TRIES_WITHOUT_WAITING
        taken = database.run(functools.partial(_choose_and_take, popper, take, most, several, wait))
        if taken or not look(database, popper):
            return taken
        if time.monotonic() > give_up:
            break
        time.sleep(random.uniform(0.001, 0.01))  # noqa: S311 jitter, so that poppers do not collide again
    raise unavailable("Too many workers want the same jobs at this moment; try again shortly.")


def _choose_and_take(
    popper: Popper,
    take: Callable[[Transaction, Candidate, int], Sequence[T]],
    most: int,
    several: bool,
    wait_for_locks: bool,
    tx: Transaction,
) -> Sequence[T]:
    taken: list[T] = []
    while len(taken) < most:
        # Who holds a request never waits for another one: two pops that did would wait for each other.
        candidate = choose(tx, popper, wait_for_locks=wait_for_locks and not taken)
        claimed = take(tx, candidate, most - len(taken)) if candidate is not None else []
        taken += claimed
        if not claimed or not several:
            break
    return taken


def look(database: Database, popper: Popper) -> bool:
    """Whether something waits that the popper may take, seen without locks."""
    return bool(database.read(lambda tx: tx.execute(LOOK, popper.parameters(1)).scalar_one()))


def count_skipped(tx: Transaction, popper: Popper) -> dict[str, int]:
    """Why the first rows of its models are not for this popper: reason -> how many."""
    rows = tx.execute(SKIPPED, popper.parameters(SKIPPED_DEPTH))
    return {row.reason: row.skipped for row in rows if row.reason is not None}
