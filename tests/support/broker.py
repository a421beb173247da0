"""A broker without its HTTP: the use cases on a test's database, with a user, a worker, an order or a pop by one call.

What moves the clock or looks into tables goes through `world`, which works on the same connections.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from horde.admission.keys import ANONYMOUS_KEY
from horde.admission.text import TextOrder
from horde.maintenance.folds import fold
from horde.settings import Settings
from horde.usecases.accounts import CreatedUser, create_user
from horde.usecases.context import Context
from horde.usecases.pop import Offer, Popped, PoppedJob, pop
from horde.usecases.submit import Submission, submit
from horde.usecases.text import Accepted, TextStatus, read_text_status, request_text
from horde.usecases.users import UserView, find_user
from horde.usecases.workers import WorkerView, read_worker_by_name
from tests.support.world import World

MODEL = "m"
# A backend whose rewards are not cut.
BRIDGE = "AI Horde Worker:1:tests"


@dataclass
class Broker:
    """One broker process's context, and calls by whoever holds a key."""

    context: Context
    world: World
    _names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def user(self, name: str | None = None, *roles: str, kudos: float = 0, **columns: Any) -> CreatedUser:
        """A user with an account; `columns` of its row are set afterwards."""
        made = create_user(self.context.database, name or f"user{next(self._names)}", roles, kudos)
        for column, value in columns.items():
            with self.context.database.transaction() as tx:
                tx.execute(f"UPDATE users SET {column} = %(value)s WHERE id = %(id)s", {"value": value, "id": made.id})
        return made

    def ask(self, key: str = ANONYMOUS_KEY, **fields: Any) -> Accepted:
        """Order a text for model `m` (80 tokens of 1,024) and see the whole answer."""
        return request_text(self.context, key, order(**fields))

    def order(self, key: str = ANONYMOUS_KEY, **fields: Any) -> uuid.UUID:
        """Order a text; the id of its request."""
        accepted = self.ask(key, **fields)
        assert accepted.id is not None
        return accepted.id

    def pop(self, key: str, *, client_gone: Callable[[], bool] = lambda: False, **fields: Any) -> Popped:
        """A pop by a worker called `worker` for model `m` (512 tokens of 4,096)."""
        return pop(self.context, key, offer(**fields), client_gone=client_gone)

    def job(self, key: str, **fields: Any) -> PoppedJob:
        """A pop that gets exactly one job."""
        (job,) = self.pop(key, **fields).jobs
        return job

    def nothing(self, key: str, **fields: Any) -> dict[str, int]:
        """A pop that gets nothing; why."""
        popped = self.pop(key, **fields)
        assert popped.jobs == []
        return popped.skipped

    def submit(self, key: str, job_id: uuid.UUID, text: str = "text", *, state: str = "ok", **fields: Any) -> float:
        """Report on a job; the reward."""
        return submit(self.context, key, Submission(job_id, state, text, **fields))

    def status(self, request: uuid.UUID) -> TextStatus:
        """The status, which must be there."""
        return read_text_status(self.context, request)

    def find_user(self, key: str) -> UserView:
        """A user as it sees itself."""
        return find_user(self.context, key)

    def worker(self, name: str = "worker") -> WorkerView:
        """A worker as everybody sees it."""
        return read_worker_by_name(self.context, name)

    def worker_id(self, key: str, name: str = "worker", **fields: Any) -> uuid.UUID:
        """The id of a worker that has just checked in; nothing may wait for it."""
        self.nothing(key, name=name, **fields)
        return self.worker(name).id

    def fold(self) -> int:
        """Fold everything; how many events."""
        return fold(self.context)

    def request_of(self, job: PoppedJob) -> uuid.UUID:
        """The request that a job is of."""
        found = self.world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=job.id)
        assert isinstance(found, uuid.UUID)
        return found


def order(**fields: Any) -> TextOrder:
    """A text order; `params` follow from the other fields."""
    values: dict[str, Any] = {
        "prompt": "Hello",
        "n": 1,
        "max_length": 80,
        "max_context_length": 1024,
        "models": [MODEL],
        **fields,
    }
    params = {name: values[name] for name in ("n", "max_length", "max_context_length")}
    return TextOrder(**{"params": params, **values})


def offer(name: str = "worker", models: Sequence[str] = (MODEL,), **fields: Any) -> Offer:
    """What a worker's pop says."""
    values = {"max_length": 512, "max_context_length": 4096, "bridge_agent": BRIDGE, **fields}
    return Offer(name=name, models=list(models), **values)


@contextmanager
def open_broker(url: str, **settings: Any) -> Iterator[Broker]:
    """A broker on a migrated database, with the limits that production has unless `settings` say otherwise."""
    chosen = Settings(**{"database_url": url, "database_pool": 24, "rate_limits": "on", **settings})
    context = Context.create(chosen)
    try:
        world = World(context.database, context.terms)
        # As a broker does when it starts: the time before it is no outage of a job that is claimed later.
        world.beat()
        yield Broker(context, world)
    finally:
        context.close()
