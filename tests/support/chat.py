"""A running broker that serves chat: a trusted worker that says what the test wants, its tokenizer uploaded, and a client."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests
from openai import OpenAI
from sqlalchemy.pool import QueuePool

from horde.kudos.prices import FEE, HUNDREDTHS, LEAST_TOKENS, text_reward
from horde.lifecycle.store import Price
from horde.lifecycle.terms import PROGRESS_LEASE
from horde.maintenance.folds import fold
from horde.maintenance.passes import Done, run_pass
from horde.usecases.accounts import CreatedUser
from tests.support import tiny_tokenizer
from tests.support.concurrency import DidNotHappen, eventually
from tests.support.invariants import check_invariants
from tests.support.live_broker import LiveBroker, live_broker
from tests.support.played_worker import PlayedWorker
from tests.support.sse import Event, Stream
from tests.support.transcript import Transcript
from tests.support.world import World

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KUDOS = 1_000_000
_LONGEST_READ = 90.0


@dataclass
class ChatBroker:
    """A broker, and everybody that a chat needs.

    Attributes:
        owner: of the workers, trusted.
        client: rich enough for any chat.
        worker: has checked in, and is driven by hand until `start`.
    """

    live: LiveBroker
    owner: CreatedUser
    client: CreatedUser
    worker: PlayedWorker
    _held: ExitStack = field(default_factory=ExitStack)
    _streams: list[Stream] = field(default_factory=list)

    @property
    def world(self) -> World:
        """Means to look into the broker's database and to move its clock."""
        return World(self.live.context.database, self.live.context.terms)

    @contextmanager
    def of_one_test(self) -> Iterator[ChatBroker]:
        """The same broker for one test of several: what it opens is closed behind it, and nothing may be left."""
        with ExitStack() as held:
            yield dataclasses.replace(self, _held=held)
            self.assert_nothing_left()
        self.worker.held.clear()

    def another_worker(
        self, name: str, *, key: str | None = None, checked_in: bool = True, **fields: Any
    ) -> PlayedWorker:
        """One more, of the same owner unless another one's key is given; it ends with the broker."""
        worker = PlayedWorker(self.live.url, key or self.owner.api_key, name, **fields)
        self._held.enter_context(worker)
        if checked_in:
            worker.check_in()
        return worker

    def open(
        self,
        content: str | Sequence[dict[str, Any]] = "Hello",
        *,
        key: str | None = None,
        path: str = CHAT,
        headers: dict[str, str] | None = None,
        await_head: bool | None = None,
        receive_buffer: int | None = None,
        at: tuple[str, int] | None = None,
        **body: Any,
    ) -> Stream:
        """Ask on a connection of its own: a stream, whose head is awaited; or with `stream=False` an answer, which is not.

        Args:
            at: host and port of another broker.
        """
        asked = order(content, path=path, **body)
        stream = Stream(
            *(at or (self.live.host, self.live.port)),
            path,
            asked,
            key=key or self.client.api_key,
            headers=headers,
            await_head=asked["stream"] if await_head is None else await_head,
            receive_buffer=receive_buffer,
        )
        self._streams.append(stream)
        return stream

    def hang_up(self) -> None:
        """Close every stream that is open, as the broker's end would."""
        while self._streams:
            self._streams.pop().hang_up()

    def read(self, stream: Iterable[Event]) -> Transcript:
        """All that a stream says, to its end, which must come some day: comments alone keep a stream open for ever."""
        told, give_up = Transcript(), time.monotonic() + _LONGEST_READ
        for event in stream:
            told.add(event)
            assert time.monotonic() < give_up, f"not at its end after {_LONGEST_READ} s: {told}"
        return told

    def post(
        self, content: str | Sequence[dict[str, Any]] = "Hello", *, path: str = CHAT, **body: Any
    ) -> requests.Response:
        """Ask without a stream and wait: the worker has to work by itself, or the order is refused."""
        headers = {"Authorization": f"Bearer {self.client.api_key}"}
        asked = order(content, path=path, **{"stream": False, **body})
        return self.live.session.post(f"{self.live.url}{path}", json=asked, headers=headers, timeout=60)

    def openai(self, *, key: str | None = None, max_retries: int = 0, **options: Any) -> OpenAI:
        """The `openai` client, closed with the broker."""
        client = OpenAI(
            base_url=f"{self.live.url}/v1", api_key=key or self.client.api_key, max_retries=max_retries, **options
        )
        self._held.callback(client.close)
        return client

    def chat_status(self, request_id: str) -> dict[str, Any]:
        """`GET generate/chat/status/{id}`."""
        answer = self.live.call("GET", f"generate/chat/status/{request_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pass_leases(self, *still_at_work: PlayedWorker) -> Done:
        """Time goes by with a word of these workers only, while all clients stay where they are; then maintenance looks."""
        world = self.world
        # The clock is about to jump: what has been quiet until now is no outage.
        world.beat()
        for _ in range(2):
            world.advance(PROGRESS_LEASE / 2 + 1)
            world.stay_attached(*(found for (found,) in world.rows("SELECT id FROM requests WHERE attached_by > 0")))
            for worker in still_at_work:
                worker.post()
        return run_pass(self.live.context)

    def unfinished(self) -> dict[str, int]:
        """What of chats still goes on: requests, jobs, streams, places (but those of polls), database connections; only what is there."""
        with self.live.context.database.autocommit() as tx:
            row = tx.execute(
                "SELECT (SELECT count(*) FROM requests WHERE outcome IS NULL) AS requests, "
                "(SELECT count(*) FROM jobs WHERE state = 'processing') AS jobs, "
                "(SELECT count(*) FROM queue) AS queued"
            ).one()
        context = self.live.context
        pool = context.database.engine.pool
        assert isinstance(pool, QueuePool)
        found = {
            "requests": row.requests,
            "jobs": row.jobs,
            "queued": row.queued,
            "streams": context.streams.following,
            "places": context.places.taken - context.places.held_by(("polls",)),
            "connections": pool.checkedout(),
        }
        return {name: count for name, count in found.items() if count}

    @property
    def calls(self) -> int:
        """Calls that the broker answers now, or has read and will answer, but for polls."""
        dispatcher = self.live.server._dispatcher
        with dispatcher.lock:
            under_way = len(dispatcher.queue) + dispatcher.active_count
        return int(under_way) - self.live.context.places.held_by(("polls",))

    def assert_nothing_left(self, *, within: float = 5) -> None:
        """No call, request, job, place or database connection is in use, or none is soon."""
        try:
            eventually(lambda: not self.calls and not self.unfinished(), "everything is cleaned up", within=within)
        except DidNotHappen:
            raise DidNotHappen(f"left behind after {within} s: {self.calls} calls, {self.unfinished()}") from None

    def assert_sound(self) -> None:
        """Nothing is left behind or failed, all is counted, and what the database holds is as the lifecycle says."""
        self.assert_nothing_left()
        assert self.live.unexpected_errors() == 0
        fold(self.live.context)
        check_invariants(self.live.context.database, folded=True)
        paid = self.world.scalar("SELECT balance FROM accounts WHERE user_id = %(id)s", id=self.client.id)
        charged = self.world.scalar(
            "SELECT coalesce(sum(price), 0) FROM events WHERE user_id = %(id)s", id=self.client.id
        )
        assert KUDOS * HUNDREDTHS - paid == charged


def price(tokens: int, prompt_tokens: int, *, own: int | None = None) -> Price:
    """Hundredths for an answer of so many tokens, `own` of them made by the worker that is paid, of a broker's first worker."""
    worth = _worth(tokens, prompt_tokens)
    own = tokens if own is None else own
    return Price(worth + FEE, _worth(own, prompt_tokens) if own else 0) if tokens else Price(0, 0)


def _worth(tokens: int, prompt_tokens: int) -> int:
    tokens = max(LEAST_TOKENS, tokens)
    model = tiny_tokenizer.MODEL
    return text_reward(tokens=tokens, prompt_tokens=prompt_tokens, model=model, trusted=True, validated=False)


def order(content: str | Sequence[dict[str, Any]] = "Hello", *, path: str = CHAT, **body: Any) -> dict[str, Any]:
    """The body of a call to `/v1`: streamed, for 64 tokens, unless said otherwise."""
    if path == COMPLETIONS:
        asked: dict[str, Any] = {"prompt": content}
    else:
        asked = {"messages": [{"role": "user", "content": content}] if isinstance(content, str) else list(content)}
    return {"model": tiny_tokenizer.MODEL, "max_tokens": 64, "stream": True, **asked, **body}


def upload_tokenizer(live: LiveBroker, key: str, body: dict[str, Any] | None = None) -> str:
    """Publish the tiny tokenizer, or this one; its revision."""
    body = body or tiny_tokenizer.upload()
    revision = tiny_tokenizer.revision_of(body)
    answer = live.call("PUT", f"tokenizers/{revision}", key=key, json=body)
    assert answer.status_code in {200, 201}, answer.text
    return revision


@contextmanager
def chat_broker(
    database_url: str, *, uploaded: bool = True, worker: dict[str, Any] | None = None, **settings: Any
) -> Iterator[ChatBroker]:
    """A broker on `database_url` with a worker that has checked in; `settings` as for `live_broker`.

    Args:
        uploaded: whether the broker knows the worker's tokenizer.
        worker: fields of the worker that are to differ.
    """
    with live_broker(database_url, **settings) as live, ExitStack() as held:
        owner, client = live.user("owner", "trusted"), live.user("client", kudos=KUDOS)
        if uploaded:
            upload_tokenizer(live, owner.api_key)
        played = held.enter_context(PlayedWorker(live.url, owner.api_key, **(worker or {})))
        played.check_in()
        broker = ChatBroker(live, owner, client, played, held)
        held.callback(broker.hang_up)
        yield broker
