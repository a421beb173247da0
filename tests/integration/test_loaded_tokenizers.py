"""Tokenizers that a process has loaded: looked up once, by one of many, and forgotten in time."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from horde.db.database import Database
from horde.errors import HordeError
from horde.registry import tokenizers as registry
from horde.registry.tokenizers import Tokenizers, canonical_form
from tests.support import tiny_tokenizer
from tests.support.live_broker import LiveBroker
from tests.support.uploads import MEBIBYTE, REVISION, TINY, canonical, large, put


def test_what_was_just_published_is_known_at_once_although_it_was_missed_before(broker: LiveBroker, key: str) -> None:
    known = broker.context.tokenizers
    assert known.load(broker.context.database, REVISION) is None
    put(broker, TINY, key)
    tokenizer = known.load(broker.context.database, REVISION)
    assert tokenizer is not None
    assert tokenizer.has_template
    assert tokenizer.vocabulary == 259
    assert known.load(broker.context.database, REVISION) is tokenizer


class Counting:
    """A database that counts who asks it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reads = 0

    def read(self, work: Any) -> Any:
        self.reads += 1
        return self._database.read(work)


@pytest.fixture
def counting(broker: LiveBroker) -> Any:
    return Counting(broker.context.database)


def test_an_unknown_revision_is_looked_for_again_only_after_a_while(
    counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Tokenizers()
    for _ in range(5):
        assert known.load(counting, REVISION) is None
    assert counting.reads == 1
    for no_revision in ("", "main", REVISION.upper(), "\x00"):
        assert known.load(counting, no_revision) is None
    assert counting.reads == 1
    monkeypatch.setattr(registry, "UNKNOWN_FOR", 0.0)
    known.forget_unknown(REVISION)
    for _ in range(5):
        assert known.load(counting, REVISION) is None
    assert counting.reads == 6


def test_unknown_revisions_are_not_remembered_without_end(counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MOST_UNKNOWN", 10)
    known = Tokenizers()
    for number in range(30):
        known.load(counting, f"{number:064x}")
    assert len(known._unknown) == 10
    assert known._loading == {}


def test_many_who_need_one_at_once_load_it_once(
    broker: LiveBroker, key: str, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(broker, TINY, key)
    known, barrier, found = Tokenizers(), threading.Barrier(8), []
    others_wait = threading.Event()
    loads = []

    def slow(canonical: bytes) -> Any:
        loads.append(1)
        others_wait.wait(0.2)
        return registry_load(canonical)

    registry_load = registry.load_canonical
    monkeypatch.setattr(registry, "load_canonical", slow)

    def work() -> None:
        barrier.wait()
        found.append(known.load(counting, REVISION))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert found[0] is not None
    assert (counting.reads, len(loads)) == (1, 1)


def test_the_ones_that_were_used_last_stay(broker: LiveBroker, key: str, counting: Any) -> None:
    revisions = []
    for number in range(3):
        body = tiny_tokenizer.upload(f"{number}")
        put(broker, body, key)
        revisions.append(tiny_tokenizer.revision_of(body))
    known = Tokenizers(most=2)
    for revision in (revisions[0], revisions[1], revisions[0], revisions[2]):
        known.load(counting, revision)
    assert counting.reads == 3
    known.load(counting, revisions[0])
    known.load(counting, revisions[2])
    assert counting.reads == 3
    known.load(counting, revisions[1])
    assert counting.reads == 4


def test_a_stored_one_that_cannot_be_used_is_as_good_as_unknown(broker: LiveBroker) -> None:
    with broker.context.database.transaction() as tx:
        tx.execute(
            "INSERT INTO tokenizers VALUES (%(revision)s, %(body)s, 1, horde_now())",
            {"revision": REVISION, "body": b"no zlib"},
        )
    assert broker.context.tokenizers.load(broker.context.database, REVISION) is None


def test_a_failed_load_is_tried_again_by_the_next(counting: Any) -> None:
    class Down:
        def read(self, _: Any) -> Any:
            raise HordeError(registry.bad_request("x").code, "down", rc="Unavailable")

    known = Tokenizers()
    down: Any = Down()
    for _ in range(2):
        with pytest.raises(HordeError):
            known.load(down, REVISION)
    assert known.load(counting, REVISION) is None
    assert counting.reads == 1


def test_the_canonical_form_is_that_of_any_json_library_and_fast_enough() -> None:
    body = large(2 * MEBIBYTE)
    assert canonical_form(json.dumps(body, indent=2).encode()) == canonical(body)
