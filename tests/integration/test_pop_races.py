"""Races for work through the whole pop: check-in, choice, claim and long poll, as use cases and over HTTP."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests

from horde.lifecycle import rows, settle
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import Stage, eventually, together
from tests.support.invariants import check_invariants
from tests.support.live_broker import LiveBroker, live_broker

ROUNDS = 20


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, database_pool=36, rate_limits="off") as made:
        yield made
        check_invariants(made.context.database)


@pytest.fixture
def live(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url, database_pool=24) as made:
        yield made
        check_invariants(made.context.database)
        assert made.unexpected_errors() == 0


def known_workers(broker: Broker, count: int) -> list[tuple[str, str]]:
    """Keys and names of workers that have checked in before."""
    key = broker.user("owner").api_key
    found = [(key, f"worker {number}") for number in range(count)]
    for _, name in found:
        broker.nothing(key, name=name)
    return found


def pops(broker: Broker, workers: Sequence[tuple[str, str]], **fields: Any) -> list[partial[Any]]:
    return [partial(broker.pop, key, name=name, **fields) for key, name in workers]


# --- as use cases


def test_twenty_workers_at_once_share_a_request_for_twenty_and_nobody_is_told_nothing(broker: Broker) -> None:
    workers = known_workers(broker, 20)
    for _ in range(ROUNDS):
        request = broker.order(n=20)

        found = together(*pops(broker, workers))

        assert [len(popped.jobs) for popped in found] == [1] * 20
        assert sorted(popped.jobs[0].slot for popped in found) == list(range(20))
        assert broker.status(request).processing == 20


def test_twenty_workers_at_once_share_ten_slots_of_two_requests(broker: Broker) -> None:
    workers = known_workers(broker, 20)
    for _ in range(ROUNDS):
        requests_ = [broker.order(n=5) for _ in range(2)]

        found = together(*pops(broker, workers))

        jobs = [job.id for popped in found for job in popped.jobs]
        assert len(set(jobs)) == len(jobs) == 10
        assert [broker.status(request).waiting for request in requests_] == [0, 0]


def test_thirty_two_pops_of_one_job_hand_it_out_once_and_the_others_need_not_wait(broker: Broker) -> None:
    workers = known_workers(broker, 32)
    for _ in range(ROUNDS):
        broker.order()

        found = together(*pops(broker, workers))

        assert sorted(len(popped.jobs) for popped in found) == [0] * 31 + [1]


def test_eight_poppers_empty_a_queue_of_two_hundred(broker: Broker) -> None:
    workers = known_workers(broker, 8)
    for _ in range(200):
        broker.order()

    def pop_until_nothing(key: str, name: str) -> list[uuid.UUID]:
        jobs: list[uuid.UUID] = []
        while popped := broker.pop(key, name=name).jobs:
            jobs += [job.id for job in popped]
        return jobs

    found = together(*[partial(pop_until_nothing, *worker) for worker in workers], within=60)

    handed_out = Counter(job for jobs in found for job in jobs)
    assert (len(handed_out), max(handed_out.values())) == (200, 1)


def test_batches_at_once_share_a_request_without_overlap(broker: Broker) -> None:
    workers = known_workers(broker, 4)
    for _ in range(ROUNDS):
        broker.order(n=12)

        found = together(*pops(broker, workers, amount=5))

        slots = [job.slot for popped in found for job in popped.jobs]
        assert sorted(slots) == list(range(12))


def test_a_pop_gets_the_slot_that_is_being_put_back_when_the_put_back_comes_first(broker: Broker) -> None:
    (first, second) = known_workers(broker, 2)
    request = broker.order(n=2)
    job = broker.job(first[0], name=first[1])
    with Stage(broker.context.database) as stage:
        fault = partial(broker.submit, first[0], job.id, state="faulted")
        faulting = stage.hold(fault, after=settle.SETTLE_JOB)
        # The one slot still waiting is locked with its request: this is no reason to say that there is nothing.
        popping = stage.start(partial(broker.pop, second[0], name=second[1], amount=2))
        popping.blocked(stage.monitor)

        faulting.result()

        assert [found.slot for found in popping.result().jobs] == [0, 1]
    assert broker.status(request).processing == 2


def test_a_pop_never_gets_a_request_that_is_cancelled_under_its_hands(broker: Broker) -> None:
    (worker,) = known_workers(broker, 1)
    for _ in range(ROUNDS):
        request = broker.order(n=2)

        popped, _ = together(*pops(broker, [worker]), partial(broker.world.cancel, request))

        status = broker.status(request)
        assert (status.waiting, status.processing, status.cancelled) == (0, len(popped.jobs), True)
        assert broker.pop(worker[0], name=worker[1]).jobs == []


def test_a_locked_request_does_not_keep_a_pop_from_the_next_one(broker: Broker) -> None:
    (worker,) = known_workers(broker, 1)
    first, second = broker.order(), broker.order()
    with Stage(broker.context.database) as stage:
        holding = stage.hold(partial(broker.world.cancel, first), after=rows.LOCK_REQUEST)

        assert broker.request_of(broker.job(worker[0], name=worker[1])) == second

        holding.result()


def test_polls_that_wait_are_all_woken_by_one_request(broker: Broker) -> None:
    workers = known_workers(broker, 6)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(pop) for pop in pops(broker, workers, wait=20)]
        eventually(lambda: len(broker.context.wakeups._waiters) == 6, "all six polls wait")

        broker.order(n=6)

        jobs = [job.slot for poll in waiting for job in poll.result(timeout=4).jobs]
    assert sorted(jobs) == list(range(6))


# --- over HTTP


class Client:
    """A worker over HTTP with a connection of its own, opened before the race."""

    def __init__(self, live: LiveBroker, key: str, name: str) -> None:
        self._url, self._name = f"{live.url}/api/v2/generate/text", name
        self._session = requests.Session()
        self._session.headers["apikey"] = key
        self.pop()

    def pop(self) -> dict[str, Any]:
        """A pop; its whole answer."""
        body = {"name": self._name, "models": ["m"], "max_length": 4096, "max_context_length": 8192}
        answer = self._session.post(f"{self._url}/pop", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def submit(self, job: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """A report; its status and answer."""
        answer = self._session.post(f"{self._url}/submit", json={"id": job, "generation": "text", **body}, timeout=30)
        return answer.status_code, answer.json()

    def close(self) -> None:
        """Close the connection."""
        self._session.close()


@pytest.fixture
def clients(live: LiveBroker) -> Iterator[list[Client]]:
    key = live.user("owner").api_key
    made = [Client(live, key, f"worker {number}") for number in range(8)]
    yield made
    for client in made:
        client.close()


def at_once(*works: Any) -> list[Any]:
    """Calls over HTTP that start at the same moment."""
    gate = threading.Barrier(len(works))

    def run(work: Any) -> Any:
        gate.wait(10)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def test_two_workers_over_http_report_the_second_fault_together_and_it_faults_once(
    live: LiveBroker, clients: list[Client]
) -> None:
    for before in [0, 1] * (ROUNDS // 2):
        request = live.request(params={"n": 3})
        for _ in range(before):
            clients[2].submit(clients[2].pop()["id"], state="faulted")
        jobs = [client.pop()["id"] for client in clients[:2]]

        found = at_once(
            *[partial(client.submit, job, state="faulted") for client, job in zip(clients, jobs, strict=False)]
        )

        codes = sorted(code for code, _ in found)
        assert codes == ([200, 400] if before else [200, 200])
        assert [body["rc"] for code, body in found if code == 400] == ["AbortedGen"] * before
        status = live.status(request)
        assert (status["faulted"], status["done"], status["waiting"], status["processing"]) == (True, True, 0, 0)
        assert status["restarted"] == 2
        ended = "SELECT count(*) FROM events WHERE request_id = %(r)s AND outcome = 'faulted'"
        with live.context.database.autocommit() as tx:
            assert tx.execute(ended, {"r": request}).scalar_one() == 1


def test_eight_workers_over_http_share_a_request_for_eight(live: LiveBroker, clients: list[Client]) -> None:
    for _ in range(ROUNDS):
        request = live.request(params={"n": 8})

        found = at_once(*[client.pop for client in clients])

        assert len({answer["id"] for answer in found} - {None}) == 8
        answers = at_once(*[partial(client.submit, job["id"]) for client, job in zip(clients, found, strict=True)])
        assert [code for code, _ in answers] == [200] * 8
        status = live.status(request)
        assert (status["finished"], status["done"], status["faulted"]) == (8, True, False)


def test_one_submit_sent_four_times_over_http_is_stored_once(live: LiveBroker, clients: list[Client]) -> None:
    for _ in range(ROUNDS):
        request = live.request()
        job = clients[0].pop()["id"]

        found = at_once(*[partial(client.submit, job, generation=str(n)) for n, client in enumerate(clients[:4])])

        assert sorted(code for code, _ in found) == [200, 400, 400, 400]
        assert {body["rc"] for code, body in found if code == 400} == {"DuplicateGen"}
        (winner,) = (str(n) for n, (code, _) in enumerate(found) if code == 200)
        assert [result["text"] for result in live.status(request)["generations"]] == [winner]


def test_a_cancel_over_http_at_the_moment_of_a_fault_brings_nothing_back(
    live: LiveBroker, clients: list[Client]
) -> None:
    for _ in range(ROUNDS):
        request = live.request()
        price = live.status(request)["kudos"]
        job = clients[0].pop()["id"]

        (code, _), deleted = at_once(
            partial(clients[0].submit, job, state="faulted"),
            partial(requests.delete, f"{live.url}/api/v2/generate/text/status/{request}", timeout=30),
        )

        assert (code, deleted.status_code) == (200, 200)
        status = live.status(request)
        assert (status["cancelled"], status["done"], status["waiting"], status["processing"]) == (True, True, 0, 0)
        assert status["kudos"] == price, "nothing was delivered, so nothing is charged for it"
        assert clients[1].pop()["id"] is None
