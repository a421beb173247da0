"""Looking at workers, and what an owner or moderator may change on one."""

from __future__ import annotations

import unicodedata
import uuid
from dataclasses import dataclass
from typing import Any

from horde.admission.keys import User, authenticate
from horde.db.database import Transaction
from horde.errors import bad_request, forbidden, not_found
from horde.kudos.prices import HUNDREDTHS
from horde.registry import workers as registry
from horde.usecases.context import Context

LONGEST_INFO = 1000


@dataclass(frozen=True)
class WorkerView:
    """A worker as shown; `owner` and `maintenance_message` only to its owner, moderators, or when it is public.

    Attributes:
        type: the family it belongs to.
        kinds: what it takes, as its last pop said.
    """

    id: uuid.UUID
    name: str
    type: str
    online: bool
    requests_fulfilled: int
    uncompleted_jobs: int
    kudos_rewards: float
    kudos_details: dict[str, float]
    performance: str
    threads: int
    uptime: int
    maintenance_mode: bool
    info: str | None
    nsfw: bool
    trusted: bool
    flagged: bool
    bridge_agent: str
    models: list[str]
    kinds: list[str]
    max_length: int
    max_context_length: int
    tokens_generated: float
    owner: str | None = None
    maintenance_message: str | None = None


def list_workers(
    context: Context, kind: str | None, *, name: str | None = None, api_key: str | None = None
) -> list[WorkerView]:
    """Workers online, those of a kind or that take it, or all, or the one of this name among them."""

    def work(tx: Transaction) -> list[WorkerView]:
        viewer = _viewer(tx, api_key)
        rows = registry.read_workers(tx, "online", kind)
        return [_view(row, viewer) for row in rows if name is None or row.name == _composed(name)]

    return context.database.read(work)


def read_worker(context: Context, worker_id: uuid.UUID, *, api_key: str | None = None) -> WorkerView:
    """A worker by id; raises HordeError 404."""
    return _read_one(context, "id", worker_id, str(worker_id), api_key)


def read_worker_by_name(context: Context, name: str, *, api_key: str | None = None) -> WorkerView:
    """A worker by name; raises HordeError 404."""
    return _read_one(context, "name", _composed(name), name, api_key)


def update_worker(
    context: Context,
    api_key: str,
    worker_id: uuid.UUID,
    *,
    maintenance: bool | None = None,
    maintenance_message: str | None = None,
    info: str | None = None,
) -> dict[str, Any]:
    """Set or clear maintenance, or the info text, as its owner or a moderator; returns what changed, by its name on the wire.

    A message alone is the new message of a worker that is in maintenance, whoever put it there; for any other it is nothing.

    Raises:
        HordeError: 400 `NoWorkerModSelected`, 401, 403 `NotOwner`, 404 `WorkerNotFound`.
    """

    def work(tx: Transaction) -> dict[str, Any]:
        user = authenticate(tx, api_key)
        rows = registry.read_workers(tx, "id", worker_id)
        if not rows:
            raise _no_such_worker(str(worker_id))
        if rows[0].owner_id != user.id and not user.moderates:
            raise forbidden("Only its owner or a moderator may change this worker.", rc="NotOwner")
        changed = _change_maintenance(tx, worker_id, maintenance, maintenance_message)
        if info is not None:
            if len(info) > LONGEST_INFO:
                raise bad_request(f"info has at most {LONGEST_INFO} characters.", field="info")
            registry.set_info(tx, worker_id, info)
            changed["info"] = info
        if not changed:
            raise bad_request("Please name something to change.", rc="NoWorkerModSelected")
        return changed

    return context.database.run(work)


def _change_maintenance(tx: Transaction, worker_id: uuid.UUID, on: bool | None, message: str | None) -> dict[str, Any]:
    if on is not None:
        registry.set_maintenance(tx, worker_id, on=on, message=message)
        return {"maintenance": on, "maintenance_msg": message} if on and message is not None else {"maintenance": on}
    if message is not None and registry.set_maintenance_message(tx, worker_id, message):
        return {"maintenance_msg": message}
    return {}


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _viewer(tx: Transaction, api_key: str | None) -> User | None:
    return None if api_key is None else authenticate(tx, api_key)


def _no_such_worker(which: str) -> Exception:
    return not_found(f"Worker {which} not found.", rc="WorkerNotFound")


def _read_one(context: Context, by: str, value: object, which: str, api_key: str | None) -> WorkerView:
    def work(tx: Transaction) -> WorkerView:
        viewer = _viewer(tx, api_key)
        rows = registry.read_workers(tx, by, value)
        if not rows:
            raise _no_such_worker(which)
        return _view(rows[0], viewer)

    return context.database.read(work)


def _view(row: Any, viewer: User | None) -> WorkerView:
    privileged = viewer is not None and (viewer.moderates or viewer.id == row.owner_id)
    earned = row.earned / HUNDREDTHS
    return WorkerView(
        id=row.id,
        name=row.name,
        type=row.kind,
        online=row.online,
        requests_fulfilled=row.fulfilled,
        uncompleted_jobs=row.aborted,
        kudos_rewards=float(earned),
        kudos_details={"generated": float(earned), "uptime": 0.0},
        performance=f"{row.speed:.1f} tokens per second" if row.speed else "No requests fulfilled yet",
        threads=row.threads,
        uptime=row.uptime,
        maintenance_mode=row.maintenance,
        info=row.info,
        nsfw=row.nsfw,
        trusted=row.trusted,
        flagged=row.flagged,
        bridge_agent=row.bridge_agent,
        models=row.models,
        kinds=row.kinds,
        max_length=row.max_length,
        max_context_length=row.max_context_length,
        tokens_generated=float(row.tokens),
        owner=f"{row.owner_name}#{row.owner_id}" if privileged or row.public_workers else None,
        maintenance_message=row.maintenance_message if privileged else None,
    )
