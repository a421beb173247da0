"""A client that waits and its worker act at the same moment, over real connections: one of them is first, and there is one ending.

Which one is first is not left to luck: whoever was waits a little longer the next time, so that most rounds are close.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

import pytest
import requests

from horde.kudos.prices import HUNDREDTHS, TEXT_TAX
from horde.lifecycle.status import Status
from horde.lifecycle.words import Outcome
from tests.support.chat import ChatBroker, chat_broker, price
from tests.support.concurrency import DEADLINE, eventually
from tests.support.played_output import PlayedJob
from tests.support.played_worker import PlayedWorker, Reply
from tests.support.postgres import Server
from tests.support.sse import Stream

ROUNDS = 100
POSTED, WHOLE = 30, 40
T = TypeVar("T")


class Edge:
    """Two calls that begin at the same moment, but for a lead that follows the edge between their two orders.

    Attributes:
        endings: how often each side was first.
    """

    _STEP, _MOST = 0.0005, 0.05

    def __init__(self) -> None:
        self.endings: Counter[str] = Counter()
        # Seconds that the client waits for the worker; below zero the worker waits.
        self._lead = 0.0

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def meet(self, client: Callable[[], object], worker: Callable[[], T]) -> T:
        """Run both; what the worker's call returned."""
        gate = threading.Barrier(2)

        def begin(call: Callable[[], T], lead: float) -> T:
            gate.wait(DEADLINE)
            # Less than a millisecond of chance lets rounds at the very edge fall both ways.
            time.sleep(max(0.0, lead) + random.uniform(0, self._STEP))
            return call()

        leaving = self._pool.submit(begin, client, self._lead)  # type: ignore[arg-type]
        working = self._pool.submit(begin, worker, -self._lead)
        leaving.result(DEADLINE)
        return working.result(DEADLINE)

    def was_first(self, side: str) -> None:
        """Whose ending it came to: `client` or `worker`."""
        self.endings[side] += 1
        step = self._STEP if side == "client" else -self._STEP
        self._lead = max(-self._MOST, min(self._MOST, self._lead + step))

    def assert_both_were_first(self) -> None:
        """Without that nothing has been raced."""
        assert set(self.endings) >= {"client", "worker"}, self.endings


@pytest.fixture(scope="module")
def running(server: Server) -> Iterator[ChatBroker]:
    url = server.create()
    try:
        # A worker that gives up as often as here would be paused.
        with chat_broker(url, max_aborts_per_hour=10_000) as broker:
            yield broker
    finally:
        server.drop(url)


@pytest.fixture
def chat(settled_chat: ChatBroker) -> ChatBroker:
    return settled_chat


@pytest.fixture
def edge() -> Iterator[Edge]:
    with Edge() as made:
        yield made
        made.assert_both_were_first()


def begin(chat: ChatBroker, number: int) -> tuple[Stream, PlayedJob]:
    """A client, every other one of a stream, and its job, of which something has been posted."""
    stream = chat.open(stream=number % 2 == 0)
    job = chat.worker.take()
    chat.worker.write(job, POSTED)
    return stream, job


def status_of(chat: ChatBroker, job: PlayedJob) -> Status:
    request = chat.world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=uuid.UUID(job.id))
    return chat.world.status(request)


def submit(worker: PlayedWorker, job: PlayedJob) -> Reply:
    """All of a job, with what has not been posted."""
    job.write(WHOLE - len(job.token_ids))
    return worker.submit(job, state="ok", finish_reason="stop", **job.result())


def assert_one_ending(chat: ChatBroker, job: PlayedJob, reply: Reply, *, whole: bool) -> None:
    """The result that the request has, and pay for just that one, to whom the worker's call came first or not."""
    status = status_of(chat, job)
    (result,) = status.results
    count = WHOLE if whole else POSTED
    assert (result["token_ids"], result["finish_reason"]) == (job.token_ids[:count], "stop" if whole else "cancelled")
    due = price(count, job.payload["prompt_tokens"])
    assert status.charged == TEXT_TAX + due.price
    assert (reply.status, reply.body) == (200, {"reward": due.reward / HUNDREDTHS})
    again = submit(chat.worker, job)
    assert (again.status, again.body["rc"]) == (400, "DuplicateGen")
    assert chat.worker.post(job)[0].reason == ("stale" if whole else "cancelled")


def test_a_hang_up_and_the_result(chat: ChatBroker, edge: Edge) -> None:
    for number in range(ROUNDS):
        stream, job = begin(chat, number)
        reply = edge.meet(stream.hang_up, lambda job=job: submit(chat.worker, job))  # type: ignore[misc]
        chat.assert_nothing_left()
        status = status_of(chat, job)
        first = "worker" if status.outcome is Outcome.COMPLETED else "client"
        edge.was_first(first)
        if first == "client":
            assert (status.outcome, status.outcome_reason) == (Outcome.CANCELLED, "disconnect")
        assert_one_ending(chat, job, reply, whole=first == "worker")


def test_a_delete_and_the_result(chat: ChatBroker, edge: Edge) -> None:
    """The client that waits is told the ending that there is."""
    session = requests.Session()

    def delete(request: str) -> None:
        url = f"{chat.live.url}/api/v2/generate/chat/status/{request}"
        assert session.delete(url, timeout=30).status_code == 200

    with session:
        for _ in range(ROUNDS):
            stream, job = begin(chat, 0)
            reply = edge.meet(
                lambda stream=stream: delete(stream.id),  # type: ignore[misc]
                lambda job=job: submit(chat.worker, job),  # type: ignore[misc]
            )
            told = chat.read(stream)
            chat.assert_nothing_left()
            status = status_of(chat, job)
            whole = status.outcome is Outcome.COMPLETED
            edge.was_first("worker" if whole else "client")
            assert_one_ending(chat, job, reply, whole=whole)
            assert told.text == status.results[0]["text"]
            if whole:
                assert (told.finish_reason, told.done, told.error) == ("stop", True, None)
            else:
                assert told.error is not None
                assert (told.finished, told.done, told.error["code"]) == ({}, False, "cancelled")
                assert status.outcome_reason == "client"


@pytest.mark.parametrize("state", ["faulted", "released"])
def test_a_hang_up_and_a_job_that_is_given_back(chat: ChatBroker, edge: Edge, state: str) -> None:
    """It waits again for a moment, or it never does; nobody gets it either way."""
    for number in range(ROUNDS):
        stream, job = begin(chat, number)
        reply = edge.meet(stream.hang_up, lambda job=job: chat.worker.submit(job, state=state))  # type: ignore[misc]
        chat.assert_nothing_left()
        status = status_of(chat, job)
        assert (status.outcome, status.outcome_reason) == (Outcome.CANCELLED, "disconnect")
        ((found, price_, reward),) = chat.world.rows(
            "SELECT state, price, reward FROM jobs WHERE id = %(id)s", id=uuid.UUID(job.id)
        )
        edge.was_first("worker" if found == state else "client")
        if found == state:
            assert (reply.status, status.results, status.charged) == (200, [], TEXT_TAX)
        else:
            due = price(POSTED, job.payload["prompt_tokens"])
            assert (found, price_, reward) == ("stored", due.price, due.reward)
            assert (reply.status, reply.body["rc"]) == (400, "DuplicateGen")
            assert status.charged == TEXT_TAX + due.price
    assert chat.worker.pop(slots=50) == []


def test_a_hang_up_and_the_next_worker_of_what_was_given_back(database_url: str) -> None:
    """The one that takes it goes on for nobody, is told so, and is paid for what it did itself: nothing."""
    with chat_broker(database_url) as chat, Edge() as edge:
        second = chat.another_worker("second")

        def give_back_and_take(job: PlayedJob) -> list[PlayedJob]:
            if chat.worker.submit(job, state="released").status != 200:
                return []
            return second.pop()

        taken = 0
        for number in range(ROUNDS):
            stream, job = begin(chat, number)
            found = edge.meet(stream.hang_up, lambda job=job: give_back_and_take(job))  # type: ignore[misc]
            chat.assert_nothing_left()
            edge.was_first("worker" if found else "client")
            taken += len(found)
            status = status_of(chat, job)
            assert (status.outcome, status.outcome_reason) == (Outcome.CANCELLED, "disconnect")
            for continued in found:
                assert continued.prefix == job.token_ids
                assert second.hear_stop(continued).reason == "cancelled"
                assert second.finish(continued) == 0
                assert status.charged == TEXT_TAX + price(POSTED, job.payload["prompt_tokens"]).price
        assert second.pop(slots=50) == []
        edge.assert_both_were_first()
        chat.assert_sound()


def test_a_hang_up_and_a_worker_that_takes_it_from_the_queue(chat: ChatBroker, edge: Edge) -> None:
    for number in range(ROUNDS):
        stream = chat.open(stream=number % 2 == 0, await_head=False)
        if number % 2 == 0:
            stream.await_head()
        else:
            eventually(lambda: chat.unfinished().get("queued") == 1, "it waits")
        jobs = edge.meet(stream.hang_up, chat.worker.pop)
        chat.assert_nothing_left()
        edge.was_first("worker" if jobs else "client")
        for job in jobs:
            assert chat.worker.post(job)[0].reason == "cancelled"
            status = status_of(chat, job)
            assert (status.outcome_reason, status.results[0]["token_ids"], status.charged) == (
                "disconnect",
                [],
                TEXT_TAX,
            )
            assert chat.worker.finish(job) == 0
    assert chat.worker.pop(slots=50) == []


def test_two_hang_ups_of_one_request_and_the_result(chat: ChatBroker, edge: Edge) -> None:
    """Both have left, in whatever order and on whichever side of the result, and it was counted once."""
    with ThreadPoolExecutor(1) as other:
        for number in range(ROUNDS):
            key = {"Idempotency-Key": f"two-{number}"}
            streams = [chat.open(headers=key) for _ in range(2)]
            job = chat.worker.take()
            chat.worker.write(job, POSTED)

            def leave(streams: list[Stream] = streams) -> None:
                leaving = other.submit(streams[1].hang_up)
                streams[0].hang_up()
                leaving.result(DEADLINE)

            reply = edge.meet(leave, lambda job=job: submit(chat.worker, job))  # type: ignore[misc]
            chat.assert_nothing_left()
            whole = status_of(chat, job).outcome is Outcome.COMPLETED
            edge.was_first("worker" if whole else "client")
            assert_one_ending(chat, job, reply, whole=whole)
