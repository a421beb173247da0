"""Who is handed output when: by announcements from any process, by themselves, slowly, after outages, until the end."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from horde.db import notices as notices_module
from horde.streams import hub as hub_module
from tests.support.concurrency import eventually
from tests.support.redis import RedisServer, redis_server
from tests.support.relay import Relay
from tests.support.streams import DEADLINE, Process, Reads, Seen, following, process

NEVER = 1_000.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but an announcement makes anybody look again."""
    monkeypatch.setattr(hub_module, "LOOK_AGAIN", NEVER)


@pytest.fixture
def broker(database_url: str, told: None) -> Iterator[Process]:
    with process(database_url) as made:
        yield made


# --- announcements


def test_announcements_that_come_twice_early_or_for_nobody_change_nothing(broker: Process) -> None:
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as seen:
        seen.next()
        for _ in range(50):
            broker.announce(request, uuid.uuid4())
            broker.announce()
        seen.nothing()
        broker.world.post(job, [1], "a")
        seen.nothing()
        for _ in range(50):
            broker.announce(request, request)
        assert seen.next().slots[0].text == "a"
        seen.nothing()


def test_what_nobody_announced_is_found_all_the_same(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LOOK_AGAIN", 0.05)
    with process(database_url) as broker:
        request = broker.chat()
        job = broker.job(request)
        with following(broker, request) as seen:
            seen.next()
            broker.world.post(job, [1], "a")
            assert seen.next().slots[0].text == "a"


def test_many_announcements_are_read_for_together(broker: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    monkeypatch.setattr(hub_module, "GATHER", 0.05)
    requests = [broker.chat() for _ in range(20)]
    jobs = [broker.job(request) for request in requests]
    with ExitStack() as stack:
        all_seen = [stack.enter_context(following(broker, request)) for request in requests]
        for seen in all_seen:
            seen.next()
        before = len(reads.sizes)
        for job in jobs:
            broker.world.post(job, [1], "a")
        for request in requests:
            broker.announce(request)
        for seen in all_seen:
            assert seen.next().slots[0].text == "a"
        assert sum(reads.sizes[before:]) == 20
        assert len(reads.sizes) - before <= 3


@pytest.fixture(params=["database", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def fan_out(request: pytest.FixtureRequest) -> str | None:
    """By what processes wake each other: the URL of a Redis server, or None for the database."""
    if request.param == "database":
        return None
    own_redis: RedisServer = request.getfixturevalue("own_redis")
    return own_redis.url


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.mark.usefixtures("told")
def test_what_a_worker_posts_to_one_broker_a_client_of_another_is_given(database_url: str, fan_out: str | None) -> None:
    with process(database_url, redis_url=fan_out) as here, process(database_url, redis_url=fan_out) as there:
        for one in (here, there):
            assert one.context.notices.listening.wait(DEADLINE)
        request = here.chat()
        job = here.job(request)
        with following(there, request) as far, following(here, request) as near:
            far.next()
            near.next()
            for number in range(5):
                here.world.post(job, [number], "x", offset=number)
                here.announce(request)
                for seen in (far, near):
                    assert seen.next().slots[0].token_ids == [number]
            there.world.store(job, "xxxxx", tokens=5, token_ids=list(range(5)))
            there.announce(request)
            for seen in (far, near):
                seen.until_done()
                assert (seen.text(), seen.token_ids()) == ("xxxxx", list(range(5)))


# --- slow clients, and those that go


def test_a_client_that_does_not_take_its_output_is_not_read_for(
    broker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    slow_request, quick_request = broker.chat(), broker.chat()
    slow_job, quick_job = broker.job(slow_request), broker.job(quick_request)
    with following(broker, slow_request) as slow, following(broker, quick_request) as quick:
        quick.next()
        eventually(lambda: slow.follower.output is not None, "the first output lies there")
        before = len(reads.sizes)
        for number in range(20):
            broker.world.post(slow_job, [number], "s", offset=number)
            broker.world.post(quick_job, [number], "q", offset=number)
            broker.announce(slow_request, quick_request)
            assert quick.next().slots[0].token_ids == [number]
        assert set(reads.sizes[before:]) == {1}
        # It is given the rest as soon as it takes what lies there, in one piece.
        assert slow.next().slots[0].token_ids == []
        assert slow.next().slots[0].token_ids == list(range(20))
        slow.nothing()


def test_what_is_announced_during_a_read_is_read_for_after_it(broker: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as seen:
        seen.next()
        reads.may_go.clear()
        broker.announce(request)
        assert reads.stands.wait(DEADLINE)
        broker.world.post(job, [1], "a")
        broker.announce(request)
        reads.may_go.set()
        assert seen.next().slots[0].text == "a"


def test_who_has_left_is_not_read_for(broker: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    request = broker.chat()
    with following(broker, request) as stays:
        with following(broker, request) as leaves:
            leaves.next()
            assert broker.context.streams.following == 2
        stays.next()
        reads = Reads(monkeypatch)
        broker.job(request)
        broker.announce(request)
        stays.next()
        assert reads.sizes == [1]
    assert broker.context.streams.following == 0
    broker.announce(request)
    assert reads.sizes == [1]


def test_a_client_that_waits_holds_no_database_connection(database_url: str, told: None) -> None:
    with process(database_url, database_pool=2) as broker, ExitStack() as stack:
        requests = [broker.chat() for _ in range(50)]
        followers = [stack.enter_context(following(broker, request)) for request in requests]
        for seen in followers:
            seen.next()
        waiting = [threading.Thread(target=seen.follower.next, args=(DEADLINE,)) for seen in followers]
        for thread in waiting:
            thread.start()
        eventually(
            lambda: broker.context.database.engine.pool.checkedout() == 0,  # type: ignore[attr-defined]
            "nobody holds a connection",
        )
        broker.announce(*(request for request in requests if broker.job(request)))
        for thread in waiting:
            thread.join(DEADLINE)
            assert not thread.is_alive()


def test_a_wake_up_ends_the_wait_of_this_follower_only(broker: Process) -> None:
    request = broker.chat()
    with following(broker, request) as woken, following(broker, request) as other:
        woken.next()
        other.next()
        ended: dict[str, threading.Event] = {"woken": threading.Event(), "other": threading.Event()}

        def wait(name: str, seen: Seen) -> None:
            assert seen.follower.next(DEADLINE) is None
            ended[name].set()

        threads = [
            threading.Thread(target=wait, args=("woken", woken)),
            threading.Thread(target=wait, args=("other", other)),
        ]
        for thread in threads:
            thread.start()
        woken.follower.wake()
        assert ended["woken"].wait(DEADLINE)
        assert not ended["other"].is_set()
        # Early is not lost either.
        woken.follower.wake()
        woken.nothing(DEADLINE * 100)
        other.follower.wake()
        for thread in threads:
            thread.join(DEADLINE)


def test_the_end_of_the_process_wakes_everybody_for_good(broker: Process) -> None:
    request = broker.chat()
    with following(broker, request) as seen:
        seen.next()
        ended = threading.Event()

        def wait() -> None:
            assert seen.follower.next(NEVER) is None
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not broker.context.streams.closed
        broker.context.stop_waiting()
        assert ended.wait(DEADLINE)
        thread.join(DEADLINE)
        assert broker.context.streams.closed
        seen.nothing(NEVER)
        broker.context.streams.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("stream")]


# --- attachments


def test_followed_requests_stay_attached_however_long_a_read_takes(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "RENEW_EVERY", 0.05)
    reads = Reads(monkeypatch)
    with process(database_url) as broker:
        followed, other = broker.chat(), broker.chat()
        with following(broker, followed) as seen, following(broker, followed):
            seen.next()
            reads.may_go.clear()
            broker.announce(followed)
            assert reads.stands.wait(DEADLINE)
            broker.world.advance(20)
            left = "SELECT extract(epoch FROM attached_until - horde_now()) FROM requests WHERE id = %(id)s"
            eventually(lambda: broker.world.scalar(left, id=followed) > 25, "it is renewed")
            assert broker.world.scalar(left, id=other) < 15
            reads.may_go.set()


def test_a_renewal_that_fails_is_tried_again_and_logged_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "RENEW_EVERY", 0.02)
    monkeypatch.setattr(hub_module, "RETRY", 0.02)
    with Relay(database_url) as relay, process(relay.url, database_pool_wait_seconds=0.1) as broker:
        request = broker.chat()
        with following(broker, request) as seen, capture_logs() as logs:
            seen.next()
            relay.cut()
            eventually(lambda: any(entry["event"] == "streams.not_renewed" for entry in logs), "it has failed")
            relay.restore()
            broker.world.advance(20)
            left = "SELECT extract(epoch FROM attached_until - horde_now()) FROM requests WHERE id = %(id)s"
            eventually(lambda: broker.world.scalar(left, id=request) > 25, "it is renewed again")
        assert sum(entry["event"] == "streams.not_renewed" for entry in logs) == 1


def test_what_has_ended_is_not_renewed(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "RENEW_EVERY", 0.02)
    renewed: list[set[uuid.UUID]] = []
    with process(database_url) as broker:
        broker.context.streams._renew = lambda requests: renewed.append(set(requests))
        ends, goes_on = broker.chat(), broker.chat()
        with following(broker, ends) as seen, following(broker, goes_on):
            eventually(lambda: {ends, goes_on} in renewed, "both are renewed")
            broker.world.cancel(ends)
            broker.announce(ends)
            seen.until_done()
            renewed.clear()
            eventually(lambda: len(renewed) > 3, "the other one is renewed")
            assert all(requests == {goes_on} for requests in renewed[1:])


# --- outages


def test_streams_go_on_after_an_outage_of_the_database_with_nothing_lost(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "LOOK_AGAIN", 0.05)
    monkeypatch.setattr(hub_module, "RETRY", 0.05)
    monkeypatch.setattr(notices_module, "RETRY_SECONDS", 0.05)
    with (
        process(database_url) as there,
        Relay(database_url) as relay,
        process(relay.url, database_pool_wait_seconds=0.1) as here,
    ):
        request = there.chat()
        job = there.job(request)
        with following(here, request) as seen, capture_logs() as logs:
            there.world.post(job, [1], "a")
            seen.until(lambda: seen.text() == "a")
            relay.cut()
            there.world.post(job, [2], "b", offset=1)
            here.announce(request)
            eventually(lambda: any(entry["event"] == "streams.not_read" for entry in logs), "reads fail")
            # Followers wait on through it.
            seen.nothing()
            there.world.store(job, "abc", tokens=3, token_ids=[1, 2, 3])
            relay.restore()
            seen.until_done()
            assert (seen.text(), seen.token_ids()) == ("abc", [1, 2, 3])
        assert sum(entry["event"] == "streams.not_read" for entry in logs) == 1


@pytest.mark.needs("redis")
def test_streams_go_on_without_redis(
    database_url: str, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "LOOK_AGAIN", 0.05)
    with (
        process(database_url, redis_url=own_redis.url) as here,
        process(database_url, redis_url=own_redis.url) as there,
    ):
        request = here.chat()
        job = here.job(request)
        with following(there, request) as seen:
            own_redis.stop()
            here.world.post(job, [1], "a")
            here.announce(request)
            seen.until(lambda: seen.text() == "a")
