"""Random walks through the whole lifecycle on a real database, compared with a plain model after every step.

Time stands still but for the walk's own ticks, so that every moment the database writes down can be compared exactly.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from horde.db.database import Database
from horde.lifecycle import due
from horde.lifecycle.claim import Claimant, Served
from horde.lifecycle.settle import Settlement
from horde.lifecycle.terms import PROGRESS_LEASE, Terms
from horde.lifecycle.words import CancelReason, Kind
from tests.support.invariants import check_invariants
from tests.support.model import Model, Request, status_of, stream
from tests.support.world import World

EPOCH = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
STILL = f"""
CREATE OR REPLACE FUNCTION horde_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS
$$ SELECT timestamptz '{EPOCH.isoformat()}' + (SELECT ahead FROM clock WHERE id = 1) $$
"""

TERMS = Terms(expiry=200, retention=120)
LEASE = 150
CODES = ("context_length_exceeded", "unsupported_parameter", "out_of_memory")
# Both sides of each term: 15 s to start, 30 s attached, 60 s of lease, 120 s kept, 150 s of lease, 200 s to expiry.
TICKS = (1, 14, 15, 16, 29, 30, 31, 60, 61, 120, 151, 210)

READ_REQUESTS = """
SELECT r.*, ARRAY(SELECT model FROM queue WHERE request_id = r.id ORDER BY model) AS queued
FROM requests r WHERE id = ANY (%(ids)s)
"""
READ_SLOTS = "SELECT * FROM slots WHERE request_id = ANY (%(ids)s) ORDER BY request_id, idx"
READ_JOBS = """
SELECT j.*, cardinality(p.token_ids) AS posted, p.text AS posted_text
FROM jobs j LEFT JOIN progress p ON p.job_id = j.id WHERE request_id = ANY (%(ids)s)
"""
READ_EVENTS = "SELECT request_id, kind, reason, outcome, price, reward FROM events WHERE request_id = ANY (%(ids)s)"

REVISIONS = ("one", "other")

keys = st.sampled_from([None, None, "first", "second"])
workers = st.integers(0, 3)
# Mostly one with something left to happen to it; now and then any, ended or removed.
choices = st.tuples(st.sampled_from([True, True, True, False]), st.integers(0, 5))
seldom = st.tuples(st.sampled_from([True, False, False, False]), st.integers(0, 5))
ENDINGS = ("runs on", "runs on", "submit", "fault", "fault")


class Lifecycle(RuleBasedStateMachine):
    """One world and one model side by side; each rule does the same to both and compares the answers."""

    def __init__(self, world: World, hands: list[Claimant]) -> None:
        super().__init__()
        self.world = world
        self.hands = hands
        now = world.scalar("SELECT horde_now()")
        self.model = Model((now - EPOCH).total_seconds(), expiry=TERMS.expiry, retention=TERMS.retention)
        self.requests: list[uuid.UUID] = []
        self.jobs: list[uuid.UUID] = []
        self.told: dict[uuid.UUID, str] = {}

    # What clients do

    @initialize(kind=st.sampled_from(Kind), n=st.integers(2, 3), attached=st.booleans())
    def first_request(self, kind: Kind, n: int, attached: bool) -> None:
        self.enqueue(kind, n, attached, None)

    @rule(
        kind=st.sampled_from(Kind),
        n=st.integers(1, 3),
        attached=st.booleans(),
        deadline=st.sampled_from([None, 100, 250]),
        revision=st.sampled_from([None, None, *REVISIONS]),
    )
    def enqueue(self, kind: Kind, n: int, attached: bool, deadline: int | None, revision: str | None = None) -> None:
        pinned = {"revision": revision, "needs_progress": revision is not None}
        request = self.world.request(n, kind=kind, attached=attached, deadline=deadline, models=["m", "o"], **pinned)
        self.model.enqueue(request, kind.value, n, attached=attached, deadline_in=deadline, revision=revision)
        self.requests.append(request)

    @rule(choice=seldom, reason=st.sampled_from([CancelReason.CLIENT, CancelReason.ADMIN, CancelReason.DISCONNECT]))
    def cancel(self, choice: tuple[bool, int], reason: CancelReason) -> None:
        request = self._request(choice)
        assert self.world.cancel(request, reason) == self.model.cancel(request, reason.value)

    @rule(choice=choices)
    def stay_attached(self, choice: tuple[bool, int]) -> None:
        request = self._request(choice)
        self.world.stay_attached(request)
        self.model.stay_attached(request)

    @rule(choice=choices)
    def join(self, choice: tuple[bool, int]) -> None:
        request = self._request(choice)
        assert self.world.join(request) == self.model.join(request)

    @rule(choice=seldom)
    def leave(self, choice: tuple[bool, int]) -> None:
        request = self._request(choice)
        assert self.world.leave(request) == self.model.leave(request)

    # What workers do

    @rule(choice=choices, hand=workers, count=st.integers(1, 3))
    def claim(self, choice: tuple[bool, int], hand: int, count: int) -> None:
        self._claim(self._request(choice), self.hands[hand], count)

    @rule(number=st.integers(0, 5), hand=workers, then=st.sampled_from(ENDINGS), posts=st.booleans(), key=keys)
    def attempt(self, number: int, hand: int, then: str, posts: bool, key: str | None) -> None:
        """A worker takes a slot where there is one, perhaps posts a token, and comes to an end with it or not."""
        worker = self.hands[hand]
        offering = [id_ for id_ in self.requests if self.model.offered(id_, 1, **what(worker))]
        if not offering:
            return
        (job,) = self._claim(offering[number % len(offering)], worker, 1)
        if posts:
            found = self.model.job(job)
            assert found is not None
            self._post(job, found[0].slots[found[1].slot].prefix, 1)
        if then == "submit":
            self._submit(job, key, "goes on")
        elif then == "fault":
            self._compare(self.world.fault(job, key=key), self.model.fault(job, key))

    @rule(
        hand=st.sampled_from([1, 3]),
        n=st.integers(1, 2),
        posts=st.tuples(st.integers(1, 3), st.integers(0, 2)),
        given_up=st.sampled_from(["fault", "release", "lost"]),
        then=st.sampled_from(["runs on", "goes on", "adds nothing", "one", "leave", "cancel"]),
    )
    def a_stream_fails_over(self, hand: int, n: int, posts: tuple[int, int], given_up: str, then: str) -> None:
        """A client waits, a worker begins and gives up, another attempt goes on from there and comes to an end or not."""
        self.enqueue(Kind.CHAT, n, attached=True, deadline=None)
        request, worker = self.requests[-1], self.hands[hand]
        (begun,) = self._claim(request, worker, 1)
        self._post(begun, 0, posts[0])
        if given_up == "lost":
            self.tick(61, then_pass=False)
            self.world.stay_attached(request)
            self.model.stay_attached(request)
            self._compare(self.world.fault_stale(begun), self.model.fault(begun, reason="stale"))
        elif given_up == "fault":
            self._compare(self.world.fault(begun), self.model.fault(begun))
        else:
            self._compare(self.world.release(begun), self.model.release(begun))
        for job in self._claim(request, worker, 1):
            self._post(job, posts[0], posts[1])
            if then == "leave":
                assert self.world.leave(request) == self.model.leave(request)
            elif then == "cancel":
                assert self.world.cancel(request) == self.model.cancel(request, "client")
            elif then != "runs on":
                self._submit(job, None, then)

    def _claim(self, request: uuid.UUID, worker: Claimant, count: int) -> list[uuid.UUID]:
        lease = PROGRESS_LEASE if worker.posts_progress else LEASE
        offered = self.model.offered(request, count, **what(worker))
        claimed = self.world.claim(request, worker, count=count, lease=lease)
        assert [job.slot for job in claimed] == offered
        if claimed:
            prefixes = [self.model.requests[request].slots[job.slot].prefix for job in claimed]
            assert [len(job.prefix_token_ids or []) for job in claimed] == prefixes
            taken = {job.slot: job.id for job in claimed}
            self.model.claim(request, worker.id, taken, lease, **what(worker))
        self.jobs += [job.id for job in claimed]
        return [job.id for job in claimed]

    @precondition(lambda self: self.jobs)
    @rule(choice=choices, key=keys, text=st.sampled_from(["goes on", "adds nothing", "one", "other"]))
    def submit(self, choice: tuple[bool, int], key: str | None, text: str) -> None:
        self._submit(self._job(choice), key, text)

    def _submit(self, job: uuid.UUID, key: str | None, text: str) -> None:
        """Hand in a text of its own, or one that begins with what was posted."""
        ids = None
        if text in {"goes on", "adds nothing"}:
            found = self.model.job(job)
            slot, sent = (0, 0) if found is None else (found[1].slot, self.model.sent(*found))
            ids = list(range(sent + (text == "goes on")))
            text = stream(slot, len(ids))
        tokens = 3 if ids is None else len(ids)
        answer = self.world.store(job, text, key=key, tokens=tokens, token_ids=ids)
        self._compare(answer, self.model.store(job, text, tokens, key))
        if answer.verdict in {"settled", "acknowledged"}:
            self.told[job] = text

    @precondition(lambda self: self.jobs)
    @rule(choice=choices, key=keys)
    def fault(self, choice: tuple[bool, int], key: str | None) -> None:
        job = self._job(choice)
        self._compare(self.world.fault(job, key=key), self.model.fault(job, key))

    @precondition(lambda self: self.jobs)
    @rule(choice=choices, key=keys)
    def release(self, choice: tuple[bool, int], key: str | None) -> None:
        job = self._job(choice)
        self._compare(self.world.release(job, key=key), self.model.release(job, key))

    @rule(choice=choices, hand=workers, times=st.integers(4, 6))
    def claim_and_release(self, choice: tuple[bool, int], hand: int, times: int) -> None:
        request = self._request(choice)
        for _ in range(times):
            for job in self._claim(request, self.hands[hand], 1):
                self._compare(self.world.release(job), self.model.release(job))

    @precondition(lambda self: self.jobs)
    @rule(choice=choices, code=st.sampled_from(CODES), known=st.booleans(), key=keys)
    def reject(self, choice: tuple[bool, int], code: str, known: bool, key: str | None) -> None:
        job = self._job(choice)
        answer = self.world.reject(job, code, known=known, key=key)
        self._compare(answer, self.model.reject(job, code, key, known=known))

    @precondition(lambda self: self.jobs)
    @rule(choice=choices, offset=st.integers(0, 4), count=st.integers(0, 3))
    def post_progress(self, choice: tuple[bool, int], offset: int, count: int) -> None:
        self._post(self._job(choice), offset, count)

    def _post(self, job: uuid.UUID, offset: int, count: int) -> None:
        found = self.model.job(job)
        if found is None:
            return
        text = stream(found[1].slot, offset + count)[offset:]
        answer = self.world.post(job, list(range(offset, offset + count)), text, offset=offset)
        assert (answer.accepted, answer.stop) == self.model.post(job, offset, count)

    # What time and maintenance do

    @rule(seconds=st.sampled_from(TICKS), then_pass=st.booleans())
    def tick(self, seconds: int, then_pass: bool) -> None:
        self.world.advance(seconds)
        self.model.pass_time(seconds)
        if then_pass:
            self.whole_pass()

    @rule(seconds=st.sampled_from([16, 40, 200]))
    def outage(self, seconds: int) -> None:
        self.world.outage(seconds)
        self.model.outage(seconds)

    @rule()
    def whole_pass(self) -> None:
        for reason in (CancelReason.DEADLINE, CancelReason.DISCONNECT, CancelReason.EXPIRED):
            self._cancel_due(reason)
        self._settle_found(due.STALE, self.model.stale, self.world.fault_stale, self.model.fault, "stale")
        self._settle_found(
            due.UNSTARTED, self.model.unstarted, self.world.release_unstarted, self.model.release, "not_started"
        )

    def _cancel_due(self, reason: CancelReason) -> None:
        statement = {
            CancelReason.EXPIRED: due.EXPIRED,
            CancelReason.DEADLINE: due.PAST_DEADLINE,
            CancelReason.DISCONNECT: due.LAPSED,
        }[reason]
        found = self._found(statement, self.requests)
        wanted = {id_ for id_, request in self.model.requests.items() if self.model.due(request, reason.value)}
        assert wanted <= set(found)
        for request in found:
            assert self.world.cancel_if_due(request, reason) == self.model.cancel_if_due(request, reason.value)

    def _settle_found(
        self,
        statement: str,
        wanted: Callable[[], set[uuid.UUID]],
        act: Callable[[uuid.UUID], Settlement],
        expect: Callable[..., tuple[str, int]],
        reason: str,
    ) -> None:
        found = self._found(statement, self.jobs)
        assert wanted() <= set(found)
        for job in found:
            self._compare(act(job), expect(job, reason=reason))

    @precondition(lambda self: self.jobs)
    @rule(choice=choices)
    def maintenance_is_late(self, choice: tuple[bool, int]) -> None:
        """It read this job and this request some time ago; whatever they have become, it acts only on what is due."""
        job, request = self._job(choice), self._request(choice)
        self._compare(self.world.fault_stale(job), self.model.fault(job, reason="stale"))
        self._compare(self.world.release_unstarted(job), self.model.release(job, reason="not_started"))
        for reason in (CancelReason.EXPIRED, CancelReason.DEADLINE, CancelReason.DISCONNECT):
            assert self.world.cancel_if_due(request, reason) == self.model.cancel_if_due(request, reason.value)

    @rule()
    def retention(self) -> None:
        while self.world.delete_old():
            pass
        removed = self.model.remove_old()
        assert self.world.rows("SELECT id FROM requests WHERE id = ANY (%(ids)s)", ids=list(removed)) == []

    # What they act on

    def _request(self, choice: tuple[bool, int]) -> uuid.UUID:
        live, number = choice
        open_ = [id_ for id_ in self.requests if id_ in self.model.requests and not self.model.requests[id_].outcome]
        pool = open_ if live and open_ else self.requests
        return pool[number % len(pool)]

    def _job(self, choice: tuple[bool, int]) -> uuid.UUID:
        live, number = choice
        running = [id_ for id_ in self.jobs if (found := self.model.job(id_)) and found[1].state == "processing"]
        pool = running if live and running else self.jobs
        return pool[number % len(pool)]

    def _found(self, statement: str, ours: list[uuid.UUID]) -> list[uuid.UUID]:
        """What maintenance would look at, without what earlier walks left."""
        return [id_ for id_ in due.pages(self.world.db, statement) if id_ in set(ours)]

    # The comparison

    @staticmethod
    def _compare(answer: Settlement, expected: tuple[str, int]) -> None:
        assert (answer.verdict.value, answer.reward) == expected

    @invariant()
    def the_database_is_what_the_model_says(self) -> None:
        assert self._database() == {id_: self._expected(request) for id_, request in self.model.requests.items()}

    def _expected(self, request: Request) -> dict[str, Any]:
        return {
            "kind": request.kind,
            "outcome": (request.outcome, request.reason, request.error_code),
            "faulted": len(request.jobs_in("faulted")),
            "last_faulted": request.last_faulted,
            "times": (request.expires_at, request.deadline, request.attached_until, request.done_at),
            "waited for": request.attached_by,
            "pinned": (request.revision, request.needs_progress),
            "tried": request.tried,
            "queued": ["m", "o"] if request.count("waiting") else [],
            "slots": [(slot.state, slot.releases, slot.prefix) for slot in request.slots],
            "jobs": {
                id_: {
                    "state": (job.slot, job.state, job.reason, job.by_cancel, job.acknowledged, job.revision),
                    "times": (job.claimed_at, job.lease_begun, job.lease_end, job.started_at),
                    "result": (job.text, job.price, job.reward),
                    "posted": (job.posted, None if job.posted is None else stream(job.slot, job.posted)),
                }
                for id_, job in request.jobs.items()
            },
            "events": sorted(request.events, key=str),
            "status": status_of(request),
        }

    def _database(self) -> dict[uuid.UUID, dict[str, Any]]:
        ids = {"ids": list(self.model.requests)}
        with self.world.db.transaction() as tx:
            rows = {statement: tx.execute(statement, ids).all() for statement in READ_ALL}
        return {row.id: self._found_request(row, rows) for row in rows[READ_REQUESTS]}

    def _found_request(self, row: Any, rows: dict[str, Any]) -> dict[str, Any]:
        events = [tuple(event[1:]) for event in rows[READ_EVENTS] if event.request_id == row.id]
        return {
            "kind": row.kind,
            "outcome": (row.outcome, row.outcome_reason, row.error_code),
            "faulted": row.faulted,
            "last_faulted": row.last_settled_faulted,
            "times": _seconds(row.expires_at, row.deadline, row.attached_until, row.done_at),
            "waited for": row.attached_by,
            "pinned": (row.revision, row.needs_progress),
            "tried": set(row.tried_workers),
            "queued": list(row.queued),
            "slots": [
                (slot.state, slot.releases, len(slot.prefix_token_ids or []))
                for slot in rows[READ_SLOTS]
                if slot.request_id == row.id
            ],
            "jobs": {
                job.id: {
                    "state": (
                        job.slot_idx,
                        job.state,
                        job.reason,
                        job.stored_by_cancel,
                        job.acknowledged,
                        job.revision,
                    ),
                    "times": _seconds(job.claimed_at, job.lease_begun, job.lease_end, job.started_at),
                    "result": (job.result, job.price or 0, job.reward or 0),
                    "posted": (job.posted, job.posted_text),
                }
                for job in rows[READ_JOBS]
                if job.request_id == row.id
            },
            "events": sorted(events, key=str),
            "status": self._found_status(row.id),
        }

    def _found_status(self, request: uuid.UUID) -> dict[str, Any]:
        status = self.world.status(request)
        shown = ("n", "waiting", "processing", "finished", "restarted", "charged", "done", "faulted", "cancelled")
        return {
            **{name: getattr(status, name) for name in (*shown, "error_code")},
            "results": [(result["slot"], result["text"]) for result in status.results],
        }

    def teardown(self) -> None:
        """Whatever state the walk ended in, everything comes to an end from there; then the invariants hold."""
        for request in list(self.model.requests):
            assert self.world.cancel(request) == self.model.cancel(request, "client")
            for job, attempt in self.model.requests[request].jobs.items():
                if attempt.state == "processing":
                    self._submit(job, None, "goes on")
            assert self.world.status(request).done
        self.the_database_is_what_the_model_says()
        kept = {job for request in self.model.requests.values() for job in request.jobs}
        check_invariants(
            self.world.db,
            accepted=self.model.requests,
            acknowledged={job: text for job, text in self.told.items() if job in kept},
        )


def what(worker: Claimant) -> dict[str, Any]:
    """What of a worker decides what it may take, by the model's names."""
    served = worker.served.get("m")
    return {"posts_progress": worker.posts_progress, "revision": served.key if served else None}


READ_ALL = (READ_REQUESTS, READ_SLOTS, READ_JOBS, READ_EVENTS)


def _seconds(*moments: dt.datetime | None) -> tuple[float | None, ...]:
    return tuple(None if moment is None else (moment - EPOCH).total_seconds() for moment in moments)


def test_every_walk_through_the_lifecycle_agrees_with_the_model(db: Database) -> None:
    with db.transaction() as tx:
        tx.execute(STILL.replace("%", "%%"))
    world = World(db, TERMS)
    world.beat()
    one, other = ({"m": Served("weights", "tokenizer", key)} for key in REVISIONS)
    hands = [
        world.worker(),
        world.worker(posts_progress=True, served=one),
        world.worker(served=one),
        world.worker(posts_progress=True, served=other),
    ]
    # A walk is some hundred round trips to the database: slow by Hypothesis's measure, and most of it is not generation.
    run_state_machine_as_test(
        lambda: Lifecycle(world, hands),  # type: ignore[arg-type]  # a factory will do
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            # All but "explain", which runs a failing walk many times more.
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
