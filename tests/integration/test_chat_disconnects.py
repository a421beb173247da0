"""A client of `/v1` that hangs up, at whatever moment and in whatever way: its request ends there, and nothing of it stays.

What waits reaches no worker. What runs ends with what was posted of it, at that price, and its worker is told to stop.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
import uuid
from collections.abc import Callable
from itertools import cycle, islice, product

import pytest
import requests

from horde.api import connections
from horde.api.connections import Channel
from horde.kudos.prices import HUNDREDTHS, TEXT_TAX
from horde.lifecycle.status import Status
from horde.lifecycle.words import Outcome
from horde.serving import WATERMARK_BYTES
from tests.support.chat import ChatBroker, chat_broker, price
from tests.support.concurrency import eventually
from tests.support.played_output import PlayedJob
from tests.support.sse import CutOffError, Stream

IN_A_ROW = 200
# Of a stream that is not read: what waits here and what lies in the kernel.
MOST_BEHIND = 256 << 10


@pytest.fixture
def chat(settled_chat: ChatBroker) -> ChatBroker:
    return settled_chat


# --- ways to hang up, each telling when it did


def close(stream: Stream) -> float:
    return stream.hang_up()


def reset(stream: Stream) -> float:
    return stream.hang_up(reset=True)


def half_close(stream: Stream) -> float:
    """Only its own side of the connection, as some proxies do; that is a hang-up like any other."""
    at = time.monotonic()
    stream.half_close()
    return at


Way = Callable[[Stream], float]
WAYS: list[Way] = [close, reset, half_close]


# --- phases of a request, each the way there; the job where a worker has one


def in_the_queue(chat: ChatBroker, stream: Stream) -> None:
    eventually(lambda: (here := chat.unfinished()).get("queued") == here.get("streams") == 1, "it waits in the queue")


def before_the_first_token(chat: ChatBroker, stream: Stream) -> PlayedJob:
    return chat.worker.take()


def in_the_middle(chat: ChatBroker, stream: Stream) -> PlayedJob:
    job = chat.worker.take()
    chat.worker.write(job, 40)
    _read_up_to(stream, job.text)
    return job


def behind_the_last_token(chat: ChatBroker, stream: Stream) -> PlayedJob:
    job = chat.worker.take()
    chat.worker.write(job, job.max_new_tokens)
    _read_up_to(stream, job.text)
    return job


def _read_up_to(stream: Stream, text: str) -> None:
    """Read so much of a stream; of an answer that comes whole there is nothing yet."""
    if not stream.status:
        return
    read = ""
    while read != text:
        read += stream.data()["choices"][0]["delta"]["content"]
        assert text.startswith(read)


RUNNING = [before_the_first_token, in_the_middle, behind_the_last_token]
PHASES: list[Callable[[ChatBroker, Stream], PlayedJob | None]] = [in_the_queue, *RUNNING]


# --- what is found afterwards


def ends_as_it_should(stream: Stream) -> bool:
    """Whether a stream, read up to here, goes on to its end."""
    return stream.rest()[-1].is_done


def status_of(chat: ChatBroker, job: PlayedJob) -> Status:
    request = chat.world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=uuid.UUID(job.id))
    return chat.world.status(request)


def latest_request(chat: ChatBroker) -> Status:
    return chat.world.status(chat.world.scalar("SELECT id FROM requests ORDER BY created_at DESC LIMIT 1"))


def now(chat: ChatBroker) -> dt.datetime:
    """By the database's clock."""
    found = chat.world.scalar("SELECT horde_now()")
    assert isinstance(found, dt.datetime)
    return found


def assert_disconnected(status: Status) -> None:
    assert (status.outcome, status.outcome_reason, status.done) == (Outcome.CANCELLED, "disconnect", True)


def assert_settled_on_what_was_posted(chat: ChatBroker, job: PlayedJob) -> None:
    """Also by what the worker is told that submits it nevertheless: its pay, once."""
    status = status_of(chat, job)
    assert_disconnected(status)
    (result,) = status.results
    assert (result["text"], result["token_ids"], result["finish_reason"]) == (job.text, job.token_ids, "cancelled")
    due = price(len(job.token_ids), job.payload["prompt_tokens"])
    assert status.charged == TEXT_TAX + due.price
    assert chat.worker.finish(job) == due.reward / HUNDREDTHS
    again = chat.worker.submit(job, state="ok", finish_reason="stop", **job.result())
    assert (again.status, again.body["rc"]) == (400, "DuplicateGen")
    assert status_of(chat, job) == status


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("streamed", [True, False])
def test_what_waits_in_the_queue_reaches_no_worker(chat: ChatBroker, way: Way, *, streamed: bool) -> None:
    stream = chat.open(stream=streamed, n=2)
    in_the_queue(chat, stream)
    way(stream)
    chat.assert_nothing_left()
    assert chat.worker.pop(slots=2) == []
    status = latest_request(chat)
    assert_disconnected(status)
    assert (status.results, status.charged) == ([], TEXT_TAX)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("phase", RUNNING)
def test_what_runs_ends_with_what_was_posted_and_its_worker_is_told(
    chat: ChatBroker, phase: Callable[[ChatBroker, Stream], PlayedJob], *, streamed: bool
) -> None:
    for way in WAYS:
        stream = chat.open(stream=streamed)
        job = phase(chat, stream)
        way(stream)
        assert chat.worker.hear_stop(job).reason == "cancelled"
        chat.assert_nothing_left()
        assert_settled_on_what_was_posted(chat, job)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_closed_its_side_only_is_told_no_end_that_looks_like_one(
    chat: ChatBroker, *, streamed: bool
) -> None:
    stream = chat.open(stream=streamed)
    job = in_the_middle(chat, stream)
    stream.half_close()
    chat.worker.hear_stop(job)
    if streamed:
        with pytest.raises(CutOffError):
            stream.rest()
    else:
        assert (stream.text(), stream.status) == ("", 0)


def test_whoever_hangs_up_at_once_may_be_seen_or_not_and_leaves_nothing(chat: ChatBroker) -> None:
    begun = now(chat)
    for way, streamed in islice(cycle(product(WAYS, [True, False])), 60):
        way(chat.open(stream=streamed, await_head=False))
    # Who comes after them is heard after them.
    assert requests.get(f"{chat.live.url}/api/v2/status/heartbeat", timeout=30).ok
    chat.assert_nothing_left()
    assert chat.worker.pop(slots=50) == []
    ends = "SELECT DISTINCT outcome, outcome_reason FROM requests WHERE created_at > %(begun)s"
    found = chat.world.rows(ends, begun=begun)
    assert found in ([], [("cancelled", "disconnect")])


@pytest.mark.parametrize("streamed", [True, False])
def test_each_answer_of_several_ends_as_far_as_it_is(chat: ChatBroker, *, streamed: bool) -> None:
    stream = chat.open(stream=streamed, n=4)
    whole, begun, silent = (chat.worker.take() for _ in range(3))
    chat.worker.write(whole, 25)
    chat.worker.finish(whole, "stop")
    chat.worker.write(begun, 30)
    if streamed:
        while stream.data()["choices"][0]["finish_reason"] != "stop":
            pass
    stream.hang_up()
    chat.worker.hear_stop(begun)
    chat.worker.hear_stop(silent)
    status = latest_request(chat)
    assert_disconnected(status)
    assert [(result["finish_reason"], len(result["token_ids"])) for result in status.results] == [
        ("stop", 25),
        ("cancelled", 30),
        ("cancelled", 0),
    ]
    prompt = whole.payload["prompt_tokens"]
    assert status.charged == TEXT_TAX + price(25, prompt).price + price(30, prompt).price
    assert chat.worker.pop(slots=4) == []


def test_an_answer_that_is_whole_stays_so_whether_it_is_read_or_not(chat: ChatBroker) -> None:
    for streamed in (True, False):
        stream = chat.open(stream=streamed)
        job = in_the_middle(chat, stream)
        chat.worker.finish(job, "stop")
        stream.hang_up()
        chat.assert_nothing_left()
        status = status_of(chat, job)
        assert (status.outcome, status.results[0]["finish_reason"]) == (Outcome.COMPLETED, "stop")
        assert status.charged == TEXT_TAX + price(40, job.payload["prompt_tokens"]).price


def test_what_waits_for_its_next_worker_is_dropped_and_costs_nothing(chat: ChatBroker) -> None:
    stream = chat.open()
    job = in_the_middle(chat, stream)
    chat.worker.release(job)
    stream.hang_up()
    chat.assert_nothing_left()
    assert chat.another_worker("second").pop() == []
    status = latest_request(chat)
    assert_disconnected(status)
    assert (status.results, status.charged) == ([], TEXT_TAX)


def test_what_another_worker_goes_on_with_costs_all_of_it_and_earns_each_its_own(chat: ChatBroker) -> None:
    second = chat.another_worker("second")
    stream = chat.open()
    first = in_the_middle(chat, stream)
    chat.worker.release(first)
    job = second.take()
    second.write(job, 10)
    stream.hang_up()
    second.hear_stop(job)
    status = latest_request(chat)
    assert_disconnected(status)
    assert status.results[0]["token_ids"] == job.token_ids
    assert len(job.token_ids) == 50
    due = price(50, job.payload["prompt_tokens"], own=10)
    assert status.charged == TEXT_TAX + due.price
    assert second.finish(job) == due.reward / HUNDREDTHS


def test_two_hundred_in_a_row_leave_everything_as_it_was(chat: ChatBroker) -> None:
    _answer_one(chat)
    begun, connected, threads = now(chat), chat.live.server.connections, threading.active_count()
    took: list[float] = []
    tokens: list[int] = []
    prompts = 0
    rounds = list(islice(cycle(product(WAYS, [True, False], PHASES)), IN_A_ROW))
    for way, streamed, phase in rounds:
        stream = chat.open(stream=streamed)
        job = phase(chat, stream)
        hung_up_at = way(stream)
        if job is not None:
            took.append(chat.worker.hear_stop(job).at - hung_up_at)
            prompts = job.payload["prompt_tokens"]
            tokens.append(len(job.token_ids))
        chat.assert_nothing_left()
        stream.hang_up()
    eventually(lambda: chat.live.server.connections <= connected, "no connection stays open")
    eventually(lambda: threading.active_count() <= threads, "no other thread is there either")
    assert chat.worker.pop(slots=50) == []
    counted = "SELECT outcome_reason, count(*), sum(charged) FROM requests WHERE created_at > %(begun)s GROUP BY 1"
    paid = sum((price(count, prompts).price for count in tokens), start=IN_A_ROW * TEXT_TAX)
    assert chat.world.rows(counted, begun=begun) == [("disconnect", IN_A_ROW, paid)]
    # Two flushes are a tenth of a second; this is about minutes of decoding for nobody.
    assert max(took) < 5


def test_a_worker_is_told_with_its_next_post(chat: ChatBroker) -> None:
    took = []
    for streamed in [True, False] * 8:
        stream = chat.open(stream=streamed)
        job = in_the_middle(chat, stream)
        hung_up_at = stream.hang_up()
        took.append(chat.worker.hear_stop(job).at - hung_up_at)
    # Posts are a twentieth of a second apart. What only a look of the waiting handler's own found would take half of one.
    assert sorted(took)[len(took) // 2] < 0.3


def _answer_one(chat: ChatBroker) -> None:
    """Serve a stream, after which everything that is made when first needed is there."""
    stream = chat.open()
    chat.worker.finish(in_the_middle(chat, stream))
    assert ends_as_it_should(stream)
    stream.hang_up()


def test_a_crowd_that_hangs_up_at_once_is_let_go_of_as_a_whole(database_url: str) -> None:
    crowd, running = 44, 20
    with chat_broker(database_url, threads=64, database_pool=4) as chat:
        # One key may not have all the places.
        keys = [chat.live.user(kudos=100_000).api_key for _ in range(2)]
        streams = [chat.open(stream=number % 3 == 0, key=keys[number % 2]) for number in range(crowd)]
        eventually(lambda: chat.unfinished().get("queued") == crowd, "all wait in the queue")
        jobs = chat.worker.pop(slots=running)
        for number, job in enumerate(jobs):
            job.write(number)
        chat.worker.post(*jobs)
        for stream in streams:
            stream.hang_up()
        for job in jobs:
            if job.stopped is None:
                chat.worker.hear_stop(job)
        chat.assert_nothing_left()
        assert chat.worker.pop(slots=50) == []
        due = [price(number, jobs[0].payload["prompt_tokens"]) for number in range(running)]
        assert chat.world.rows("SELECT state, price, reward FROM jobs ORDER BY price, reward") == sorted(
            ("stored", one.price, one.reward) for one in due
        )
        chat.assert_sound()


# --- clients that do not read


def channel_of(chat: ChatBroker, stream: Stream) -> Channel:
    address = stream._socket.getsockname()
    channels = [channel for channel in chat.live.server._map.values() if isinstance(channel, Channel)]
    return next(channel for channel in channels if channel.addr == address)


def held_back(chat: ChatBroker) -> tuple[Stream, PlayedJob, Channel]:
    """A stream whose client does not read, at the point where the broker waits for it."""
    stream = chat.open(max_tokens=1400, logprobs=True, top_logprobs=20, receive_buffer=4096)
    job, channel = chat.worker.take(), channel_of(chat, stream)
    while channel.total_outbufs_len <= WATERMARK_BYTES:
        chat.worker.write(job, 20)
        assert len(job.token_ids) < 400, "nothing holds it back"
    return stream, job, channel


def test_who_does_not_read_holds_up_nobody_and_is_kept_for_within_bounds(chat: ChatBroker) -> None:
    slow, job, channel = held_back(chat)
    while len(job.token_ids) < job.max_new_tokens:
        chat.worker.write(job, 20)
        assert channel._sent + channel.total_outbufs_len <= MOST_BEHIND
    # Another one is served from its first token to its last meanwhile.
    other = chat.open("another")
    theirs = in_the_middle(chat, other)
    chat.worker.finish(theirs)
    assert ends_as_it_should(other)
    # Who reads on after all has lost nothing.
    chat.worker.finish(job, "length")
    told = chat.read(slow)
    assert (told.text, told.finish_reason, told.done) == (job.text, "length", True)
    assert len(told.logprobs[0]) == job.max_new_tokens


def test_who_does_not_read_for_its_time_has_hung_up(chat: ChatBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, job, _ = held_back(chat)
    other = chat.open("another")
    theirs = in_the_middle(chat, other)
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(connections, "SLOWEST_BYTES_PER_SECOND", 1 << 30)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    for listener in chat.live.server._listeners:
        listener.next_channel_cleanup = 0.0
        listener.pull_trigger()
    assert chat.worker.hear_stop(job).reason == "cancelled"
    assert_settled_on_what_was_posted(chat, job)
    with pytest.raises(CutOffError):
        slow.rest()
    chat.worker.finish(theirs)
    assert ends_as_it_should(other)
