"""`/v1/models`: what can be asked now."""

from __future__ import annotations

from typing import Any, Literal

from apiflask import APIBlueprint
from flask import Response

from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import openai_failures
from horde.api.openai_v1.delivery import key_of_caller, require_key
from horde.api.validation import Answer
from horde.usecases.models import ChatModel, find_model, list_models

openai_models = APIBlueprint("openai_models", __name__, url_prefix="/v1", tag="OpenAI")
require_key(openai_models)


class Model(Answer):
    """A model that workers online serve. `context_length` is tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int


class Models(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


@openai_models.get("/models")
@openai_models.output(Models)
@openai_models.doc(operation_id="list_chat_models", security="bearer", responses=openai_failures(401, 429))
def list_all() -> Response:
    """Which models can be asked now"""
    found = list_models(context(), key_of_caller())
    return answer({"object": "list", "data": [_body(model) for model in found]})


@openai_models.get("/models/<any_text:name>")
@openai_models.output(Model)
@openai_models.doc(operation_id="read_chat_model", security="bearer", responses=openai_failures(401, 404, 429))
def read(name: str) -> Response:
    """One model

    Its name may hold slashes, as they are.
    """
    return answer(_body(find_model(context(), key_of_caller(), name)))


def _body(model: ChatModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "horde",
        "context_length": model.context_length,
    }
