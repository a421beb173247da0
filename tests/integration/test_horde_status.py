"""What the horde says of its queue: exact while it is short, an estimate at a bounded cost when it is long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from horde.db.tables.workers import ONLINE_SECONDS
from horde.statistics import totals
from horde.usecases.horde_status import list_models, read_performance
from tests.support.broker import Broker, open_broker

# Rows that orders would leave, as far as these figures look at them.
FILL = """
INSERT INTO requests (id, kind, user_id, payload, created_at, expires_at, rank, models, max_length, max_context_length, n, waiting)
SELECT gen_random_uuid(), %(kind)s, 0, '{}', horde_now(), horde_now() + random() * interval '1 hour', horde_now(), %(models)s,
       %(max_length)s, 1024, 3, 3
FROM generate_series(1, %(count)s)
"""


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def looks_at(monkeypatch: pytest.MonkeyPatch) -> int:
    """Requests that are looked at one by one."""
    monkeypatch.setattr(totals, "COUNTED", 200)
    return 200


def fill(
    broker: Broker, count: int, kind: str = "text", models: tuple[str, ...] = ("m",), max_length: int = 80
) -> None:
    values = {"count": count, "kind": kind, "models": list(models), "max_length": max_length}
    with broker.context.database.transaction() as tx:
        tx.execute(FILL, values)


def analyze(broker: Broker) -> None:
    with broker.context.database.autocommit() as tx:
        tx.execute("ANALYZE requests")


def counts(broker: Broker) -> tuple[int, int, int]:
    row = read_performance(broker.context)
    return row["queued_requests"], row["queued_text_requests"], row["queued_tokens"]


def test_a_short_queue_is_counted_exactly(broker: Broker, looks_at: int) -> None:
    fill(broker, 150)
    fill(broker, 40, kind="chat", models=("m", "n"), max_length=16)
    fill(broker, 9, kind="image", models=())
    assert counts(broker) == (9, 190, 3 * (150 * 80 + 40 * 16))
    (m,) = list_models(broker.context, "text")
    assert (m.name, m.jobs, m.queued) == ("m", 450, 36_000)
    assert {model.name: model.jobs for model in list_models(broker.context, "chat")} == {"m": 120, "n": 120}


def test_a_long_queue_is_estimated(broker: Broker, looks_at: int) -> None:
    fill(broker, 3000)
    fill(broker, 1000, kind="image", models=("painter",))
    analyze(broker)
    images, texts, tokens = counts(broker)
    assert images + texts == pytest.approx(4000, rel=0.01)
    assert texts == pytest.approx(3000, rel=0.2)
    assert tokens == pytest.approx(3 * 80 * texts, rel=0.01)
    (m,) = list_models(broker.context, "text")
    assert (m.jobs, m.queued) == (pytest.approx(3 * texts, rel=0.01), pytest.approx(tokens, rel=0.01))


def test_an_estimate_is_never_less_than_what_was_counted(broker: Broker, looks_at: int) -> None:
    # No statistics of such a young queue: what is known is that there are at least as many.
    fill(broker, 300)
    assert counts(broker) == (0, looks_at, 3 * 80 * looks_at)


def rows_looked_at(broker: Broker, statement: str) -> int:
    """The most rows that any step of the plan gave, all its rounds together."""
    values = {"online": ONLINE_SECONDS, "counted": totals.COUNTED, "kind": "text"}
    with broker.context.database.autocommit() as tx:
        found = tx.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values).scalar_one()
    (plan,) = found if isinstance(found, list) else json.loads(found)

    def most(node: dict[str, Any]) -> int:
        own = int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
        return max([own, *map(most, node.get("Plans", []))])

    return most(plan["Plan"])


@pytest.mark.parametrize("statement", [totals.PERFORMANCE, totals.MODELS], ids=["performance", "models"])
def test_the_cost_does_not_grow_with_the_queue(broker: Broker, looks_at: int, statement: str) -> None:
    fill(broker, 1500)
    fill(broker, 1500, kind="image")
    analyze(broker)
    assert rows_looked_at(broker, statement) <= looks_at
