"""Whole answers of `/v1`: their shapes, and how what a chat had to say becomes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from horde.api.openai_v1.logprobs import CompletionLogprobs, chat_logprobs
from horde.api.validation import Answer
from horde.errors import ErrorCode, HordeError
from horde.usecases.chat_stream import Delta, Ended, OpenChat, TokenLogprob

CHAT_ID, COMPLETION_ID = "chatcmpl-", "cmpl-"
# The finish reason of an answer that is not to be seen.
WITHHELD = "content_filter"


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, how many a worker had in its cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens; `estimated` is there, and true, where the model's tokenizer is not known here."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    estimated: bool | None = None


class Message(Answer):
    """What the assistant says."""

    role: str
    content: str
    refusal: None


class ChatChoice(Answer):
    """One of `n` answers. `finish_reason` is `stop`, `length` or `content_filter`."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(Answer):
    """The answers to a chat."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(Answer):
    """One of `n` continuations."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class Completion(Answer):
    """The continuations of a text."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


@dataclass
class Choice:
    """One slot, as far as it is; `tokens` where log-probabilities came."""

    text: str = ""
    tokens: list[TokenLogprob] | None = None
    finish_reason: str = ""


@dataclass
class Tally:
    """What the slots that have ended took, in tokens."""

    completion_tokens: int = 0
    cached: list[int] = field(default_factory=list)

    def add(self, ended: Ended) -> None:
        """Count a slot."""
        self.completion_tokens += ended.completion_tokens
        self.cached.append(ended.cached_tokens)

    @property
    def ended(self) -> int:
        """How many slots have ended."""
        return len(self.cached)

    def usage(self, chat: OpenChat) -> dict[str, Any]:
        """The usage of a request. Its prompt counts once; cached is what was so before any of its slots ran."""
        body: dict[str, Any] = {
            "prompt_tokens": chat.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": chat.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, default=0)},
        }
        if chat.estimated:
            body["estimated"] = True
        return body


def collect(chat: OpenChat) -> tuple[list[Choice], Tally]:
    """Wait for all that a chat has to say.

    Raises:
        HordeError: it ended otherwise, or the client has gone.
    """
    texts: list[list[str]] = [[] for _ in range(chat.n)]
    choices = [Choice() for _ in range(chat.n)]
    tally = Tally()
    for event in chat.events():
        match event:
            case Delta(slot, text, tokens):
                texts[slot].append(text)
                if tokens is not None:
                    choices[slot].tokens = [*(choices[slot].tokens or []), *tokens]
            case Ended(slot, finish_reason):
                choices[slot].finish_reason = finish_reason
                if finish_reason == WITHHELD:
                    # Whatever was posted before that was known has not been told yet, and need not be.
                    choices[slot].tokens = None
                else:
                    choices[slot].text = "".join(texts[slot])
                tally.add(event)
            case _:
                pass
    if tally.ended < chat.n:
        raise HordeError(ErrorCode.CANCELLED, "The client hung up before its answer was there.", rc="Cancelled")
    return choices, tally


def head(chat: OpenChat, prefix: str, kind: str) -> dict[str, Any]:
    """What an answer and every chunk of a stream begin with. The fingerprint is the model's revision."""
    return {
        "id": f"{prefix}{chat.id}",
        "object": kind,
        "created": chat.created,
        "model": chat.model,
        "system_fingerprint": chat.model_revision,
    }


def chat_body(chat: OpenChat, *, logprobs: bool) -> dict[str, Any]:
    """The answer to a chat, once it is whole."""

    def choice(index: int, whole: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": chat_logprobs(whole.tokens or []) if logprobs else None,
            "finish_reason": whole.finish_reason,
        }

    return _body(chat, head(chat, CHAT_ID, "chat.completion"), choice)


def completion_body(chat: OpenChat, *, logprobs: bool) -> dict[str, Any]:
    """The answer to a text, once it is whole."""
    written = CompletionLogprobs()

    def choice(index: int, whole: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": whole.text,
            "logprobs": written.write(index, whole.tokens or []) if logprobs else None,
            "finish_reason": whole.finish_reason,
        }

    return _body(chat, head(chat, COMPLETION_ID, "text_completion"), choice)


def _body(chat: OpenChat, begun: dict[str, Any], write: Callable[[int, Choice], dict[str, Any]]) -> dict[str, Any]:
    choices, tally = collect(chat)
    return begun | {
        "choices": [write(index, choice) for index, choice in enumerate(choices)],
        "usage": tally.usage(chat),
    }
