"""`models` and `tokenizers`: what trusted workers publish, so that the broker renders prompts and counts tokens as they do.

Both only grow: what stands under a revision never changes.
"""

from __future__ import annotations

from typing import Any

from apiflask import APIBlueprint
from flask import Response, request
from werkzeug.exceptions import RequestEntityTooLarge, UnsupportedMediaType

from horde.api.answers import JSON_TYPE, answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.horde_v2.registry_bodies import (
    PublishedModelAnswer,
    RevisionAnswer,
    RevisionBody,
    TokenizerAnswer,
    TokenizerBody,
)
from horde.api.identity import required_key
from horde.usecases.models import (
    MAX_TOKENIZER_BYTES,
    Published,
    find_revision,
    find_tokenizer,
    has_published_tokenizer,
    list_published,
    publish_model,
    publish_tokenizer,
)

registry = APIBlueprint("registry", __name__, url_prefix="/api/v2", tag="Models")

_FOR_GOOD = "public, max-age=31536000, immutable"
_MISMATCH = {422: "The revision stands for something else"}
_STORED = {201: "Stored now"}


@registry.put("/tokenizers/<revision>")
@registry.input(TokenizerBody, arg_name="body")
@registry.output(TokenizerAnswer)
@registry.doc(
    operation_id="publish_tokenizer",
    security="apikey",
    responses={**failures(400, 401, 403, 429), **_STORED, **_MISMATCH, 413: "The body is larger than 32 MiB"},
)
def put_tokenizer(revision: str, body: TokenizerBody) -> Response:  # noqa: ARG001 read late, see `TokenizerBody`
    """Publish a tokenizer with its chat template

    For trusted users and admins. `revision` is the SHA-256 of the canonical form. 200 when it was there already.
    """
    key = required_key()
    if not request.is_json:
        raise UnsupportedMediaType
    if (request.content_length or 0) > MAX_TOKENIZER_BYTES:
        raise RequestEntityTooLarge
    added = publish_tokenizer(context(), key, revision, _read_body)
    return answer({"revision": revision}, 201 if added else 200)


def _read_body() -> bytes:
    body = request.get_data(cache=False)
    if len(body) > MAX_TOKENIZER_BYTES:
        raise RequestEntityTooLarge
    return body


@registry.get("/tokenizers/<revision>")
@registry.output(TokenizerBody)
@registry.doc(operation_id="read_tokenizer", responses={**failures(404, 429), 304: "Already known to the caller"})
def read_tokenizer(revision: str) -> Response:
    """A tokenizer with its chat template, in its canonical form

    It never changes: its ETag is its revision, and `HEAD` or `If-None-Match` tell whether it is there.
    """
    if request.method == "HEAD" or request.if_none_match.contains(revision):
        has_published_tokenizer(context(), revision)
        response = Response(status=200 if request.method == "HEAD" else 304, content_type=JSON_TYPE)
    else:
        response = Response(find_tokenizer(context(), revision), content_type=JSON_TYPE)
    response.set_etag(revision)
    response.headers["Cache-Control"] = _FOR_GOOD
    return response


@registry.put("/models/<any_text:name>/revisions/<revision>")
@registry.input(RevisionBody, arg_name="body")
@registry.output(RevisionAnswer)
@registry.doc(
    operation_id="publish_model_revision",
    security="apikey",
    responses={**failures(400, 401, 403, 429), **_STORED, **_MISMATCH},
)
def put_revision(name: str, revision: str, body: RevisionBody) -> Response:
    """Publish a revision of a model

    For trusted users and admins. 200 when it was there already and says the same.
    """
    fields = {
        **body.model_dump(),
        "capabilities": tuple(body.capabilities),
        "probe": None if body.probe is None else dict(body.probe),
    }
    published, added = publish_model(context(), required_key(), Published(model=name, revision=revision, **fields))
    return answer(published.as_json(), 201 if added else 200)


@registry.get("/models/<any_text:name>/revisions/<revision>")
@registry.output(RevisionAnswer)
@registry.doc(operation_id="read_model_revision", responses=failures(404, 429))
def read_revision(name: str, revision: str) -> Response:
    """A published revision of a model"""
    return answer(find_revision(context(), name, revision).as_json())


@registry.get("/models/<any_text:name>")
@registry.output(PublishedModelAnswer)
@registry.doc(operation_id="read_model", responses=failures(404, 429))
def read_model(name: str) -> Response:
    """A model and its published revisions

    Its name may hold slashes, as they are.
    """
    body: dict[str, Any] = {
        "name": name,
        "revisions": [published.as_json() for published in list_published(context(), name)],
    }
    return answer(body)
