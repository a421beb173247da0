"""What a worker's pop gets: the filter and its reasons, whose requests come first, who gets the retry, and batches."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horde.errors import HordeError
from horde.maintenance.passes import run_pass
from horde.queue.candidates import SKIPPED_DEPTH
from horde.usecases.workers import update_worker
from tests.support.broker import MODEL, Broker, open_broker


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def measure(broker: Broker, worker: uuid.UUID, tokens_per_second: float) -> None:
    """Let the worker have been measured at this speed."""
    with broker.context.database.transaction() as tx:
        tx.execute(
            "INSERT INTO worker_totals (worker_id, recent_tokens, recent_seconds) VALUES (%(id)s, %(tokens)s, 10)",
            {"id": worker, "tokens": 10 * tokens_per_second},
        )


# --- the filter


@pytest.mark.parametrize(
    ("reason", "wanted", "beyond"),
    [
        ("max_length", {"max_length": 512}, {"max_length": 513}),
        ("max_context_length", {"max_context_length": 4096}, {"max_context_length": 4097}),
    ],
)
def test_a_worker_gets_what_reaches_its_limits_and_not_one_token_more(
    broker: Broker, key: str, reason: str, wanted: dict[str, Any], beyond: dict[str, Any]
) -> None:
    broker.order(**beyond)
    assert broker.nothing(key) == {reason: 1}

    request = broker.order(**wanted)
    assert broker.request_of(broker.job(key)) == request
    assert broker.nothing(key) == {reason: 1}


def test_a_worker_gets_only_requests_for_its_models(broker: Broker, key: str) -> None:
    broker.order(models=["other"])
    # What is for other models is not even looked at.
    assert broker.nothing(key) == {}

    either = broker.order(models=["other", MODEL])
    assert broker.request_of(broker.job(key)) == either
    anything = broker.order(models=[])
    assert broker.request_of(broker.job(key)) == anything


@pytest.mark.parametrize("model", ["a/b", "a b", "a%2Fb", "..", "é", "'; --", "**"])
def test_any_name_of_a_model_finds_its_worker(broker: Broker, key: str, model: str) -> None:
    broker.order(models=["other"])
    request = broker.order(models=[model])
    job = broker.job(key, models=[model])
    assert (broker.request_of(job), job.model) == (request, model)


def test_a_model_called_like_the_queues_word_for_any_is_refused(broker: Broker, key: str) -> None:
    with pytest.raises(HordeError, match="no model's name") as refused:
        broker.order(models=["*", MODEL])
    assert (refused.value.status, refused.value.errors and list(refused.value.errors)) == (400, ["models"])
    assert broker.nothing(key) == {}

    # A worker may call its model what it likes: it gets what asks for any.
    request = broker.order(models=[])
    assert broker.request_of(broker.job(key, models=["*"])) == request


def test_an_allow_list_lets_nobody_else_have_it(broker: Broker, key: str) -> None:
    chosen = broker.worker_id(key, "chosen")
    request = broker.order(worker_ids=[chosen])

    assert broker.nothing(key, name="other") == {"worker_id": 1}
    assert broker.request_of(broker.job(key, name="chosen")) == request


def test_a_deny_list_lets_everybody_else_have_it(broker: Broker, key: str) -> None:
    denied = broker.worker_id(key, "denied")
    request = broker.order(worker_ids=[denied], worker_blacklist=True)

    assert broker.nothing(key, name="denied") == {"worker_id": 1}
    assert broker.request_of(broker.job(key, name="other")) == request


def test_a_request_for_trusted_workers_waits_for_one(broker: Broker, key: str) -> None:
    request = broker.order(trusted_workers=True)

    assert broker.nothing(key) == {"untrusted": 1}
    trusted = broker.user("trusted", "trusted").api_key
    assert broker.request_of(broker.job(trusted, name="trusted")) == request


@pytest.mark.parametrize("speed", [None, 5.0])
def test_a_request_for_fast_workers_goes_to_one_that_is_fast_or_was_never_measured(
    broker: Broker, key: str, speed: float | None
) -> None:
    slow = broker.worker_id(key, "slow")
    measure(broker, slow, 4.9)
    if speed is not None:
        measure(broker, broker.worker_id(key, "fast"), speed)
    request = broker.order(slow_workers=False)

    assert broker.nothing(key, name="slow") == {"performance": 1}
    assert broker.request_of(broker.job(key, name="fast")) == request


def test_a_slow_worker_gets_what_does_not_mind(broker: Broker, key: str) -> None:
    measure(broker, broker.worker_id(key), 0.1)
    request = broker.order(slow_workers=True)
    assert broker.request_of(broker.job(key)) == request


def test_a_worker_in_maintenance_serves_only_its_owner_and_is_told_why(broker: Broker, key: str) -> None:
    worker = broker.worker_id(key)
    update_worker(broker.context, key, worker, maintenance=True, maintenance_message="a new disk")
    broker.order()

    with pytest.raises(HordeError, match="maintenance mode: a new disk") as refused:
        broker.pop(key)
    assert (refused.value.status, refused.value.rc) == (403, "WorkerMaintenance")

    own = broker.order(key)
    assert broker.request_of(broker.job(key)) == own
    update_worker(broker.context, key, worker, maintenance=False)
    broker.job(key)


def test_each_request_that_is_skipped_counts_under_its_first_reason(broker: Broker, key: str) -> None:
    other = broker.worker_id(broker.user().api_key, "other")
    broker.order(worker_ids=[other], max_length=600)
    broker.order(trusted_workers=True, max_context_length=8192)
    broker.order(max_context_length=8192, max_length=600)
    broker.order(max_length=600)
    broker.order(max_length=600, models=[MODEL, "also"])
    broker.order(max_length=600, models=["another"])

    counted = broker.nothing(key, models=[MODEL, "also"])
    # The one that names two of the worker's models stands in the queue under both, and counts once.
    assert counted == {"worker_id": 1, "untrusted": 1, "max_context_length": 1, "max_length": 2}


def test_skipped_requests_are_counted_up_to_a_depth(broker: Broker, key: str) -> None:
    for _ in range(SKIPPED_DEPTH + 5):
        broker.world.request(max_length=600)
    assert broker.nothing(key) == {"max_length": SKIPPED_DEPTH}


def test_what_a_worker_cannot_take_never_hides_what_it_can(broker: Broker, key: str) -> None:
    for _ in range(30):
        broker.world.request(max_length=600)
    request = broker.world.request(max_length=512)
    assert broker.request_of(broker.job(key)) == request


def test_an_empty_queue_gives_an_empty_answer(broker: Broker, key: str) -> None:
    popped = broker.pop(key)
    assert (popped.jobs, popped.skipped, popped.messages) == ([], {}, [])


@pytest.mark.parametrize("limit", ["expires_at", "deadline"])
def test_a_request_past_its_time_is_given_to_nobody_though_no_pass_has_run(
    broker: Broker, key: str, limit: str
) -> None:
    request = broker.order(deadline_seconds=100 if limit == "deadline" else None)
    broker.world.pass_time(request, limit)
    assert broker.nothing(key) == {}
    assert broker.world.slots(request) == ["waiting"]


@pytest.mark.parametrize(
    ("fields", "rc"),
    [
        ({"models": []}, "BadRequest"),
        ({"priority_usernames": ["nobody"]}, "InvalidPriorityUsername"),
        ({"priority_usernames": ["nobody#"]}, "InvalidPriorityUsername"),
        ({"priority_usernames": ["nobody#1x"]}, "InvalidPriorityUsername"),
        ({"priority_usernames": ["nobody#²"]}, "InvalidPriorityUsername"),
        ({"priority_usernames": ["nobody#" + "9" * 19]}, "InvalidPriorityUsername"),
    ],
)
def test_a_pop_that_makes_no_sense_is_refused(broker: Broker, key: str, fields: dict[str, Any], rc: str) -> None:
    with pytest.raises(HordeError) as refused:
        broker.pop(key, **fields)
    assert (refused.value.status, refused.value.rc) == (400, rc)


def test_the_anonymous_account_works_for_nobody(broker: Broker) -> None:
    with pytest.raises(HordeError) as refused:
        broker.pop("0000000000")
    assert (refused.value.status, refused.value.rc) == (403, "AnonForbiddenWorker")


# --- whose requests come first


def test_the_owners_and_its_friends_requests_come_first_among_each_other_by_age(broker: Broker, key: str) -> None:
    friend, owner = broker.user("friend"), broker.user("boss")
    stranger_s = broker.order()
    friend_s = broker.order(friend.api_key)
    owner_s = broker.order(owner.api_key)

    pops = [broker.job(owner.api_key, priority_usernames=[friend.alias]) for _ in range(3)]
    assert [broker.request_of(job) for job in pops] == [friend_s, owner_s, stranger_s]


def test_a_friend_that_asked_for_what_the_worker_cannot_do_is_passed_over(broker: Broker) -> None:
    owner = broker.user("boss")
    broker.order(owner.api_key, max_length=600)
    broker.order(owner.api_key, models=["other"])
    stranger_s = broker.order()
    assert broker.request_of(broker.job(owner.api_key)) == stranger_s


# --- models


def test_the_model_of_a_job_is_one_that_this_very_pop_named_and_stays(broker: Broker, key: str) -> None:
    request = broker.order(models=[])
    job = broker.job(key, models=["koboldcpp/gemma-31B"])
    assert job.model == "koboldcpp/gemma-31B"

    # A second thread of the same worker announces another list meanwhile.
    broker.nothing(key, models=["agents/other"])
    broker.submit(key, job.id)

    (generation,) = broker.status(request).generations
    assert (generation.model, generation.worker_name) == ("koboldcpp/gemma-31B", "worker")
    assert generation.worker_id == str(broker.worker().id)


def test_a_job_runs_on_a_model_that_both_sides_named(broker: Broker, key: str) -> None:
    for _ in range(10):
        broker.order(models=["b", "c", "x"])
    models = {broker.job(key, models=["a", "b", "c"]).model for _ in range(10)}
    assert models <= {"b", "c"}


# --- batches


@pytest.mark.parametrize(("amount", "slots"), [(1, [0]), (3, [0, 1, 2]), (9, [0, 1, 2, 3, 4])])
def test_a_batch_is_of_one_request_with_its_own_seeds(broker: Broker, key: str, amount: int, slots: list[int]) -> None:
    request, other = broker.order(n=5), broker.order(n=5)

    jobs = broker.pop(key, amount=amount).jobs
    assert [job.slot for job in jobs] == slots
    assert {broker.request_of(job) for job in jobs} == {request}
    seeds = broker.world.rows("SELECT seed FROM slots WHERE request_id = %(id)s ORDER BY idx", id=request)
    assert [(job.seed,) for job in jobs] == seeds[: len(slots)]
    assert broker.world.slots(other) == ["waiting"] * 5


# --- who gets the retry


@pytest.mark.parametrize("report", ["faulted", "released"])
def test_a_retry_is_not_offered_to_the_worker_that_failed_while_another_could_serve_it(
    broker: Broker, key: str, report: str
) -> None:
    broker.nothing(key, name="other")
    request = broker.order()
    broker.submit(key, broker.job(key, name="failed").id, state=report)

    assert broker.nothing(key, name="failed") == {}
    assert broker.request_of(broker.job(key, name="other")) == request


@pytest.mark.parametrize("report", ["faulted", "released"])
def test_a_retry_goes_to_anyone_when_there_is_nobody_else(broker: Broker, key: str, report: str) -> None:
    request = broker.order()
    broker.submit(key, broker.job(key).id, state=report)
    assert broker.request_of(broker.job(key)) == request


def elsewhere(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other", models=["else"])


def too_short(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other", max_length=79)


def paused(broker: Broker, key: str) -> None:
    update_worker(broker.context, key, broker.worker_id(key, "other"), maintenance=True)


def gone(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other")
    broker.world.advance(301)


@pytest.mark.parametrize("no_help", [elsewhere, too_short, paused, gone], ids=lambda case: case.__name__)
def test_one_that_is_offline_or_could_not_serve_it_does_not_stand_in_the_way(
    broker: Broker, key: str, no_help: Callable[[Broker, str], None]
) -> None:
    no_help(broker, key)
    request = broker.order()
    broker.submit(key, broker.job(key, name="failed").id, state="faulted")
    assert broker.request_of(broker.job(key, name="failed")) == request


def test_the_failed_worker_gets_it_again_once_the_other_one_goes_offline(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other")
    request = broker.order()
    broker.submit(key, broker.job(key, name="failed").id, state="faulted")
    broker.world.advance(299)
    assert broker.nothing(key, name="failed") == {}

    broker.world.advance(2)
    assert broker.request_of(broker.job(key, name="failed")) == request


def test_a_worker_that_failed_it_too_does_not_count_as_another_one(broker: Broker, key: str) -> None:
    request = broker.order()
    broker.nothing(key, name="second", max_length=16)
    broker.submit(key, broker.job(key, name="first").id, state="released")
    broker.submit(key, broker.job(key, name="second").id, state="released")
    # Both have tried: either may have it.
    assert broker.request_of(broker.job(key, name="first")) == request


def test_a_failed_worker_still_gets_other_requests(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other")
    broker.order()
    broker.submit(key, broker.job(key, name="failed").id, state="faulted")
    fresh = broker.order()
    assert broker.request_of(broker.job(key, name="failed")) == fresh


# --- the lease of a popped job


def test_a_job_is_taken_back_when_its_lease_is_over_and_not_before(broker: Broker, key: str) -> None:
    request = broker.order(max_length=512)
    job = broker.job(key)
    assert job.ttl == 286

    broker.world.advance(285)
    assert run_pass(broker.context).stale == 0
    broker.world.advance(2)
    assert run_pass(broker.context).stale == 1
    assert broker.world.slots(request) == ["waiting"]
    assert broker.worker().uncompleted_jobs == 1


def test_a_measured_worker_gets_a_lease_by_its_speed(broker: Broker, key: str) -> None:
    measure(broker, broker.worker_id(key), 2.0)
    broker.order(max_length=512)
    assert broker.job(key).ttl == 768
