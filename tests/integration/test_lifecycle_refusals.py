"""What PostgreSQL itself refuses, whoever writes: triggers, constraints and unique indexes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from tests.support.invariants import check_invariants
from tests.support.postgres import Server
from tests.support.world import World, open_world


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[World]:
    # One database for all of this file: each test has requests of its own.
    url = server.create()
    try:
        with open_world(url, connections=4) as made:
            yield made
    finally:
        server.drop(url)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    check_invariants(shared.db)


REFUSED_BY_TRIGGER = {
    "another outcome": (
        "UPDATE requests SET outcome = 'faulted', outcome_reason = NULL WHERE id = %(cancelled)s",
        "a request has one outcome",
    ),
    "another reason": (
        "UPDATE requests SET outcome_reason = 'admin' WHERE id = %(cancelled)s",
        "a request has one outcome",
    ),
    "no outcome any more": (
        "UPDATE requests SET outcome = NULL, outcome_reason = NULL, outcome_at = NULL WHERE id = %(cancelled)s",
        "a request has one outcome",
    ),
    "done is false again": ("UPDATE requests SET done_at = NULL WHERE id = %(done)s", "a done request stays as it is"),
    "another result after done": (
        "UPDATE requests SET stored = stored - 1 WHERE id = %(done)s",
        "a done request stays as it is",
    ),
    "a settled job runs again": (
        "UPDATE jobs SET state = 'processing', settled_at = NULL WHERE id = %(stored)s",
        "a settled job stays as it is",
    ),
    "another text": ("UPDATE jobs SET result = 'better' WHERE id = %(stored)s", "a settled job stays as it is"),
    "another reward": ("UPDATE jobs SET reward = 1 WHERE id = %(stored)s", "a settled job stays as it is"),
    "a job that begins settled": (
        """INSERT INTO jobs (id, request_id, slot_idx, state, worker_id, worker_name, owner_id, model, claimed_at,
                             lease_begun, lease_end, ttl, settled_at, result)
        SELECT gen_random_uuid(), request_id, slot_idx, 'stored', worker_id, worker_name, owner_id, model, claimed_at,
               lease_begun, lease_end, ttl, horde_now(), 'planted' FROM jobs WHERE id = %(running)s""",
        "a job begins as processing",
    ),
    "a stored slot waits": (
        "UPDATE slots SET state = 'waiting' WHERE request_id = %(open)s AND state = 'stored'",
        "a stored or dropped slot stays so",
    ),
    "a dropped slot runs": (
        "UPDATE slots SET state = 'processing' WHERE request_id = %(cancelled)s AND state = 'dropped'",
        "a stored or dropped slot stays so",
    ),
    "a slot stored unrun": (
        "UPDATE slots SET state = 'stored' WHERE request_id = %(open)s AND state = 'waiting'",
        "only a processing slot can be stored",
    ),
    "a slot waits after the outcome": (
        "UPDATE slots SET state = 'waiting' WHERE request_id = %(cancelled)s AND state = 'processing'",
        "nothing waits after an outcome",
    ),
    "a new slot after the outcome": (
        "INSERT INTO slots (request_id, idx, state, seed) VALUES (%(cancelled)s, 9, 'waiting', 0)",
        "nothing waits after an outcome",
    ),
    "a changed event": ("UPDATE events SET price = 1", "events are append-only"),
    "a deleted event": ("DELETE FROM events", "events are append-only"),
    "a changed ledger line": ("UPDATE ledger SET amount = amount + 1", "the ledger is append-only"),
    "a deleted ledger line": ("DELETE FROM ledger", "the ledger is append-only"),
}

REFUSED_BY_CONSTRAINT = {
    "ck_requests_counts": "UPDATE requests SET waiting = -1 WHERE id = %(open)s",
    "ck_requests_counts_add_up": "UPDATE requests SET waiting = 0 WHERE id = %(open)s",
    "ck_requests_nothing_waits_after_an_outcome": """UPDATE requests SET outcome = 'completed', outcome_at = horde_now()
        WHERE id = %(open)s""",
    "ck_requests_outcome": """UPDATE requests SET outcome = 'lost', outcome_at = horde_now(), waiting = 0
        WHERE id = %(open)s""",
    "ck_requests_reason_of_a_cancel": """UPDATE requests
        SET outcome = 'cancelled', outcome_at = horde_now(), waiting = 0
        WHERE id = %(open)s""",
    "ck_requests_outcome_reason": """UPDATE requests SET outcome = 'cancelled', outcome_reason = 'mood',
        outcome_at = horde_now(), waiting = 0 WHERE id = %(open)s""",
    "ck_requests_code_of_a_rejection": """UPDATE requests
        SET outcome = 'rejected', outcome_at = horde_now(), waiting = 0
        WHERE id = %(open)s""",
    "ck_requests_time_of_outcome": "UPDATE requests SET outcome_at = horde_now() WHERE id = %(open)s",
    "ck_requests_done": "UPDATE requests SET done_at = horde_now() WHERE id = %(open)s",
    "ck_requests_kind": "UPDATE requests SET kind = 'sound' WHERE id = %(open)s",
    "ck_slots_state": "UPDATE slots SET state = 'lost' WHERE request_id = %(open)s AND state = 'waiting'",
    "ck_jobs_state": "UPDATE jobs SET state = 'lost', settled_at = horde_now() WHERE id = %(running)s",
    "ck_jobs_settled_at": "UPDATE jobs SET state = 'faulted' WHERE id = %(running)s",
    "ck_jobs_stored_has_a_result": "UPDATE jobs SET state = 'stored', settled_at = horde_now() WHERE id = %(running)s",
    "fk_jobs_slot": "UPDATE jobs SET slot_idx = 19 WHERE id = %(running)s",
}


# At the same slot as the job, whatever state that is in.
ANOTHER_ATTEMPT = """
INSERT INTO jobs (id, request_id, slot_idx, state, worker_id, worker_name, owner_id, model, claimed_at, lease_begun,
                  lease_end, ttl)
SELECT gen_random_uuid(), request_id, slot_idx, 'processing', worker_id, worker_name, owner_id, model, claimed_at,
       lease_begun, lease_end, ttl FROM jobs WHERE id = %(job)s
"""

STORE_LATEST_ATTEMPT = """
UPDATE jobs SET state = 'stored', settled_at = horde_now(), result = 'twin' FROM jobs first
WHERE first.id = %(job)s AND jobs.request_id = first.request_id AND jobs.slot_idx = first.slot_idx AND jobs.id <> first.id
"""

GIFT = """
INSERT INTO ledger (entry_id, account_id, amount, reason, created_at)
SELECT 'c0ffee00-0000-4000-8000-000000000000', id, CASE kind WHEN 'mint' THEN -5 ELSE 5 END, 'gift', horde_now()
FROM accounts WHERE kind IN ('mint', 'horde')
"""


def one_of_each(world: World) -> dict[str, uuid.UUID]:
    """A request with one stored, one running and one waiting slot; a cancelled one that still runs; a done one."""
    found = {"open": world.request(3), "cancelled": world.request(2), "done": world.request()}
    found["stored"], found["running"] = (world.claim_one(found["open"], world.worker()) for _ in range(2))
    world.store(found["stored"])
    world.claim_one(found["cancelled"], world.worker())
    world.cancel(found["cancelled"])
    world.store(world.claim_one(found["done"], world.worker()))
    with world.db.transaction() as tx:
        tx.execute(GIFT)
    return found


@pytest.mark.parametrize("case", REFUSED_BY_TRIGGER)
def test_a_trigger_refuses_what_no_transition_does(world: World, case: str) -> None:
    statement, refusal = REFUSED_BY_TRIGGER[case]
    ids = one_of_each(world)

    with pytest.raises(sa.exc.IntegrityError, match=f"illegal transition: {refusal}"), world.db.transaction() as tx:
        tx.execute(statement, ids)


@pytest.mark.parametrize("constraint", REFUSED_BY_CONSTRAINT)
def test_a_constraint_refuses_what_does_not_add_up(world: World, constraint: str) -> None:
    ids = one_of_each(world)

    with pytest.raises(sa.exc.IntegrityError, match=f'"{constraint}"'), world.db.transaction() as tx:
        tx.execute(REFUSED_BY_CONSTRAINT[constraint], ids)


def test_a_slot_has_no_second_processing_job(world: World) -> None:
    ids = one_of_each(world)

    with pytest.raises(sa.exc.IntegrityError, match='"uq_jobs_one_processing"'), world.db.transaction() as tx:
        tx.execute(ANOTHER_ATTEMPT, {"job": ids["running"]})


def test_a_slot_has_no_second_stored_job(world: World) -> None:
    ids = one_of_each(world)

    with pytest.raises(sa.exc.IntegrityError, match='"uq_jobs_one_stored"'), world.db.transaction() as tx:
        tx.execute(f"{ANOTHER_ATTEMPT}; {STORE_LATEST_ATTEMPT}", {"job": ids["stored"]})
