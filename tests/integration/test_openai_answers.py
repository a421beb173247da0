"""What `/v1` answers over a live broker, streamed and whole: the same text, reasons and counts, or one error and an end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from horde.db.database import Database
from horde.usecases import chat_stream
from horde.usecases.chat import cancel_chat
from tests.support import tiny_tokenizer
from tests.support.chat import COMPLETIONS, ChatBroker, chat_broker
from tests.support.sse import Stream

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def chat(database_url: str) -> Iterator[ChatBroker]:
    with chat_broker(database_url) as broker:
        yield broker


def whole(stream: Stream) -> dict[str, Any]:
    """The body of an answer that is no stream."""
    found: dict[str, Any] = json.loads(stream.text())
    return found


def test_a_stream_says_by_its_head_what_it_is(chat: ChatBroker) -> None:
    stream = chat.open()
    assert stream.status == 200
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-length" not in stream.headers
    assert stream.headers["access-control-allow-origin"] == "*"
    assert stream.headers["x-horde-request-id"]


def test_what_a_worker_posts_is_what_a_stream_says_piece_by_piece(chat: ChatBroker) -> None:
    stream = chat.open()
    job = chat.worker.take()
    pieces = ["Hé", "llo", " wörld 😀"]
    heard = []
    for piece in pieces:
        chat.worker.say(job, piece)
        chunk = stream.data()
        if not heard:
            assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            chunk = stream.data()
        heard.append(chunk["choices"][0]["delta"])
    chat.worker.finish(job)
    finish, done = stream.rest()
    assert heard == [{"content": piece} for piece in pieces]
    assert finish.json()["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert done.is_done
    chat.assert_nothing_left()


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}, {"other": 1}])
def test_usage_is_not_told_unless_it_was_asked_for(chat: ChatBroker, options: Any) -> None:
    chat.worker.start(jobs=1, rate=500)
    transcript = chat.read(chat.open(stream_options=options, max_tokens=4))
    assert transcript.done
    assert all("usage" not in chunk for chunk in transcript.chunks)


def test_streamed_and_whole_answers_say_the_same(chat: ChatBroker) -> None:
    chat.worker.start(jobs=8, rate=500)
    counted = {"include_usage": True, "continuous_usage_stats": True}
    for body in ({"n": 3}, {"stop": ["sees", "sea", "you", "ça"]}, {"max_tokens": 1}, {"path": COMPLETIONS, "n": 2}):
        asked = {"seed": 7, "max_tokens": 48, **body}
        streamed = chat.read(chat.open(**asked, stream_options=counted))
        answer = chat.post(**asked, stream_options=counted).json()
        texts = [
            choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]
        ]
        assert [streamed.texts[index] for index in range(len(texts))] == texts
        assert len(set(texts)) == len(texts)
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert [streamed.finished[index] for index in range(len(texts))] == reasons
        assert streamed.usage is not None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert streamed.usage[name] == answer["usage"][name]
        assert all(chunk["usage"] is None for chunk in streamed.chunks[:-1])
    chat.assert_nothing_left()


def test_usage_counts_the_prompt_once_and_every_choice(chat: ChatBroker) -> None:
    chat.worker.start(jobs=3, rate=500)
    usage = chat.post(n=3, max_tokens=5).json()["usage"]
    prompt = len(tiny_tokenizer.encode(tiny_tokenizer.render(HELLO)))
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": 15,
        "total_tokens": prompt + 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_usage_of_a_model_whose_tokenizer_is_not_known_says_that_it_is_an_estimate(database_url: str) -> None:
    with chat_broker(database_url, uploaded=False) as chat:
        chat.worker.start(jobs=1, rate=500)
        assert chat.post().json()["usage"]["estimated"] is True
        assert chat.read(chat.open(stream_options={"include_usage": True})).usage["estimated"] is True  # type: ignore[index]


def test_the_sdk_reads_both_ways_and_both_kinds(chat: ChatBroker) -> None:
    chat.worker.start(jobs=4, rate=500)
    client = chat.openai()
    told = client.chat.completions.create(model="tiny", messages=HELLO, seed=3, max_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, seed=3, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == told.choices[0].message.content
    assert chunks[-1].usage is not None
    assert told.usage is not None
    assert chunks[-1].usage.completion_tokens == told.usage.completion_tokens == 20
    assert told.choices[0].finish_reason == "length"
    text = client.completions.create(model="tiny", prompt=[72, 101], seed=3, max_tokens=20)
    pieces = client.completions.create(model="tiny", prompt=[[72, 101]], seed=3, max_tokens=20, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text


def test_logprobs_are_those_of_the_tokens_said(chat: ChatBroker) -> None:
    chat.worker.start(jobs=4, rate=500)
    asked = {"seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    content = chat.post(**asked).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    assert chat.read(chat.open(**asked)).logprobs[0] == content
    text = chat.post(**asked).json()["choices"][0]["message"]["content"]
    said = b"".join(bytes(entry["bytes"]) for entry in content)
    assert said.decode("utf-8", "ignore") == text
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    older = chat.post(path=COMPLETIONS, seed=3, max_tokens=12, logprobs=2).json()["choices"][0]["logprobs"]
    assert older["token_logprobs"] == [entry["logprob"] for entry in content]
    assert older["text_offset"] == sorted(older["text_offset"])
    streamed = chat.read(chat.open(path=COMPLETIONS, seed=3, max_tokens=12, logprobs=2)).logprobs[0]
    assert [offset for entry in streamed for offset in entry["text_offset"]] == older["text_offset"]


def test_silence_is_filled_with_comments(chat: ChatBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_stream, "KEEP_ALIVE_EVERY", 0.05)
    stream = chat.open()
    heard = [stream.next() for _ in range(4)]
    assert [event.comment for event in heard if event is not None] == ["keep-alive"] * 4
    job = chat.worker.take()
    chat.worker.finish(job)
    assert chat.read(stream).done


def test_the_first_fault_is_not_seen_and_the_second_ends_the_stream(chat: ChatBroker) -> None:
    stream = chat.open()
    chat.worker.fault(chat.worker.take())
    second = chat.worker.take()
    chat.worker.say(second, "Hel")
    assert [stream.data()["choices"][0]["delta"]["content"] for _ in range(2)] == ["", "Hel"]
    chat.worker.fault(second)
    transcript = chat.read(stream)
    assert (transcript.done, transcript.chunks) == (False, [])
    assert transcript.error == {
        "message": transcript.error["message"],  # type: ignore[index]
        "type": "server_error",
        "param": None,
        "code": "generation_faulted",
    }
    chat.assert_nothing_left()


def test_a_whole_answer_that_failed_is_a_502_that_the_sdk_does_not_try_again(chat: ChatBroker) -> None:
    stream = chat.open(stream=False)
    for _ in range(2):
        chat.worker.fault(chat.worker.take())
    assert whole(stream)["error"]["code"] == "generation_faulted"
    assert (stream.status, stream.headers["x-should-retry"]) == (502, "false")
    chat.assert_nothing_left()


def test_a_stream_that_fails_raises_in_the_sdk(chat: ChatBroker) -> None:
    chunks = chat.openai(max_retries=2).chat.completions.create(model="tiny", messages=HELLO, stream=True)
    job = chat.worker.take()
    chat.worker.say(job, "x")
    chat.worker.fault(job)
    chat.worker.fault(chat.worker.take())
    with pytest.raises(openai.APIError) as failed:
        list(chunks)
    assert failed.value.code == "generation_faulted"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_refusal_of_the_worker_is_the_clients(database_url: str, *, streamed: bool) -> None:
    with chat_broker(database_url, uploaded=False) as chat:
        stream = chat.open(stream=streamed)
        chat.worker.reject(chat.worker.take())
        error = chat.read(stream).error if streamed else whole(stream)["error"]
        assert error is not None
        assert error["code"] == "context_length_exceeded"
        assert streamed or stream.status == 400


@pytest.mark.parametrize("streamed", [True, False])
def test_a_cancel_from_elsewhere_is_told_as_one(chat: ChatBroker, *, streamed: bool) -> None:
    stream = chat.open(stream=streamed)
    job = chat.worker.take()
    cancel_chat(chat.live.context, chat.live.context.database.read(_only_request))
    error = chat.read(stream).error if streamed else whole(stream)["error"]
    assert error is not None
    assert error["code"] == "cancelled"
    assert streamed or (stream.status, stream.headers["x-should-retry"]) == (409, "false")
    assert chat.worker.hear_stop(job).reason == "cancelled"


def _only_request(tx: Any) -> Any:
    return tx.execute("SELECT id FROM requests").scalar_one()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_deadline_that_passes_ends_it(chat: ChatBroker, *, streamed: bool) -> None:
    stream = chat.open(stream=streamed, deadline_seconds=1)
    error = chat.read(stream).error if streamed else whole(stream)["error"]
    assert error is not None
    assert error["code"] == "deadline_exceeded"
    assert streamed or (stream.status, stream.headers["x-should-retry"]) == (504, "false")
    chat.assert_nothing_left()


def test_a_censored_answer_has_its_own_reason(chat: ChatBroker) -> None:
    stream = chat.open()
    job = chat.worker.take()
    assert chat.worker.submit(job, state="censored", finish_reason="stop", **job.result()).status == 200
    assert chat.read(stream).finish_reason == "content_filter"


def test_a_broker_that_stops_ends_its_streams_with_an_error_and_keeps_their_requests(
    chat: ChatBroker, db: Database
) -> None:
    stream = chat.open()
    chat.worker.say(chat.worker.take(), "Hel")
    assert [stream.data()["choices"][0]["delta"]["content"] for _ in range(2)] == ["", "Hel"]
    chat.live.stop.set()
    (last,) = stream.rest()
    assert last.json()["error"]["code"] == "broker_unavailable"
    chat.live.thread.join(60)
    with db.autocommit() as tx:
        assert tx.execute("SELECT outcome FROM requests").scalar_one() is None


def test_an_sdk_that_loses_patience_leaves_one_cancelled_request_for_each_try(chat: ChatBroker) -> None:
    client = chat.openai(timeout=0.5, max_retries=1)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="tiny", messages=HELLO)
    chat.assert_nothing_left()
    with chat.live.context.database.autocommit() as tx:
        found = tx.execute("SELECT outcome, outcome_reason FROM requests").all()
    assert [tuple(row) for row in found] == [("cancelled", "disconnect")] * 2
