"""How often who may call what, over HTTP: limits that a client cannot talk itself out of and a normal one never meets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from flask import Flask

from horde.admission.chat import NO_CAPACITY_RETRY
from horde.api.limits import LIMITS, Limit, _anonymous, _by_address, _by_key
from tests.support.chat import chat_broker
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker
from tests.support.redis import redis_server

BURST_SECONDS = 0.9


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url, rate_limits="on") as live:
        yield live
        assert live.unexpected_errors() == 0


def burst(count: int, call: Callable[[int], requests.Response]) -> list[requests.Response]:
    """`count` calls within one second of the limiter; again after a pause when this machine was too slow for that."""
    for _ in range(10):
        began = time.monotonic()
        answers = [call(number) for number in range(count)]
        if time.monotonic() - began < BURST_SECONDS:
            return answers
        time.sleep(1.1)
    pytest.fail("this machine does not get a burst through within a second")


def test_a_status_may_be_read_ten_times_a_second_per_request(broker: LiveBroker) -> None:
    def statuses(request_id: str) -> list[int]:
        return [
            answer.status_code
            for answer in burst(12, lambda _: broker.call("GET", f"generate/text/status/{request_id}"))
        ]

    assert statuses(str(uuid.uuid4())) == [404] * 10 + [429] * 2
    assert statuses(str(uuid.uuid4())) == [404] * 10 + [429] * 2


def test_a_refusal_by_a_limit_is_json_and_says_when_to_come_back(broker: LiveBroker) -> None:
    path = f"generate/text/status/{uuid.uuid4()}"
    refused = burst(11, lambda _: broker.call("GET", path))[-1]
    assert refused.status_code == 429
    assert refused.json() == {"message": "10 per 1 second"}
    assert refused.headers["Content-Type"] == "application/json; charset=utf-8"
    assert refused.headers["Access-Control-Allow-Origin"] == "*"
    assert int(refused.headers["Retry-After"]) >= 1
    assert (refused.headers["X-RateLimit-Limit"], refused.headers["X-RateLimit-Remaining"]) == ("10", "0")
    assert abs(int(refused.headers["X-RateLimit-Reset"]) - time.time()) < 5


def test_an_answer_tells_of_the_limit_that_ends_first(broker: LiveBroker) -> None:
    def told(answer: requests.Response) -> tuple[int, str, str]:
        return answer.status_code, answer.headers["X-RateLimit-Limit"], answer.headers["X-RateLimit-Remaining"]

    answers = burst(3, lambda _: broker.ask({"prompt": 5}))
    assert [told(answer) for answer in answers] == [(400, "2", "1"), (400, "2", "0"), (429, "2", "0")]
    assert answers[-1].headers["Retry-After"] in {"1", "2"}


@pytest.mark.parametrize("short", ["2/second", "3/second"])
def test_when_several_limits_bind_the_one_that_lasts_is_told(
    database_url: str, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    monkeypatch.setitem(LIMITS, "text.ask", (Limit(short, _by_address), Limit("2/minute", _by_address)))
    with live_broker(database_url, rate_limits="on") as broker:
        second = burst(2, lambda _: broker.ask({"prompt": 5}))[-1]
    assert (second.headers["X-RateLimit-Limit"], second.headers["X-RateLimit-Remaining"]) == ("2", "0")
    assert int(second.headers["X-RateLimit-Reset"]) > time.time() + 5
    assert "Retry-After" not in second.headers


def test_only_who_has_to_wait_is_told_to_come_back(broker: LiveBroker) -> None:
    owner, url = broker.user("Owner", "trusted").api_key, f"{broker.url}/v1/models/tiny"
    bearer = {"Authorization": f"Bearer {owner}"}
    answers = [
        broker.call("GET", "find_user"),
        broker.call("GET", f"generate/text/status/{uuid.uuid4()}"),
        broker.ask({"prompt": 5}),
        broker.call("GET", "find_user", key=owner),
        broker.pop(owner),
        broker.session.get(url, headers=bearer, timeout=30),
        broker.session.get(f"{broker.url}/v1/models", headers=bearer, timeout=30),
    ]
    assert [answer.status_code for answer in answers] == [401, 404, 400, 200, 200, 404, 200]
    for answer in answers:
        assert "Retry-After" not in answer.headers, answer.url
        assert int(answer.headers["X-RateLimit-Remaining"]) > 0, answer.url


def test_a_rule_that_says_when_is_not_outdone_by_a_limit(database_url: str) -> None:
    with chat_broker(database_url, rate_limits="on") as chat:
        refused = chat.post(model_revision="another")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_capacity")
    assert refused.headers["Retry-After"] == str(int(NO_CAPACITY_RETRY))
    assert refused.headers["X-RateLimit-Limit"] == "20"


def test_a_key_may_open_twenty_chats_a_second_and_the_anonymous_one_two(broker: LiveBroker) -> None:
    def statuses(key: str, count: int) -> list[int]:
        def call(_: int) -> requests.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return broker.session.post(f"{broker.url}/v1/chat/completions", json={}, headers=headers, timeout=30)

        return [answer.status_code for answer in burst(count, call)]

    assert statuses("someone", 22) == [400] * 20 + [429] * 2
    assert statuses(ANONYMOUS, 4) == [400] * 2 + [429] * 2


@pytest.mark.parametrize("endpoint", ["openai_chat.complete", "openai_completions.complete"])
def test_the_limits_of_v1_are_the_documented_ones(endpoint: str) -> None:
    limits = LIMITS[endpoint]
    with Flask("x").test_request_context("/", headers={"Authorization": "Bearer k"}):
        applied = sorted(limit.amount for limit in limits if not (limit.unless and limit.unless()))
    assert applied == ["1200/minute", "20/second", "40/second"]
    with Flask("x").test_request_context("/", headers={"Authorization": f"Bearer {ANONYMOUS}"}):
        applied = sorted(limit.amount for limit in limits if not (limit.unless and limit.unless()))
    assert applied == ["1200/minute", "2/second", "40/second", "90/minute"]


def test_no_header_makes_another_caller_of_the_same_one(broker: LiveBroker) -> None:
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "CF-Connecting-IP", "Proxied-For"):
        path = f"generate/text/status/{uuid.uuid4()}"
        answers = burst(
            12, lambda number, path=path, header=header: broker.call("GET", path, headers={header: f"9.9.9.{number}"})
        )
        assert [answer.status_code for answer in answers[-2:]] == [429, 429], header


def test_behind_a_trusted_proxy_its_clients_are_told_apart(database_url: str) -> None:
    with live_broker(database_url, rate_limits="on", trusted_proxies=1) as broker:
        path = f"generate/text/status/{uuid.uuid4()}"
        apart = burst(
            12, lambda number: broker.call("GET", path, headers={"X-Forwarded-For": f"6.6.6.6, 9.9.9.{number}"})
        )
        assert {answer.status_code for answer in apart} == {404}
        same = burst(
            12, lambda number: broker.call("GET", path, headers={"X-Forwarded-For": f"6.6.6.{number}, 9.9.8.1"})
        )
        assert same[-1].status_code == 429


def test_orders_are_limited_by_address_and_the_body_does_not_matter(broker: LiveBroker) -> None:
    answers = burst(4, lambda _: broker.ask({"prompt": 5}))
    assert [answer.status_code for answer in answers] == [400, 400, 429, 429]


def test_a_route_without_a_limit_of_its_own_has_the_default_and_the_heartbeat_none(broker: LiveBroker) -> None:
    seen = [broker.call("GET", "status/heartbeat").status_code for _ in range(120)]
    assert set(seen) == {200}
    seen = [broker.call("GET", "find_user").status_code for _ in range(91)]
    assert seen == [401] * 90 + [429]
    assert broker.call("GET", "status/performance").status_code == 200


def test_preflights_are_not_counted(broker: LiveBroker) -> None:
    for _ in range(20):
        broker.call("OPTIONS", "generate/text/async")
    assert broker.ask().status_code == 202


def test_bridges_and_clients_at_their_usual_pace_meet_no_limit(broker: LiveBroker) -> None:
    """Fifty workers behind one address that pop each second, and a client that polls eight times a second."""
    key = broker.user("Owner", "trusted").api_key
    request_id = broker.request()
    pops = [broker.pop(key, name="one") for _ in range(50)]
    polls = [broker.call("GET", f"generate/text/status/{request_id}") for _ in range(8)]
    assert {answer.status_code for answer in pops + polls} == {200}


def test_too_many_waiting_orders_of_one_user_are_refused(broker: LiveBroker) -> None:
    user = broker.user().api_key
    first = broker.ask({"prompt": "x", "params": {"n": 20}}, key=user)
    assert first.status_code == 202
    refused = broker.ask({"prompt": "x", "params": {"n": 11}}, key=user)
    assert (refused.status_code, refused.json().get("rc")) == (429, "TooManyPrompts")
    assert int(refused.headers["Retry-After"]) >= 1
    # The limit of two orders a second is met by now, so the last one that fits waits for the next.
    time.sleep(1.1)
    assert broker.ask({"prompt": "x", "params": {"n": 10}}, key=user).status_code == 202


def test_a_user_has_the_same_limit_however_the_key_is_sent() -> None:
    """The address's own limit is as small, so over HTTP the two cannot be told apart."""
    spelled: list[dict[str, str]] = [{"apikey": "k"}, {"Authorization": "Bearer k"}, {"Authorization": "bearer  k"}]
    app = Flask("x")
    callers = set()
    for headers in [*spelled, {"apikey": "k", "Authorization": "Bearer k"}]:
        with app.test_request_context("/", headers=headers):
            assert not _anonymous()
            callers.add(_by_key())
    assert len(callers) == 1
    for headers in ({}, {"apikey": ANONYMOUS}, {"Authorization": f"Bearer {ANONYMOUS}"}):
        with app.test_request_context("/", headers=headers):
            assert _anonymous()


def test_two_keys_that_differ_are_refused_and_limited_all_the_same(broker: LiveBroker) -> None:
    headers = {"apikey": "a", "Authorization": "Bearer b"}
    answers = burst(3, lambda _: broker.call("POST", "generate/text/async", headers=headers, json={"prompt": "x"}))
    assert [answer.status_code for answer in answers] == [401, 401, 429]


def test_a_key_is_nowhere_in_the_limiters_storage(broker: LiveBroker) -> None:
    key = broker.user().api_key
    with Flask("x").test_request_context("/", headers={"apikey": key}):
        assert key not in _by_key()


def test_limits_can_be_off(database_url: str) -> None:
    with live_broker(database_url, rate_limits="off") as broker:
        answers = [broker.ask() for _ in range(20)]
        assert {answer.status_code for answer in answers} == {202}
        assert "X-RateLimit-Limit" not in answers[0].headers


def test_without_its_storage_the_limiter_counts_by_itself(database_url: str) -> None:
    """Nobody listens on that port: as if Redis had gone."""
    with live_broker(database_url, rate_limits="on", rate_limit_storage="redis://127.0.0.1:1") as broker:
        path = f"generate/text/status/{uuid.uuid4()}"
        assert broker.call("GET", path).status_code == 404
        answers = burst(12, lambda _: broker.call("GET", path))
        assert answers[-1].status_code == 429
        assert broker.unexpected_errors() == 0


@pytest.mark.needs("redis")
def test_processes_that_count_in_one_redis_have_one_limit_together(database_url: str, tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        shared = {"rate_limits": "on", "rate_limit_storage": redis.url}
        with live_broker(database_url, **shared) as first, live_broker(database_url, **shared) as second:
            path = f"generate/text/status/{uuid.uuid4()}"
            answers = burst(12, lambda number: (first, second)[number % 2].call("GET", path))
            assert [answer.status_code for answer in answers] == [404] * 10 + [429] * 2
            with redis.client() as client:
                kept = [key for key in client.scan_iter() if client.ttl(key) != -1]
                assert kept == list(client.scan_iter()) != []
                assert not [key for key in kept if ANONYMOUS in key]
            assert first.unexpected_errors() == second.unexpected_errors() == 0


@pytest.mark.needs("redis")
def test_a_redis_that_goes_away_and_comes_back_costs_nobody_an_answer(database_url: str, tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as redis,
        live_broker(database_url, rate_limits="on", rate_limit_storage=redis.url) as broker,
    ):
        path = f"generate/text/status/{uuid.uuid4()}"
        assert broker.call("GET", path).status_code == 404
        redis.stop()
        answers = burst(12, lambda _: broker.call("GET", path))
        assert (answers[0].status_code, answers[-1].status_code) == (404, 429)
        redis.start()
        # It is looked for again with growing pauses; until it is found this process goes on counting.
        give_up = time.monotonic() + 30
        with redis.client() as client:
            while not list(client.scan_iter()):
                assert broker.call("GET", f"generate/text/status/{uuid.uuid4()}").status_code in {404, 429}
                assert time.monotonic() < give_up, "nothing is counted there again"
        assert broker.unexpected_errors() == 0
