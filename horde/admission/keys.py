"""API keys. Stored as a SHA-256 hash only; keys have 128 random bits, so a salt would add nothing."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from horde.db.database import Prepared, Transaction
from horde.errors import forbidden, invalid_key

ANONYMOUS_KEY = "0000000000"
ANONYMOUS_ID = 0
ROLES = ("trusted", "moderator", "admin")

FIND_USER = Prepared("""
SELECT id, name, key_hash, trusted, moderator, admin, flagged, public_workers, concurrency, created_at, contact
FROM users WHERE key_hash = %(hash)s AND deleted_at IS NULL
""")


@dataclass(frozen=True)
class User:
    """The holder of a key."""

    id: int
    name: str
    trusted: bool
    moderator: bool
    admin: bool
    flagged: bool
    concurrency: int

    @property
    def alias(self) -> str:
        """`NAME#id`, unique and shown to everyone."""
        return f"{self.name}#{self.id}"

    @property
    def anonymous(self) -> bool:
        """Whether this is the account that everybody's key `0000000000` opens."""
        return self.id == ANONYMOUS_ID

    @property
    def moderates(self) -> bool:
        """Whether this user may act on what belongs to others."""
        return self.moderator or self.admin


def new_key() -> str:
    """A fresh key: 16 random bytes, URL-safe, 22 characters."""
    return secrets.token_urlsafe(16)


def hash_key(key: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def authenticate(tx: Transaction, key: str) -> User:
    """The user of a key; raises HordeError 401 when nobody holds it."""
    wanted = hash_key(key)
    row = tx.execute(FIND_USER, {"hash": wanted}).one_or_none()
    if row is None or not hmac.compare_digest(row.key_hash.encode(), wanted.encode()):
        raise invalid_key()
    return User(row.id, row.name, row.trusted, row.moderator, row.admin, row.flagged, row.concurrency)


def require_registered(user: User) -> None:
    """Raise HordeError 403 for the anonymous account, which may request but not work."""
    if user.anonymous:
        raise forbidden("The anonymous account may not run workers. Create a key first.", rc="AnonForbiddenWorker")
