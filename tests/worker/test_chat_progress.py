"""What is posted of a chat while it is written: nothing twice, nothing missing, and never other than the result."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.worker.played_broker import CHAT_SUBMIT, PATIENCE, PROGRESS, Answer, Fault
from worker.engine.interface import FinishReason

# Ids and the text shown with each: half of a character shows nothing, the other half all of it, and the possible
# beginning of a stop string waits for what comes after it.
PIECES = (
    ("H", "H"),
    ("é", ""),
    ("\x01", "é"),
    ("l", "l"),
    ("E", ""),
    ("N", ""),
    ("x", "ENx"),
    ("😀", "😀"),
    ("!", "!"),
)
TEXT = "".join(shown for _, shown in PIECES)
IDS = [ord(c) for c, _ in PIECES]


def test_posts_carry_ids_and_text_by_absolute_offsets(broker, start):
    broker.ttl = 100_000
    worker = start(chat=True, progress=3600.0)
    broker.give_chat("c", prefix="Oh ", logprobs=1)
    worker.engine.wait_for("c", PATIENCE)
    worker.engine.says("c", ("a", "a"), ("b", ""), ("c", "bc"), logprobs=True)
    broker.wait_until(lambda: len(broker.held.get("c", broker).token_ids) == 6 if "c" in broker.held else False)
    assert broker.held["c"].text == "Oh abc"
    told = [post for post in broker.told_of("c") if "offset" in post]
    assert [post["offset"] for post in told] == sorted({post["offset"] for post in told}), "something came twice"
    assert (told[0]["offset"], told[0]["text_offset"]) == (3, 3)
    assert broker.held["c"].logprobs == [[i, -0.5, [[i, -0.5], [0, -1.5]]] for i in map(ord, "abc")]
    worker.engine.says("c", ("d", "d"), logprobs=True)
    worker.engine.ends("c", 7)
    broker.wait_until(lambda: "c" in broker.settled)
    assert broker.settled["c"]["generation"] == "Oh abcd"


def test_an_unattached_chat_and_a_text_are_told_by_state_alone(broker, start):
    worker = start(chat=True, max_batch=2)
    broker.give_chat("c", attached=False)
    broker.give("t")
    for name in ("c", "t"):
        worker.engine.says(name, ("a", "a"))
    broker.wait_until(lambda: {"c": "decode", "t": "decode"} in broker.stages())
    assert all(set(post) == {"id", "state"} for name in ("c", "t") for post in broker.told_of(name))


@pytest.mark.parametrize("seed", range(4))
def test_lost_repeated_and_failing_posts_leave_what_the_result_begins_with(broker, start, seed):
    chance = random.Random(seed)
    faults = [Fault.LOST, Fault.TWICE, Fault.RESET, Answer(503), Answer(200, {"jobs": [], "stop": []}), Answer(200)]
    worker = start(chat=True, max_batch=3, stream=0.01, first_retry=0.01)
    pieces = PIECES * 6
    expected = {}
    for name, prefix in (("a", ""), ("b", "Once "), ("c", "")):
        broker.give_chat(name, prefix=prefix, logprobs=0)
        worker.engine.wait_for(name, PATIENCE)
        expected[name] = ([*map(ord, prefix), *IDS * 6], prefix + TEXT * 6)
    # Each few tokens of each job wait for a post that came through, so that there are many.
    for begin in range(0, len(pieces), 9):
        broker.fail(PROGRESS, *chance.choices(faults, k=2))
        for name in expected:
            worker.engine.says(name, *pieces[begin : begin + 9], logprobs=True)
        broker.wait_until(lambda end=begin + 9: all(_new(broker, name) == end for name in expected))
    for name, (ids, _) in expected.items():
        worker.engine.ends(name, len(ids))
    broker.wait_until(lambda: len(broker.settled) == 3)
    shown = [len("".join(text for _, text in pieces[:n])) for n in range(len(pieces) + 1)]
    for name, (ids, text) in expected.items():
        assert (broker.settled[name]["generation"], broker.settled[name]["token_ids"]) == (text, ids)
        before = len(ids) - len(pieces)
        moments = broker.seen[name]
        assert len(moments) >= 6
        for held in moments:
            tokens = len(held.token_ids) - before
            assert held.token_ids == ids[: before + tokens]
            assert held.text == text[: before + shown[tokens]]
            assert [entry[0] for entry in held.logprobs] == held.token_ids[before:]


def _new(broker, name: str) -> int:
    return len(broker.held[name].token_ids) - len(broker.entries[name]["prefix_token_ids"])


def test_a_broker_that_knows_less_than_it_said_gets_it_again(broker, start):
    worker = start(chat=True, stream=0.01)
    broker.give_chat("c")
    worker.engine.says("c", ("a", "a"), ("b", "b"))
    broker.wait_until(lambda: broker.held["c"].text == "ab" if "c" in broker.held else False)
    with broker.changed:
        broker.held["c"].token_ids.clear()
        broker.held["c"].text = ""
    worker.engine.says("c", ("c", "c"))
    broker.wait_until(lambda: broker.held["c"].text == "abc")


def test_a_broker_that_takes_nothing_is_not_told_all_the_time(broker, start):
    worker = start(chat=True, progress=0.3, stream=0.01, shortest_round=0.1)
    broker.fail(PROGRESS, *[Answer(200, {"jobs": [{"id": "c", "accepted": 0, "ttl": 60}], "stop": []})] * 1000)
    broker.give_chat("c")
    worker.engine.says("c", ("a", "a"))
    broker.wait_until(lambda: _told(broker) > 0)
    told, begun = _told(broker), time.monotonic()
    # Each pause is twice the one before, up to that between posts that nobody waits for.
    broker.wait_until(lambda: _told(broker) >= told + 8)
    assert time.monotonic() - begun > 0.6
    with broker.changed:
        broker.faults[PROGRESS].clear()
    broker.wait_until(lambda: broker.held["c"].text == "a")


def _told(broker) -> int:
    """Posts that carried something of `c`."""
    return sum("offset" in post for post in broker.told_of("c"))


def test_a_hang_up_is_heard_at_the_pace_of_a_stream_also_before_there_is_a_token(broker, start):
    worker = start(chat=True, progress=3600.0, stream=0.01)
    broker.give_chat("c")
    worker.engine.wait_for("c", PATIENCE)
    posts = len(broker.made(PROGRESS))
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= posts + 3)
    broker.stop_job("c", "cancelled")
    worker.engine.wait_until(lambda: "c" in worker.engine.aborted, PATIENCE)


def test_there_are_no_posts_and_no_work_while_nobody_waits(broker, start):
    worker = start(chat=True, max_batch=2, progress=3600.0, stream=0.01)
    broker.give_chat("c", attached=False)
    worker.engine.says("c", ("a", "a"))
    worker.engine.wait_for("c", PATIENCE)
    broker.wait_until(lambda: bool(broker.told_of("c")))
    posts, seen, seconds = len(broker.made(PROGRESS)), len(broker.pops()), _thread_seconds(worker)
    # The engine steps on silently while a poll waits for its whole second, and then another one.
    broker.wait_until(lambda: len(broker.pops()) >= seen + 2)
    assert len(broker.made(PROGRESS)) == posts
    assert _thread_seconds(worker) - seconds < 0.05


def _thread_seconds(worker) -> float:
    """Processor time that the poster has taken."""
    clock = time.pthread_getcpuclockid(worker.worker._progress.ident)
    return time.clock_gettime(clock)


def test_posts_are_as_far_apart_as_asked_while_tokens_come(broker, start):
    worker = start(chat=True, progress=3600.0, stream=0.2)
    broker.give_chat("c")
    worker.engine.wait_for("c", PATIENCE)
    begun = time.monotonic()
    worker.engine.says("c", *[("a", "a")] * 200)
    broker.wait_until(lambda: len(broker.held["c"].token_ids) == 200)
    posts = [post for post in broker.told_of("c") if "offset" in post]
    assert len(posts) <= (time.monotonic() - begun) / 0.2 + 2
    assert sum(len(post["token_ids"]) for post in posts) == 200


def test_a_stopped_chat_leaves_the_engine_before_its_next_step(broker, start):
    worker = start(chat=True, max_batch=2, progress=3600.0, stream=0.01)
    broker.give_chat("a")
    broker.give_chat("b")
    worker.engine.wait_for("b", PATIENCE)
    broker.stop_job("a", "cancelled")
    worker.engine.says("a", ("x", "x"))
    worker.engine.wait_until(lambda: worker.engine.aborted == ["a"], PATIENCE)
    worker.engine.writes("b")
    broker.wait_until(lambda: "b" in broker.settled)
    assert "a" not in broker.settled
    assert worker.status.snapshot().stopped == 1


def test_a_finished_chat_is_named_and_no_longer_told_until_its_result_is_taken(broker, start):
    worker = start(chat=True, stream=0.01)
    broker.fail(CHAT_SUBMIT, *[Answer(503)] * 1000)
    broker.fail(PROGRESS, *[Answer(503)] * 1000)
    broker.give_chat("c")
    worker.engine.writes("c", "whole")
    broker.wait_until(lambda: bool(broker.made(CHAT_SUBMIT)))
    # One post may have been under way; those after it were made when the end was known.
    posts = len(broker.made(PROGRESS)) + 1
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= posts)
    with broker.changed:
        broker.faults[PROGRESS].clear()
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= posts + 3)
    assert all(post == {"id": "c", "state": "decode"} for post in broker.told_of("c")[posts:])
    with broker.changed:
        broker.faults[CHAT_SUBMIT].clear()
    broker.wait_until(lambda: "c" in broker.settled)
    assert broker.settled["c"]["generation"] == "whole"


def test_a_broker_that_asks_for_patience_is_left_alone_however_much_is_new(broker, start):
    worker = start(chat=True, max_batch=2, stream=0.01)
    broker.give_chat("c")
    worker.engine.wait_for("c", PATIENCE)
    broker.fail(PROGRESS, Answer(503, {}, {"Retry-After": "3600"}))
    broker.wait_until(lambda: not broker.faults[PROGRESS])
    posts, seen = len(broker.made(PROGRESS)), len(broker.pops())
    worker.engine.says("c", *[("a", "a")] * 50)
    broker.wait_until(lambda: len(broker.pops()) >= seen + 2)
    assert len(broker.made(PROGRESS)) == posts


# Emoji are 12 bytes each in JSON. With logprobs a token has four lists besides, and those come first to their limit.
@pytest.mark.parametrize(("jobs", "tokens", "logprobs"), [(2, 6000, 1), (16, 5000, None)])
def test_what_piles_up_during_an_outage_comes_in_posts_of_bearable_size(broker, start, jobs, tokens, logprobs):
    worker = start(chat=True, max_batch=jobs, stream=0.01)
    names = [f"j{number}" for number in range(jobs)]
    for name in names:
        broker.give_chat(name, logprobs=logprobs)
        worker.engine.wait_for(name, PATIENCE)
    broker.fail(PROGRESS, *[Answer(503)] * 3)
    for name in names:
        worker.engine.says(name, ("😀" * tokens, "😀" * tokens), logprobs=logprobs is not None)
    broker.wait_until(lambda: all(len(broker.held[name].token_ids) == tokens for name in names))
    bodies = [json.dumps(call.body, separators=(",", ":")) for call in broker.made(PROGRESS)]
    assert max(map(len, bodies)) <= 1 << 20
    assert max(body.count("[") + body.count("{") for body in bodies) <= 10_000
    for name in names:
        assert broker.held[name].text == "😀" * tokens
        assert [entry[0] for entry in broker.held[name].logprobs] == [ord("😀")] * (tokens if logprobs else 0)
        worker.engine.ends(name, tokens, FinishReason.LENGTH)
    broker.wait_until(lambda: len(broker.settled) == jobs)
