"""A worker's check-in: its own committed statement before the claim, so that no transition takes a worker's row."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.db.tables.workers import ONLINE_SECONDS
from horde.errors import HordeError, bad_request, forbidden
from horde.registry.revisions import Manifest, revision_key

# An unchanged worker is written at most this often; a changed one at once.
WRITE_EVERY = 5
WORKERS_PER_USER, WORKERS_PER_TRUSTED_USER = 3, 20

READ_WORKER = Prepared("""
SELECT w.id, w.owner_id, w.kind, w.models, w.max_length, w.max_context_length, w.threads, w.nsfw, w.posts_progress, w.bridge_agent,
       w.kinds, w.manifests, w.revisions, w.maintenance, w.maintenance_message,
       w.last_check_in <= horde_now() - make_interval(secs => %(write_every)s) AS due,
       w.last_check_in > horde_now() - make_interval(secs => %(online)s) AS online,
       tokens_per_second(t.recent_tokens, t.recent_seconds) AS speed
FROM workers w LEFT JOIN worker_totals t ON t.worker_id = w.id
WHERE w.name = %(name)s AND w.deleted_at IS NULL
""")

# Presence counts as uptime while the gaps between check-ins are short.
_UPTIME = """uptime + CASE WHEN horde_now() - last_check_in < make_interval(secs => %(online)s)
                                          THEN extract(epoch FROM horde_now() - last_check_in)::bigint ELSE 0 END"""
CHECK_IN = f"""
UPDATE workers SET uptime = {_UPTIME},
    last_check_in = horde_now(), models = %(models)s, max_length = %(max_length)s, max_context_length = %(max_context_length)s,
    threads = %(threads)s, nsfw = %(nsfw)s, posts_progress = %(posts_progress)s, bridge_agent = %(bridge_agent)s,
    kinds = %(kinds)s, manifests = %(manifests)s, revisions = %(revisions)s
WHERE id = %(id)s AND deleted_at IS NULL
"""

# A deleted one too: what it holds it may finish. The name may be another worker's since.
READ_OWN = Prepared("""
SELECT id, deleted_at IS NULL AND last_check_in <= horde_now() - make_interval(secs => %(write_every)s) AS due
FROM workers WHERE owner_id = %(owner)s AND name = %(name)s ORDER BY deleted_at DESC NULLS FIRST LIMIT 1
""")

# One that has been away has its next pop to come back by, which counts its owner's workers.
STAY_ONLINE = f"""
UPDATE workers SET uptime = {_UPTIME}, last_check_in = horde_now()
WHERE id = %(id)s AND deleted_at IS NULL AND last_check_in > horde_now() - make_interval(secs => %(online)s)
"""

# As if it had last been here so long ago that it counts as away.
GO_OFFLINE = f"""
UPDATE workers SET uptime = {_UPTIME}, last_check_in = horde_now() - make_interval(secs => %(online)s)
WHERE id = %(id)s AND deleted_at IS NULL AND last_check_in > horde_now() - make_interval(secs => %(online)s)
"""

# The owner's row is the lock under which two first pops count the owner's workers one after the other.
LOCK_OWNER = "SELECT id FROM users WHERE id = %(owner)s FOR NO KEY UPDATE"

# Without the worker itself: another thread of it may have come first.
COUNT_LIVE = """
SELECT count(*) FROM workers WHERE owner_id = %(owner)s AND deleted_at IS NULL AND name <> %(name)s
  AND last_check_in > horde_now() - make_interval(secs => %(online)s)
"""

REGISTER = """
INSERT INTO workers (id, name, kind, owner_id, created_at, last_check_in, models, max_length, max_context_length, threads, nsfw,
                     posts_progress, bridge_agent, kinds, manifests, revisions)
VALUES (%(id)s, %(name)s, %(kind)s, %(owner)s, horde_now(), horde_now(), %(models)s, %(max_length)s, %(max_context_length)s,
        %(threads)s, %(nsfw)s, %(posts_progress)s, %(bridge_agent)s, %(kinds)s, %(manifests)s, %(revisions)s)
ON CONFLICT (name) WHERE deleted_at IS NULL DO UPDATE SET last_check_in = excluded.last_check_in
    WHERE workers.owner_id = excluded.owner_id
"""


@dataclass(frozen=True)
class Announcement:
    """What a worker says of itself with each pop.

    Attributes:
        kind: the family it belongs to, for good.
        kinds: what it takes with this pop; its `kind` alone where it names none.
        manifests: of its models, by their names.
    """

    name: str
    kind: str
    models: Sequence[str]
    max_length: int
    max_context_length: int
    threads: int = 1
    nsfw: bool = True
    posts_progress: bool = False
    bridge_agent: str = "unknown:0:unknown"
    kinds: Sequence[str] = ()
    manifests: Mapping[str, Manifest] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """By the names of the table, as a row of it is read."""
        return {
            **self.__dict__,
            "models": list(self.models),
            "kinds": sorted({str(kind) for kind in self.kinds} or {str(self.kind)}),
            "manifests": {model: manifest.as_json() for model, manifest in self.manifests.items()},
            "revisions": [
                revision_key(model, manifest.model_revision, manifest.tokenizer_revision)
                for model, manifest in self.manifests.items()
            ],
        }


@dataclass(frozen=True)
class CheckedIn:
    """The worker as the registry knows it after its check-in."""

    id: uuid.UUID
    maintenance: bool
    maintenance_message: str | None
    speed: float | None


def read_worker(tx: Transaction, name: str) -> Any:
    """The row of a worker by its name, or None."""
    return tx.execute(READ_WORKER, {"name": name, "write_every": WRITE_EVERY, "online": ONLINE_SECONDS}).one_or_none()


def check_in(tx: Transaction, owner_id: int, announcement: Announcement) -> CheckedIn | None:
    """Check in a worker that is online; None when it is new or has been away, and must be registered first.

    Raises:
        HordeError: 403 `WrongCredentials` when the name is somebody else's, 400 `PolymorphicNameConflict` when it serves
            another kind.
    """
    row = read_worker(tx, announcement.name)
    if row is None:
        return None
    if row.owner_id != owner_id:
        raise forbidden("wrong credentials: this worker's name belongs to another user.", rc="WrongCredentials")
    if row.kind != announcement.kind:
        raise bad_request(
            f"This name is in use by a worker of kind {row.kind}.", rc="PolymorphicNameConflict", field="name"
        )
    if not row.online:
        return None
    columns = announcement.columns()
    if row.due or any(getattr(row, name) != value for name, value in columns.items() if name != "name"):
        tx.execute(CHECK_IN, {**_written(columns), "id": row.id, "online": ONLINE_SECONDS})
    return CheckedIn(row.id, row.maintenance, row.maintenance_message, row.speed)


def stay_online(tx: Transaction, owner_id: int, name: str) -> None:
    """A sign of life between two pops: a worker that is busy with all it can hold is online.

    Raises:
        HordeError: 403 `WrongCredentials` when the owner never had a worker of this name.
    """
    row = _read_own(tx, owner_id, name)
    if row.due:
        tx.execute(STAY_ONLINE, {"id": row.id, "online": ONLINE_SECONDS})


def go_offline(tx: Transaction, owner_id: int, name: str) -> None:
    """The last sign of life: the worker is offline at once, until its next pop.

    Raises:
        HordeError: 403 `WrongCredentials` when the owner never had a worker of this name.
    """
    tx.execute(GO_OFFLINE, {"id": _read_own(tx, owner_id, name).id, "online": ONLINE_SECONDS})


def _read_own(tx: Transaction, owner_id: int, name: str) -> Any:
    row = tx.execute(READ_OWN, {"owner": owner_id, "name": name, "write_every": WRITE_EVERY}).one_or_none()
    if row is None:
        raise forbidden("wrong credentials: you have no worker of this name.", rc="WrongCredentials")
    return row


def register(tx: Transaction, owner_id: int, announcement: Announcement, *, trusted: bool, limited: bool) -> None:
    """Register a worker at its first pop, or admit one that comes back, in a transaction of its own.

    A name that somebody else took meanwhile stays theirs.

    Raises:
        HordeError: 403 `TooManyWorkers` or `TooManyWorkersTrusted` when the owner has as many online as allowed.
    """
    tx.execute(LOCK_OWNER, {"owner": owner_id})
    if limited:
        who = {"owner": owner_id, "name": announcement.name, "online": ONLINE_SECONDS}
        live = tx.execute(COUNT_LIVE, who).scalar_one()
        most = WORKERS_PER_TRUSTED_USER if trusted else WORKERS_PER_USER
        if live >= most:
            raise too_many_workers(most, trusted=trusted)
    tx.execute(REGISTER, {**_written(announcement.columns()), "id": uuid.uuid4(), "owner": owner_id})


def _written(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {**columns, "manifests": json.dumps(columns["manifests"])}


def too_many_workers(most: int, *, trusted: bool) -> HordeError:
    """The 403 for one worker more than allowed."""
    rc = "TooManyWorkersTrusted" if trusted else "TooManyWorkers"
    return forbidden(f"You have {most} workers online already, which is as many as you may have.", rc=rc)
