"""The check of the invariants itself: each violation, planted by raw SQL with the triggers off, is found and named."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.lifecycle.words import Kind
from horde.maintenance.folds import fold_batch
from tests.support.invariants import Violation, check_invariants, find_violations
from tests.support.postgres import Server
from tests.support.world import World, open_world

TABLES = ("requests", "jobs", "slots", "events", "ledger")

ANOTHER_EVENT = """
INSERT INTO events (at, kind, request_kind, request_id, slot_idx, job_id, user_id, owner_id, outcome, price, reward, reason)
SELECT at, kind, request_kind, request_id, slot_idx, {job}, user_id, owner_id, {outcome}, {price}, {price}, reason FROM events
"""

# Part of the sentence -> what breaks it; `open` has a stored, a running and a waiting slot and one fault behind it.
PLANTED = {
    "a slot is processing or stored exactly": "UPDATE slots SET state = 'waiting' WHERE request_id = %(open)s AND idx = 0",
    "has its n slots": "DELETE FROM slots WHERE request_id = %(open)s AND state = 'waiting'",
    "nothing waits after an outcome": "UPDATE slots SET state = 'waiting' WHERE request_id = %(cancelled)s AND idx = 1",
    "I4: no job faults after the second": ANOTHER_EVENT.format(job="job_id", outcome="NULL", price=0)
    + " WHERE request_id = %(open)s AND kind = 'faulted'",
    "I4: an image request": "UPDATE events SET outcome = NULL WHERE request_id = %(image)s",
    "completes exactly when": "UPDATE requests SET outcome = 'faulted' WHERE id = %(done)s",
    "an outcome is told of by exactly one event": "UPDATE events SET outcome = NULL WHERE request_id = %(cancelled)s",
    "one event of its claim": "DELETE FROM events WHERE request_id = %(done)s AND kind = 'claimed'",
    "no job was stored twice": ANOTHER_EVENT.format(job="job_id", outcome="NULL", price=0)
    + " WHERE request_id = %(done)s AND kind = 'stored'",
    "has its price, its reward and its own tokens": "UPDATE events SET reward = reward + 1 WHERE request_id = %(done)s AND kind = 'stored'",
    "the ledger's entries sum to zero": "UPDATE ledger SET amount = amount + 1 WHERE id = (SELECT min(id) FROM ledger)",
    "I8: a request's counters": "UPDATE requests SET restarted = 7 WHERE id = %(open)s",
    "whether the latest settled job faulted": """UPDATE requests SET last_settled_faulted = true WHERE id = %(done)s""",
    "a request queues exactly while": "DELETE FROM queue WHERE request_id = %(open)s",
    "under its models": "UPDATE queue SET rank = rank + interval '1 second' WHERE request_id = %(open)s",
    "done exactly when": """UPDATE jobs SET state = 'processing', settled_at = NULL FROM requests r
        WHERE r.id = %(done)s AND jobs.request_id = r.id""",
    "I9: no job was claimed or settled after": """UPDATE jobs SET settled_at = settled_at + interval '1 hour'
        WHERE request_id = %(done)s""",
    "no job was claimed after its request's outcome": ANOTHER_EVENT.format(
        job="gen_random_uuid()", outcome="NULL", price=0
    )
    + " WHERE request_id = %(cancelled)s AND kind = 'claimed'",
    "at most 5 times": "UPDATE slots SET releases = 6 WHERE request_id = %(open)s",
    "stays: a stored result": "UPDATE jobs SET result = 'another' WHERE request_id = %(stream)s AND state = 'stored'",
    "the output of each later attempt": """UPDATE progress SET token_ids = '{9,9}' FROM jobs j
        WHERE j.id = job_id AND j.request_id = %(stream)s AND j.state = 'faulted'""",
    "logprobs are one a token": "UPDATE progress SET logprobs = '[]' WHERE cardinality(token_ids) > 0",
    "a stream that was begun goes on": "UPDATE requests SET revision = 'another' WHERE id = %(stream)s",
    "only with a worker that posts": "UPDATE requests SET needs_progress = false WHERE id = %(stream)s",
    "only an attached request": "UPDATE requests SET attached_by = 1 WHERE id = %(open)s",
    "have come and not gone": "UPDATE requests SET attached_by = -1 WHERE id = %(stream)s",
    "behind the deadline": "UPDATE requests SET deadline = expires_at - interval '1 s' WHERE id = %(open)s",
    "every event is folded": "INSERT INTO events_unfolded SELECT max(id) FROM events",
    "one entry of its price": ANOTHER_EVENT.format(job="gen_random_uuid()", outcome="NULL", price=5)
    + " WHERE request_id = %(done)s AND kind = 'stored'",
    "is paid the reward": """UPDATE ledger SET account_id = (SELECT id FROM accounts WHERE kind = 'horde')
        FROM accounts WHERE accounts.id = ledger.account_id AND accounts.user_id = %(owner)s""",
    "a balance is the sum": "UPDATE accounts SET balance = balance + 1 WHERE kind = 'horde'",
}


@pytest.fixture(scope="module")
def world(server: Server) -> Iterator[World]:
    url = server.create()
    try:
        with open_world(url, connections=3) as made:
            yield made
    finally:
        server.drop(url)


@pytest.fixture(scope="module")
def ids(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"open": world.request(3), "cancelled": world.request(2), "done": world.request()}
    worker, poster = world.worker(), world.worker(posts_progress=True)
    world.fault(world.claim_one(found["open"], worker))
    found["stored"], found["running"] = (world.claim_one(found["open"], worker) for _ in range(2))
    world.store(found["stored"], "kept")
    world.claim_one(found["cancelled"], worker)
    world.cancel(found["cancelled"])
    world.store(world.claim_one(found["done"], worker))
    found["image"], found["owner"] = world.request(kind=Kind.IMAGE), worker.owner_id
    world.fault(world.claim_one(found["image"], worker))
    found["stream"] = world.request(attached=True)
    for text in ("a", "ab"):
        job = world.claim_one(found["stream"], poster)
        world.post(job, [1, 2][: len(text)], text)
        if text == "a":
            world.fault(job)
    world.store(job, "abc", token_ids=[1, 2, 3])
    world.db.run(lambda tx: fold_batch(tx, max_aborts=20))
    check_invariants(world.db, folded=True, acknowledged={found["stored"]: "kept"}, accepted=[found["open"]], swept=0)
    return found


class Planted(Exception):  # noqa: N818 ends a transaction without a trace
    """The violation has been looked for."""


@pytest.mark.parametrize("sentence", PLANTED)
def test_a_planted_violation_is_found_and_named(world: World, ids: dict[str, Any], sentence: str) -> None:
    found: list[str] = []

    def plant() -> None:
        with world.db.transaction() as tx:
            for table in TABLES:
                tx.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
            assert tx.execute(PLANTED[sentence], ids).rowcount > 0
            found.extend(find_violations(tx, folded=True))
            raise Planted

    with pytest.raises(Planted):
        plant()

    assert any(sentence in violation for violation in found), found


def test_a_slot_with_two_running_jobs_is_found(world: World, ids: dict[str, Any]) -> None:
    twin = """INSERT INTO jobs (id, request_id, slot_idx, state, worker_id, worker_name, owner_id, model, claimed_at,
                                lease_begun, lease_end, ttl)
    SELECT gen_random_uuid(), request_id, slot_idx, state, worker_id, worker_name, owner_id, model, claimed_at, lease_begun,
           lease_end, ttl FROM jobs WHERE id = %(running)s"""
    found: list[str] = []

    def plant() -> None:
        with world.db.transaction() as tx:
            tx.execute("DROP INDEX uq_jobs_one_processing")
            tx.execute(twin, ids)
            found.extend(find_violations(tx))
            raise Planted

    with pytest.raises(Planted):
        plant()

    assert any("at most one processing" in violation for violation in found), found


def test_what_was_promised_and_is_not_there_is_found(world: World, ids: dict[str, Any]) -> None:
    with pytest.raises(Violation, match="I1: every accepted request exists"):
        check_invariants(world.db, accepted=[uuid.uuid4()])
    for told in ({uuid.uuid4(): "kept"}, {ids["stored"]: "another text"}, {ids["running"]: "kept"}):
        with pytest.raises(Violation, match="I2: every acknowledged submit"):
            check_invariants(world.db, acknowledged=told)


def test_a_lease_that_two_passes_left_alone_is_found(world: World, ids: dict[str, Any]) -> None:
    world.pass_lease(ids["running"])

    check_invariants(world.db, swept=20)
    world.advance(20)
    with pytest.raises(Violation, match="I6: nothing is processing past its lease"):
        check_invariants(world.db, swept=20)
