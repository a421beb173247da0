"""Workers as the registry knows them: names, limits, check-ins, deletion."""

from __future__ import annotations

import functools
import unicodedata
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.db.tables.workers import ONLINE_SECONDS
from horde.errors import HordeError
from horde.registry.check_in import LOCK_OWNER, WRITE_EVERY
from horde.usecases.workers import list_workers, read_worker_by_name, update_worker
from tests.support.broker import Broker, offer, open_broker
from tests.support.concurrency import Stage, together

COMPOSED, DECOMPOSED = unicodedata.normalize("NFC", "Zoë"), unicodedata.normalize("NFD", "Zoë")


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def count_workers(broker: Broker) -> int:
    return int(broker.world.scalar("SELECT count(*) FROM workers"))


def column(broker: Broker, name: str, worker: str = "worker") -> Any:
    return broker.world.scalar(f"SELECT {name} FROM workers WHERE name = %(worker)s", worker=worker)


# --- names


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "x" * 100,
        "a/b",
        "a%2Fb",
        "../admin",
        "Ünïcödé 🙂‍↔️",
        "\"';--",
        "<b>x</b>",
        " padded ",
        "%(name)s",
        "*",
        "👩‍👩‍👧‍👦",
        "می\u200cخواهم",
        "क्\u200dष",
    ],
)
def test_a_name_is_kept_as_it_is_and_found_again(broker: Broker, key: str, name: str) -> None:
    worker = broker.worker_id(key, name)
    assert broker.worker(name).name == name
    assert [found.id for found in list_workers(broker.context, None, name=name)] == [worker]
    # The second check-in is the same worker's.
    assert broker.worker_id(key, name) == worker
    assert count_workers(broker) == 1


@pytest.mark.parametrize(
    ("name", "rc"),
    [
        ("", "BadRequest"),
        (" ", "BadRequest"),
        (" \u3000 ", "BadRequest"),
        ("\0", "BadRequest"),
        ("x" * 101, "TooLongWorkerName"),
        ("x" * 10_000, "TooLongWorkerName"),
        ("a\u202eb", "BadRequest"),
        ("a\u2066b", "BadRequest"),
        ("tab\there", "BadRequest"),
        ("new\nline", "BadRequest"),
        ("bell\x07", "BadRequest"),
        ("half \ud83d", "BadRequest"),
        ("\u200b", "BadRequest"),
        ("work\u200ber", "BadRequest"),
        ("work\u00ader", "BadRequest"),
        ("\ufeffworker", "BadRequest"),
        ("work\u2028er", "BadRequest"),
        ("worker\u2029", "BadRequest"),
        ("worker\U000e0001", "BadRequest"),
        ("work\u200der", "BadRequest"),
        ("\u3164", "BadRequest"),
    ],
)
def test_a_bad_name_is_refused_by_field_and_registers_nothing(broker: Broker, key: str, name: str, rc: str) -> None:
    with pytest.raises(HordeError) as refused:
        broker.pop(key, name=name)
    assert (refused.value.status, refused.value.rc, list(refused.value.errors or ())) == (400, rc, ["name"])
    assert count_workers(broker) == 0


def test_two_spellings_of_one_name_are_one_worker(broker: Broker, key: str) -> None:
    assert COMPOSED != DECOMPOSED
    worker = broker.worker_id(key, COMPOSED)
    broker.nothing(key, name=DECOMPOSED)
    assert count_workers(broker) == 1
    assert read_worker_by_name(broker.context, DECOMPOSED).id == worker


def test_upper_and_lower_case_are_two_workers(broker: Broker, key: str) -> None:
    assert broker.worker_id(key, "Name") != broker.worker_id(key, "name")


def test_a_nul_is_taken_out_of_a_name(broker: Broker, key: str) -> None:
    assert broker.worker_id(key, "plain") == broker.worker(name="plain").id
    broker.nothing(key, name="pl\0ain")
    assert count_workers(broker) == 1


def test_a_name_that_another_user_has_is_not_taken_over(broker: Broker, key: str) -> None:
    broker.nothing(key)
    with pytest.raises(HordeError, match="wrong credentials") as refused:
        broker.pop(broker.user("thief").api_key)
    assert (refused.value.status, refused.value.rc) == (403, "WrongCredentials")
    # Nor while its worker is offline.
    broker.world.advance(2 * ONLINE_SECONDS)
    with pytest.raises(HordeError, match="wrong credentials"):
        broker.pop(broker.user("later").api_key)


def test_a_name_wanted_by_two_users_at_once_goes_to_one(broker: Broker) -> None:
    def pop(api_key: str) -> str:
        try:
            broker.nothing(api_key)
        except HordeError as error:
            return error.rc
        return "ok"

    for number in range(5):
        keys = [broker.user(f"user {number} {i}").api_key for i in range(4)]
        with broker.context.database.transaction() as tx:
            tx.execute("DELETE FROM workers")
        answers = together(*[functools.partial(pop, api_key) for api_key in keys])
        assert sorted(answers) == ["WrongCredentials"] * 3 + ["ok"]
        assert count_workers(broker) == 1


def test_a_name_of_a_worker_of_another_kind_is_refused(broker: Broker, key: str) -> None:
    owner = broker.world.scalar("SELECT id FROM users WHERE name = 'owner'")
    broker.world.worker(owner, name="painter", kind="image")
    with pytest.raises(HordeError) as refused:
        broker.pop(key, name="painter")
    assert (refused.value.status, refused.value.rc) == (400, "PolymorphicNameConflict")


# --- how many


def refused_or_id(broker: Broker, key: str, name: str) -> str:
    try:
        broker.nothing(key, name=name)
    except HordeError as error:
        return error.rc
    return "ok"


@pytest.mark.parametrize(
    ("roles", "limit", "rc"), [((), 3, "TooManyWorkers"), (("trusted",), 20, "TooManyWorkersTrusted")]
)
def test_a_user_has_as_many_workers_as_its_limit_and_not_one_more(
    broker: Broker, roles: tuple[str, ...], limit: int, rc: str
) -> None:
    key = broker.user("many", *roles).api_key
    for number in range(limit - 1):
        broker.nothing(key, name=f"worker{number}")
    assert refused_or_id(broker, key, "the last") == "ok"
    assert refused_or_id(broker, key, "one more") == rc
    assert count_workers(broker) == limit
    # Those it has go on, and another user is not concerned.
    broker.nothing(key, name="worker0")
    broker.nothing(broker.user().api_key, name="somebody else's")


def test_first_pops_at_once_do_not_pass_the_limit(broker: Broker) -> None:
    for number in range(5):
        key = broker.user(f"racer{number}").api_key
        names = [f"{number}-{i}" for i in range(8)]
        answers = together(*[functools.partial(refused_or_id, broker, key, name) for name in names])
        assert answers.count("ok") == 3
        assert answers.count("TooManyWorkers") == 5


def test_the_second_of_two_first_pops_counts_the_first_one(broker: Broker, key: str) -> None:
    broker.nothing(key, name="one")
    broker.nothing(key, name="two")
    with Stage(broker.context.database) as stage:
        answers = stage.in_order(
            lambda: refused_or_id(broker, key, "three"), lambda: refused_or_id(broker, key, "four"), after=LOCK_OWNER
        )
    assert answers == ("ok", "TooManyWorkers")


def test_one_worker_that_pops_from_many_threads_at_first_counts_once(broker: Broker, key: str) -> None:
    broker.nothing(key, name="one")
    broker.nothing(key, name="two")
    # The last that the limit allows: its own threads do not count against it.
    assert together(*[functools.partial(refused_or_id, broker, key, "three")] * 8) == ["ok"] * 8
    assert count_workers(broker) == 3


def test_workers_that_are_offline_or_deleted_do_not_count(broker: Broker, key: str) -> None:
    for name in ("one", "two", "three"):
        broker.nothing(key, name=name)
    assert refused_or_id(broker, key, "four") == "TooManyWorkers"
    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE workers SET deleted_at = horde_now() WHERE name = 'one'")
    assert refused_or_id(broker, key, "four") == "ok"
    broker.world.advance(ONLINE_SECONDS + 1)
    assert [refused_or_id(broker, key, name) for name in ("five", "six", "seven")] == ["ok"] * 3


def test_old_workers_that_come_back_do_not_pass_the_limit(broker: Broker, key: str) -> None:
    for name in ("one", "two", "three"):
        broker.nothing(key, name=name)
    broker.world.advance(ONLINE_SECONDS + 1)
    for name in ("four", "five"):
        broker.nothing(key, name=name)
    # One of the old ones has room, a second has not.
    assert refused_or_id(broker, key, "one") == "ok"
    assert refused_or_id(broker, key, "two") == "TooManyWorkers"
    assert refused_or_id(broker, key, "one") == "ok"
    online = [worker.name for worker in list_workers(broker.context, "text")]
    assert sorted(online) == ["five", "four", "one"]


def test_without_rate_limits_there_is_no_limit(database_url: str) -> None:
    with open_broker(database_url, rate_limits="off") as broker:
        key = broker.user().api_key
        assert [refused_or_id(broker, key, f"worker{number}") for number in range(5)] == ["ok"] * 5


# --- check-ins


def test_a_changed_worker_is_written_at_once_and_an_unchanged_one_only_now_and_then(broker: Broker, key: str) -> None:
    broker.nothing(key)
    first = column(broker, "last_check_in")
    broker.nothing(key)
    assert column(broker, "last_check_in") == first

    for changes in (
        {"models": ["m", "n"]},
        {"models": ["n", "m"]},
        {"max_length": 100},
        {"max_context_length": 2048},
        {"threads": 4},
        {"nsfw": False},
        {"bridge_agent": "AI Horde Worker:2:tests"},
    ):
        before = column(broker, "last_check_in")
        broker.nothing(key, **changes)
        (name, value), *_ = changes.items()
        assert (column(broker, name), column(broker, "last_check_in") > before) == (value, True)
        broker.nothing(key, **changes)

    broker.nothing(key)
    before = column(broker, "last_check_in")
    broker.world.advance(WRITE_EVERY + 1)
    broker.nothing(key)
    assert column(broker, "last_check_in") > before


def test_a_model_named_twice_is_announced_once(broker: Broker, key: str) -> None:
    broker.nothing(key, models=["m", "n", "m"])
    assert broker.worker().models == ["m", "n"]


def test_presence_counts_as_uptime_and_absence_does_not(broker: Broker, key: str) -> None:
    broker.nothing(key)
    for seconds in (60, ONLINE_SECONDS - 1):
        broker.world.advance(seconds)
        broker.nothing(key)
    present = 60 + ONLINE_SECONDS - 1
    assert broker.worker().uptime == pytest.approx(present, abs=2)
    assert broker.worker().online

    broker.world.advance(ONLINE_SECONDS + 1)
    assert not broker.worker().online
    broker.nothing(key)
    assert broker.worker().online
    assert broker.worker().uptime == pytest.approx(present, abs=2)


def test_what_a_worker_announces_is_what_is_shown(broker: Broker, key: str) -> None:
    said = offer(models=["a/b"], max_length=123, max_context_length=2345, threads=3, nsfw=False)
    broker.nothing(key, models=said.models, max_length=123, max_context_length=2345, threads=3, nsfw=False)
    shown = broker.worker()
    assert (shown.models, shown.max_length, shown.max_context_length, shown.threads, shown.nsfw) == (
        ["a/b"],
        123,
        2345,
        3,
        False,
    )
    assert (shown.type, shown.bridge_agent, shown.performance) == (
        "text",
        said.bridge_agent,
        "No requests fulfilled yet",
    )
    # Whose it is, only its owner sees.
    assert shown.owner is None
    (own,) = list_workers(broker.context, "text", api_key=key)
    assert own.owner == broker.find_user(key).username


# --- deletion


def test_a_deleted_worker_is_gone_and_its_name_free_but_its_jobs_go_on(broker: Broker, key: str) -> None:
    request = broker.order()
    job = broker.job(key)
    old = broker.worker().id
    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE workers SET deleted_at = horde_now()")

    with pytest.raises(HordeError) as missing:
        broker.worker()
    assert (missing.value.status, missing.value.rc) == (404, "WorkerNotFound")
    assert list_workers(broker.context, None) == []
    with pytest.raises(HordeError):
        update_worker(broker.context, key, old, maintenance=True)

    # Authorised by the owner that the job remembers.
    broker.submit(key, job.id)
    (generation,) = broker.status(request).generations
    assert (generation.worker_id, generation.worker_name) == (str(old), "worker")

    other = broker.user("other").api_key
    broker.nothing(other)
    new = broker.worker()
    assert (new.id == old, new.requests_fulfilled) == (False, 0)


def test_a_request_for_a_deleted_worker_alone_is_refused(broker: Broker, key: str) -> None:
    worker = broker.worker_id(key)
    broker.order(worker_ids=[worker])
    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE workers SET deleted_at = horde_now()")
    for unknown in (worker, uuid.uuid4()):
        with pytest.raises(HordeError) as refused:
            broker.order(worker_ids=[unknown])
        assert (refused.value.status, refused.value.rc) == (404, "WorkerNotFound")
