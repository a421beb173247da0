"""`/v1/completions`: text that is continued as it is, without a chat template."""

from __future__ import annotations

from functools import partial

from apiflask import APIBlueprint
from flask import Response

from horde.api.openai_v1.answers import Completion, completion_body
from horde.api.openai_v1.bodies import CompletionRequest
from horde.api.openai_v1.delivery import FAILURES, STREAMED, deliver, require_key
from horde.api.openai_v1.events import CompletionChunks
from horde.api.openai_v1.orders import completion_order

openai_completions = APIBlueprint("openai_completions", __name__, url_prefix="/v1", tag="OpenAI")
require_key(openai_completions)


@openai_completions.post("/completions")
@openai_completions.input(CompletionRequest, arg_name="body")
@openai_completions.output(Completion, description="The continuations, or with `stream` server-sent events")
@openai_completions.doc(operation_id="create_completion", security="bearer", responses={200: STREAMED, **FAILURES})
def complete(body: CompletionRequest) -> Response:
    """Continue a text

    One prompt a call: a text, or ids of the model's own tokens. All else is as for chats.
    """
    return deliver(
        completion_order(body),
        chunks=CompletionChunks() if body.stream else None,
        include_usage=body.wants_usage,
        whole=partial(completion_body, logprobs=body.logprobs is not None),
    )
