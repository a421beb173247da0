"""Revisions of models: what a worker announces of one (its manifest), and what trusted workers and admins have published.

A model is a name; which weights and which tokenizer stand behind it is told by two revisions. What was counted with one
tokenizer must run on just that: a key of name and revisions ties a request to it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from horde.db.database import Transaction

INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
MOST_CAPABILITIES = 32
_VISIBLE = re.compile(r"[\x21-\x7e]{1,128}")

PUBLISH = """
INSERT INTO model_revisions (model, revision, tokenizer_revision, context_length, block_size, kv_bytes_per_token, capabilities,
                             probe, published_by, created_at)
VALUES (%(model)s, %(revision)s, %(tokenizer_revision)s, %(context_length)s, %(block_size)s, %(kv_bytes_per_token)s,
        %(capabilities)s, %(probe)s, %(user)s, horde_now())
ON CONFLICT (model, revision) DO NOTHING
"""

READ_PUBLISHED = """
SELECT model, revision, tokenizer_revision, context_length, block_size, kv_bytes_per_token, capabilities, probe, created_at
FROM model_revisions WHERE model = %(model)s AND (%(revision)s::text IS NULL OR revision = %(revision)s)
ORDER BY created_at DESC, revision
"""


@dataclass(frozen=True)
class Manifest:
    """A model as one worker serves it. Lengths are in tokens.

    Attributes:
        model_revision, tokenizer_revision: 1 to 128 visible ASCII characters.
        context_length: of prompt and answer together, at most.
        block_size: tokens that a block of its cache holds.
        blocks: blocks in its pool.
        kv_bytes_per_token: memory that a token takes in its cache; 0 where it does not say.
        capabilities: what it can do beyond text: `tools`, `json`.

    Raises:
        ValueError: a value is out of bounds; the message begins with its name.
    """

    model_revision: str
    tokenizer_revision: str
    context_length: int
    block_size: int
    blocks: int
    kv_bytes_per_token: int
    capabilities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model_revision", "tokenizer_revision"):
            if not is_revision(getattr(self, name)):
                raise ValueError(f"{name} has to be 1 to 128 visible ASCII characters")
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} has to be an integer from {least} to {most}")
        if len(self.capabilities) > MOST_CAPABILITIES or not all(map(is_revision, self.capabilities)):
            raise ValueError(f"capabilities has to be at most {MOST_CAPABILITIES} names of visible ASCII characters")

    def as_json(self) -> dict[str, Any]:
        """As it is announced and stored."""
        return {**asdict(self), "capabilities": list(self.capabilities)}

    @classmethod
    def from_json(cls, given: Any) -> Manifest:
        """What `as_json` gave, or a worker sent; fields beyond it are ignored.

        Raises:
            ValueError: it is none; the message names the field.
        """
        if not isinstance(given, Mapping):
            raise ValueError("a manifest has to be an object")  # noqa: TRY004 as for any other of its faults
        missing = [name for name in _FIELDS if name not in given]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        capabilities = given.get("capabilities", [])
        if not isinstance(capabilities, list | tuple):
            raise ValueError("capabilities has to be a list")  # noqa: TRY004
        return cls(**{name: given[name] for name in _FIELDS}, capabilities=tuple(capabilities))


_BOUNDS = (
    ("context_length", 1, INT32_MAX),
    ("block_size", 1, INT32_MAX),
    ("blocks", 1, INT32_MAX),
    ("kv_bytes_per_token", 0, INT64_MAX),
)
_FIELDS = ("model_revision", "tokenizer_revision", *(name for name, _, _ in _BOUNDS))


def is_revision(value: object) -> bool:
    """Whether this may name a revision: 1 to 128 visible ASCII characters."""
    return isinstance(value, str) and _VISIBLE.fullmatch(value) is not None


def revision_key(model: str, model_revision: str, tokenizer_revision: str) -> str:
    """32 hexadecimal digits for a model at a revision, read by a tokenizer at a revision."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, model_revision, tokenizer_revision):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


@dataclass(frozen=True)
class Published:
    """A revision of a model, as it was published and stays.

    Attributes:
        probe: a fixed prompt and what comes of it: `prompt`, `token_ids`, `output_token_ids`.
    """

    model: str
    revision: str
    tokenizer_revision: str
    context_length: int
    block_size: int
    kv_bytes_per_token: int
    capabilities: tuple[str, ...] = ()
    probe: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """As it is shown."""
        return {**asdict(self), "capabilities": list(self.capabilities)}


def publish_revision(tx: Transaction, user_id: int, published: Published) -> bool:
    """Add a revision; False when there is one of this model and name already, which stays as it is."""
    row = {
        **published.as_json(),
        "probe": None if published.probe is None else json.dumps(published.probe),
        "user": user_id,
    }
    return tx.execute(PUBLISH, row).rowcount == 1


def read_revision(tx: Transaction, model: str, revision: str) -> Published | None:
    """One published revision."""
    return next(iter(_read(tx, model, revision)), None) if is_revision(revision) else None


def list_revisions(tx: Transaction, model: str) -> Sequence[Published]:
    """All published revisions of a model, the newest first."""
    return _read(tx, model, None)


def _read(tx: Transaction, model: str, revision: str | None) -> list[Published]:
    if "\0" in model:
        return []
    rows = tx.execute(READ_PUBLISHED, {"model": model, "revision": revision})
    return [
        Published(
            model=row.model,
            revision=row.revision,
            tokenizer_revision=row.tokenizer_revision,
            context_length=row.context_length,
            block_size=row.block_size,
            kv_bytes_per_token=row.kv_bytes_per_token,
            capabilities=tuple(row.capabilities),
            probe=row.probe,
        )
        for row in rows
    ]
