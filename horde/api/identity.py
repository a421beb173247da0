"""Who calls: the key, the client's name, the idempotency key, and ids in paths."""

from __future__ import annotations

import hashlib
import re
import uuid

import orjson
from flask import request
from pydantic import BaseModel

from horde.api.errors import InvalidInputError
from horde.errors import HordeError, invalid_key, not_found

ANONYMOUS_KEY = "0000000000"
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST_AGENT = 255


def given_key() -> str | None:
    """The caller's key: header `apikey`, else `Authorization: Bearer`. A key in the query string does not count.

    Raises:
        HordeError: 401, both are given and differ.
    """
    key = request.headers.get("apikey")
    authorization = request.headers.get("Authorization")
    if authorization is None:
        return key
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return key
    token = token.strip(" ")
    if key is not None and key != token:
        raise invalid_key()
    return token


def required_key() -> str:
    """The caller's key; a 400 in the shape of a missing parameter when there is none, as AI Horde answers it."""
    key = given_key()
    if key is None:
        raise InvalidInputError({"apikey": "Your API key. Missing required parameter in the HTTP headers"})
    return key


def client_agent() -> str:
    """`name:version:contact` as the client wrote it, or `unknown:0:unknown`."""
    agent = request.headers.get("Client-Agent")
    return _CONTROL.sub("", agent)[:_LONGEST_AGENT] if agent else "unknown:0:unknown"


def idempotency_key() -> str | None:
    """The `Idempotency-Key` header, 1-255 visible ASCII characters; a 400 for any other."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidInputError({"Idempotency-Key": "has to be 1 to 255 visible ASCII characters"})
    return key


def body_hash(body: BaseModel, *, without: frozenset[str] = frozenset()) -> str:
    """Equal for bodies that ask for the same, however they are spelled; `without` fields that say only how to tell it."""
    asked = body.model_dump(mode="json", include=set(type(body).model_fields) - without)
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()


def read_id(text: str) -> uuid.UUID | None:
    """An id in the one form we give out; other spellings of a UUID are no id of ours."""
    return uuid.UUID(text) if _UUID.fullmatch(text) else None


def request_id_or_404(text: str) -> uuid.UUID:
    """The id in the path of a status."""
    found = read_id(text)
    if found is None:
        raise not_found("There is no request with this id.", rc="RequestNotFound")
    return found


def worker_id_or_404(text: str) -> uuid.UUID:
    """The id in the path of a worker."""
    found = read_id(text)
    if found is None:
        raise no_worker()
    return found


def job_id_or_404(text: str) -> uuid.UUID:
    """The id in a submit. Workers look for parts of this sentence."""
    found = read_id(text)
    if found is None:
        raise not_found(f"Processing Job with ID {text[:64]} does not exist.", rc="InvalidJobID")
    return found


def no_worker() -> HordeError:
    """The 404 of a worker."""
    return not_found("There is no worker with this id or name.", rc="WorkerNotFound")
