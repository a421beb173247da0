"""Orders of chats for a model that nobody else serves: the use cases on a test's database, with workers that say what a test wants."""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from horde.admission.chat import ChatOrder
from horde.errors import HordeError
from horde.registry.revisions import Manifest, revision_key
from horde.usecases.accounts import CreatedUser
from horde.usecases.chat import AcceptedChat, ChatStatus, order_chat, read_chat_status
from horde.usecases.models import publish_tokenizer
from horde.usecases.pop import PoppedJob
from tests.support import tiny_tokenizer
from tests.support.broker import Broker, open_broker
from tests.support.invariants import check_invariants
from tests.support.postgres import Server

# One model in two revisions, both with the tiny tokenizer, and in one whose tokenizer nobody has published.
MANIFEST = Manifest.from_json(tiny_tokenizer.manifest(model_revision="weights-1"))
OTHER = dataclasses.replace(MANIFEST, model_revision="weights-2")
UNKNOWN = dataclasses.replace(MANIFEST, tokenizer_revision="f" * 64)

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = tiny_tokenizer.render(HELLO)
TOKENS = len(tiny_tokenizer.encode(PROMPT))
RICH = 1_000_000

_numbers = itertools.count(1)


@dataclass
class ChatOrders:
    """A model, who may serve it, and who asks for it.

    Attributes:
        owner: of workers, trusted.
        client: the key of somebody who may have anything.
    """

    broker: Broker
    model: str
    owner: CreatedUser
    client: str

    @classmethod
    def of(cls, broker: Broker, model: str | None = None) -> ChatOrders:
        """For a model that nobody has heard of, or this one."""
        name = model or f"m{next(_numbers)}"
        return cls(broker, name, broker.user(None, "trusted"), broker.user(kudos=RICH).api_key)

    # Workers.

    def publish(self, body: dict[str, Any] | None = None) -> str:
        """Publish the tiny tokenizer, or this one; its revision."""
        body = body or tiny_tokenizer.upload()
        revision = tiny_tokenizer.revision_of(body)
        publish_tokenizer(self.broker.context, self.owner.api_key, revision, lambda: json.dumps(body).encode())
        return revision

    def with_template(self, template: str | None) -> Manifest:
        """A manifest whose tokenizer is published and has this template."""
        return dataclasses.replace(MANIFEST, tokenizer_revision=self.publish(tiny_tokenizer.upload(template)))

    def offer(self, manifest: Manifest = MANIFEST, *, name: str = "worker", **fields: Any) -> dict[str, Any]:
        """What a worker's pop says that takes chats for this model."""
        return {
            "name": self.name(name),
            "models": [self.model],
            "kinds": ["chat"],
            "progress": True,
            "slots": 1,
            "manifests": {self.model: manifest},
            "max_length": 2048,
            "max_context_length": manifest.context_length,
            **fields,
        }

    def name(self, name: str = "worker") -> str:
        """The whole name of a worker."""
        return f"{name} of {self.model}"

    def serve(self, manifest: Manifest = MANIFEST, *, owner: CreatedUser | None = None, **fields: Any) -> uuid.UUID:
        """Let a worker check in; its id."""
        return self.broker.worker_id((owner or self.owner).api_key, **self.offer(manifest, **fields))

    def take(self, manifest: Manifest = MANIFEST, **fields: Any) -> PoppedJob:
        """A pop that gets a job."""
        return self.broker.job(self.owner.api_key, **self.offer(manifest, **fields))

    def nothing(self, manifest: Manifest = MANIFEST, **fields: Any) -> dict[str, int]:
        """A pop that gets nothing; why."""
        return self.broker.nothing(self.owner.api_key, **self.offer(manifest, **fields))

    def report(self, job: PoppedJob, state: str, **fields: Any) -> float:
        """Settle a job without a result; the reward."""
        return self.broker.submit(self.owner.api_key, job.id, "", state=state, **fields)

    def pinned(self, manifest: Manifest = MANIFEST) -> str:
        """What a chat that was counted for this is pinned to."""
        return revision_key(self.model, manifest.model_revision, manifest.tokenizer_revision)

    # Clients.

    def order(self, **fields: Any) -> ChatOrder:
        """An order of 64 tokens, unless it says otherwise."""
        return ChatOrder(**{"models": [self.model], "messages": HELLO, "max_tokens": 64, **fields})

    def ask(self, key: str | None = None, **fields: Any) -> AcceptedChat:
        """Order a chat to be polled."""
        return order_chat(self.broker.context, key or self.client, self.order(**fields))

    def refusal(self, key: str | None = None, **fields: Any) -> HordeError:
        """Why an order is refused; nothing of it is left."""
        before = self.in_all()
        with pytest.raises(HordeError) as refused:
            self.ask(key, **fields)
        assert self.in_all() == before
        return refused.value

    def in_all(self) -> int:
        """Requests that were ever enqueued, of anybody."""
        return int(self.broker.world.scalar("SELECT count(*) FROM requests"))

    def row(self, accepted: AcceptedChat) -> Any:
        """What was enqueued."""
        with self.broker.context.database.autocommit() as tx:
            return tx.execute("SELECT * FROM requests WHERE id = %(id)s", {"id": accepted.id}).one()

    def asked(self, key: str | None = None, **fields: Any) -> Any:
        """What is enqueued for an order."""
        return self.row(self.ask(key, **fields))

    def longest(self, key: str | None = None, **fields: Any) -> int:
        """How long an answer is let become, in tokens."""
        return int(self.asked(key, **fields).max_length)

    def status(self, accepted: AcceptedChat) -> ChatStatus:
        """How far a chat is."""
        assert accepted.id is not None
        return read_chat_status(self.broker.context, accepted.id)


@contextmanager
def order_broker(server: Server) -> Iterator[Broker]:
    """A broker on a database of its own that knows the tiny tokenizer; its invariants hold in the end."""
    url = server.create()
    try:
        with open_broker(url) as made:
            made.context.start()
            ChatOrders.of(made).publish()
            yield made
            check_invariants(made.context.database)
    finally:
        server.drop(url)
