"""What a client that waits is given of its request's output: each token once, in order, whichever attempt made it."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from horde.db.database import Transaction
from horde.lifecycle.progress import Chunk, post_progress
from horde.lifecycle.words import CancelReason, ResultState
from horde.streams import hub as hub_module
from horde.streams.output import READ_OUTPUT, Output, Reader, SlotOutput, read_output
from tests.support.streams import Process, following, process

NEVER = 1_000.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but an announcement makes anybody look again."""
    monkeypatch.setattr(hub_module, "LOOK_AGAIN", NEVER)


@pytest.fixture
def broker(database_url: str, told: None) -> Iterator[Process]:
    with process(database_url) as made:
        yield made


# --- what a follower is given


def test_a_follower_sees_its_request_wait_run_and_end(broker: Process) -> None:
    request = broker.chat()
    with following(broker, request) as seen:
        first = seen.next()
        assert (first.outcome, first.done, first.gone) == (None, False, False)
        assert [(new.idx, new.state, new.text, new.token_ids) for new in first.slots] == [(0, "waiting", "", [])]
        seen.nothing()

        job = broker.job(request)
        broker.announce(request)
        assert [new.state for new in seen.next().slots] == ["processing"]

        broker.world.post(job, [1, 2], "ab")
        broker.announce(request)
        (new,) = seen.next().slots
        assert (new.text, new.token_ids, new.tokens, new.finish_reason) == ("ab", [1, 2], 2, None)

        broker.world.post(job, [3], "c", offset=2)
        broker.announce(request)
        (new,) = seen.next().slots
        assert (new.text, new.token_ids, new.tokens) == ("c", [3], 3)

        broker.world.store(job, "abcd", tokens=4, token_ids=[1, 2, 3, 4], finish_reason="stop", cached_tokens=16)
        broker.announce(request)
        last = seen.next()
        assert (last.outcome, last.done) == ("completed", True)
        (new,) = last.slots
        assert new == SlotOutput(0, "stored", "d", [4], None, "stop", "ok", 4, 16)
        broker.announce(request)
        seen.nothing()


def test_who_comes_late_is_given_everything_at_once(broker: Process) -> None:
    request = broker.chat()
    job = broker.job(request)
    broker.world.post(job, [1, 2], "ab")
    with following(broker, request) as running:
        assert [(new.state, new.text) for new in running.next().slots] == [("processing", "ab")]
    broker.world.store(job, "abc", tokens=3, token_ids=[1, 2, 3], finish_reason="length")
    with following(broker, request) as ended:
        output = ended.next()
        assert output.done
        assert [(new.text, new.token_ids, new.finish_reason) for new in output.slots] == [("abc", [1, 2, 3], "length")]


def test_everybody_who_follows_a_request_is_given_all_of_it(broker: Process) -> None:
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as first:
        broker.world.post(job, [1], "a")
        broker.announce(request)
        first.until(lambda: first.text() == "a")
        with following(broker, request) as second:
            broker.world.post(job, [2], "b", offset=1)
            broker.world.store(job, "abc", tokens=3, token_ids=[1, 2, 3])
            broker.announce(request)
            for seen in (first, second):
                seen.until_done()
                assert (seen.text(), seen.token_ids()) == ("abc", [1, 2, 3])


def test_slots_of_one_request_do_not_mix(broker: Process) -> None:
    request = broker.chat(3)
    jobs = [broker.job(request) for _ in range(3)]
    with following(broker, request, 3) as seen:
        assert [new.idx for new in seen.next().slots] == [0, 1, 2]
        broker.world.post(jobs[1], [11, 12], "bb")
        broker.world.post(jobs[2], [21], "c")
        broker.announce(request)
        assert [(new.idx, new.text) for new in seen.next().slots] == [(1, "bb"), (2, "c")]
        for number, (job, text) in enumerate(zip(jobs, ("a", "bbb", "cc"), strict=True)):
            broker.world.store(job, text, tokens=len(text), token_ids=[10 * number + at + 1 for at in range(len(text))])
            broker.announce(request)
        seen.until_done()
        assert [seen.text(slot) for slot in range(3)] == ["a", "bbb", "cc"]
        assert [seen.token_ids(slot) for slot in range(3)] == [[1], [11, 12, 13], [21, 22]]
        assert sum(new.state == "stored" for output in seen.outputs for new in output.slots) == 3


def test_offsets_are_characters_whatever_they_weigh_in_bytes(broker: Process) -> None:
    pieces = ["é", "🙂🙃", "", "日本", "e\u0301", "\U0010ffff", "\t\n", "z"]
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as seen:
        text = ""
        for number, piece in enumerate(pieces):
            chunk = {"offset": number, "text_offset": len(text)}
            broker.world.db.run(lambda tx, c=chunk, n=number, p=piece: _post(tx, job, [n], p, **c))  # type: ignore[misc]
            text += piece
            broker.announce(request)
            seen.until(lambda text=text, number=number: (seen.text(), len(seen.token_ids())) == (text, number + 1))  # type: ignore[misc]
        broker.world.store(job, text + "🙂", tokens=len(pieces), token_ids=list(range(len(pieces))))
        broker.announce(request)
        seen.until_done()
        assert seen.text() == text + "🙂"


def _post(tx: Transaction, job: uuid.UUID, tokens: Sequence[int], text: str, *, offset: int, text_offset: int) -> None:
    owner = tx.execute("SELECT owner_id FROM jobs WHERE id = %(job)s", {"job": job}).scalar_one()
    post_progress(tx, owner, [Chunk(job, offset, tokens, text, text_offset)])


def test_logprobs_come_with_their_tokens(broker: Process) -> None:
    entries = [[token, -0.5 * token, [[token, -0.5 * token], [7, -9.0]]] for token in range(4)]
    request = broker.chat(payload={"prompt": "Hello", "logprobs": 1})
    job = broker.job(request)
    with following(broker, request) as seen:
        for number in range(3):
            broker.world.post(job, [number], "x", offset=number, logprobs=[entries[number]])
            broker.announce(request)
            seen.until(lambda number=number: len(seen.token_ids()) == number + 1)  # type: ignore[misc]
        broker.world.store(job, "xxxx", tokens=4, token_ids=[0, 1, 2, 3], logprobs=entries)
        broker.announce(request)
        seen.until_done()
        assert [entry for new in seen.slots() for entry in new.logprobs or []] == entries
        assert all(len(new.logprobs or []) == len(new.token_ids) for new in seen.slots())


def test_a_result_that_is_withheld_adds_nothing_to_what_was_posted(broker: Process) -> None:
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as seen:
        broker.world.post(job, [1], "a")
        broker.announce(request)
        seen.until(lambda: seen.text() == "a")
        broker.world.store(job, "something else entirely", tokens=5, state=ResultState.CENSORED)
        broker.announce(request)
        seen.until_done()
        assert seen.text() == "a"
        assert seen.slots()[-1].result_state == "censored"


@pytest.mark.parametrize("end", ["cancelled", "rejected", "faulted"])
def test_every_end_is_told_with_what_was_posted_until_then(broker: Process, end: str) -> None:
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as seen:
        broker.world.post(job, [1, 2], "ab")
        if end == "cancelled":
            broker.world.cancel(request, CancelReason.DEADLINE)
        elif end == "rejected":
            broker.world.reject(job)
        else:
            broker.world.fault(job)
            broker.world.fault(broker.job(request))
        broker.announce(request)
        seen.until_done()
        last = seen.outputs[-1]
        expected = {
            "cancelled": ("deadline", None),
            "rejected": (None, "context_length_exceeded"),
            "faulted": (None, None),
        }
        assert (last.outcome, (last.outcome_reason, last.error_code)) == (end, expected[end])
        if end == "cancelled":
            assert (seen.text(), seen.slots()[-1].state) == ("ab", "stored")


def test_a_request_that_is_gone_is_said_to_be(broker: Process) -> None:
    with following(broker, uuid.uuid4()) as seen:
        output = seen.next()
        assert (output.gone, output.done, output.slots) == (True, True, [])
        seen.nothing()


# --- attempts that take turns


def test_the_next_attempt_goes_on_where_the_last_one_stopped(broker: Process) -> None:
    request = broker.chat()
    job = broker.job(request)
    with following(broker, request) as seen:
        broker.world.post(job, [1, 2], "ab")
        broker.announce(request)
        seen.until(lambda: seen.text() == "ab")
        broker.world.post(job, [3], "c", offset=2)
        broker.world.release(job)
        broker.announce(request)
        seen.until(lambda: seen.slots()[-1].state == "waiting")
        # What was posted last had not been read when the attempt ended; it lies with the slot now.
        assert seen.text() == "abc"

        job = broker.job(request)
        broker.announce(request)
        seen.until(lambda: seen.slots()[-1].state == "processing")
        assert seen.text() == "abc"

        broker.world.post(job, [4], "d", offset=3)
        broker.announce(request)
        seen.until(lambda: seen.text() == "abcd")
        broker.world.store(job, "abcde", tokens=5, token_ids=[1, 2, 3, 4, 5])
        broker.announce(request)
        seen.until_done()
        assert (seen.text(), seen.token_ids()) == ("abcde", [1, 2, 3, 4, 5])


def test_nothing_is_given_twice_or_left_out_however_attempts_and_reads_come(broker: Process) -> None:
    """Attempts that post, repeat themselves, hand back and go on, with readers that look at any moment."""
    chance = random.Random(7)
    for _ in range(12):
        size = chance.randint(1, 30)
        text = "".join(chance.choice("aé🙂日") for _ in range(size))
        entries = [[token, -1.0, []] for token in range(size)]
        request = broker.chat(payload={"prompt": "Hello", "logprobs": 0})
        readers: list[tuple[Reader, list[Any]]] = []
        job, posted, releases = None, 0, 0
        while True:
            if chance.random() < 0.2:
                readers.append((Reader(request, 1), []))
            for reader, outputs in readers:
                if chance.random() < 0.5:
                    _look(broker, reader, outputs)
            if job is None:
                job = broker.job(request)
            elif posted == size:
                broker.world.store(
                    job, text, tokens=size, token_ids=list(range(size)), logprobs=_behind(broker, job, entries)
                )
                break
            elif chance.random() < 0.25 and releases < 4:
                broker.world.release(job)
                job, releases = None, releases + 1
            else:
                start = chance.randint(0, posted)
                end = chance.randint(posted, size)
                broker.world.post(job, range(start, end), text[start:end], offset=start, logprobs=entries[start:end])
                posted = max(posted, end)
        for reader, outputs in [*readers, (Reader(request, 1), [])]:
            _look(broker, reader, outputs)
            slots = [new for output in outputs for new in output.slots]
            assert "".join(new.text for new in slots) == text
            assert [token for new in slots for token in new.token_ids] == list(range(size))
            assert [entry for new in slots for entry in new.logprobs or []] == entries
            assert outputs[-1].done
            assert [new.state for new in slots].count("stored") == 1


def _look(broker: Process, reader: Reader, outputs: list[Output]) -> None:
    (rows,) = broker.world.db.read(lambda tx: read_output(tx, [reader]))
    output = reader.take(rows)
    if output is not None:
        outputs.append(output)


def _behind(broker: Process, job: uuid.UUID, entries: list[Any]) -> list[Any]:
    """The entries behind the slot's prefix, which are all that an attempt submits."""
    prefix = broker.world.scalar(
        "SELECT coalesce(cardinality(s.prefix_token_ids), 0) FROM slots s JOIN jobs j ON j.request_id = s.request_id "
        "AND j.slot_idx = s.idx WHERE j.id = %(job)s",
        job=job,
    )
    return entries[prefix:]


# --- the statement


def test_a_read_costs_one_statement_and_only_looks_at_what_was_asked_for(broker: Process) -> None:
    """Among a thousand other requests: each table by its index, each row on its own."""
    with broker.world.db.transaction() as tx:
        tx.execute(
            """
WITH r AS (
    INSERT INTO requests (id, kind, user_id, payload, created_at, expires_at, rank, models, max_length, max_context_length, n,
                          waiting, processing)
    SELECT gen_random_uuid(), 'chat', 0, '{}', horde_now(), horde_now() + interval '1 hour', horde_now(), '{m}', 80, 1024, 1, 0, 1
    FROM generate_series(1, 1000) RETURNING id),
s AS (INSERT INTO slots (request_id, idx, state, seed) SELECT id, 0, 'processing', 0 FROM r RETURNING request_id)
INSERT INTO jobs (id, request_id, slot_idx, state, worker_id, worker_name, owner_id, model, claimed_at, lease_begun, lease_end, ttl)
SELECT gen_random_uuid(), request_id, 0, 'processing', gen_random_uuid(), 'w', 0, 'm', horde_now(), horde_now(),
       horde_now() + interval '1 hour', 3600 FROM s
"""
        )
        tx.execute("INSERT INTO progress (job_id, text, updated_at) SELECT id, 'x', horde_now() FROM jobs")
    requests = [row for (row,) in broker.world.rows("SELECT id FROM requests LIMIT 8")]
    readers = [Reader(request, 1) for request in requests]
    with broker.world.db.transaction() as tx:
        tx.execute("ANALYZE requests, slots, jobs, progress")
    with broker.world.db.autocommit() as tx:
        found = read_output(tx, readers)
        assert [rows[0].text for rows in found] == ["x"] * 8
        _, execute = READ_OUTPUT.parts
        parameters = {
            "readers": list(range(8)),
            "requests": requests,
            "slots": [0] * 8,
            "characters": [0] * 8,
            "tokens": [0] * 8,
        }
        (plan,) = tx.execute(f"EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) {execute}", parameters).scalar_one()
    nodes = list(_nodes(plan["Plan"]))
    tables = [node for node in nodes if "Relation Name" in node]
    assert {node["Relation Name"] for node in tables} == {"requests", "slots", "jobs", "progress"}
    assert {node["Node Type"] for node in tables} == {"Index Scan"}
    assert not [node for node in nodes if node["Node Type"] in {"Hash Join", "Merge Join"}]
    assert all(node["Actual Rows"] <= 1 for node in tables)
    assert all(node.get("Rows Removed by Filter", 0) == 0 for node in tables)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from _nodes(child)
