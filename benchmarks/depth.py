"""A pop's time against the depth of the queue: a thousand requests, and a million older ones in front or beside them."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.load import quantiles
from benchmarks.report import Report
from benchmarks.server import Postgres, make_users, open_broker, open_postgres
from horde.db.database import Database
from horde.settings import Settings
from horde.usecases.accounts import CreatedUser
from horde.usecases.context import Context
from horde.usecases.pop import Offer, pop

MODEL, OTHER = "bench/tiny-7b", "bench/other"
FEW, MANY = 1_000, 1_000_000
CHUNK = 100_000
POPS, WARM_UP = 200, 20
MOST_RATIO = 2.0

# What orders would leave, `age` seconds old; they expire long after the measurement.
FILL = """
WITH new AS (
    INSERT INTO requests (id, kind, user_id, payload, created_at, expires_at, rank, models, max_length, max_context_length,
                          n, waiting)
    SELECT gen_random_uuid(), 'text', %(user)s, '{"prompt": "Hello", "n": 1, "max_length": 80}',
           at, at + interval '1 day', at, ARRAY[%(model)s], 80, 1024, 1, 1
    FROM (SELECT horde_now() - make_interval(secs => %(age)s) + i * interval '1 ms' AS at
          FROM generate_series(1, %(count)s) AS i) AS moments
    RETURNING id, rank, user_id),
slot AS (INSERT INTO slots (request_id, idx, state, seed) SELECT id, 0, 'waiting', 1 FROM new)
INSERT INTO queue (kind, model, rank, request_id, user_id) SELECT 'text', %(model)s, rank, id, user_id FROM new
"""


def run(report: Report, *, many: int = MANY, few: int = FEW, pops: int = POPS) -> None:
    """Fill `report`; each depth in a database of its own."""
    depths = {
        f"{few:,} requests": [(MODEL, few)],
        f"{few:,}, and {many:,} older ones for another model": [(OTHER, many), (MODEL, few)],
        f"{many:,} older ones for this model": [(MODEL, many), (MODEL, few)],
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    with open_postgres() as postgres:
        for name, lots in depths.items():
            found[name] = _measure(postgres, lots, pops)
        report.raw |= {"postgres": postgres.version, "depths": found}
    first, *deeper = found
    for name, ways in found.items():
        for way, took in ways.items():
            report.tell(f"{way}: {name}, half and 99 % of the pops", f"{took['p50']:.2f} / {took['p99']:.2f} ms")
    for name in deeper:
        for way, took in found[name].items():
            report.judge_at_most(
                f"{way}: {name}, by half of the pops", took["p50"] / found[first][way]["p50"], MOST_RATIO
            )


def _measure(postgres: Postgres, lots: list[tuple[str, int]], pops: int) -> dict[str, dict[str, float]]:
    url = postgres.create_database()
    client, owner = make_users(url)
    for place, (model, count) in enumerate(lots):
        _fill(url, client.id, model, count, age=7200 - 3600 * place)
    measured = {}
    with _pops_by_call(url, owner) as once:
        measured["in the process"] = _time(once, pops)
    with open_broker(url) as broker, _pops_over_http(broker, owner) as once:
        measured["over HTTP"] = _time(once, pops)
    postgres.drop_database(url)
    return measured


def _fill(url: str, user: int, model: str, count: int, *, age: float) -> None:
    database = Database(url, pool=1, settings={"statement_timeout": "0", "enable_seqscan": "on"})
    try:
        for begin in range(0, count, CHUNK):
            chunk = {"user": user, "model": model, "count": min(CHUNK, count - begin), "age": age - begin / 1000}
            with database.transaction() as tx:
                tx.execute(FILL, chunk)
        # A queue that grew by itself would have been vacuumed on the way; and its writes would be on disk.
        with database.autocommit() as tx:
            tx.execute("VACUUM (ANALYZE)")
            tx.execute("CHECKPOINT")
    finally:
        database.close()


def _time(once: Callable[[], None], pops: int) -> dict[str, float]:
    for _ in range(WARM_UP):
        once()
    took = []
    for _ in range(pops):
        began = time.perf_counter()
        once()
        took.append(time.perf_counter() - began)
    return quantiles(took)


@contextmanager
def _pops_by_call(url: str, owner: CreatedUser) -> Iterator[Callable[[], None]]:
    context = Context.create(Settings(database_url=url, rate_limits="off"))
    offer = Offer("bench worker", [MODEL], max_length=512, max_context_length=4096)

    def once() -> None:
        if not pop(context, owner.api_key, offer, client_gone=lambda: False).jobs:
            raise RuntimeError("the queue is empty")

    try:
        yield once
    finally:
        context.close()


@contextmanager
def _pops_over_http(broker: str, owner: CreatedUser) -> Iterator[Callable[[], None]]:
    parts = urllib.parse.urlsplit(broker)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=60)
    offer = {"name": "bench worker", "models": [MODEL], "max_length": 512, "max_context_length": 4096}
    headers = {"apikey": owner.api_key, "Content-Type": "application/json"}

    def once() -> None:
        connection.request("POST", "/api/v2/generate/text/pop", json.dumps(offer), headers)
        answer = connection.getresponse()
        popped: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200 or not popped["id"]:
            raise RuntimeError(f"a pop was answered {answer.status}: {popped}")

    try:
        yield once
    finally:
        connection.close()
