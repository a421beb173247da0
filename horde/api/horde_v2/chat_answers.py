"""What we answer about a chat that is polled: the shapes, and how the results of use cases become them."""

from __future__ import annotations

from typing import Any

from horde.api.horde_v2.text_answers import RequestState, state_fields
from horde.api.openai_v1.logprobs import chat_logprobs
from horde.api.validation import Answer
from horde.usecases.chat import AcceptedChat, ChatGeneration, ChatStatus


class AcceptedChatAnswer(Answer):
    """A chat that is on disk, or for a dry run only what it would cost. `estimated` is there, and true, where the
    model's tokenizer is not known here."""

    id: str | None = None
    kudos: float
    prompt_tokens: int
    estimated: bool | None = None
    message: str | None = None


class ChatMessage(Answer):
    """What the assistant says."""

    role: str
    content: str


class ChatUsage(Answer):
    """Tokens of one answer. `cached_tokens` are those of the prompt that the worker had computed before."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class ChatGenerationAnswer(Answer):
    """One answer. `finish_reason` is `stop`, `length`, `content_filter`, or `cancelled`; `text` is the message's content."""

    worker_id: str
    worker_name: str
    model: str
    state: str
    message: ChatMessage
    text: str
    seed: int
    finish_reason: str
    usage: ChatUsage
    logprobs: dict[str, Any] | None


class ChatStatusAnswer(RequestState):
    """How far a chat is. `estimated`, `cancelled` and `error_code` are there only where they apply."""

    prompt_tokens: int
    estimated: bool | None = None
    generations: list[ChatGenerationAnswer]


def accepted_chat_body(accepted: AcceptedChat) -> dict[str, Any]:
    """The 202 of a chat, the 200 of a dry run."""
    body: dict[str, Any] = {"kudos": accepted.kudos, "prompt_tokens": accepted.prompt_tokens}
    if accepted.id is not None:
        body["id"] = str(accepted.id)
    if accepted.estimated:
        body["estimated"] = True
    if accepted.message:
        body["message"] = accepted.message
    return body


def chat_status_body(status: ChatStatus) -> dict[str, Any]:
    """The status. Like that of a text it never has a `message` of its own."""
    body = state_fields(status)
    body["prompt_tokens"] = status.prompt_tokens
    if status.estimated:
        body["estimated"] = True
    body["generations"] = [_generation(generation, status.prompt_tokens) for generation in status.generations]
    return body


def _generation(generation: ChatGeneration, prompt_tokens: int) -> dict[str, Any]:
    return {
        "worker_id": generation.worker_id,
        "worker_name": generation.worker_name,
        "model": generation.model,
        "state": generation.state,
        "message": {"role": "assistant", "content": generation.text},
        "text": generation.text,
        "seed": generation.seed,
        "finish_reason": generation.finish_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generation.completion_tokens,
            "total_tokens": prompt_tokens + generation.completion_tokens,
            "cached_tokens": generation.cached_tokens,
        },
        "logprobs": chat_logprobs(generation.logprobs) if generation.logprobs is not None else None,
    }
