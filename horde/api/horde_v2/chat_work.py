"""`generate/chat/pop` and `/submit`: how workers take chats, and texts beside them, and hand in what came of them."""

from __future__ import annotations

import dataclasses

from apiflask import APIBlueprint
from flask import Response

from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.horde_v2.chat_work_bodies import ChatPop, ChatSubmit
from horde.api.horde_v2.chat_work_examples import POP, POPPED, SUBMIT, SUBMITTED
from horde.api.horde_v2.pop_answers import PopAnswer, pop_body
from horde.api.horde_v2.text_answers import SubmitAnswer
from horde.api.horde_v2.work import popped_for, submission_of
from horde.api.identity import required_key
from horde.errors import bad_request
from horde.usecases.submit import submit

REJECTIONS = ("context_length_exceeded", "unsupported_parameter")

chat_work = APIBlueprint("chat_work", __name__, url_prefix="/api/v2/generate/chat", tag="Chat")


@chat_work.post("/pop")
@chat_work.input(ChatPop, arg_name="body", example=POP)
@chat_work.output(PopAnswer, description="Jobs, or the same shape with `id` null when there are none", example=POPPED)
@chat_work.doc(operation_id="pop_chat", security="apikey", responses=failures(400, 401, 403, 429))
def pop_chat(body: ChatPop) -> Response:
    """Ask for chats, as a worker

    As `generate/text/pop`, and with `kinds` for texts and chats in one call. `progress` has to be true, and `manifests`
    has to hold one for each model: a chat goes only to a worker that serves the very revision that its prompt was
    counted with. A job with a prefix is gone on with behind it.
    """
    return answer(pop_body(popped_for(body, body.kinds), native=True, no_payload={}))


@chat_work.post("/submit")
@chat_work.input(ChatSubmit, arg_name="body", example=SUBMIT)
@chat_work.output(SubmitAnswer, example=SUBMITTED)
@chat_work.doc(operation_id="submit_chat", security="apikey", responses=failures(400, 401, 403, 404, 429))
def submit_chat(body: ChatSubmit) -> Response:
    """Hand in the result of a chat's job, or give it up

    As `generate/text/submit`. `ok` needs a `finish_reason`; its text and tokens begin with what was posted as progress.
    `released` is also for a revision that the worker does not serve. `rejected` needs its `error_code`.
    """
    key = required_key()
    _check(body)
    submission = dataclasses.replace(
        submission_of(body), logprobs=body.logprobs, cached_tokens=body.usage.cached_tokens if body.usage else None
    )
    return answer({"reward": submit(context(), key, submission)})


def _check(body: ChatSubmit) -> None:
    if body.state == "ok" and body.finish_reason is None:
        raise bad_request("A result says why it ends: `stop` or `length`.", field="finish_reason")
    if body.state == "rejected" and body.error_code not in REJECTIONS:
        raise bad_request(f"A rejection has an `error_code` of {' or '.join(REJECTIONS)}.", field="error_code")
