"""What `/v1` writes for each event of a chat: recorded shapes, byte for byte, which the `openai` SDK's types read too."""

from __future__ import annotations

import gc
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from structlog.testing import capture_logs

from horde.api.openai_v1 import answers
from horde.api.openai_v1.answers import chat_body, completion_body
from horde.api.openai_v1.events import DONE, KEEP_ALIVE, ChatChunks, Chunks, CompletionChunks, stream
from horde.errors import ErrorCode, HordeError
from horde.usecases.chat_stream import Delta, Ended, KeepAlive, TokenLogprob

ID = uuid.UUID("11111111-2222-4333-8444-555555555555")
SECRET = "canary-prompt"


class ToldChat:
    """A chat of which everything is known beforehand. An exception among its events is raised in its turn."""

    id, created, model, model_revision = ID, 1_700_000_000, "a/model", "r1"

    def __init__(self, *told: Any, n: int = 1, prompt_tokens: int = 7, estimated: bool = False) -> None:
        self.told, self.n, self.prompt_tokens, self.estimated = told, n, prompt_tokens, estimated
        self.left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1

    def events(self) -> Iterator[Any]:
        for event in self.told:
            if isinstance(event, Exception):
                raise event
            yield event


def written(chat: ToldChat, chunks: Chunks | None = None, *, include_usage: bool = False) -> list[bytes]:
    """All that is sent."""
    return list(stream(chat, chunks or ChatChunks(), include_usage=include_usage, route="/v1"))  # type: ignore[arg-type]


def parsed(sent: list[bytes]) -> list[dict[str, Any]]:
    """The data of the events that hold JSON."""
    found = []
    for event in sent:
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2, "one line an event"
        if event not in {KEEP_ALIVE, DONE}:
            found.append(json.loads(event.removeprefix(b"data: ").decode("utf-8")))
    return found


SHARED = {
    "id": f"chatcmpl-{ID}",
    "object": "chat.completion.chunk",
    "created": 1_700_000_000,
    "model": "a/model",
    "system_fingerprint": "r1",
}


def chat_chunk(choice: dict[str, Any]) -> dict[str, Any]:
    return SHARED | {"choices": [{"index": 0, "logprobs": None, "finish_reason": None} | choice]}


ROLE = chat_chunk({"delta": {"role": "assistant", "content": ""}})
STOP = chat_chunk({"delta": {}, "finish_reason": "stop"})


def test_a_chat_is_a_comment_a_role_its_text_one_finish_and_done() -> None:
    sent = written(ToldChat(Delta(0, "Hé"), Delta(0, "llo"), Ended(0, "stop", 2, 0)))
    assert (sent[0], sent[-1]) == (KEEP_ALIVE, DONE)
    expected = [ROLE, chat_chunk({"delta": {"content": "Hé"}}), chat_chunk({"delta": {"content": "llo"}}), STOP]
    assert parsed(sent) == expected
    for chunk in expected:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_an_event_is_recorded_byte_for_byte() -> None:
    sent = written(ToldChat(Delta(0, 'a\n\u2028\U0001f600"\\'), Ended(0, "length", 1, 0)))
    head = (
        b'data: {"id":"chatcmpl-11111111-2222-4333-8444-555555555555","object":"chat.completion.chunk",'
        b'"created":1700000000,"model":"a/model","system_fingerprint":"r1","choices":[{"index":0,"delta":'
    )
    tail = b',"logprobs":null,"finish_reason":'
    assert sent == [
        b": keep-alive\n\n",
        head + b'{"role":"assistant","content":""}' + tail + b"null}]}\n\n",
        head + '{"content":"a\\n\u2028\U0001f600\\"\\\\"}'.encode() + tail + b"null}]}\n\n",
        head + b"{}" + tail + b'"length"}]}\n\n',
        b"data: [DONE]\n\n",
    ]


def test_an_empty_answer_is_a_role_and_a_finish() -> None:
    assert parsed(written(ToldChat(Ended(0, "stop", 0, 0)))) == [ROLE, STOP]


def test_waiting_is_a_comment() -> None:
    sent = written(ToldChat(KeepAlive(), Delta(0, "x"), KeepAlive(), Ended(0, "stop", 1, 0)))
    assert [event == KEEP_ALIVE for event in sent] == [True, True, False, False, True, False, False]


def test_usage_is_told_once_where_it_was_asked_for() -> None:
    chat = ToldChat(Delta(1, "x"), Ended(1, "stop", 3, 4), Delta(0, "y"), Ended(0, "length", 5, 2), n=2)
    *chunks, last = parsed(written(chat, include_usage=True))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last == SHARED | {
        "choices": [],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 8,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    ChatCompletionChunk.model_validate(last, strict=True)
    assert all("usage" not in chunk for chunk in parsed(written(chat)))


def test_usage_of_an_estimated_prompt_says_so() -> None:
    chat = ToldChat(Ended(0, "stop", 3, 0), estimated=True)
    assert parsed(written(chat, include_usage=True))[-1]["usage"]["estimated"] is True


def test_each_choice_has_its_own_role_told_in_their_order_and_its_own_finish() -> None:
    told = [Delta(1, "b"), Delta(0, "a"), Ended(1, "stop", 1, 0), Delta(0, "c"), Ended(0, "length", 2, 0)]
    choices = [chunk["choices"][0] for chunk in parsed(written(ToldChat(*told, n=2)))]
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in choices] == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "b"}, None),
        (0, {"content": "a"}, None),
        (1, {}, "stop"),
        (0, {"content": "c"}, None),
        (0, {}, "length"),
    ]


LOGPROBS = [
    TokenLogprob("é", "é".encode(), -0.5, [("é", "é".encode(), -0.5), ("e", b"e", float("-inf"))]),
    TokenLogprob("\ufffd", b"\xf0\x9f", -1.0, []),
    TokenLogprob("\ufffd", b"\x98\x80", -1.5, []),
    TokenLogprob("!", b"!", -2.0, []),
]
CHAT_LOGPROBS = {
    "content": [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "e", "logprob": -9999.0, "bytes": [101]},
            ],
        },
        {"token": "\ufffd", "logprob": -1.0, "bytes": [240, 159], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -1.5, "bytes": [152, 128], "top_logprobs": []},
        {"token": "!", "logprob": -2.0, "bytes": [33], "top_logprobs": []},
    ],
    "refusal": None,
}


def test_logprobs_of_a_chat_stand_beside_its_text() -> None:
    chunks = parsed(written(ToldChat(Delta(0, "é😀!", LOGPROBS), Ended(0, "stop", 4, 0))))
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, CHAT_LOGPROBS, None]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


COMPLETION_SHARED = SHARED | {"id": f"cmpl-{ID}", "object": "text_completion"}


def completion_chunk(**choice: Any) -> dict[str, Any]:
    return COMPLETION_SHARED | {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None} | choice]}


def test_a_completion_has_text_and_no_role() -> None:
    sent = written(ToldChat(Delta(0, "Hello"), Ended(0, "length", 2, 0)), CompletionChunks(), include_usage=True)
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert parsed(sent) == [
        completion_chunk(text="Hello") | {"usage": None},
        completion_chunk(finish_reason="length") | {"usage": None},
        COMPLETION_SHARED | {"choices": [], "usage": usage | details},
    ]
    assert sent[-1] == DONE


def test_logprobs_of_a_completion_count_characters_across_its_pieces() -> None:
    told = [Delta(0, "é", LOGPROBS[:2]), Delta(0, "😀!", LOGPROBS[2:]), Ended(0, "stop", 4, 0)]
    first, second, _ = parsed(written(ToldChat(*told), CompletionChunks()))
    assert first["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.0],
        "tokens": ["é", "\ufffd"],
        "top_logprobs": [{"é": -0.5, "e": -9999.0}, {"\ufffd": -1.0}],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [1, 2]


FAILURE = HordeError(ErrorCode.GENERATION_FAULTED, "Two workers failed.", rc="Faulted")


@pytest.mark.parametrize("told", [[], [Delta(0, "x")], [Delta(0, "x"), Ended(0, "stop", 1, 0)]])
def test_a_failure_is_the_last_event_and_never_done(told: list[Any]) -> None:
    chat = ToldChat(*told, FAILURE, n=2)
    *_, last = sent = written(chat)
    assert last == (
        b'data: {"error":{"message":"Two workers failed.","type":"server_error","param":null,'
        b'"code":"generation_faulted"}}\n\n'
    )
    assert DONE not in sent
    choices = [choice for chunk in parsed(sent) for choice in chunk.get("choices", [])]
    assert not any(choice["finish_reason"] for choice in choices if choice["index"] == 1)
    assert chat.left == 1


def test_a_fault_of_the_broker_is_an_event_that_tells_nothing_and_a_line_of_the_log() -> None:
    chat = ToldChat(Delta(0, "x"), RuntimeError(SECRET))
    with capture_logs() as logs:
        *_, last = written(chat)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert SECRET.encode() not in last
    assert [entry["event"] for entry in logs] == ["unexpected_error"]
    assert SECRET not in str(logs)
    assert chat.left == 1


def test_who_has_gone_is_told_no_end() -> None:
    chat = ToldChat(Delta(0, "x"))
    assert DONE not in written(chat, include_usage=True)
    assert all(chunk["choices"] for chunk in parsed(written(ToldChat(Delta(0, "x")), include_usage=True)))
    assert chat.left == 1


def never_read(events: Iterator[bytes]) -> None:
    events.close()  # type: ignore[attr-defined]


def read_once(events: Iterator[bytes]) -> None:
    next(events)
    events.close()  # type: ignore[attr-defined]


def read_into_the_text(events: Iterator[bytes]) -> None:
    for _ in range(3):
        next(events)
    events.close()  # type: ignore[attr-defined]


def forgotten(_: Iterator[bytes]) -> None:
    """Nobody holds it when this returns."""


@pytest.mark.parametrize("way_out", [never_read, read_once, read_into_the_text, forgotten])
def test_a_chat_is_left_once_on_every_way_out(way_out: Callable[[Iterator[bytes]], None]) -> None:
    chat = ToldChat(Delta(0, "x"), Delta(0, "y"), Ended(0, "stop", 2, 0))
    way_out(stream(chat, ChatChunks(), include_usage=False, route="/v1"))  # type: ignore[arg-type]
    gc.collect()
    assert chat.left == 1


def test_much_at_once_leaves_in_pieces_that_say_the_same() -> None:
    text = "äöü" * 20_000
    tokens = [TokenLogprob("ä", "ä".encode(), -1.0, [])] * 1_000
    for delta in (Delta(0, text), Delta(0, text, tokens), Delta(0, "", tokens), Delta(0, "x", tokens)):
        sent = written(ToldChat(delta, Ended(0, "stop", 1, 0)))
        assert max(map(len, sent)) < 64 << 10
        choices = [chunk["choices"][0] for chunk in parsed(sent)]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == delta.text
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert len(entries) == len(delta.tokens or [])


def test_a_whole_chat_has_the_recorded_shape() -> None:
    told = [Delta(1, "b"), Delta(0, "a", LOGPROBS[:1]), Delta(0, "!", LOGPROBS[3:])]
    chat = ToldChat(*told, Ended(1, "length", 1, 0), Ended(0, "stop", 2, 3), n=2)
    body = chat_body(chat, logprobs=True)  # type: ignore[arg-type]
    assert body == SHARED | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a!", "refusal": None},
                "logprobs": {
                    "content": [CHAT_LOGPROBS["content"][0], CHAT_LOGPROBS["content"][3]],  # type: ignore[index]
                    "refusal": None,
                },
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "b", "refusal": None},
                "logprobs": {"content": [], "refusal": None},
                "finish_reason": "length",
            },
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    ChatCompletion.model_validate(body, strict=True)
    answers.ChatCompletion.model_validate(body, strict=True)


def test_a_whole_completion_has_the_recorded_shape() -> None:
    chat = ToldChat(Delta(0, "a"), Delta(0, "b"), Ended(0, "length", 2, 0))
    body = completion_body(chat, logprobs=False)  # type: ignore[arg-type]
    assert body == COMPLETION_SHARED | {
        "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    Completion.model_validate(body, strict=True)
    answers.Completion.model_validate(body, strict=True)
    offsets = completion_body(ToldChat(Delta(0, "é😀!", LOGPROBS), Ended(0, "stop", 4, 0)), logprobs=True)  # type: ignore[arg-type]
    assert offsets["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 2]


def test_a_whole_answer_to_nobody_is_no_answer() -> None:
    with pytest.raises(HordeError) as refused:
        chat_body(ToldChat(Delta(0, "x")), logprobs=False)  # type: ignore[arg-type]
    assert refused.value.code is ErrorCode.CANCELLED
