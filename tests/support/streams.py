"""Followers of requests in a broker process without its HTTP: what they were given, and what the process read for them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from horde.db.database import Transaction
from horde.lifecycle.words import Kind
from horde.settings import Settings
from horde.streams import hub as hub_module
from horde.streams.hub import Follower
from horde.streams.output import Output, Reader, SlotOutput, read_output
from horde.usecases.context import Context
from tests.support.world import World

DEADLINE = 12.0
# Long enough for anything that should not come to have come.
A_WHILE = 0.15


@dataclass
class Process:
    """A broker process without its HTTP, whose streams run."""

    context: Context
    world: World

    def chat(self, n: int = 1, **fields: Any) -> uuid.UUID:
        """A chat that somebody waits for."""
        return self.world.request(n, kind=Kind.CHAT, attached=True, needs_progress=True, **fields)

    def job(self, request: uuid.UUID) -> uuid.UUID:
        """A job at its lowest waiting slot, by a worker of its own that posts progress."""
        return self.world.claim_one(request, self.world.worker(posts_progress=True))

    def announce(self, *requests: uuid.UUID) -> None:
        self.context.streams.announce(requests)


@dataclass
class Seen:
    """What a follower was given."""

    follower: Follower
    outputs: list[Output] = field(default_factory=list)

    def text(self, slot: int = 0) -> str:
        return "".join(new.text for new in self.slots(slot))

    def token_ids(self, slot: int = 0) -> list[int]:
        return [token for new in self.slots(slot) for token in new.token_ids]

    def slots(self, slot: int = 0) -> list[SlotOutput]:
        return [new for output in self.outputs for new in output.slots if new.idx == slot]

    def next(self, timeout: float = DEADLINE) -> Output:
        """The next output, which must come."""
        output = self.follower.next(timeout)
        assert output is not None, "nothing came"
        self.outputs.append(output)
        return output

    def nothing(self, timeout: float = A_WHILE) -> None:
        """Nothing comes."""
        assert self.follower.next(timeout) is None

    def until(self, holds: Callable[[], bool]) -> None:
        """Take output until it holds."""
        while not holds():
            self.next()

    def until_done(self) -> None:
        self.until(lambda: bool(self.outputs) and self.outputs[-1].done)


@contextmanager
def process(url: str, **settings: Any) -> Iterator[Process]:
    context = Context.create(Settings(**{"database_url": url, "database_pool": 8, **settings}))
    try:
        world = World(context.database, context.terms)
        world.beat()
        context.start()
        yield Process(context, world)
    finally:
        context.close()


@contextmanager
def following(on: Process, request: uuid.UUID, n: int = 1) -> Iterator[Seen]:
    with on.context.streams.follow(request, n) as follower:
        yield Seen(follower)


class Reads:
    """Counts the readers of every read, and can hold what was read up."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.stands = threading.Event()

        def counted(tx: Transaction, readers: Sequence[Reader]) -> list[list[Any]]:
            self.sizes.append(len(readers))
            rows = read_output(tx, readers)
            if not self.may_go.is_set():
                self.stands.set()
                assert self.may_go.wait(DEADLINE)
            return rows

        patch.setattr(hub_module, "read_output", counted)
