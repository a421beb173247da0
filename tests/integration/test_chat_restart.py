"""A stream and its broker: that may be another one than its worker's, shut down, or die. The request outlives it by half a minute.

Within that time a client that comes back with its `Idempotency-Key`, to any broker, goes on with the same request.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horde.kudos.prices import TEXT_TAX
from horde.lifecycle.outages import beat
from horde.lifecycle.words import Outcome
from horde.maintenance.passes import run_pass
from horde.streams import hub
from tests.support import tiny_tokenizer
from tests.support.chat import ChatBroker, chat_broker, price
from tests.support.concurrency import eventually
from tests.support.live_broker import LiveBroker, live_broker
from tests.support.played_output import PlayedJob
from tests.support.played_worker import PlayedWorker
from tests.support.redis import redis_server
from tests.support.sse import CutOffError, Stream
from tests.support.transcript import Transcript

PATIENCE = 60.0
# Brokers tell each other things within a twentieth of a second; what only a look of its own finds takes some of them.
SOON = 3.0
KEY = {"Idempotency-Key": "come-back"}


@dataclass
class Two:
    """Two brokers on one database; users, worker and tokenizer are those of `here`."""

    here: ChatBroker
    there: LiveBroker

    def open_there(self, **asked: Any) -> Stream:
        """A stream of the same client, served by the other broker."""
        return self.here.open(at=(self.there.host, self.there.port), **asked)

    @contextmanager
    def worker_there(self) -> Iterator[PlayedWorker]:
        """The worker, with what it holds, at the other broker from now on."""
        worker = self.here.worker
        with PlayedWorker(self.there.url, worker.key, worker.name) as moved:
            moved.held |= worker.held
            yield moved


@contextmanager
def two_brokers(url: str, **settings: Any) -> Iterator[Two]:
    with live_broker(url, **settings) as there, chat_broker(url, **settings) as here:
        there.context.database.run(beat)
        # Whoever ends a stream counts it by what it has at hand, so both have served this model before.
        for context in (here.live.context, there.context):
            assert context.tokenizers.load(context.database, tiny_tokenizer.manifest()["tokenizer_revision"])
        yield Two(here, there)


@pytest.fixture(params=["database", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def announcing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of either way in which brokers tell each other what is new."""
    if request.param == "database":
        yield {}
        return
    with redis_server(tmp_path) as running:
        yield {"redis_url": running.url}


def read_up_to(stream: Stream, told: Transcript, text: str, *, within: float = SOON) -> None:
    """Read on until the first choice says so much."""
    give_up = time.monotonic() + within
    while told.text != text:
        assert text.startswith(told.text)
        event = stream.next(give_up - time.monotonic())
        assert event is not None, "the stream ended"
        told.add(event)


def begin(chat: ChatBroker, stream: Stream) -> tuple[PlayedJob, Transcript]:
    """Have the worker take it and say something, and the client read that."""
    job, told = chat.worker.take(), Transcript()
    chat.worker.write(job, 20)
    if stream.status:
        read_up_to(stream, told, job.text)
    return job, told


def finish(worker: PlayedWorker, job: PlayedJob) -> str:
    """Go on to the end; the whole text."""
    worker.write(job, job.max_new_tokens - len(job.token_ids))
    worker.finish(job, "length")
    text = job.result()["generation"]
    assert isinstance(text, str)
    return text


# --- two brokers


def test_one_broker_streams_what_the_worker_posts_to_another(
    database_url: str, announcing: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks by itself, so what is read was told.
    monkeypatch.setattr(hub, "LOOK_AGAIN", 1000.0)
    with (
        two_brokers(database_url, **announcing) as two,
        two.worker_there() as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        polling = pool.submit(worker.take, wait=25)
        eventually(lambda: two.there.context.places.taken == 1, "the worker waits")
        stream, told = two.here.open(n=2), Transcript()
        job = polling.result(SOON)
        for _ in range(5):
            worker.write(job, 10)
            read_up_to(stream, told, job.text)
        text = finish(worker, job)
        read_up_to(stream, told, text)
        # The second answer meets with a DELETE at the worker's broker.
        other = worker.take()
        worker.write(other, 10)
        assert two.there.call("DELETE", f"generate/chat/status/{stream.id}").status_code == 200
        told.read(stream)
        assert told.error is not None
        assert (told.error["code"], told.texts[1]) == ("cancelled", other.text)
        assert worker.hear_stop(other).reason == "cancelled"
        two.here.assert_sound()


def test_a_hang_up_at_one_broker_is_told_to_the_worker_at_another(
    database_url: str, announcing: dict[str, str]
) -> None:
    with two_brokers(database_url, **announcing) as two, two.worker_there() as worker:
        for _ in range(20):
            stream = two.here.open()
            job = worker.take()
            worker.write(job, 10)
            hung_up_at = stream.hang_up()
            stop = worker.hear_stop(job)
            assert (stop.reason, stop.at - hung_up_at < SOON) == ("cancelled", True)
        two.here.assert_sound()


def test_a_request_is_joined_at_another_broker_and_the_last_to_leave_either_gives_it_up(database_url: str) -> None:
    with two_brokers(database_url) as two:
        for first_to_leave in (0, 1):
            key = {"Idempotency-Key": f"joined-{first_to_leave}"}
            streams = [two.here.open(headers=key)]
            job, _ = begin(two.here, streams[0])
            streams.append(two.open_there(headers=key))
            assert streams[0].id == streams[1].id
            read_up_to(streams[1], Transcript(), job.text)
            streams[first_to_leave].hang_up()
            eventually(partial(is_left_by_one, two, streams[0]), "it is noted")
            two.here.worker.write(job, 5)
            assert job.stopped is None
            streams[1 - first_to_leave].hang_up()
            assert two.here.worker.hear_stop(job).reason == "cancelled"
        two.here.assert_sound()
        eventually(lambda: two.there.context.places.taken == 0, "no place is held there")


def is_left_by_one(two: Two, stream: Stream) -> bool:
    attached = "SELECT attached_by FROM requests WHERE id = %(id)s"
    return bool(two.here.world.scalar(attached, id=uuid.UUID(stream.id)) == 1)


def test_what_a_delete_ends_costs_the_same_at_a_broker_that_has_not_seen_it_before(database_url: str) -> None:
    with two_brokers(database_url) as two:
        stream = two.here.open()
        job, _ = begin(two.here, stream)
        two.here.worker.write(job, 20)
        assert two.there.call("DELETE", f"generate/chat/status/{stream.id}").status_code == 200
        status = two.here.world.status(uuid.UUID(stream.id))
        assert status.results[0]["token_ids"] == job.token_ids
        assert status.charged == TEXT_TAX + price(40, job.payload["prompt_tokens"]).price
        two.here.hang_up()
        two.here.assert_sound()


# --- a broker that shuts down


def shut_down(broker: LiveBroker) -> None:
    broker.stop.set()
    broker.thread.join(PATIENCE)
    assert not broker.thread.is_alive()


def test_a_stream_whose_broker_shuts_down_goes_on_elsewhere_with_the_same_request(database_url: str) -> None:
    with two_brokers(database_url) as two:
        stream = two.open_there(headers=KEY)
        job, told = begin(two.here, stream)
        whole = two.open_there(stream=False, headers=KEY)
        eventually(lambda: two.there.context.streams.following == 2, "both wait")
        shut_down(two.there)
        told.read(stream)
        assert told.error is not None
        assert (told.error["code"], told.text, told.done) == ("broker_unavailable", job.text, False)
        error = json.loads(whole.text())["error"]
        assert (whole.status, error) == (503, told.error)
        assert int(whole.headers["retry-after"]) >= 1
        # Its worker has noticed nothing, and the client finds all of it.
        two.here.worker.write(job, 10)
        assert job.stopped is None
        again, told = two.here.open(headers=KEY), Transcript()
        assert again.id == stream.id
        read_up_to(again, told, job.text)
        text = finish(two.here.worker, job)
        told.read(again)
        assert (told.text, told.finish_reason, told.done) == (text, "length", True)
        two.here.assert_sound()


def test_whoever_came_back_gives_it_up_by_hanging_up(database_url: str) -> None:
    """Those that the broker which shut down had to let go of are not waited for."""
    with two_brokers(database_url) as two:
        streams = [two.open_there(headers=KEY) for _ in range(2)]
        job, _ = begin(two.here, streams[0])
        shut_down(two.there)
        again = two.here.open(headers=KEY)
        assert again.id == streams[0].id
        again.hang_up()
        assert two.here.worker.hear_stop(job, within=SOON).reason == "cancelled"
        two.here.assert_sound()


def test_what_nobody_comes_back_for_is_cancelled_half_a_minute_later(database_url: str) -> None:
    with two_brokers(database_url) as two:
        stream = two.open_there()
        job, _ = begin(two.here, stream)
        waiting = two.open_there(stream=False)
        eventually(lambda: two.here.unfinished().get("queued") == 1, "it waits")
        shut_down(two.there)
        assert_lapses(two.here, stream, job)
        assert two.here.worker.pop(slots=2) == []
        assert json.loads(waiting.text())["error"]["code"] == "broker_unavailable"
        two.here.assert_sound()


def assert_lapses(chat: ChatBroker, stream: Stream, job: PlayedJob) -> None:
    """It goes on until its attachment is over, and then ends with what was posted."""
    request = uuid.UUID(stream.id)
    chat.worker.write(job, 10)
    left = chat.world.scalar(
        "SELECT extract(epoch FROM attached_until - horde_now())::float FROM requests WHERE id = %(id)s", id=request
    )
    assert 20 < left <= 30
    run_pass(chat.live.context)
    chat.worker.write(job, 10)
    assert job.stopped is None
    chat.world.pass_time(request, "attached_until")
    run_pass(chat.live.context)
    assert chat.worker.hear_stop(job).reason == "cancelled"
    status = chat.world.status(request)
    assert (status.outcome, status.outcome_reason) == (Outcome.CANCELLED, "disconnect")
    assert status.results[0]["token_ids"] == job.token_ids
    assert len(job.token_ids) == 40
    assert status.charged == TEXT_TAX + price(40, job.payload["prompt_tokens"]).price


# --- a broker in a process of its own


@contextmanager
def process(database_url: str) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """`horde serve` on a free port; it ends however the test does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-c", "from horde.cli.main import main; main()", "serve", f"--port={port}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HORDE_")}
    settings = {"HORDE_DATABASE_URL": database_url, "HORDE_RATE_LIMITS": "off", "HORDE_LOG_LEVEL": "WARNING"}
    running = subprocess.Popen(
        command, env=kept | settings, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    too_long = threading.Timer(PATIENCE, running.kill)
    too_long.start()
    try:
        assert running.stdout is not None
        assert str(port) in running.stdout.readline()
        yield running, ("127.0.0.1", port)
    finally:
        too_long.cancel()
        running.kill()
        running.wait()
        if running.stdout is not None:
            running.stdout.close()


def test_a_broker_that_is_killed_costs_its_streams_a_connection_and_no_answer(database_url: str) -> None:
    with process(database_url) as (broker, address), chat_broker(database_url) as chat:
        returning = chat.open(at=address, headers=KEY)
        job, told = begin(chat, returning)
        lost = chat.open(at=address)
        forsaken, _ = begin(chat, lost)
        broker.kill()
        broker.wait()
        for stream in (returning, lost):
            with pytest.raises(CutOffError):
                stream.rest()
        # The one comes back, to a broker that is there.
        chat.worker.write(job, 10)
        assert job.stopped is None
        again, told = chat.open(headers=KEY), Transcript()
        assert again.id == returning.id
        text = finish(chat.worker, job)
        told.read(again)
        assert (told.text, told.done) == (text, True)
        # The other does not.
        assert_lapses(chat, lost, forsaken)
        chat.assert_sound()


def test_a_broker_that_is_told_to_stop_ends_its_streams_and_itself(database_url: str) -> None:
    with process(database_url) as (broker, address), chat_broker(database_url) as chat:
        began = time.monotonic()
        streams = [chat.open(at=address, headers=KEY) for _ in range(3)]
        job, _ = begin(chat, streams[0])
        broker.terminate()
        for stream in streams:
            last = stream.rest()[-1]
            assert last.json()["error"]["code"] == "broker_unavailable"
        assert broker.wait(PATIENCE) == 0
        assert time.monotonic() - began < 20
        again = chat.open(headers=KEY)
        text = finish(chat.worker, job)
        assert chat.read(again).text == text
        chat.assert_sound()
