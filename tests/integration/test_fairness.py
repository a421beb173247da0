"""Who is served when more is asked for than can be done at once: by age, within what kudos and floods may move."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator

import pytest

from tests.support.broker import Broker, open_broker


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def served(broker: Broker, key: str, pops: int) -> list[uuid.UUID]:
    """The requests that the next pops get, in order."""
    return [broker.request_of(broker.job(key)) for _ in range(pops)]


def rank(broker: Broker, request: uuid.UUID) -> dt.datetime:
    found = broker.world.scalar("SELECT rank FROM requests WHERE id = %(id)s", id=request)
    assert isinstance(found, dt.datetime)
    return found


def test_without_kudos_or_floods_the_oldest_comes_first(broker: Broker, key: str) -> None:
    asked = [broker.order(broker.user().api_key) for _ in range(5)]
    assert served(broker, key, 5) == asked


def test_one_users_flood_stands_behind_another_users_single_request(broker: Broker, key: str) -> None:
    flood = broker.user("flood").api_key
    for _ in range(25):
        broker.order(flood)
    single = broker.order(broker.user("single").api_key)

    # What the flood had waiting when it came counts, so its first request is as good as anybody's.
    assert single in served(broker, key, 2)


def test_a_flood_of_big_requests_stands_behind_it_too(broker: Broker, key: str) -> None:
    flood = broker.user("flood", concurrency=500).api_key
    first, second = broker.order(flood, n=20), broker.order(flood, n=20)
    single = broker.order(broker.user("single").api_key)

    pops = served(broker, key, 21)
    assert pops == [first] * 20 + [single]
    assert served(broker, key, 1) == [second]


def test_a_big_requester_and_an_anonymous_one_are_both_served(broker: Broker, key: str) -> None:
    rich = broker.user("rich", kudos=1_000_000, concurrency=500).api_key
    anonymous = broker.order()
    big = broker.order(rich, n=20)

    pops = served(broker, key, 21)
    assert pops.count(big) == 20
    assert pops.count(anonymous) == 1


@pytest.mark.parametrize(("ahead", "rich_first"), [(595, True), (605, False)])
def test_no_amount_of_kudos_passes_what_is_ten_minutes_older(
    broker: Broker, key: str, ahead: float, rich_first: bool
) -> None:
    poor = broker.order(broker.user("poor").api_key)
    broker.world.advance(ahead)
    rich = broker.order(broker.user("rich", kudos=1e12).api_key)
    assert served(broker, key, 2) == ([rich, poor] if rich_first else [poor, rich])


def test_a_thousand_kudos_are_worth_a_minute(broker: Broker, key: str) -> None:
    poor = broker.order(broker.user("poor").api_key)
    some = broker.order(broker.user("some", kudos=1000).api_key)
    assert (rank(broker, poor) - rank(broker, some)).total_seconds() == pytest.approx(60, abs=2)


def test_a_steady_stream_of_rich_requests_delays_an_anonymous_one_by_ten_minutes_at_most(
    broker: Broker, key: str
) -> None:
    rich = broker.user("rich", kudos=1e12).api_key
    poor = broker.order()
    minutes = 0
    while True:
        broker.order(rich)
        if served(broker, key, 1) == [poor]:
            break
        broker.world.advance(60)
        minutes += 1
        assert minutes <= 10
    assert minutes == 10


def test_a_put_back_keeps_its_place_before_what_came_later(broker: Broker, key: str) -> None:
    old = broker.order(broker.user().api_key)
    before = rank(broker, old)
    job = broker.job(key)
    broker.world.advance(30)
    fresh = broker.order(broker.user().api_key)
    broker.submit(key, job.id, state="faulted")

    assert rank(broker, old) == before
    assert broker.world.rows("SELECT rank FROM queue WHERE request_id = %(id)s", id=old) == [(before,)]
    assert served(broker, key, 2) == [old, fresh]


def test_a_part_of_a_request_that_is_put_back_joins_the_rest(broker: Broker, key: str) -> None:
    old = broker.order(broker.user().api_key, n=3)
    job = broker.job(key)
    fresh = broker.order(broker.user().api_key)
    broker.submit(key, job.id, state="released")

    # The worker that gave it back is alone, so it may have it again.
    assert served(broker, key, 4) == [old] * 3 + [fresh]


def test_kudos_earned_later_move_nothing_that_waits(broker: Broker, key: str) -> None:
    poor, other = broker.user("poor"), broker.user("other")
    first, second = broker.order(poor.api_key), broker.order(other.api_key)
    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE accounts SET balance = 100000000 WHERE user_id = %(id)s", {"id": other.id})
    assert served(broker, key, 2) == [first, second]


def test_a_long_job_is_not_passed_for_ever_by_short_ones_of_a_smaller_worker(broker: Broker, key: str) -> None:
    long = broker.order(max_length=512)
    for _ in range(5):
        broker.order(max_length=16)
        broker.job(key, name="small", max_length=16)
    # No short one in between made it younger: a worker that can, takes it first.
    broker.order(max_length=16)
    assert served(broker, key, 1) == [long]
