"""`/v1/chat/completions`."""

from __future__ import annotations

from functools import partial

from apiflask import APIBlueprint
from flask import Response

from horde.api.openai_v1.answers import ChatCompletion, chat_body
from horde.api.openai_v1.bodies import ChatCompletionRequest
from horde.api.openai_v1.delivery import FAILURES, STREAMED, deliver, require_key
from horde.api.openai_v1.events import ChatChunks
from horde.api.openai_v1.orders import chat_order

openai_chat = APIBlueprint("openai_chat", __name__, url_prefix="/v1", tag="OpenAI")
require_key(openai_chat)


@openai_chat.post("/chat/completions")
@openai_chat.input(ChatCompletionRequest, arg_name="body")
@openai_chat.output(ChatCompletion, description="The answers, or with `stream` server-sent events")
@openai_chat.doc(operation_id="create_chat_completion", security="bearer", responses={200: STREAMED, **FAILURES})
def complete(body: ChatCompletionRequest) -> Response:
    """Continue a chat

    The request waits on this connection until workers have answered it; hanging up cancels it. With `stream` the text
    comes as it is made. What would change the answer and is not served (tools, structured output, images) is refused.
    """
    return deliver(
        chat_order(body),
        chunks=ChatChunks() if body.stream else None,
        include_usage=body.wants_usage,
        whole=partial(chat_body, logprobs=bool(body.logprobs)),
    )
