"""From an order to its answer, streamed or whole, for both kinds of completion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from apiflask import APIBlueprint
from flask import Response, request

from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import openai_failures
from horde.api.identity import given_key
from horde.api.openai_v1.events import CONTENT_TYPE, HEADERS, Chunks, stream
from horde.api.undelivered import if_gone
from horde.errors import ErrorCode, HordeError
from horde.usecases.chat import ChatOrder
from horde.usecases.chat_stream import OpenChat, open_chat

REQUEST_ID = "X-Horde-Request-Id"
# For the API's description.
STREAMED: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
FAILURES: dict[int, Any] = openai_failures(400, 401, 403, 404, 409, 422, 429, 502, 503, 504)


def require_key(blueprint: APIBlueprint) -> None:
    """Have every route of this blueprint ask for a key before it looks at anything else."""
    blueprint.before_request(_check_key)


def _check_key() -> None:
    key_of_caller()


def key_of_caller() -> str:
    """The caller's key; raises HordeError 401 when there is none."""
    key = given_key()
    if not key:
        raise HordeError(
            ErrorCode.INVALID_API_KEY,
            "There is no API key in this call. Send one in the header `Authorization: Bearer KEY`.",
            rc="InvalidAPIKey",
        )
    return key


def deliver(
    order: ChatOrder, *, chunks: Chunks | None, include_usage: bool, whole: Callable[[OpenChat], dict[str, Any]]
) -> Response:
    """Admit an order and answer it.

    Args:
        chunks: how to write a stream; None to answer once all is there.
        whole: waits for a chat and writes its answer.

    Raises:
        HordeError: it is not admitted; or, where it is not streamed, it ended without an answer.
    """
    gone = request.environ.get("waitress.client_disconnected", lambda: False)
    with ExitStack() as held:
        chat = held.enter_context(open_chat(context(), key_of_caller(), order, client_gone=gone))
        if_gone(chat.wake)
        headers = {REQUEST_ID: str(chat.id)}
        if chunks is None:
            return answer(whole(chat), headers=headers)
        events = stream(chat, chunks, include_usage=include_usage, route=request.path)
        # From here on the stream holds the chat.
        held.pop_all()
        return Response(events, content_type=CONTENT_TYPE, headers=headers | HEADERS)
