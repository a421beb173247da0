"""A chat as server-sent events in OpenAI's shapes.

A comment at once, so that the headers are out; with the first news of a chat the role of each choice; then their deltas,
and for each exactly one chunk with a finish reason. At the end the usage where it was asked for, and `[DONE]`. A failure
is an event with an `error` and the end, never `[DONE]`. All chunks of a stream share their head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import orjson
import structlog

from horde.api.errors import log_unexpected
from horde.api.openai_errors import horde_error_object, internal_error_object
from horde.api.openai_v1.answers import CHAT_ID, COMPLETION_ID, Tally, head
from horde.api.openai_v1.logprobs import CompletionLogprobs, chat_logprobs
from horde.errors import HordeError
from horde.usecases.chat_stream import Delta, Ended, KeepAlive, OpenChat

CONTENT_TYPE = "text/event-stream; charset=utf-8"
# Proxies hold an answer back to compress or buffer it unless they are told not to.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Who joins late gets all there is at once: in pieces, so that a client that reads slowly holds little of it here.
_MOST_CHARACTERS, _MOST_TOKENS = 8192, 64
log = structlog.get_logger("horde.streams")


class Chunks(ABC):
    """The choices of one kind of completion, piece by piece."""

    prefix: str
    kind: str

    @abstractmethod
    def begin(self, slot: int) -> dict[str, Any] | None:
        """What goes before the first piece of a slot."""

    @abstractmethod
    def piece(self, delta: Delta) -> dict[str, Any]:
        """New text."""

    @abstractmethod
    def end(self, ended: Ended) -> dict[str, Any]:
        """The one with the finish reason."""


class ChatChunks(Chunks):
    """Those of a chat."""

    prefix, kind = CHAT_ID, "chat.completion.chunk"

    def begin(self, slot: int) -> dict[str, Any]:
        """The role, once."""
        return self._choice(slot, {"role": "assistant", "content": ""})

    def piece(self, delta: Delta) -> dict[str, Any]:
        """New text."""
        choice = self._choice(delta.slot, {"content": delta.text})
        if delta.tokens is not None:
            choice["logprobs"] = chat_logprobs(delta.tokens)
        return choice

    def end(self, ended: Ended) -> dict[str, Any]:
        """The one with the finish reason."""
        return self._choice(ended.slot, {}) | {"finish_reason": ended.finish_reason}

    @staticmethod
    def _choice(slot: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": slot, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionChunks(Chunks):
    """Those of a text that is continued."""

    prefix, kind = COMPLETION_ID, "text_completion"

    def __init__(self) -> None:
        self._logprobs = CompletionLogprobs()

    def begin(self, slot: int) -> None:
        """Nothing."""

    def piece(self, delta: Delta) -> dict[str, Any]:
        """New text."""
        logprobs = None if delta.tokens is None else self._logprobs.write(delta.slot, delta.tokens)
        return {"index": delta.slot, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, ended: Ended) -> dict[str, Any]:
        """The one with the finish reason."""
        return {"index": ended.slot, "text": "", "logprobs": None, "finish_reason": ended.finish_reason}


def stream(chat: OpenChat, chunks: Chunks, *, include_usage: bool, route: str) -> Iterator[bytes]:
    """The events of a chat, which is left whenever and however the stream ends.

    It has begun when this returns: so closing it, or forgetting it, leaves the chat even where nothing was read of it.

    Args:
        route: for the log, should something fail.
    """
    events = _stream(chat, chunks, include_usage=include_usage, route=route)
    next(events)
    return events


def _stream(chat: OpenChat, chunks: Chunks, *, include_usage: bool, route: str) -> Iterator[bytes]:
    with chat:
        yield b""
        yield KEEP_ALIVE
        try:
            yield from _written(chat, chunks, include_usage=include_usage)
        except HordeError as error:
            log.info("stream_ended_by_error", route=route, code=error.code)
            yield _event(horde_error_object(error))
        except Exception as error:  # noqa: BLE001 the headers are out: all that can be said is an event
            log_unexpected(error, method="POST", route=route)
            yield _event(internal_error_object())


def _written(chat: OpenChat, chunks: Chunks, *, include_usage: bool) -> Iterator[bytes]:
    begun = False
    tally = Tally()
    shared = head(chat, chunks.prefix, chunks.kind)
    unused = {"usage": None} if include_usage else {}

    def chunk(choice: dict[str, Any]) -> bytes:
        return _event(shared | {"choices": [choice]} | unused)

    for event in chat.events():
        if isinstance(event, KeepAlive):
            yield KEEP_ALIVE
            continue
        if not begun:
            begun = True
            # All of them, in their order: OpenAI's own client takes an index it has not met for the next one.
            firsts = [chunks.begin(slot) for slot in range(chat.n)]
            yield from (chunk(first) for first in firsts if first is not None)
        if isinstance(event, Ended):
            tally.add(event)
            yield chunk(chunks.end(event))
        else:
            for piece in _pieces(event):
                yield chunk(chunks.piece(piece))
    if tally.ended < chat.n:
        # The client has gone, and so nobody reads this: no end that looks like one.
        return
    if include_usage:
        yield _event(shared | {"choices": [], "usage": tally.usage(chat)})
    yield DONE


def _pieces(delta: Delta) -> Iterator[Delta]:
    """The same in pieces that are not too large."""
    if len(delta.text) <= _MOST_CHARACTERS and len(delta.tokens or ()) <= _MOST_TOKENS:
        yield delta
        return
    texts = [delta.text[at : at + _MOST_CHARACTERS] for at in range(0, len(delta.text), _MOST_CHARACTERS)]
    if delta.tokens is None:
        yield from (Delta(delta.slot, text) for text in texts)
        return
    groups = [delta.tokens[at : at + _MOST_TOKENS] for at in range(0, len(delta.tokens), _MOST_TOKENS)]
    for text, tokens in zip_longest(texts, groups):
        yield Delta(delta.slot, text or "", tokens)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
