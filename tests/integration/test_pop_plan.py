"""How the server runs the statements that a queue's depth must not slow down: which indexes, and how many rows it looks at."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.db import database as db_module
from horde.db.database import Database, Prepared
from horde.lifecycle import due
from horde.lifecycle.terms import START_WITHIN
from horde.queue.candidates import CHOOSE_UNLOCKED, DEPTH, LOOK, SKIPPED, SKIPPED_DEPTH, Popper
from horde.queue.estimate import AHEAD_DEPTH, ASSUMED_SPEED, ESTIMATE, ESTIMATE_NEXT, IS_POSSIBLE
from tests.support.postgres import Server

OWN, FRIEND, STRANGER = 1, 2, 3
WORKER = uuid.UUID(int=7)
MANY = 3500

# The rows that orders would leave, by the thousand.
FILL = """
WITH new AS (
    INSERT INTO requests (id, kind, user_id, payload, created_at, expires_at, rank, models, max_length, max_context_length,
                          n, waiting)
    SELECT gen_random_uuid(), %(kind)s, %(user)s, '{"prompt": "x"}', horde_now(), horde_now() + interval '1 hour',
           horde_now() + i * interval '1 ms', ARRAY[%(model)s], %(max_length)s, 1024, 1, 1
    FROM generate_series(1, %(count)s) AS i
    RETURNING id, rank, user_id),
slot AS (INSERT INTO slots (request_id, idx, state, seed) SELECT id, 0, 'waiting', 0 FROM new)
INSERT INTO queue (kind, model, rank, request_id, user_id) SELECT %(kind)s, %(model)s, rank, id, user_id FROM new
"""

RUN = """
WITH chosen AS (SELECT id FROM requests WHERE waiting > 0 LIMIT %(count)s),
request AS (UPDATE requests SET waiting = 0, processing = 1 FROM chosen WHERE requests.id = chosen.id),
left_queue AS (DELETE FROM queue USING chosen WHERE request_id = chosen.id),
slot AS (UPDATE slots SET state = 'processing' FROM chosen WHERE request_id = chosen.id)
INSERT INTO jobs (id, request_id, slot_idx, state, worker_id, worker_name, owner_id, model, posts_progress, claimed_at,
                  lease_begun, lease_end, ttl)
SELECT gen_random_uuid(), id, 0, 'processing', gen_random_uuid(), 'w', 1, 'm', true, horde_now(), horde_now(),
       horde_now() + interval '1 hour', 3600
FROM chosen
"""


def users(db: Database) -> None:
    with db.transaction() as tx:
        for user in (OWN, FRIEND, STRANGER):
            tx.execute(
                "INSERT INTO users (id, name, key_hash, created_at) VALUES (%(id)s, %(name)s, %(name)s, horde_now())",
                {"id": user, "name": f"user {user}"},
            )
        tx.execute(
            "INSERT INTO workers (id, name, kind, kinds, owner_id, created_at, last_check_in) "
            "VALUES (%(id)s, 'worker', 'text', '{text}', %(owner)s, horde_now(), horde_now())",
            {"id": WORKER, "owner": OWN},
        )


def fill(db: Database, model: str, *, kind: str = "text", user: int = STRANGER, count: int = MANY) -> None:
    with db.transaction() as tx:
        tx.execute(FILL, {"kind": kind, "model": model, "user": user, "count": count, "max_length": 80})


@pytest.fixture(scope="module")
def full(server: Server) -> Iterator[Database]:
    """A queue with thousands of rows for this worker's model, for another one, and of its owner and a friend."""
    url = server.create()
    db = Database(url, pool=2)
    try:
        users(db)
        fill(db, "other")
        fill(db, "m")
        fill(db, "m", user=OWN)
        fill(db, "m", user=FRIEND)
        fill(db, "m", kind="chat")
        with db.transaction() as tx:
            tx.execute(RUN, {"count": 1000})
        yield db
    finally:
        db.close()
        server.drop(url)


def popper(*models: str, **changes: Any) -> Popper:
    values: dict[str, Any] = {
        "worker_id": WORKER,
        "kinds": ["text"],
        "models": models or ("m",),
        "max_length": 512,
        "max_context_length": 4096,
        "trusted": False,
        "speed": None,
        "friends": [OWN, FRIEND],
        **changes,
    }
    return Popper(**values)


@pytest.fixture(scope="module")
def flooded(server: Server) -> Iterator[Database]:
    """A queue that one stranger has filled, and statistics that know of nobody else."""
    url = server.create()
    db = Database(url, pool=2)
    try:
        users(db)
        fill(db, "m", count=3 * MANY)
        with db.autocommit() as tx:
            tx.execute("VACUUM (ANALYZE)")
        yield db
    finally:
        db.close()
        server.drop(url)


class Plan:
    """A plan as it was run: its nodes, with what they read."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.nodes = list(self._walk(tree))

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    def scanned(self, table: str) -> list[str]:
        """How each scan of a table is done."""
        return [node["Node Type"] for node in self.nodes if node.get("Relation Name") == table]

    def rows(self, table: str) -> float:
        """Rows of a table that were looked at, whether they were taken or not."""
        scans = [node for node in self.nodes if node.get("Relation Name") == table]
        looked: list[float] = [scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0) for scan in scans]
        return float(sum(rows * scan["Actual Loops"] for rows, scan in zip(looked, scans, strict=True)))

    def sorted_rows(self) -> float:
        """The most rows that any sort was given."""
        given: list[float] = [node["Plans"][0]["Actual Rows"] for node in self.nodes if "Sort" in node["Node Type"]]
        return max(given, default=0)

    def _walk(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from self._walk(child)


def explain(db: Database, statement: str, parameters: dict[str, Any]) -> Plan:
    """Run a statement as the broker does, prepared where it is `Prepared`, and take its plan; undo it."""
    with db.transaction() as tx:
        run = statement
        if isinstance(statement, Prepared):
            tx.execute(f"DEALLOCATE ALL; {statement.parts[0]}")
            tx.connection.connection.info.pop("planned", None)
            run = statement.parts[1]
        tree = tx.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {run}", parameters).scalar_one()[0]["Plan"]
        tx.roll_back()
    return Plan(tree)


def assert_cheap(plan: Plan, *, indexes: set[str], most_rows: float) -> None:
    assert indexes <= plan.indexes
    for table in ("queue", "requests"):
        assert not [scan for scan in plan.scanned(table) if not scan.startswith("Index")], plan.scanned(table)
    assert plan.rows("queue") <= most_rows
    assert plan.sorted_rows() <= most_rows


# --- the claim


def test_a_claim_walks_two_indexes_and_reads_no_more_than_its_depth(full: Database) -> None:
    plan = explain(full, CHOOSE_UNLOCKED, popper().parameters(DEPTH))
    # One walk for each of (owner, friend, everybody) x (model, any), each of which stops after `DEPTH`.
    assert_cheap(plan, indexes={"pk_queue", "ix_queue_user", "pk_requests"}, most_rows=6 * DEPTH)


def test_a_claim_of_texts_and_chats_walks_one_range_more_for_each_that_comes_first(full: Database) -> None:
    of_texts = explain(full, CHOOSE_UNLOCKED, popper().parameters(DEPTH))
    plan = explain(full, CHOOSE_UNLOCKED, popper(kinds=["text", "chat"]).parameters(DEPTH))
    # (Owner, friend, everybody) x (texts for the model, texts for any, chats for the model).
    assert_cheap(plan, indexes={"pk_queue", "ix_queue_user", "pk_requests"}, most_rows=9 * DEPTH)
    # All chats are a stranger's.
    assert plan.rows("queue") == pytest.approx(of_texts.rows("queue") + DEPTH, abs=0.5)


def test_a_flood_of_one_user_is_not_walked_to_find_that_a_friend_wants_nothing(flooded: Database) -> None:
    plan = explain(flooded, CHOOSE_UNLOCKED, popper().parameters(DEPTH))
    assert_cheap(plan, indexes={"pk_queue", "ix_queue_user"}, most_rows=6 * DEPTH)
    plan = explain(flooded, LOOK, popper("rare").parameters(1))
    assert_cheap(plan, indexes={"pk_queue", "ix_queue_user"}, most_rows=0)


def test_a_claim_for_a_model_that_nobody_asked_for_reads_nothing(full: Database) -> None:
    plan = explain(full, CHOOSE_UNLOCKED, popper("rare").parameters(DEPTH))
    assert_cheap(plan, indexes={"pk_queue", "ix_queue_user"}, most_rows=0)


def test_a_claim_for_many_models_reads_its_depth_of_each(full: Database) -> None:
    models = ["m", "other", *(f"model{i}" for i in range(198))]
    plan = explain(full, CHOOSE_UNLOCKED, popper(*models).parameters(DEPTH))
    assert_cheap(plan, indexes={"pk_queue", "ix_queue_user"}, most_rows=3 * 201 * DEPTH)


def test_the_look_for_anything_at_all_reads_a_row_of_each(full: Database) -> None:
    plan = explain(full, LOOK, popper().parameters(1))
    assert_cheap(plan, indexes=set(), most_rows=6)
    assert plan.indexes & {"pk_queue", "ix_queue_user"}


def test_counting_what_is_skipped_reads_its_depth(full: Database) -> None:
    plan = explain(full, SKIPPED, popper("m", "other").parameters(SKIPPED_DEPTH))
    assert_cheap(plan, indexes={"pk_queue"}, most_rows=3 * SKIPPED_DEPTH)


ESTIMATED = {
    "kind": "text",
    "models": ["m"],
    "any_model": False,
    "rank": "infinity",
    "rank_offset": 1e9,
    "depth": AHEAD_DEPTH,
    "assumed": ASSUMED_SPEED,
    "online": 300,
}


@pytest.mark.parametrize(
    ("statement", "parameters", "most_rows"),
    [
        (CHOOSE_UNLOCKED, popper().parameters(DEPTH), 6 * DEPTH),
        (LOOK, popper().parameters(1), 6),
        (SKIPPED, popper().parameters(SKIPPED_DEPTH), 2 * SKIPPED_DEPTH),
        (ESTIMATE, ESTIMATED, 2 * AHEAD_DEPTH),
        (ESTIMATE_NEXT, ESTIMATED, 2 * AHEAD_DEPTH),
    ],
    ids=["choose", "look", "skipped", "estimate", "estimate of the next"],
)
def test_a_plan_made_for_an_empty_queue_serves_a_full_one_as_well(
    database_url: str, monkeypatch: pytest.MonkeyPatch, statement: Prepared, parameters: dict[str, Any], most_rows: int
) -> None:
    # Never planned again: what a connection has cached while nothing waited is what it goes on with.
    monkeypatch.setattr(db_module, "PLAN_AGE", float("inf"))
    # One connection, so that both transactions have the same plans.
    db = Database(database_url, pool=1)
    try:
        users(db)
        with db.transaction() as tx:
            tx.execute(statement, parameters)
        fill(db, "m")
        fill(db, "other")
        with db.transaction() as tx:
            before = tx.execute("SELECT count(*) FROM pg_prepared_statements").scalar_one()
            tree = tx.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.parts[1]}", parameters).scalar_one()
            tx.roll_back()
    finally:
        db.close()
    assert before == 1
    plan = Plan(tree[0]["Plan"])
    assert_cheap(plan, indexes=set(), most_rows=most_rows)
    assert plan.rows("requests") <= 2 * most_rows


def test_a_cached_plan_is_made_again_once_it_is_old(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = "SELECT prepare_time FROM pg_prepared_statements WHERE name = %(name)s"
    parameters = popper().parameters(DEPTH)
    with db.autocommit() as tx:
        tx.execute(CHOOSE_UNLOCKED, parameters)
        first = tx.execute(prepared, {"name": CHOOSE_UNLOCKED.name}).scalar_one()
        tx.execute(CHOOSE_UNLOCKED, parameters)
        assert tx.execute(prepared, {"name": CHOOSE_UNLOCKED.name}).scalar_one() == first
        monkeypatch.setattr(db_module, "PLAN_AGE", 0.0)
        tx.execute(CHOOSE_UNLOCKED, parameters)
        assert tx.execute(prepared, {"name": CHOOSE_UNLOCKED.name}).scalar_one() > first


# --- estimates, for each status


@pytest.mark.parametrize("statement", [ESTIMATE, ESTIMATE_NEXT])
def test_an_estimate_reads_no_further_ahead_than_its_depth(full: Database, statement: Prepared) -> None:
    plan = explain(full, statement, ESTIMATED)
    assert_cheap(plan, indexes={"pk_queue"}, most_rows=2 * AHEAD_DEPTH)


def test_whether_a_request_is_possible_reads_that_request_alone(full: Database) -> None:
    with full.autocommit() as tx:
        request = tx.execute("SELECT id FROM requests WHERE waiting > 0 LIMIT 1").scalar_one()
    plan = explain(full, IS_POSSIBLE, {"request": request})
    assert plan.rows("requests") <= 1
    assert not [scan for scan in plan.scanned("requests") if not scan.startswith("Index")]


# --- what maintenance looks for


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (due.STALE, "ix_jobs_lease"),
        (due.UNSTARTED, "ix_jobs_lease"),
        (due.EXPIRED, "ix_requests_open_expiry"),
        (due.PAST_DEADLINE, "ix_requests_open_deadline"),
        (due.LAPSED, "ix_requests_attached"),
    ],
    ids=["stale", "unstarted", "expired", "deadline", "lapsed"],
)
def test_a_pass_finds_what_is_due_by_a_partial_index(full: Database, statement: str, index: str) -> None:
    page = {"at": "-infinity", "id": uuid.UUID(int=0), "page": due.PAGE, "start_within": START_WITHIN}
    plan = explain(full, statement, page)
    assert plan.indexes == {index}
    assert plan.sorted_rows() <= due.PAGE


@pytest.mark.parametrize("statement", [due.STALE, due.EXPIRED, due.PAST_DEADLINE, due.LAPSED])
def test_a_pass_with_nothing_due_reads_nothing(full: Database, statement: str) -> None:
    page = {"at": "-infinity", "id": uuid.UUID(int=0), "page": due.PAGE, "start_within": START_WITHIN}
    plan = explain(full, statement, page)
    assert plan.rows("jobs") + plan.rows("requests") == 0
