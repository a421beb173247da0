"""Words between processes: they reach every other process and never their own, soon, and survive a lost connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from horde.db import notices as notices_module
from horde.db import redis_notices
from horde.db.notices import MOST_KEPT, PAYLOAD_BYTES, DatabaseNotices, Notices, payloads
from horde.db.redis_notices import RedisNotices
from horde.settings import Settings
from horde.usecases.context import Context
from tests.support.concurrency import eventually
from tests.support.redis import RedisServer, redis_server
from tests.support.relay import Relay

DEADLINE = 12.0
NEWS, OTHER = "test_news", "test_other"


class Ears:
    """What a process hears of both channels."""

    def __init__(self, notices: Notices) -> None:
        self.notices = notices
        self._changed = threading.Condition(threading.RLock())
        self._heard: list[tuple[str, frozenset[str]]] = []
        for channel in (NEWS, OTHER):
            notices.subscribe(channel, lambda words, channel=channel: self._hear(channel, words))  # type: ignore[misc]

    def words(self, channel: str = NEWS) -> set[str]:
        with self._changed:
            return {word for where, words in self._heard if where == channel for word in words}

    @property
    def times(self) -> int:
        """How often it was told anything."""
        with self._changed:
            return len(self._heard)

    def until(self, *words: str, channel: str = NEWS) -> None:
        """Return once all these words were heard."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.words(channel) >= set(words), DEADLINE), self._heard

    def _hear(self, channel: str, words: frozenset[str]) -> None:
        with self._changed:
            self._heard.append((channel, words))
            self._changed.notify_all()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture(params=["database", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def make(request: pytest.FixtureRequest) -> Callable[[], Notices]:
    """Makes the notices of one more process."""
    if request.param == "database":
        url = request.getfixturevalue("database_url")
        return lambda: DatabaseNotices(url)
    own_redis: RedisServer = request.getfixturevalue("own_redis")
    return lambda: RedisNotices(own_redis.url)


@contextmanager
def processes(*made: Notices) -> Iterator[list[Ears]]:
    """Processes that listen."""
    with ExitStack() as stack:
        ears = [Ears(notices) for notices in made]
        for notices in made:
            stack.callback(notices.close)
            notices.start()
        for notices in made:
            assert notices.listening.wait(DEADLINE)
        yield ears


# --- both ways


def test_words_reach_every_other_process_on_their_channel_and_never_their_own(make: Callable[[], Notices]) -> None:
    with processes(make(), make(), make()) as (first, second, third):
        first.notices.tell(NEWS, ["a", "b"])
        second.notices.tell(OTHER, ["c"])
        third.until("a", "b")
        third.until("c", channel=OTHER)
        second.until("a", "b")
        first.until("c", channel=OTHER)
        # Each has heard the others; had it heard itself, that had come before.
        assert (first.words(), second.words(OTHER)) == (set(), set())
        assert (third.words(), third.words(OTHER)) == ({"a", "b"}, {"c"})


def test_words_that_come_one_by_one_are_told_together_once_a_tick(make: Callable[[], Notices]) -> None:
    with processes(make(), make()) as (teller, hearer):
        words = [str(number) for number in range(400)]
        began = time.monotonic()
        for word in words:
            teller.notices.tell(NEWS, [word])
            time.sleep(0.001)
        hearer.until(*words)
        tick = notices_module.TICK if isinstance(teller.notices, DatabaseNotices) else redis_notices.TICK
        assert hearer.times <= (time.monotonic() - began) / tick + 2


def test_the_first_word_after_a_silence_does_not_wait_for_a_tick(
    make: Callable[[], Notices], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (notices_module, redis_notices):
        monkeypatch.setattr(module, "TICK", 2 * DEADLINE)
    with processes(make(), make()) as (teller, hearer):
        teller.notices.tell(NEWS, ["now"])
        hearer.until("now")
        teller.notices.tell(NEWS, ["later"])
        # The end of a process tells what is left at once.
        teller.notices.close()
        hearer.until("later")


def test_thousands_of_words_come_in_payloads_that_postgresql_takes(make: Callable[[], Notices]) -> None:
    words = [f"{number:032x}" for number in range(5_000)]
    with processes(make(), make()) as (teller, hearer):
        teller.notices.tell(NEWS, words)
        hearer.until(*words)
        assert hearer.words() == set(words)


def test_a_hearer_that_fails_does_not_make_the_others_deaf(make: Callable[[], Notices]) -> None:
    failing = make()
    failed = threading.Event()

    def fail(_words: frozenset[str]) -> None:
        failed.set()
        raise LookupError("of this test")

    with processes(make(), failing) as (teller, hearer):
        failing.subscribe(NEWS, fail)
        teller.notices.tell(NEWS, ["a"])
        assert failed.wait(DEADLINE)
        teller.notices.tell(OTHER, ["b"])
        hearer.until("b", channel=OTHER)


def test_what_was_told_before_the_start_is_told_then(make: Callable[[], Notices]) -> None:
    early = make()
    early.tell(NEWS, ["early"])
    with processes(make()) as (hearer,), processes(early):
        hearer.until("early")


def test_notices_that_never_began_can_be_told_and_closed(make: Callable[[], Notices]) -> None:
    notices = make()
    notices.tell(NEWS, ["a"])
    notices.close()
    notices.close()
    notices.tell(NEWS, ["b"])


def test_nobody_keeps_more_than_so_many_words_for_a_connection_that_never_comes() -> None:
    notices = DatabaseNotices("postgresql://nowhere/none")
    for start in range(0, MOST_KEPT * 2, 1_000):
        notices.tell(NEWS, map(str, range(start, start + 1_000)))
    assert len(notices._fresh[NEWS]) == MOST_KEPT


def test_payloads_hold_every_word_once_and_stay_small() -> None:
    words = [str(number) * (number % 60 + 1) for number in range(3_000)]
    made = payloads(words)
    assert ",".join(made).split(",") == words
    assert max(map(len, made)) <= PAYLOAD_BYTES
    # None could hold the first word of the next as well.
    assert all(len(one) + 1 + len(two.split(",")[0]) > PAYLOAD_BYTES - 1 for one, two in pairwise(made))
    assert payloads([]) == []


# --- connections that are lost


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is looked for ten times a second."""
    for module in (notices_module, redis_notices):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.1)


@pytest.mark.usefixtures("hurried")
def test_words_told_while_the_database_is_away_come_when_it_is_back(database_url: str) -> None:
    with Relay(database_url) as relay, processes(DatabaseNotices(relay.url), DatabaseNotices(database_url)) as both:
        cut_off, hearer = both
        relay.cut()
        eventually(lambda: not cut_off.notices.listening.is_set(), "it has noticed")
        cut_off.notices.tell(NEWS, ["meanwhile"])
        relay.restore()
        hearer.until("meanwhile")
        assert cut_off.notices.listening.wait(DEADLINE)
        hearer.notices.tell(NEWS, ["afterwards"])
        cut_off.until("afterwards")


@pytest.mark.usefixtures("hurried")
def test_a_word_whose_statement_fails_is_told_again(database_url: str) -> None:
    with Relay(database_url) as relay, processes(DatabaseNotices(relay.url), DatabaseNotices(database_url)) as both:
        cut_off, hearer = both
        # Told in the moment of the cut: whether the statement has failed or nobody has tried it yet, it is not lost.
        relay.cut()
        cut_off.notices.tell(NEWS, ["in between"])
        eventually(lambda: not cut_off.notices.listening.is_set(), "it has noticed")
        relay.restore()
        hearer.until("in between")


@pytest.mark.needs("redis")
@pytest.mark.usefixtures("hurried")
def test_words_told_while_redis_is_away_come_when_it_is_back(own_redis: RedisServer) -> None:
    with processes(RedisNotices(own_redis.url), RedisNotices(own_redis.url)) as (teller, hearer):
        own_redis.stop()
        for ears in (teller, hearer):
            eventually(lambda ears=ears: not ears.notices.listening.is_set(), "it has noticed")  # type: ignore[misc]
        teller.notices.tell(NEWS, ["meanwhile"])
        own_redis.start()
        for ears in (teller, hearer):
            assert ears.notices.listening.wait(DEADLINE)
        # What was told before the other one listened again is nobody's; whoever waits looks by itself.
        teller.notices.tell(NEWS, ["afterwards"])
        hearer.until("afterwards")


@pytest.mark.needs("redis")
@pytest.mark.usefixtures("hurried")
def test_a_process_starts_and_ends_without_its_redis(own_redis: RedisServer) -> None:
    own_redis.stop()
    notices = RedisNotices(own_redis.url)
    ears = Ears(notices)
    notices.start()
    notices.tell(NEWS, ["a"])
    assert not notices.listening.wait(0.3)
    began = time.monotonic()
    notices.close()
    assert time.monotonic() - began < 3
    assert ears.words() == set()


# --- what a broker makes of its settings


def test_a_broker_takes_redis_where_it_is_told_to(database_url: str) -> None:
    for url, kind in ((None, DatabaseNotices), ("redis://127.0.0.1:1", RedisNotices)):
        context = Context.create(Settings(database_url=database_url, redis_url=url))
        assert isinstance(context.notices, kind)
        context.close()


def test_a_redis_url_that_is_none_is_refused_by_name(database_url: str) -> None:
    with pytest.raises(ValueError, match="HORDE_REDIS_URL"):
        Context.create(Settings(database_url=database_url, redis_url="http://127.0.0.1"))
