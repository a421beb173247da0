"""A stream whose worker is lost: its client sees a pause, and then the rest of the same text, from another worker."""

from __future__ import annotations

import dataclasses
import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from horde.kudos.prices import TEXT_TAX
from tests.support import tiny_tokenizer
from tests.support.chat import ChatBroker, chat_broker, price
from tests.support.played_output import PlayedJob
from tests.support.played_worker import PlayedWorker
from tests.support.postgres import Server
from tests.support.sse import Stream
from tests.support.transcript import Transcript

Loss = Callable[[ChatBroker, PlayedWorker, PlayedJob], object]
USAGE = {"include_usage": True}
_numbers = itertools.count()
PROMPT_TOKENS = len(tiny_tokenizer.encode(tiny_tokenizer.render([{"role": "user", "content": "Hello"}])))


def vanish(chat: ChatBroker, worker: PlayedWorker, _job: PlayedJob) -> None:
    worker.vanish()
    assert chat.pass_leases().stale == 1


def fault(_chat: ChatBroker, worker: PlayedWorker, job: PlayedJob) -> None:
    worker.fault(job)


def release(_chat: ChatBroker, worker: PlayedWorker, job: PlayedJob) -> None:
    worker.release(job)


LOSSES: list[Loss] = [vanish, fault, release]
lost_in_any_way = pytest.mark.parametrize("lose", LOSSES, ids=lambda loss: loss.__name__)


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[ChatBroker]:
    url = server.create()
    with chat_broker(url) as broker:
        yield broker
        broker.assert_sound()
    server.drop(url)


@pytest.fixture
def chat(shared: ChatBroker) -> Iterator[ChatBroker]:
    with shared.of_one_test() as broker:
        yield dataclasses.replace(broker, worker=newcomer(broker))


def newcomer(chat: ChatBroker) -> PlayedWorker:
    """A worker that nobody has met: the broker pauses one that loses many jobs."""
    return chat.another_worker(f"worker {next(_numbers)}")


def undisturbed(job: PlayedJob, tokens: int) -> PlayedJob:
    """What a single worker makes of a slot in so many tokens of its story."""
    whole = PlayedJob({**job.told, "prefix_token_ids": [], "prefix_text": ""})
    whole.write(tokens)
    return whole


def read_to(stream: Stream, told: Transcript, text: str) -> None:
    """Read until all of this has come, and see that nothing else has."""
    while told.text != text:
        assert text.startswith(told.text), told.text
        event = stream.next()
        assert event is not None, told.text
        told.add(event)
    assert (told.finished, told.done) == ({}, False)


def settled(chat: ChatBroker, stream: Stream) -> list[tuple[Any, ...]]:
    """(state, tokens, price, reward) of a request's jobs, in the order they were claimed."""
    return chat.world.rows(
        "SELECT state, tokens, price, reward FROM jobs WHERE request_id = %(id)s ORDER BY claimed_at",
        id=uuid.UUID(stream.id),
    )


# --- one text


@lost_in_any_way
def test_the_client_sees_one_text_and_each_worker_is_paid_for_its_own(chat: ChatBroker, lose: Loss) -> None:
    owners = [chat.live.user(f"owner {number}", "trusted") for number in range(2)]
    workers = [chat.another_worker(f"of user {owner.id}", key=owner.api_key) for owner in owners]
    told = Transcript()
    with chat.open(max_tokens=60, seed=7, stream_options=USAGE) as stream:
        first = workers[0].take()
        workers[0].write(first, 25)
        read_to(stream, told, first.text)
        lose(chat, workers[0], first)
        assert stream.status == 200

        second = workers[1]
        job = second.take()
        assert (job.prefix, job.told["prefix_text"]) == (first.token_ids, first.text)
        assert (job.seed, job.slot, job.payload) == (first.seed, first.slot, first.payload)
        assert job.id != first.id
        second.write(job, 10)
        read_to(stream, told, job.text)
        second.write(job, 25)
        reward = second.finish(job, "length")
        told.read(stream)

    whole = undisturbed(first, 60)
    assert told.text == whole.result()["generation"]
    assert (told.finished, told.done, told.error) == ({0: "length"}, True, None)
    assert told.usage == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 60,
        "total_tokens": PROMPT_TOKENS + 60,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    expected = price(60, PROMPT_TOKENS, own=35)
    assert round(100 * reward) == expected.reward
    states = {vanish: "faulted", fault: "faulted", release: "released"}
    assert settled(chat, stream) == [
        (states[lose], None, None, None),
        ("stored", 60, expected.price, expected.reward),
    ]
    chat.assert_sound()
    earned = "SELECT balance FROM accounts WHERE user_id = %(id)s"
    assert [chat.world.scalar(earned, id=owner.id) for owner in owners] == [0, expected.reward]


@lost_in_any_way
def test_a_client_that_does_not_stream_gets_one_answer_too(chat: ChatBroker, lose: Loss) -> None:
    second = newcomer(chat)
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(chat.post, max_tokens=60, seed=7)
        first = chat.worker.take()
        chat.worker.write(first, 31)
        lose(chat, chat.worker, first)
        job = second.take()
        second.write(job, 29)
        second.finish(job, "length")
        told = answer.result(20).json()
    assert told["choices"][0]["message"]["content"] == undisturbed(first, 60).result()["generation"]
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 60


def test_a_text_goes_through_many_hands(chat: ChatBroker) -> None:
    """By chance, but the same in each run: who loses it how, and after how many tokens."""
    chance = random.Random(1)
    worker, posted, told = chat.worker, 0, Transcript()
    faults = 0
    with chat.open(max_tokens=120, seed=3) as stream:
        for _ in range(6):
            job = worker.take()
            assert len(job.prefix) == posted
            for _ in range(chance.randrange(3)):
                worker.write(job, chance.randrange(1, 9))
            read_to(stream, told, job.text)
            posted = len(job.token_ids)
            lose = release if faults else chance.choice(LOSSES)
            faults += lose is not release
            following = newcomer(chat)
            lose(chat, worker, job)
            worker = following
        job = worker.take()
        worker.write(job, 120)
        worker.finish(job, "length")
        told.read(stream)
    assert told.text == undisturbed(job, 120).result()["generation"]
    assert (told.finish_reason, told.done) == ("length", True)


def test_what_was_never_posted_is_made_again(chat: ChatBroker) -> None:
    second = newcomer(chat)
    with chat.open(max_tokens=20, seed=7) as stream:
        first = chat.worker.take()
        chat.worker.write(first, 8)
        first.write(5)
        vanish(chat, chat.worker, first)
        job = second.take()
        assert job.prefix == first.token_ids[:8]
        second.write(job, 12)
        second.finish(job, "length")
        told = chat.read(stream)
    assert told.text == undisturbed(first, 20).result()["generation"]


@lost_in_any_way
def test_without_a_word_posted_the_next_worker_begins(chat: ChatBroker, lose: Loss) -> None:
    second = newcomer(chat)
    with chat.open(max_tokens=20) as stream:
        first = chat.worker.take()
        chat.worker.post(first)
        lose(chat, chat.worker, first)
        job = second.take()
        assert (job.prefix, job.told["prefix_text"]) == ([], "")
        second.write(job, 20)
        second.finish(job, "length")
        told = chat.read(stream)
    assert told.text == undisturbed(first, 20).result()["generation"]
    assert settled(chat, stream)[1][3] == price(20, PROMPT_TOKENS).reward


def test_only_a_worker_of_the_same_revision_goes_on(database_url: str) -> None:
    with chat_broker(database_url) as chat, chat.open(max_tokens=20) as stream:
        other = chat.another_worker("other", manifest=tiny_tokenizer.manifest(model_revision="tiny-2"))
        job = chat.worker.take()
        chat.worker.write(job, 4)
        chat.worker.release(job)
        assert other.pop() == []
        # Nobody else could, so the one that gave it back may have it again.
        again = chat.worker.take()
        assert again.prefix == job.token_ids
        chat.worker.write(again, 16)
        chat.worker.finish(again, "length")
        assert chat.read(stream).text == undisturbed(job, 20).result()["generation"]
        chat.assert_sound()


@pytest.mark.parametrize("uploaded", [True, False], ids=["of a known tokenizer", "of an unknown one"])
def test_who_goes_on_is_paid_for_its_share_however_it_is_counted(database_url: str, uploaded: bool) -> None:
    with (
        chat_broker(database_url, uploaded=uploaded) as chat,
        chat.open(max_tokens=600, stream_options=USAGE) as stream,
    ):
        first = chat.worker.take()
        chat.worker.say(first, "a" * 400)
        chat.worker.release(first)
        job = chat.worker.take()
        chat.worker.say(job, "b" * 200)
        reward = chat.worker.finish(job, "length")
        usage = chat.read(stream).usage
        assert usage is not None
        tokens, own = (600, 200) if uploaded else (150, 50)
        assert (usage["completion_tokens"], usage.get("estimated", False)) == (tokens, not uploaded)
        expected = price(tokens, usage["prompt_tokens"], own=own)
        assert round(100 * reward) == expected.reward
        assert settled(chat, stream)[1] == ("stored", tokens, expected.price, expected.reward)
        chat.assert_sound()


# --- where the border lies


@pytest.mark.parametrize("kept", range(1, 18))
def test_a_character_may_be_cut_by_the_border(chat: ChatBroker, kept: int) -> None:
    text = "Kä你好😀 né!"
    ids = tiny_tokenizer.encode(text)
    assert len(ids) == 18
    second = newcomer(chat)
    with chat.open(max_tokens=len(ids), stream_options=USAGE) as stream:
        first = chat.worker.take()
        chat.worker.say(first, ids[:kept])
        chat.worker.release(first)
        job = second.take()
        assert job.prefix == ids[:kept]
        assert job.told["prefix_text"] == tiny_tokenizer.decode(ids[:kept])
        for token_id in ids[kept:]:
            second.say(job, [token_id])
        second.finish(job, "length")
        told = chat.read(stream)
    assert told.text == text
    assert told.usage is not None
    assert told.usage["completion_tokens"] == len(ids)


@lost_in_any_way
@pytest.mark.parametrize("before", ["abc E", "abc EN"])
@pytest.mark.parametrize(("after", "text", "tokens"), [("D of it", "abc ", 7), ("x", "abc ENx", 7)])
def test_a_stop_string_may_span_the_border(
    chat: ChatBroker, lose: Loss, before: str, after: str, text: str, tokens: int
) -> None:
    second = newcomer(chat)
    told = Transcript()
    with chat.open(stop=["END"], stream_options=USAGE) as stream:
        first = chat.worker.take()
        chat.worker.say(first, before)
        read_to(stream, told, "abc ")
        lose(chat, chat.worker, first)
        job = second.take()
        assert (job.prefix, job.told["prefix_text"]) == (tiny_tokenizer.encode(before), "abc ")
        second.say(job, "abc EN"[len(before) :] + after)
        second.finish(job)
        told.read(stream)
    assert (told.text, told.finish_reason, told.done) == (text, "stop", True)
    assert told.usage is not None
    assert told.usage["completion_tokens"] == tokens


@lost_in_any_way
def test_a_text_whose_last_token_was_posted_is_only_submitted(chat: ChatBroker, lose: Loss) -> None:
    second = newcomer(chat)
    told = Transcript()
    with chat.open(max_tokens=24, seed=7, stream_options=USAGE) as stream:
        first = chat.worker.take()
        chat.worker.write(first, 24)
        read_to(stream, told, first.text)
        lose(chat, chat.worker, first)
        job = second.take()
        assert len(job.prefix) == job.max_new_tokens == 24
        assert second.finish(job, "length") == 0
        told.read(stream)
    assert told.text == undisturbed(first, 24).result()["generation"]
    assert (told.finished, told.done) == ({0: "length"}, True)
    assert told.usage is not None
    assert told.usage["completion_tokens"] == 24
    assert settled(chat, stream)[1] == ("stored", 24, price(24, PROMPT_TOKENS).price, 0)


@lost_in_any_way
def test_log_probabilities_go_on_too(chat: ChatBroker, lose: Loss) -> None:
    second = newcomer(chat)
    with chat.open(max_tokens=30, seed=7, logprobs=True, top_logprobs=2) as stream:
        first = chat.worker.take()
        chat.worker.write(first, 11)
        lose(chat, chat.worker, first)
        job = second.take()
        second.write(job, 6)
        job.write(13)
        second.finish(job, "length")
        told = chat.read(stream)
    whole = undisturbed(first, 30)
    assert told.text == whole.result()["generation"]
    assert [entry["bytes"] for entry in told.logprobs[0]] == [[token_id] for token_id in whole.token_ids]
    assert all(len(entry["top_logprobs"]) == 2 for entry in told.logprobs[0])


# --- one of several


@lost_in_any_way
def test_one_slot_of_three_goes_on_elsewhere(chat: ChatBroker, lose: Loss) -> None:
    lost, others = newcomer(chat), chat.worker
    told = Transcript()
    with chat.open(n=3, max_tokens=40, seed=5, stream_options=USAGE) as stream:
        zero, one, two = others.take(), lost.take(), others.take()
        assert [job.slot for job in (zero, one, two)] == [0, 1, 2]
        for worker, job, count in ((others, zero, 12), (lost, one, 17), (others, two, 3)):
            worker.write(job, count)
        if lose is vanish:
            lost.vanish()
            assert chat.pass_leases(others).stale == 1
        else:
            lose(chat, lost, one)
        others.write(zero, 28)
        others.finish(zero, "length")
        rest = others.take()
        assert (rest.slot, rest.seed, rest.prefix) == (1, one.seed, one.token_ids)
        others.write(two, 37)
        others.write(rest, 23)
        others.finish(two, "length")
        others.finish(rest, "length")
        told.read(stream)
    for slot, job in enumerate((zero, one, two)):
        assert told.texts[slot] == undisturbed(job, 40).result()["generation"]
    assert len({zero.seed, one.seed, two.seed}) == 3
    assert (told.finished, told.done) == (dict.fromkeys(range(3), "length"), True)
    assert told.usage is not None
    assert (told.usage["prompt_tokens"], told.usage["completion_tokens"]) == (PROMPT_TOKENS, 120)


def test_all_slots_of_a_worker_that_leaves_go_on_elsewhere(chat: ChatBroker) -> None:
    second = newcomer(chat)
    with chat.open(n=3, max_tokens=40, seed=5) as stream:
        first = chat.worker.pop(slots=3)
        for job, count in zip(first, (30, 0, 9), strict=True):
            chat.worker.write(job, count)
        for job in first:
            chat.worker.release(job)
        jobs = sorted(second.pop(slots=3), key=lambda job: job.slot)
        assert [len(job.prefix) for job in jobs] == [30, 0, 9]
        for job in jobs:
            second.write(job, 40)
            second.finish(job, "length")
        told = chat.read(stream)
    assert [told.texts[job.slot] for job in first] == [undisturbed(job, 40).result()["generation"] for job in first]


def test_a_worker_that_vanishes_with_two_slots_of_a_request_is_two_faults(chat: ChatBroker) -> None:
    with chat.open(n=2, max_tokens=40) as stream:
        for job in chat.worker.pop(slots=2):
            chat.worker.write(job, 5)
        assert chat.pass_leases().stale == 2
        told = chat.read(stream)
    assert told.error is not None
    assert (told.error["code"], told.finished, told.done) == ("generation_faulted", {}, False)


# --- who comes back, and who fails again


@pytest.mark.parametrize("ended", [False, True], ids=["while it runs elsewhere", "after it has ended"])
def test_a_worker_that_comes_back_is_told_that_it_is_stale_and_changes_nothing(chat: ChatBroker, ended: bool) -> None:
    second = newcomer(chat)
    told = Transcript()
    with chat.open(max_tokens=30, seed=7) as stream:
        first = chat.worker.take()
        chat.worker.write(first, 10)
        assert chat.pass_leases().stale == 1
        job = second.take()
        second.write(job, 5)
        if ended:
            second.write(job, 15)
            second.finish(job, "length")
        read_as = (
            "SELECT to_jsonb(j) - 'x', to_jsonb(p) FROM jobs j LEFT JOIN progress p ON p.job_id = j.id ORDER BY j.id"
        )
        before = chat.world.rows(read_as)

        first.say("something else entirely, and much of it")
        assert [(stop.job_id, stop.reason) for stop in chat.worker.post(first)] == [(first.id, "stale")]
        reply = chat.worker.submit(first, state="ok", finish_reason="stop", **first.result())
        assert (reply.status, reply.body["rc"]) == (400, "AbortedGen")
        for state in ("faulted", "released"):
            reply = chat.worker.submit(first, state=state)
            assert (reply.status, reply.body["rc"]) == (400, "AbortedGen")
        assert chat.world.rows(read_as) == before

        if not ended:
            second.write(job, 15)
            second.finish(job, "length")
        told.read(stream)
    assert told.text == undisturbed(job, 30).result()["generation"]
    assert (told.finish_reason, told.done) == ("length", True)


@pytest.mark.parametrize("first_loss", [vanish, fault], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("second_loss", [vanish, fault], ids=lambda loss: loss.__name__)
def test_the_second_fault_ends_the_stream_with_an_error(chat: ChatBroker, first_loss: Loss, second_loss: Loss) -> None:
    second, third = newcomer(chat), newcomer(chat)
    told = Transcript()
    with chat.open(max_tokens=30, seed=7) as stream:
        first = chat.worker.take()
        chat.worker.write(first, 10)
        first_loss(chat, chat.worker, first)
        job = second.take()
        second.write(job, 5)
        read_to(stream, told, job.text)
        second_loss(chat, second, job)
        told.read(stream)
    assert told.text == undisturbed(first, 15).text
    assert told.error is not None
    assert told.error["code"] == "generation_faulted"
    assert (told.finished, told.done, told.usage) == ({}, False, None)
    assert third.pop() == []
    charged = chat.world.scalar("SELECT charged FROM requests WHERE id = %(id)s", id=uuid.UUID(stream.id))
    assert charged == TEXT_TAX


def test_the_second_fault_is_a_status_where_nothing_was_sent(chat: ChatBroker) -> None:
    second = newcomer(chat)
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(chat.post, max_tokens=30)
        job = chat.worker.take()
        chat.worker.write(job, 10)
        chat.worker.fault(job)
        second.fault(second.take())
        told = answer.result(20)
    assert (told.status_code, told.json()["error"]["code"]) == (502, "generation_faulted")
    assert told.headers["x-should-retry"] == "false"


def test_a_worker_that_says_otherwise_than_was_sent_loses_the_job(chat: ChatBroker) -> None:
    second, third = newcomer(chat), newcomer(chat)
    with chat.open(max_tokens=30, seed=7) as stream:
        first = chat.worker.take()
        chat.worker.write(first, 10)
        chat.worker.release(first)
        job = second.take()
        other = {**job.result(), "generation": "another text", "token_ids": list(b"another text")}
        reply = second.submit(job, state="ok", finish_reason="stop", **other)
        assert (reply.status, reply.body["rc"]) == (400, "ContradictsProgress")
        rest = third.take()
        assert rest.prefix == first.token_ids
        third.write(rest, 20)
        third.finish(rest, "length")
        assert chat.read(stream).text == undisturbed(first, 30).result()["generation"]
