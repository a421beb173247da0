"""The tests' own worker and client meet over a running broker: what one says the other reads, and neither stays behind."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from horde.lifecycle.attach import stay_attached
from horde.lifecycle.outages import beat
from horde.maintenance.passes import run_pass
from tests.support.chat import ChatBroker, chat_broker
from tests.support.concurrency import DidNotHappen, eventually
from tests.support.played_output import PlayedJob
from tests.support.played_worker import PlayedWorker, VanishedError
from tests.support.transcript import Transcript


@pytest.fixture
def chat(database_url: str) -> Iterator[ChatBroker]:
    with chat_broker(database_url) as broker:
        yield broker


def test_what_the_worker_says_is_what_the_client_reads(chat: ChatBroker) -> None:
    with chat.open("Hi") as stream:
        job = chat.worker.take()
        assert chat.worker.say(job, "Käse") == len("Käse".encode())
        told = Transcript()
        while not told.text and (event := stream.next()):
            told.add(event)
        assert (told.text, told.finish_reason) == ("Käse", None)
        chat.worker.say(job, " and 😀")
        assert chat.worker.finish(job, "stop") > 0
        told.read(stream)
    assert (told.text, told.finish_reason, told.done) == ("Käse and 😀", "stop", True)
    chat.assert_nothing_left()


def test_left_to_itself_it_serves_several_streams_to_their_end(chat: ChatBroker) -> None:
    chat.worker.start(jobs=4, rate=200)
    streams = [chat.open(f"story {number}", max_tokens=40, seed=number) for number in range(4)]
    for told in [chat.read(stream) for stream in streams]:
        assert (told.finish_reason, told.done) == ("length", True)
        assert len(told.text) > 20
    assert not chat.worker.refused
    assert not chat.worker.failures
    chat.assert_nothing_left()


def test_it_hears_that_a_client_has_gone(chat: ChatBroker) -> None:
    stream = chat.open()
    job = chat.worker.take()
    chat.worker.say(job, "a")
    assert stream.data()["choices"]
    gone_at = stream.hang_up()
    stop = chat.worker.hear_stop(job)
    assert (stop.reason, job.stopped) == ("cancelled", "cancelled")
    assert stop.at > gone_at
    chat.assert_nothing_left()


def test_who_takes_over_from_one_that_vanished_goes_on_with_its_story(chat: ChatBroker) -> None:
    second = chat.another_worker("second")
    with chat.open(max_tokens=60) as stream:
        job = chat.worker.take()
        chat.worker.write(job, 25)
        chat.worker.fault(job)
        taken_over = second.take()
        assert taken_over.prefix == job.token_ids
        second.write(taken_over, 35)
        second.finish(taken_over, "length")
        told = chat.read(stream)
    assert told.text == taken_over.text
    assert told.text.startswith(job.text)
    chat.assert_nothing_left()


def test_a_client_of_one_that_vanished_gets_the_rest_of_its_story_from_another(chat: ChatBroker) -> None:
    chat.live.context.database.run(beat)
    second = chat.another_worker("second")
    with chat.open(max_tokens=60) as stream:
        job = chat.worker.take()
        chat.worker.write(job, 25)
        chat.worker.vanish()
        chat.world.pass_lease(uuid.UUID(job.id))
        chat.live.context.database.run(lambda tx: stay_attached(tx, [uuid.UUID(stream.id)]))
        run_pass(chat.live.context)
        taken_over = second.take()
        second.write(taken_over, 35)
        second.finish(taken_over, "length")
        told = chat.read(stream)
    whole = PlayedJob({**job.told, "prefix_token_ids": [], "prefix_text": ""})
    whole.write(60)
    assert told.text == whole.result()["generation"]
    chat.assert_nothing_left()


def test_one_that_vanishes_ends_its_call_under_way_and_makes_no_other(chat: ChatBroker) -> None:
    ended: list[BaseException] = []

    def wait_for_work() -> None:
        try:
            chat.worker.pop(wait=25)
        except VanishedError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait_for_work)
    waiting.start()
    eventually(lambda: chat.live.context.places.taken == 1, "the poll waits")
    chat.worker.vanish()
    waiting.join(5)
    assert len(ended) == 1
    with pytest.raises(VanishedError):
        chat.worker.pop()
    chat.assert_nothing_left()


def test_what_is_left_behind_is_noticed(chat: ChatBroker) -> None:
    with chat.open():
        chat.worker.take()
        with pytest.raises(DidNotHappen, match="'jobs': 1"):
            chat.assert_nothing_left(within=0.2)


def test_a_fault_of_the_worker_itself_is_not_kept_quiet(chat: ChatBroker) -> None:
    broken = PlayedWorker(chat.live.url, "nobody's key", "broken").start(jobs=1, rate=1)
    with pytest.raises(AssertionError, match="401"):
        broken.wait_until(lambda: False, within=10)
    with pytest.raises(AssertionError, match="401"):
        broken.close()
