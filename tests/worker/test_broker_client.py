"""The HTTP client against a real server that misbehaves."""

from __future__ import annotations

import pytest

from tests.worker.played_broker import FIND_USER, POP, SUBMIT, Answer, Fault, PlayedBroker
from worker.backoff import Backoff
from worker.broker import (
    BrokerClient,
    BrokerUnavailableError,
    JobGoneError,
    PausedError,
    TurnedAwayError,
    normalise_url,
)

BODY = {"name": "w", "models": ["m"], "wait": 0}
RESULT = {"id": "j", "generation": "text", "state": "ok", "seed": 1}


@pytest.fixture
def client(broker: PlayedBroker):
    made = BrokerClient(broker.url, "secret-key", "Horde Worker:1:me")
    yield made
    made.close()


def test_a_pop_carries_key_agent_and_idempotency_key(broker, client):
    broker.give("j", "hi")
    assert client.pop(BODY, "once")["id"] == "j"
    [call] = broker.made(POP)
    assert call.body == BODY
    assert call.key == "once"
    assert call.headers["apikey"] == "secret-key"
    assert call.headers["Client-Agent"] == "Horde Worker:1:me"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, {"message": "No user matches this API key.", "rc": "UserNotFound"}),
        Answer(401, {"message": "No user matches", "rc": "InvalidAPIKey"}),
    ],
)
def test_a_key_that_is_nobodys_is_noticed(broker, client, answer):
    broker.fail(FIND_USER, answer)
    with pytest.raises(TurnedAwayError, match="does not know this API key") as turned_away:
        client.check_key()
    assert "secret-key" not in str(turned_away.value)
    client.check_key()
    assert broker.made(FIND_USER)[0].headers["apikey"] == "secret-key"


def test_a_broker_that_says_nothing_about_keys_is_given_the_benefit_of_the_doubt(broker, client):
    broker.fail(FIND_USER, Answer(404, b"<html>"), Answer(503), Fault.RESET)
    client.check_key()
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError):
            client.check_key()


def test_the_reward_comes_back(broker, client):
    assert client.submit(RESULT, "k") == 1.5
    assert broker.settled["j"] == RESULT


def test_text_arrives_byte_for_byte(broker, client):
    text = "👩‍👩‍👧‍👦 e\u0301 \u2028 \ufeff \u202e\r\n 𠀀  \x00"
    client.submit({**RESULT, "generation": text}, "k")
    assert broker.settled["j"]["generation"] == text


@pytest.mark.parametrize(
    "fault",
    [Answer(500), Answer(502, b"<html>bad gateway</html>"), Answer(503), Answer(429), Fault.RESET, Fault.LOST],
    ids=["500", "502 html", "503", "429", "reset", "lost answer"],
)
@pytest.mark.parametrize("route", [POP, SUBMIT])
def test_what_may_pass_is_reported_as_such(broker, client, route, fault):
    broker.fail(route, fault)
    call = (lambda: client.pop(BODY, "k")) if route == POP else (lambda: client.submit(RESULT, "k"))
    with pytest.raises(BrokerUnavailableError):
        call()
    call()


def test_a_lost_answer_comes_again_for_the_same_key(broker, client):
    broker.give("j1")
    broker.give("j2")
    broker.fail(POP, Fault.LOST)
    with pytest.raises(BrokerUnavailableError):
        client.pop(BODY, "k")
    assert client.pop(BODY, "k")["id"] == "j1"
    assert client.pop(BODY, "other")["id"] == "j2"


def test_nobody_there_is_worth_another_try(broker, client):
    broker.stop()
    with pytest.raises(BrokerUnavailableError, match="connection refused"):
        client.pop(BODY, "k")


@pytest.mark.parametrize("body", [b"not json", b"[1]", b""])
def test_an_answer_that_is_no_json_object_is_worth_another_try(broker, client, body):
    broker.fail(POP, Answer(200, body))
    with pytest.raises(BrokerUnavailableError, match="JSON"):
        client.pop(BODY, "k")


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("nonsense", None), ("Fri, 01 Jan 2010 00:00:00 GMT", 0.0), (None, None)]
)
def test_retry_after_is_read_in_both_forms(broker, client, value, seconds):
    broker.fail(POP, Answer(503, {"message": "busy"}, {"Retry-After": value} if value else {}))
    with pytest.raises(BrokerUnavailableError, match="busy") as unavailable:
        client.pop(BODY, "k")
    assert unavailable.value.retry_after == seconds


@pytest.mark.parametrize("rc", ["AbortedGen", "DuplicateGen"])
def test_a_job_that_is_over_is_final(broker, client, rc):
    broker.fail(SUBMIT, Answer(400, {"message": "Please check your worker speed", "rc": rc}))
    with pytest.raises(JobGoneError, match=rc):
        client.submit(RESULT, "k")


def test_an_unknown_job_is_final_but_a_proxys_404_is_not(broker, client):
    broker.forgotten.add("j")
    with pytest.raises(JobGoneError, match="does not exist"):
        client.submit(RESULT, "k")
    broker.fail(SUBMIT, Answer(404, b"<html>no backend</html>"))
    with pytest.raises(BrokerUnavailableError):
        client.submit(RESULT, "k")


@pytest.mark.parametrize(
    "answer",
    [
        Answer(403, {"message": "paused by its owner", "rc": "WorkerMaintenance"}),
        Answer(403, {"message": "This worker is in maintenance mode", "rc": "Forbidden"}),
    ],
)
def test_maintenance_is_a_pause_with_its_message(broker, client, answer):
    broker.fail(POP, answer)
    with pytest.raises(PausedError, match=answer.body["message"]):
        client.pop(BODY, "k")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(401, {"message": "No user matches", "rc": "InvalidAPIKey"}), "does not know this API key"),
        (Answer(403, {"message": "name is taken", "rc": "WrongCredentials"}), r"name is taken \(WrongCredentials\)"),
        (Answer(400, {"message": "bad", "errors": {"max_length": "too small"}}), "max_length: too small"),
        (Answer(404, b"<html>"), "is it a broker"),
    ],
)
def test_being_turned_away_says_why_and_never_shows_the_key(broker, client, answer, says):
    broker.fail(POP, answer)
    with pytest.raises(TurnedAwayError, match=says) as turned_away:
        client.pop(BODY, "k")
    assert "secret-key" not in str(turned_away.value)


def test_a_404_from_a_known_broker_is_a_proxy_during_its_restart(broker, client):
    client.pop(BODY, "a")
    broker.fail(POP, Answer(404, b"<html>"))
    with pytest.raises(BrokerUnavailableError):
        client.pop(BODY, "k")


@pytest.mark.parametrize("suffix", ["", "/", "/api", "/api/", "/api/v2", "/api/v2/"])
def test_an_address_may_be_written_with_its_api_path(suffix):
    assert normalise_url("http://h:7001" + suffix) == "http://h:7001"


@pytest.mark.parametrize("url", ["", "localhost:7001", "ftp://h", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="is not a URL"):
        normalise_url(url)


def test_delays_grow_to_a_bound_with_jitter_and_obey_the_broker():
    backoff = Backoff(first=1.0, longest=8.0)
    delays = [backoff.next() for _ in range(8)]
    for delay, bound in zip(delays, [1, 2, 4, 8, 8, 8, 8, 8], strict=True):
        assert bound / 2 <= delay <= bound
    assert len(set(delays)) == len(delays)
    assert backoff.next(retry_after=60) == 60
    backoff.reset()
    assert backoff.next() <= 1
