"""Creating users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horde.admission.keys import ROLES, hash_key, new_key
from horde.db.database import Database, Transaction
from horde.errors import bad_request
from horde.kudos.accounts import open_account
from horde.kudos.prices import HUNDREDTHS
from horde.registry.names import user_name

CREATE_USER = """
INSERT INTO users (name, key_hash, created_at, trusted, moderator, admin)
VALUES (%(name)s, %(hash)s, horde_now(), %(trusted)s, %(moderator)s, %(admin)s) RETURNING id
"""


@dataclass(frozen=True)
class CreatedUser:
    """A new user; the key is stored as a hash only and shown this once."""

    id: int
    username: str
    alias: str
    api_key: str


def create_user(database: Database, name: str, roles: Sequence[str] = (), kudos: float = 0) -> CreatedUser:
    """Create a user with a fresh key, the given roles and kudos.

    Raises:
        HordeError: 400, when the name is empty, too long or holds what cannot be seen, or a role is unknown.
    """
    name = user_name(name)
    unknown = sorted(set(roles) - set(ROLES))
    if unknown:
        raise bad_request(f"Unknown role {unknown[0]!r}; roles are {', '.join(ROLES)}.", field="role")
    key = new_key()

    def work(tx: Transaction) -> int:
        columns = {"name": name, "hash": hash_key(key), "admin": "admin" in roles}
        # A moderator is trusted, an admin moderates.
        columns["moderator"] = columns["admin"] or "moderator" in roles
        columns["trusted"] = columns["moderator"] or "trusted" in roles
        user = int(tx.execute(CREATE_USER, columns).scalar_one())
        open_account(tx, user, round(kudos * HUNDREDTHS))
        return user

    user = database.run(work)
    return CreatedUser(user, name, f"{name}#{user}", key)
