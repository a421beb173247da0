"""A pop that says how many more sequences its worker can take: jobs of several requests at once, in the order of the queue."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from horde.maintenance.passes import run_pass
from horde.queue.candidates import DEPTH
from horde.usecases.pop import PoppedJob
from tests.support.broker import MODEL, Broker, open_broker
from tests.support.concurrency import together
from tests.support.invariants import check_invariants

ROUNDS = 20


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made
        check_invariants(made.context.database)


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def taken(broker: Broker, key: str, slots: int, **fields: Any) -> list[tuple[uuid.UUID, int]]:
    """(request, slot) of each job of a pop."""
    return [(job.request_id, job.slot) for job in broker.pop(key, slots=slots, **fields).jobs]


def facts(jobs: list[PoppedJob]) -> list[tuple[Any, ...]]:
    return [(job.id, job.model, job.ttl, job.payload, job.seed, job.slot, job.cache_salt) for job in jobs]


# --- which jobs


def test_one_pop_takes_several_requests_in_the_order_of_the_queue(broker: Broker, key: str) -> None:
    requests = [broker.order(prompt=f"prompt {number}") for number in range(4)]

    jobs = broker.pop(key, slots=3).jobs

    assert [broker.request_of(job) for job in jobs] == [job.request_id for job in jobs] == requests[:3]
    assert [job.payload["prompt"] for job in jobs] == ["prompt 0", "prompt 1", "prompt 2"]
    assert broker.world.slots(requests[3]) == ["waiting"]


def test_the_owners_and_its_friends_requests_come_first_here_too(broker: Broker, key: str) -> None:
    friend = broker.user("friend")
    stranger_s = broker.order()
    friend_s = broker.order(friend.api_key)
    own = broker.order(key)

    found = taken(broker, key, 3, priority_usernames=[friend.alias])

    assert [request for request, _ in found] == [friend_s, own, stranger_s]


def test_an_earlier_rank_comes_first_however_late_it_was_asked_for(broker: Broker, key: str) -> None:
    poor, rich = broker.user("poor"), broker.user("rich", kudos=100_000)
    late = broker.order(poor.api_key)
    early = broker.order(rich.api_key)

    assert [request for request, _ in taken(broker, key, 2)] == [early, late]


def test_a_request_that_does_not_fit_is_taken_in_part_and_its_rest_comes_first_next_time(
    broker: Broker, key: str
) -> None:
    first, second, third = broker.order(n=3), broker.order(n=4), broker.order()

    assert taken(broker, key, 5) == [(first, 0), (first, 1), (first, 2), (second, 0), (second, 1)]
    assert broker.world.slots(second) == ["processing"] * 2 + ["waiting"] * 2
    assert taken(broker, key, 50) == [(second, 2), (second, 3), (third, 0)]
    assert taken(broker, key, 50) == []


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_no_more_jobs_are_given_than_there_is_room_for(broker: Broker, key: str, slots: int) -> None:
    for n in (3, 1, 5):
        broker.order(n=n)

    # `amount` says how many of one request; who counts its slots does not mean that.
    assert len(taken(broker, key, slots, amount=9)) == slots
    assert broker.world.scalar("SELECT count(*) FROM jobs") == slots


def test_more_requests_than_a_claim_looks_at_are_taken_at_once(broker: Broker, key: str) -> None:
    requests = [broker.world.request() for _ in range(2 * DEPTH + 3)]
    assert [request for request, _ in taken(broker, key, 2 * DEPTH + 1)] == requests[: 2 * DEPTH + 1]


def test_what_the_worker_cannot_take_is_passed_over_among_what_it_can(broker: Broker, key: str) -> None:
    other = broker.worker_id(broker.user().api_key, "other")
    fits = []
    for beyond in ({"max_length": 513}, {"models": ["else"]}, {"trusted_workers": True}, {"worker_ids": [other]}):
        broker.order(**beyond)
        fits.append(broker.order())

    assert [request for request, _ in taken(broker, key, 50)] == fits
    assert broker.nothing(key, slots=50) == {"max_length": 1, "untrusted": 1, "worker_id": 1}


def test_a_request_for_any_model_runs_on_one_that_the_worker_serves(broker: Broker, key: str) -> None:
    for models in ([], ["a"], ["a", "b", "c"]):
        broker.order(models=models)

    jobs = broker.pop(key, slots=3, models=["a", "b"]).jobs

    assert [job.model in served for job, served in zip(jobs, ["ab", "a", "ab"], strict=True)] == [True] * 3


def test_without_slots_a_pop_takes_of_one_request_only(broker: Broker, key: str) -> None:
    broker.order(n=2)
    broker.order()
    assert [job.slot for job in broker.pop(key, amount=9).jobs] == [0, 1]


def test_a_poll_that_waits_with_room_for_several_takes_what_came(broker: Broker, key: str) -> None:
    broker.worker_id(key)
    request = broker.order(n=4)
    assert taken(broker, key, 8, wait=20) == [(request, slot) for slot in range(4)]


# --- under a key, and when nobody reads the answer


def test_a_repeat_under_the_key_gets_all_of_the_jobs_again_in_their_order(broker: Broker, key: str) -> None:
    for n in (2, 1, 3):
        broker.order(n=n)
    first = broker.pop(key, slots=5, idempotency_key="pop-1").jobs
    assert len(first) == 5

    again = broker.pop(key, slots=5, idempotency_key="pop-1").jobs

    assert facts(again) == facts(first)
    assert broker.world.scalar("SELECT count(*) FROM jobs") == 5
    broker.submit(key, first[2].id)
    assert facts(broker.pop(key, slots=5, idempotency_key="pop-1").jobs) == facts(first[:2] + first[3:])


def test_pops_at_once_under_one_key_are_all_answered_with_the_same_jobs(broker: Broker, key: str) -> None:
    broker.worker_id(key)
    for number in range(ROUNDS // 2):
        for _ in range(6):
            broker.order()
        pop = partial(broker.pop, key, slots=4, idempotency_key=f"pop-{number}")

        found = together(*[pop] * 6)

        assert len(found[0].jobs) > 0
        assert {tuple(job.id for job in popped.jobs) for popped in found} == {tuple(job.id for job in found[0].jobs)}
        broker.pop(key, slots=6)


def test_a_hang_up_gives_all_of_the_jobs_back_even_when_one_has_ended_meanwhile(broker: Broker, key: str) -> None:
    requests = [broker.order(n=2), broker.order(), broker.order()]
    asked = iter((False, True))

    def gone() -> bool:
        hung_up = next(asked)
        if hung_up:
            # The first request ends at this moment, and with it two of the jobs.
            for job in broker.world.rows("SELECT id FROM jobs WHERE request_id = %(id)s", id=requests[0]):
                broker.world.fault(job[0])
        return hung_up

    assert broker.pop(key, slots=4, client_gone=gone).jobs == []

    assert [job[1] for job in broker.world.jobs(requests[0])] == ["faulted", "faulted"]
    for request in requests[1:]:
        assert [job[1:3] for job in broker.world.jobs(request)] == [("released", "not_delivered")]
        assert broker.world.slots(request) == ["waiting"]
    assert len(broker.pop(key, slots=4, name="second").jobs) == 2


# --- at once


def test_two_workers_at_once_get_different_jobs_and_nothing_is_left(broker: Broker, key: str) -> None:
    for name in ("one", "two"):
        broker.worker_id(key, name)
    for _ in range(ROUNDS):
        requests = [broker.order(n=n) for n in (1, 3, 1, 2, 1)]

        one, two = together(*[partial(broker.pop, key, name=name, slots=4) for name in ("one", "two")])

        # One may have found the other's requests locked, and took what came behind them.
        rest = broker.pop(key, slots=50).jobs
        jobs = [*one.jobs, *two.jobs, *rest]
        assert sorted((job.request_id, job.slot) for job in jobs) == sorted(
            (request, slot) for request, n in zip(requests, (1, 3, 1, 2, 1), strict=True) for slot in range(n)
        )
        assert 0 < len(one.jobs) <= 4
        assert 0 < len(two.jobs) <= 4


def test_eight_workers_with_room_for_several_empty_a_queue(broker: Broker, key: str) -> None:
    names = [f"worker {number}" for number in range(8)]
    for name in names:
        broker.worker_id(key, name)
    for n in [1, 2, 5] * 20:
        broker.order(n=n)

    def pop_until_nothing(name: str) -> list[uuid.UUID]:
        jobs: list[uuid.UUID] = []
        while popped := broker.pop(key, name=name, slots=7).jobs:
            jobs += [job.id for job in popped]
        return jobs

    found = together(*[partial(pop_until_nothing, name) for name in names], within=60)

    jobs = [job for some in found for job in some]
    assert len(jobs) == len(set(jobs)) == 160


def test_a_cancel_of_one_request_at_the_moment_of_the_pop_leaves_the_others(broker: Broker, key: str) -> None:
    broker.worker_id(key)
    for _ in range(ROUNDS):
        requests = [broker.order() for _ in range(3)]

        popped, _ = together(partial(broker.pop, key, slots=3), partial(broker.world.cancel, requests[1]))

        found = [job.request_id for job in popped.jobs]
        assert found in (requests, [requests[0], requests[2]])
        assert broker.status(requests[1]).processing == (requests[1] in found)


# --- the lease


def test_a_worker_that_posts_progress_gets_a_lease_of_a_minute_and_has_to_start_soon(broker: Broker, key: str) -> None:
    requests = [broker.order(max_length=512) for _ in range(2)]
    assert [job.ttl for job in broker.pop(key, slots=2, progress=True).jobs] == [60, 60]
    broker.world.advance(16)

    assert run_pass(broker.context).unstarted == 2

    assert [broker.world.slots(request) for request in requests] == [["waiting"]] * 2
    # One that does not has the whole of it.
    broker.world.advance(301)
    assert [job.ttl for job in broker.pop(key, slots=2, name="silent").jobs] == [286, 286]


# --- the salt of what a worker may share


def test_a_salt_is_one_users_at_one_worker_and_tells_nothing_about_either(broker: Broker, key: str) -> None:
    users = [broker.user() for _ in range(2)]
    for user in (users[0], users[1], users[0]):
        broker.order(user.api_key, n=2)

    salts = [job.cache_salt for job in broker.pop(key, slots=4).jobs]
    elsewhere = [job.cache_salt for job in broker.pop(key, slots=2, name="other").jobs]

    assert salts[0] == salts[1] != salts[2] == salts[3]
    # The first user again, at another worker.
    assert elsewhere[0] == elsewhere[1] != salts[0]
    broker.order(users[0].api_key)
    assert broker.job(key).cache_salt == salts[0]
    for salt in {*salts, *elsewhere}:
        assert (len(salt), int(salt, 16) >= 0) == (32, True)


def test_strangers_who_share_the_anonymous_key_share_no_salt(broker: Broker, key: str) -> None:
    for _ in range(2):
        broker.order(n=2, models=[MODEL])
    salts = [job.cache_salt for job in broker.pop(key, slots=4).jobs]
    assert salts[0] == salts[1] != salts[2] == salts[3]
