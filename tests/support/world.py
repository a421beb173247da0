"""Factories and shorthands for tests of the lifecycle: users, workers, requests, and each transition by one call.

Everything goes through the real functions on a real database; every call is its own transaction, on a connection of
its own.
"""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Database
from horde.lifecycle.attach import join, leave, let_go, stay_attached
from horde.lifecycle.cancel import Cancelled, cancel, cancel_if_due
from horde.lifecycle.claim import Claimant, ClaimedJob, Served, claim
from horde.lifecycle.enqueue import NewRequest, enqueue
from horde.lifecycle.fault import fault, fault_stale
from horde.lifecycle.outages import Beat, beat
from horde.lifecycle.progress import Chunk, Progressed, post_progress
from horde.lifecycle.reject import reject
from horde.lifecycle.release import release, release_unstarted
from horde.lifecycle.retention import delete_old
from horde.lifecycle.rows import JobFacts
from horde.lifecycle.settle import Settlement
from horde.lifecycle.status import Status, read_status
from horde.lifecycle.store import Price, Pricing, Result, store
from horde.lifecycle.terms import Terms
from horde.lifecycle.words import CancelReason, Kind

PRICE, REWARD = 740, 640


def _flat(_job: JobFacts, result: Result) -> Price:
    return Price(PRICE, 0 if result.prefix_tokens and not result.own_tokens else REWARD)


def _by_tokens(_job: JobFacts, result: Result) -> Price:
    return Price(10 * result.tokens, 9 * result.own_tokens)


def _count_characters(_job: JobFacts, text: str, _token_ids: Sequence[int]) -> int:
    return len(text)


# The same price for every result, so that sums are easy to check; nothing is earned with others' tokens alone.
flat_price = Pricing(_flat, _count_characters)

# Ten hundredths a token; a worker gets nine of each of its own. What is posted has one character a token.
price_by_tokens = Pricing(_by_tokens, _count_characters)


@contextmanager
def open_world(url: str, *, connections: int = 40, settings: Mapping[str, str] | None = None) -> Iterator[World]:
    """A world with a connection for each of many threads; `settings` are the server's, for these connections."""
    database = Database(url, pool=connections, settings=settings)
    try:
        with database.transaction() as tx:
            # Some broker was alive until now: the age of the template is no outage.
            tx.execute("UPDATE heartbeat SET beat_at = horde_now()")
        yield World(database)
    finally:
        database.close()


@dataclass
class World:
    """A database and the means to act on it."""

    db: Database
    terms: Terms = field(default_factory=Terms)
    pricing: Pricing = flat_price
    _names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def user(self, name: str | None = None, **columns: Any) -> int:
        """A user with an account; returns the id."""
        name = name or f"user{next(self._names)}"
        values = {"name": name, "key_hash": uuid.uuid4().hex, **columns}
        names, places = ", ".join(values), ", ".join(f"%({column})s" for column in values)
        with self.db.transaction() as tx:
            user = tx.execute(
                f"INSERT INTO users (created_at, {names}) VALUES (horde_now(), {places}) RETURNING id", values
            ).scalar_one()
            tx.execute("INSERT INTO accounts (kind, user_id, floor) VALUES ('user', %(user)s, 0)", {"user": user})
        return int(user)

    def worker(
        self,
        owner: int | None = None,
        *,
        posts_progress: bool = False,
        served: Mapping[str, Served] | None = None,
        **columns: Any,
    ) -> Claimant:
        """A worker that has just checked in; serves model `m` up to 512 tokens of 4,096, in the revisions of `served`."""
        owner = self.user() if owner is None else owner
        name = columns.pop("name", None) or f"worker{next(self._names)}"
        values = {
            "id": uuid.uuid4(),
            "name": name,
            "kind": "text",
            "owner_id": owner,
            "models": ["m"],
            "max_length": 512,
            "max_context_length": 4096,
            "posts_progress": posts_progress,
            "revisions": [model.key for model in (served or {}).values()],
            **columns,
        }
        values.setdefault("kinds", [values["kind"]])
        names, places = ", ".join(values), ", ".join(f"%({column})s" for column in values)
        with self.db.transaction() as tx:
            tx.execute(
                f"INSERT INTO workers (created_at, last_check_in, {names}) VALUES (horde_now(), horde_now(), {places})",
                values,
            )
        return Claimant(values["id"], name, owner, posts_progress=posts_progress, served=served or {})

    def request(self, n: int = 1, *, kind: Kind = Kind.TEXT, user: int = 0, **fields: Any) -> uuid.UUID:
        """A request with n waiting slots for model `m`."""
        values: dict[str, Any] = {
            "models": ["m"],
            "payload": {"prompt": "Hello"},
            "max_length": 80,
            "max_context_length": 1024,
        }
        new = NewRequest(id=uuid.uuid4(), kind=kind, user_id=user, seeds=list(range(n)), **{**values, **fields})
        with self.db.transaction() as tx:
            enqueue(tx, new, self.terms)
        return new.id

    def claim(self, request: uuid.UUID, worker: Claimant, *, count: int = 1, lease: int = 150) -> list[ClaimedJob]:
        """Claim up to `count` slots of this very request."""
        return list(self.db.run(lambda tx: claim(tx, request, worker, model="m", lease=lease, count=count)))

    def claim_one(self, request: uuid.UUID, worker: Claimant, *, lease: int = 150) -> uuid.UUID:
        """Claim one slot, which must be there; the job's id."""
        (job,) = self.claim(request, worker, lease=lease)
        return job.id

    def store(
        self, job: uuid.UUID, text: str = "text", *, key: str | None = None, tokens: int = 3, **fields: Any
    ) -> Settlement:
        """Submit ok."""
        result = Result(text, tokens, **fields)
        return self.db.run(lambda tx: store(tx, job, result, pricing=self.pricing, terms=self.terms, key=key))

    def fault(self, job: uuid.UUID, *, key: str | None = None) -> Settlement:
        """Report a fault."""
        return self.db.run(lambda tx: fault(tx, job, pricing=self.pricing, key=key))

    def fault_stale(self, job: uuid.UUID) -> Settlement:
        """What maintenance does to a job whose lease may be over."""
        return self.db.run(lambda tx: fault_stale(tx, job, pricing=self.pricing))

    def release(self, job: uuid.UUID, *, key: str | None = None) -> Settlement:
        """Hand a job back."""
        return self.db.run(lambda tx: release(tx, job, pricing=self.pricing, key=key))

    def release_unstarted(self, job: uuid.UUID) -> Settlement:
        """What maintenance does to a claim that may not have started."""
        return self.db.run(lambda tx: release_unstarted(tx, job, pricing=self.pricing))

    def reject(
        self, job: uuid.UUID, code: str = "context_length_exceeded", *, known: bool = False, key: str | None = None
    ) -> Settlement:
        """Reject the request as such."""
        return self.db.run(lambda tx: reject(tx, job, code, broker_knows_better=known, pricing=self.pricing, key=key))

    def cancel(self, request: uuid.UUID, reason: CancelReason = CancelReason.CLIENT) -> Cancelled:
        """Cancel a request."""
        return self.db.run(lambda tx: cancel(tx, request, reason, pricing=self.pricing))

    def cancel_if_due(self, request: uuid.UUID, reason: CancelReason) -> Cancelled:
        """What maintenance does to a request that may be due."""
        return self.db.run(lambda tx: cancel_if_due(tx, request, reason, pricing=self.pricing))

    def post(
        self, job: uuid.UUID, tokens: Sequence[int] = (), text: str = "", *, offset: int = 0, **fields: Any
    ) -> Progressed:
        """Post progress of one job as its owner; one character of text a token, so that both offsets are the same."""
        owner = self.scalar("SELECT owner_id FROM jobs WHERE id = %(job)s", job=job)
        chunk = Chunk(job, offset=offset, token_ids=tokens, text=text, text_offset=offset, **fields)
        (answer,) = self.db.run(lambda tx: post_progress(tx, owner, [chunk]))
        return answer

    def stay_attached(self, *requests: uuid.UUID) -> None:
        """What waiting handlers do every few seconds."""
        self.db.run(lambda tx: stay_attached(tx, requests))

    def join(self, request: uuid.UUID) -> bool:
        """One connection more waits."""
        return self.db.run(lambda tx: join(tx, request))

    def leave(self, request: uuid.UUID) -> bool:
        """One connection fewer waits; whether that cancelled the request."""
        return self.db.run(lambda tx: leave(tx, request, pricing=self.pricing))

    def let_go(self, request: uuid.UUID) -> None:
        """One connection fewer waits, for its broker shuts down."""
        self.db.run(lambda tx: let_go(tx, request))

    def delete_old(self) -> int:
        """One batch of retention; how many requests went."""
        return self.db.run(lambda tx: delete_old(tx, self.terms))

    def beat(self) -> Beat:
        """One beat of a broker's heart."""
        return self.db.run(beat)

    def status(self, request: uuid.UUID) -> Status:
        """The status, which must be there."""
        status = self.db.read(lambda tx: read_status(tx, request))
        assert status is not None
        return status

    def advance(self, seconds: float) -> None:
        """Move the database's clock ahead; the heartbeat moves with it, so that this is no outage."""
        ahead = {"by": dt.timedelta(seconds=seconds)}
        with self.db.transaction() as tx:
            tx.execute("UPDATE clock SET ahead = ahead + %(by)s", ahead)
            tx.execute("UPDATE heartbeat SET beat_at = beat_at + %(by)s", ahead)

    def outage(self, seconds: float) -> None:
        """Let the last broker die now, time pass, and a broker come back."""
        with self.db.transaction() as tx:
            tx.execute("UPDATE heartbeat SET beat_at = horde_now()")
            tx.execute("UPDATE clock SET ahead = ahead + %(by)s", {"by": dt.timedelta(seconds=seconds)})
        assert self.beat().outage > 0, "too short for an outage"

    def pass_lease(self, job: uuid.UUID) -> None:
        """Move the clock to a second behind a job's lease, outages included."""
        ending = "extract(epoch FROM without_outages(lease_begun, lease_end) - horde_now())"
        self.advance(float(self.scalar(f"SELECT {ending} FROM jobs WHERE id = %(id)s", id=job)) + 1)

    def pass_time(self, request: uuid.UUID, column: str) -> None:
        """Move the clock to a second behind a request's `expires_at`, `deadline` or `attached_until`."""
        left = f"SELECT extract(epoch FROM {column} - horde_now()) FROM requests WHERE id = %(id)s"
        self.advance(float(self.scalar(left, id=request)) + 1)

    def rows(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Rows by a read of their own."""
        with self.db.autocommit() as tx:
            return [tuple(row) for row in tx.execute(statement, parameters)]

    def jobs(self, request: uuid.UUID) -> list[tuple[Any, ...]]:
        """(slot, state, reason, result, price, reward) of a request's jobs, by slot and claim."""
        return self.rows(
            "SELECT slot_idx, state, reason, result, price, reward FROM jobs WHERE request_id = %(request)s "
            "ORDER BY slot_idx, claimed_at",
            request=request,
        )

    def slots(self, request: uuid.UUID) -> list[str]:
        """States of a request's slots, by index."""
        rows = self.rows("SELECT state FROM slots WHERE request_id = %(request)s ORDER BY idx", request=request)
        return [state for (state,) in rows]

    def scalar(self, statement: str, **parameters: Any) -> Any:
        """One value by a read of its own."""
        with self.db.autocommit() as tx:
            return tx.execute(statement, parameters).scalar_one()
