"""Models: what is served for chat, and what trusted workers and admins publish of it: revisions, and tokenizers by their hash."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from horde.admission.keys import User, authenticate
from horde.db.database import Transaction
from horde.errors import ErrorCode, HordeError, bad_request, forbidden, not_found
from horde.registry.models import ChatModel, is_known_model, list_chat_models
from horde.registry.revisions import Published, is_revision, list_revisions, publish_revision, read_revision
from horde.registry.tokenizers import (
    MAX_TOKENIZER_BYTES,
    canonical_form,
    has_tokenizer,
    load_canonical,
    read_tokenizer,
    store_tokenizer,
    tokenizer_revision,
)
from horde.usecases.context import Context

__all__ = [
    "MAX_TOKENIZER_BYTES",
    "ChatModel",
    "Published",
    "find_model",
    "find_revision",
    "find_tokenizer",
    "has_published_tokenizer",
    "list_models",
    "list_published",
    "publish_model",
    "publish_tokenizer",
]

LONGEST_MODEL_NAME = 255
NO_CAPACITY_RETRY = 30.0
# Reading one takes hundreds of megabytes for a moment.
_reading = threading.Lock()


def list_models(context: Context, api_key: str) -> list[ChatModel]:
    """The models that can be asked now, by name; raises HordeError 401."""

    def work(tx: Transaction) -> list[ChatModel]:
        authenticate(tx, api_key)
        return list_chat_models(tx)

    return context.database.read(work)


def find_model(context: Context, api_key: str, name: str) -> ChatModel:
    """A model that can be asked now.

    Raises:
        HordeError: 401, 404 `model_not_found` when it was never announced, 503 `no_capacity` when nobody serves it now.
    """

    def work(tx: Transaction) -> ChatModel:
        authenticate(tx, api_key)
        found = next((model for model in list_chat_models(tx) if model.name == name), None)
        if found is not None:
            return found
        if not is_known_model(tx, name):
            raise _no_such_model(name)
        raise HordeError(
            ErrorCode.NO_CAPACITY,
            f"No worker online serves {name[:LONGEST_MODEL_NAME]!r}.",
            rc="NoCapacity",
            retry_after=NO_CAPACITY_RETRY,
        )

    return context.database.read(work)


def publish_tokenizer(context: Context, api_key: str, revision: str, read: Callable[[], bytes]) -> bool:
    """Store a tokenizer under its hash; False when it was there already.

    Args:
        read: gives the body; not called before the key is known to be trusted.

    Raises:
        HordeError: 401, 403, 422 when the body is not what the revision says, 400 that names the field at fault.
    """
    user, stored = context.database.read(
        lambda tx: (_publisher(tx, api_key), has_tokenizer(tx, revision)),
    )
    body = read()
    if stored and hashlib.sha256(body).hexdigest() == revision:
        return False
    with _reading:
        canonical = canonical_form(body)
        actual = tokenizer_revision(canonical)
        if actual != revision:
            raise _conflict(
                f"This is not the tokenizer of that revision: the SHA-256 of its canonical form is {actual}.",
                rc="TokenizerMismatch",
            )
        if stored:
            return False
        load_canonical(canonical)
        compressed = zlib.compress(canonical)
    added = context.database.run(lambda tx: store_tokenizer(tx, user.id, canonical, compressed))
    context.tokenizers.forget_unknown(revision)
    return added


def find_tokenizer(context: Context, revision: str) -> bytes:
    """The canonical form of a tokenizer; raises HordeError 404."""
    stored = context.database.read(lambda tx: read_tokenizer(tx, revision))
    if stored is None:
        raise _no_such_tokenizer()
    return zlib.decompress(stored)


def has_published_tokenizer(context: Context, revision: str) -> None:
    """Raises HordeError 404 where there is no such tokenizer."""
    if not context.database.read(lambda tx: has_tokenizer(tx, revision)):
        raise _no_such_tokenizer()


def publish_model(context: Context, api_key: str, published: Published) -> tuple[Published, bool]:
    """Add a revision of a model, which stays as it is; gives it as it stands, and False when it was there already.

    Raises:
        HordeError: 401, 403, 400 that names the field at fault, 422 when it is there and says something else.
    """
    _check_published(published)
    wanted = replace(published, capabilities=tuple(sorted(set(published.capabilities))))

    def work(tx: Transaction) -> tuple[Published | None, bool]:
        added = publish_revision(tx, _publisher(tx, api_key).id, wanted)
        return read_revision(tx, wanted.model, wanted.revision), added

    stands, added = context.database.run(work)
    if stands != wanted:
        raise _conflict(
            "This revision of the model is published already and says something else; a revision never changes.",
            rc="RevisionConflict",
        )
    return wanted, added


def find_revision(context: Context, model: str, revision: str) -> Published:
    """A published revision of a model; raises HordeError 404."""
    found = context.database.read(lambda tx: read_revision(tx, model, revision))
    if found is None:
        raise not_found("There is no such revision of this model.", rc="RevisionNotFound")
    return found


def list_published(context: Context, model: str) -> Sequence[Published]:
    """All published revisions of a model, the newest first; raises HordeError 404 for a model that nobody knows."""

    def work(tx: Transaction) -> Sequence[Published]:
        found = list_revisions(tx, model)
        if not found and not is_known_model(tx, model):
            raise _no_such_model(model)
        return found

    return context.database.read(work)


def _publisher(tx: Transaction, api_key: str) -> User:
    user = authenticate(tx, api_key)
    if not (user.trusted or user.admin):
        raise forbidden("Only trusted workers' owners and admins may publish models and tokenizers.", rc="NotTrusted")
    return user


def _check_published(published: Published) -> None:
    name = published.model
    if not name.strip() or len(name) > LONGEST_MODEL_NAME or not name.isprintable():
        raise bad_request(
            f"A model's name has to be 1 to {LONGEST_MODEL_NAME} characters that can be printed.", field="name"
        )
    if "/revisions/" in name:
        raise bad_request("A model's name must not hold /revisions/, which ends it in an address.", field="name")
    for field in ("revision", "tokenizer_revision"):
        if not is_revision(getattr(published, field)):
            raise bad_request(f"{field} has to be 1 to 128 visible ASCII characters.", field=field)


def _conflict(message: str, *, rc: str) -> HordeError:
    # Of the closed list it is the code for one name that stands for two things.
    return HordeError(ErrorCode.IDEMPOTENCY_CONFLICT, message, rc=rc)


def _no_such_model(name: str) -> HordeError:
    return HordeError(
        ErrorCode.MODEL_NOT_FOUND,
        f"The model {name[:LONGEST_MODEL_NAME]!r} does not exist here, or no worker has ever served it for chat.",
        rc="ModelNotFound",
        errors={"model": "not known"},
    )


def _no_such_tokenizer() -> HordeError:
    return not_found("There is no tokenizer of this revision.", rc="TokenizerNotFound")
