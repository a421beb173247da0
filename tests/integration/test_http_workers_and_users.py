"""Workers, models, users and figures over HTTP, on a real database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from horde.api.horde_v2.status import HeartbeatAnswer
from horde.api.horde_v2.users import UserAnswer
from horde.api.horde_v2.workers import ChangeAnswer, WorkerAnswer
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def worker_key(broker: LiveBroker) -> str:
    return broker.user("Owner").api_key


WORKER_NAMES = [
    "x", "a/b", "a%2Fb", "../admin", "Ünïcödé 🙂‍↔️", "\"';--", "<b>x</b>", "Name", "name", "//", "a//b", "x?y#z", "x" * 100,
]  # fmt: skip


def test_a_worker_is_found_by_its_name(broker: LiveBroker) -> None:
    trusted = broker.user("Trusted", "trusted").api_key
    for name in WORKER_NAMES:
        assert broker.pop(trusted, name=name).status_code == 200, name
        found = broker.call("GET", f"workers/name/{quote(name, safe='')}")
        assert found.status_code == 200, name
        worker = WorkerAnswer.model_validate(found.json())
        assert worker.name == name
        assert broker.call("GET", f"workers/{worker.id}").json() == found.json()


def test_a_bad_name_of_a_worker_is_refused(broker: LiveBroker, worker_key: str) -> None:
    bad: list[Any] = ["", " ", "x" * 101, "x" * 10_000, "a\tb", "a\nb", "a\u202eb", None, 5]
    for name in bad:
        answer = broker.pop(worker_key, name=name)
        assert answer.status_code == 400, name
        assert list(answer.json()["errors"]) == ["name"]


def test_a_nul_in_the_name_of_a_worker_is_left_out_and_elsewhere_refused(broker: LiveBroker, worker_key: str) -> None:
    assert broker.pop(worker_key, name="\0a\0b").status_code == 200
    assert [worker["name"] for worker in broker.call("GET", "workers").json()] == ["ab"]
    nothing_left = broker.pop(worker_key, name="\0")
    assert (nothing_left.status_code, list(nothing_left.json()["errors"])) == (400, ["name"])
    elsewhere = broker.pop(worker_key, name="a\0", models=["m\0"])
    assert (elsewhere.status_code, elsewhere.json()["rc"]) == (400, "NulByteInPayload")
    assert list(elsewhere.json()["errors"]) == ["models.0"]


def test_two_spellings_of_one_name_are_one_worker_and_another_owner_cannot_have_it(
    broker: LiveBroker, worker_key: str
) -> None:
    assert broker.pop(worker_key, name="caf\u00e9").status_code == 200
    assert broker.pop(worker_key, name="cafe\u0301").status_code == 200
    assert len(broker.call("GET", "workers").json()) == 1
    stranger = broker.pop(broker.user("Stranger").api_key, name="cafe\u0301")
    assert (stranger.status_code, stranger.json()["rc"]) == (403, "WrongCredentials")


def test_an_owner_pauses_a_worker_and_lets_it_go_on(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key)
    (worker,) = broker.call("GET", "workers", key=worker_key).json()
    path = f"workers/{worker['id']}"
    changed = broker.call("PUT", path, key=worker_key, json={"maintenance": True, "maintenance_msg": "back at nine"})
    assert changed.status_code == 200
    ChangeAnswer.model_validate(changed.json())
    broker.request()
    refused = broker.pop(worker_key)
    assert (refused.status_code, refused.json()["rc"]) == (403, "WorkerMaintenance")
    assert "maintenance mode" in refused.json()["message"]
    assert "back at nine" in refused.json()["message"]
    assert broker.call("GET", path).json()["maintenance_mode"] is True
    assert "maintenance_message" not in broker.call("GET", path).json()
    assert broker.call("GET", path, key=worker_key).json()["maintenance_message"] == "back at nine"
    assert broker.call("PUT", path, key=worker_key, json={"maintenance": False}).json()["maintenance"] is False
    assert broker.pop_job(worker_key)


def test_the_message_of_a_worker_in_maintenance_is_changed_by_itself(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key)
    (worker,) = broker.call("GET", "workers", key=worker_key).json()
    path = f"workers/{worker['id']}"
    broker.call("PUT", path, key=worker_key, json={"maintenance": True, "maintenance_msg": "back at nine"})
    changed = broker.call("PUT", path, key=worker_key, json={"maintenance_msg": "back at ten"})
    assert changed.status_code == 200, changed.text
    ChangeAnswer.model_validate(changed.json())
    assert broker.call("GET", path, key=worker_key).json()["maintenance_message"] == "back at ten"


def test_who_may_change_a_worker(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key)
    (worker,) = broker.call("GET", "workers").json()
    path, change = f"workers/{worker['id']}", {"info": "hello"}
    stranger = broker.call("PUT", path, key=broker.user().api_key, json=change)
    assert (stranger.status_code, stranger.json()["rc"]) == (403, "NotOwner")
    assert broker.call("PUT", path, key="nobody", json=change).status_code == 401
    nothing = broker.call("PUT", path, key=worker_key, json={"unknown": 1})
    assert (nothing.status_code, nothing.json()["rc"]) == (400, "NoWorkerModSelected")
    missing = broker.call("PUT", f"workers/{uuid.uuid4()}", key=worker_key, json=change)
    assert (missing.status_code, missing.json()["rc"]) == (404, "WorkerNotFound")
    moderator = broker.user("Mod", "moderator").api_key
    assert broker.call("PUT", path, key=moderator, json=change).json() == change
    assert broker.call("GET", path).json()["info"] == "hello"


def test_whose_key_it_is(broker: LiveBroker) -> None:
    user = broker.user("Alice", "trusted", kudos=12.5)
    found = UserAnswer.model_validate(broker.call("GET", "find_user", key=user.api_key).json())
    assert (found.username, found.kudos, found.trusted, found.moderator) == (user.alias, 12.5, True, False)
    assert found.worker_count == len(found.worker_ids) == 0
    anonymous = UserAnswer.model_validate(broker.call("GET", "find_user", key=ANONYMOUS).json())
    assert (anonymous.username, anonymous.id, anonymous.worker_ids) == ("Anonymous#0", 0, [])
    unknown = broker.call("GET", "find_user", key="nobody")
    assert (unknown.status_code, unknown.json()["rc"]) == (404, "UserNotFound")
    missing = broker.call("GET", "find_user")
    assert (missing.status_code, missing.json()["rc"]) == (401, "InvalidAPIKey")


def test_what_was_done_shows_at_once(broker: LiveBroker, worker_key: str) -> None:
    client = broker.user("Client", kudos=1000).api_key
    broker.request(key=client)
    job = broker.pop_job(worker_key)
    reward = broker.submit(worker_key, job["id"], generation="x" * 200).json()["reward"]
    assert broker.call("GET", "find_user", key=worker_key).json()["kudos"] == pytest.approx(reward)
    assert broker.call("GET", "find_user", key=client).json()["kudos"] < 1000
    (worker,) = [WorkerAnswer.model_validate(entry) for entry in broker.call("GET", "workers").json()]
    assert (worker.requests_fulfilled, worker.kudos_rewards) == (1, pytest.approx(reward))
    assert isinstance(worker.performance, str)
    HeartbeatAnswer.model_validate(broker.call("GET", "status/heartbeat").json())


def test_models_are_listed_by_kind_and_count(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key, threads=3, models=["m", "other"])
    listed = broker.call("GET", "status/models", params={"type": "text"}).json()
    assert {(entry["name"], entry["count"], entry["type"]) for entry in listed} == {
        ("m", 3, "text"),
        ("other", 3, "text"),
    }
    assert broker.call("GET", "status/models").json() == []
    assert broker.call("GET", "status/models?type=text&min_count=4").json() == []
    assert len(broker.call("GET", "status/models?type=text&max_count=3").json()) == 2
    assert broker.call("GET", "status/models?type=text&min_count=three").status_code == 400


def test_workers_are_listed_by_kind_and_name(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key, name="one")
    broker.pop(worker_key, name="two")
    assert {worker["name"] for worker in broker.call("GET", "workers?type=text").json()} == {"one", "two"}
    assert broker.call("GET", "workers?type=image").json() == []
    assert broker.call("GET", "workers?type=interrogation").json() == []
    assert [worker["name"] for worker in broker.call("GET", "workers?name=two").json()] == ["two"]


def test_an_empty_type_or_name_asks_for_all_workers(broker: LiveBroker, worker_key: str) -> None:
    # As horde-sdk asks for all workers.
    assert broker.pop(worker_key).status_code == 200
    listed = broker.call("GET", "workers?type=&name=").json()
    assert len(listed) == 1
    assert listed == broker.call("GET", "workers").json()
