"""The paged engine as its callers know it: every setting means the same in company, preempted or continued; sharing
within a tenant and never beyond; who comes first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.engine.paged_scenes import (
    GREEDY,
    WARM,
    Run,
    make_engine,
    one_thread,
    plain_logits,
    preempt,
    pristine,
    reference,
    request,
    run,
)
from tests.worker.tiny_model import EOS
from worker.engine.interface import (
    Delta,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestRefusedError,
    Sampling,
)
from worker.engine.paged import PagedEngine

SPELT = "né 😀 où 👩‍👧 日本"


@pytest.fixture(autouse=True, scope="module")
def thread() -> Iterator[None]:
    with one_thread():
        yield


def ids_of(text: str) -> list[int]:
    return list(pristine().tokenizer(text).input_ids)


class Only:
    """A toy grammar: some characters, in any order."""

    def __init__(self, characters: str) -> None:
        self._mask = torch.zeros(257, dtype=torch.bool)
        self._mask[ids_of(characters)] = True

    def allowed(self, output: Sequence[int]) -> Tensor:
        return self._mask


class Spelling:
    """Another: one text, over and over."""

    def __init__(self, text: str) -> None:
        self._ids = ids_of(text)

    def allowed(self, output: Sequence[int]) -> Tensor:
        mask = torch.zeros(257, dtype=torch.bool)
        mask[self._ids[len(output) % len(self._ids)]] = True
        return mask


def find_end() -> int:
    """A token that comes up in the middle of the likeliest answer, and not before."""
    text = run(make_engine(), request(max_new_tokens=20)).tokens()
    return next(token for at, token in enumerate(text) if at >= 6 and text.index(token) == at)


def make_requests(end: int) -> list[GenerationRequest]:
    """One for each setting; `end` ends texts beside the model's own end token."""
    digits = Sampling(temperature=1.5, constraint=Only("0123456789"))
    made: dict[str, dict[str, Any]] = {
        "greedy": {},
        "ignores the end": {"sampling": replace(GREEDY, ignore_eos=True)},
        "bans the end": {"sampling": replace(GREEDY, ban_eos=True)},
        "late end": {"sampling": replace(GREEDY, min_tokens=14)},
        "stop token": {"sampling": replace(GREEDY, ignore_eos=True), "stop_token_ids": (end,)},
        "warm": {"sampling": WARM, "seed": 11},
        "hot": {"sampling": Sampling(temperature=2.5, top_k=60, min_p=0.01), "seed": 12, "logprobs": 4},
        "penalised": {
            "sampling": Sampling(
                temperature=0.8,
                repetition_penalty=1.4,
                repetition_range=24,
                repetition_slope=0.7,
                frequency_penalty=0.5,
                presence_penalty=0.3,
            ),
        },
        "penalised and greedy": {"sampling": replace(GREEDY, repetition_penalty=2.0, frequency_penalty=1.0)},
        "filtered": {
            "sampling": Sampling(
                temperature=1.4, typical=0.9, tail_free=0.95, top_a=0.02, smoothing_factor=0.1, dynatemp_range=0.4
            ),
        },
        "biased": {"sampling": replace(WARM, logit_bias=((70, 1000.0), (71, 1000.0)), banned_tokens=(70,))},
        "banned": {"sampling": replace(WARM, banned_tokens=tuple(range(0, 256, 2)))},
        "digits": {"sampling": digits, "prompt": "Numbers:"},
        "spelt": {"sampling": Sampling(constraint=Spelling(SPELT)), "prompt": "emoji 😀"},
        "three": {"sampling": WARM, "n": 3, "seed": 13, "max_new_tokens": 12},
        "short": {"sampling": WARM, "max_new_tokens": 1},
        "long prompt": {"sampling": WARM, "prompt": "over and over and over again, " * 2},
    }
    made["stops"] = {**made["digits"], "stop": (digit_stop(digits, end), "never")}
    return [request(name, **{"max_new_tokens": 24, **settings}) for name, settings in made.items()]


def digit_stop(digits: Sampling, end: int) -> str:
    """Three characters of the middle of the text of digits; each is a token."""
    whole = run(make_engine(eos=(EOS, end)), request("d", "Numbers:", max_new_tokens=24, sampling=digits))
    return whole.texts["d", 0].text[10:13]


@pytest.fixture(scope="module")
def end(thread) -> int:
    return find_end()


@pytest.fixture(scope="module")
def requests(end) -> list[GenerationRequest]:
    return make_requests(end)


@pytest.fixture(scope="module")
def expected(requests, end) -> Run:
    """The texts by the reference engine, each alone."""
    return reference(requests, eos=(EOS, end))


def alone(engine: PagedEngine, requests: list[GenerationRequest]) -> Run:
    done = Run(engine)
    for each in requests:
        done.add(each).drain()
    return done


def in_company(engine: PagedEngine, requests: list[GenerationRequest]) -> Run:
    """Some come while others are at work; neighbours that nobody asks about come and go."""
    dice = random.Random(3)
    queue = [*requests, *(request(f"noise {i}", "noise " * i, seed=i, sampling=WARM) for i in range(8))]
    dice.shuffle(queue)
    done = Run(engine, *queue[:10])
    for each in queue[10:]:
        done.step()
        done.add(each)
    done.drain()
    for i in range(8):
        del done.texts[f"noise {i}", 0]
    return done


def robbed(engine: PagedEngine, requests: list[GenerationRequest]) -> Run:
    done = Run(engine, *requests).drain(after_each=lambda: preempt(engine))
    assert engine.statistics().preemptions > 100
    return done


def crowded(engine: PagedEngine, requests: list[GenerationRequest]) -> Run:
    done = run(engine, *requests)
    assert engine.statistics().preemptions > 3
    return done


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (alone, {"max_batch": 3}),
        (in_company, {"max_batch": 32}),
        (in_company, {"block_size": 4, "chunk_limit": 7, "backend": "gather"}),
        (robbed, {"max_batch": 32}),
        (robbed, {"max_batch": 5, "block_size": 1, "prefix_caching": False}),
        (crowded, {"max_batch": 32, "tokens": 256, "block_size": 4}),
    ],
    ids=["alone", "in company", "in company, chunked", "robbed", "robbed, no cache", "crowded"],
)
def test_each_text_is_that_of_the_reference(requests, expected, end, way, options):
    assert way(make_engine(eos=(EOS, end), **options), requests).outcomes == expected.outcomes


def test_each_setting_does_what_it_says(expected, requests, end):
    stopped = expected.texts["greedy", 0]
    assert stopped.end is not None
    assert stopped.end.reason is FinishReason.STOP
    assert expected.tokens("stop token") == stopped.token_ids
    ignoring = expected.tokens("ignores the end")
    assert ignoring[: len(stopped.token_ids) + 1] == [*stopped.token_ids, end]
    assert end not in expected.tokens("bans the end")
    assert len(expected.tokens("late end")) >= 14
    assert len({tuple(expected.tokens("three", sample)) for sample in range(3)}) == 3
    assert set(expected.tokens("biased")) == {71}
    assert all(token % 2 for token in expected.tokens("banned"))
    assert expected.texts["digits", 0].text.isdigit()
    assert len(set(expected.tokens("penalised and greedy"))) == len(expected.tokens("penalised and greedy"))
    whole, cut = expected.texts["digits", 0].text, expected.texts["stops", 0]
    assert cut.end is not None
    assert cut.text == whole[: whole.index(cut.end.stop_string or "nothing")]
    assert len(cut.text) >= 3


def test_no_part_of_a_stop_string_and_no_half_character_is_ever_shown(requests, expected, end):
    """Though the sequences lose their blocks between any two tokens of it."""
    engine = make_engine(eos=(EOS, end))
    wanted = [each for each in requests if each.id in {"stops", "spelt"}]
    done = Run(engine, *wanted).drain(after_each=lambda: preempt(engine))
    whole, stop = expected.texts["digits", 0].text, wanted[-1].stop[0]
    assert wanted[-1].id == "stops"
    assert all(whole[: whole.index(stop)].startswith(shown) for shown in done.texts["stops", 0].shown)
    assert all(SPELT.startswith(shown) for shown in done.texts["spelt", 0].shown[:-1])


@pytest.mark.parametrize("name", ["greedy", "warm", "penalised", "spelt", "stops", "hot", "late end"])
def test_a_text_goes_on_from_any_of_its_tokens_as_if_never_interrupted(requests, expected, end, name):
    (whole,) = [each for each in requests if each.id == name]
    text = expected.texts[name, 0]
    cuts = range(1, len(text.token_ids) + (text.end is not None and text.end.reason is FinishReason.STOP))
    parts = [replace(whole, id=f"{cut}", prefix=tuple(text.token_ids[:cut])) for cut in cuts]
    done = run(make_engine(eos=(EOS, end), max_batch=5), *parts)
    for cut in cuts:
        rest = done.texts[f"{cut}", 0]
        assert text.token_ids[:cut] + rest.token_ids == text.token_ids
        assert text.shown[cut - 1] + rest.text == text.text
        assert rest.end is not None
        assert replace(rest.end, request_id=name, cached_tokens=0) == text.end


@pytest.mark.parametrize("limit", [4, 5])
def test_a_prefix_that_is_the_whole_answer_already_only_ends(limit):
    engine = make_engine()
    prefix = tuple(run(engine, request()).tokens()[:limit])
    engine.add(request("done", max_new_tokens=limit, prefix=prefix))
    assert engine.running == 1
    assert engine.step() == [Finished("done", FinishReason.LENGTH, 11, limit)]
    assert engine.running == 0


def test_logprobs_are_those_of_the_plain_model():
    wanted = [request("likeliest", logprobs=5), request("warm", sampling=WARM, logprobs=3), request("own", logprobs=0)]
    done = run(make_engine(), *wanted, request("none"))
    prompt = ids_of("The capital")
    for name, count in (("likeliest", 5), ("warm", 3), ("own", 0)):
        text = done.texts[name, 0]
        assert len(text.logprobs) == len(text.token_ids) == 16
        (rows,) = plain_logits(pristine(), [[*prompt, *text.token_ids]])
        for row, token, told in zip(
            rows[len(prompt) - 1 :].log_softmax(-1), text.token_ids, text.logprobs, strict=False
        ):
            assert told.token_id == token
            assert len(told.top) == count
            assert all(math.isfinite(value) for _, value in told.top)
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [value for _, value in told.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
    assert all(told.top[0] == (told.token_id, told.logprob) for told in done.texts["likeliest", 0].logprobs)
    assert done.texts["none", 0].logprobs == []


@pytest.mark.parametrize(("length", "shared", "own"), [(64, 4, 1), (60, 3, 1), (63, 3, 2)])
def test_samples_share_the_blocks_of_their_prompt(length, shared, own):
    engine = make_engine(prefix_caching=False)
    done = Run(engine, request("three", tuple(range(length)), n=3, sampling=WARM))
    for _ in range(3):
        done.step()
    state = engine.statistics()
    assert state.running == 3
    # A last block that is not full is copied for all but one; else each begins a new one.
    assert state.blocks_total - state.blocks_free == shared + 3 * own
    done.drain()
    assert {sample for _, sample in done.texts} == {0, 1, 2}


def test_samples_are_those_of_requests_of_the_same_seed():
    three = run(make_engine(), request(n=3, sampling=WARM))
    again = run(make_engine(max_batch=3, block_size=4), request("b", "x"), request(n=3, sampling=WARM))
    assert [three.tokens(sample=i) for i in range(3)] == [again.tokens(sample=i) for i in range(3)]
    assert three.tokens(sample=0) == run(make_engine(), request(sampling=WARM)).tokens()


def steps_to_first_token(engine: PagedEngine, each: GenerationRequest) -> int:
    return run(engine, each).first_token[each.id, 0]


def test_tenants_share_no_block_and_see_no_difference_in_time():
    engine = make_engine(chunk_limit=8)
    prompt = tuple(range(40))
    assert steps_to_first_token(engine, request("first", prompt, cache_salt="red")) == 5
    done = run(engine, request("foreign", prompt, cache_salt="blue"))
    assert (done.first_token["foreign", 0], done.cached("foreign")) == (5, 0)
    assert steps_to_first_token(engine, request("without", prompt)) == 5
    assert engine.statistics().prefix_hits == 0
    own = run(engine, request("own", prompt, cache_salt="red"))
    assert (own.first_token["own", 0], own.cached("own")) == (1, 32)
    assert engine.statistics().prefix_hits == 32
    assert engine.statistics().prefix_queries == 160


def test_tenants_in_the_same_step_share_no_block():
    engine = make_engine()
    prompt = tuple(range(48))
    done = Run(engine, *(request(salt, prompt, cache_salt=salt, max_new_tokens=40) for salt in ("", "red", "blue")))
    for _ in range(4):
        done.step()
    tables = [set(sequence.block_table) for sequence in engine._scheduler._running]
    assert len(tables) == 3
    assert len(set.union(*tables)) == sum(map(len, tables))
    done.drain()
    assert len({tuple(done.tokens(salt)) for salt in ("", "red", "blue")}) == 1
    assert engine.statistics().prefix_hits == 0


def test_without_prefix_caching_nothing_is_found():
    engine = make_engine(prefix_caching=False)
    for name in "ab":
        assert run(engine, request(name, tuple(range(40)))).cached(name) == 0
    assert engine.statistics().blocks_cached == 0


@pytest.mark.parametrize("max_batch", [1, 3, 16])
def test_first_tokens_come_by_priority_and_then_by_arrival(max_batch):
    priorities = [0, 3, -1, 0, 3, -1, 2, 2, 0]
    wanted = [request(f"{i}", f"prompt number {i}", priority=p) for i, p in enumerate(priorities)]
    done = run(make_engine(max_batch=max_batch), *wanted)
    order = sorted(range(len(priorities)), key=lambda i: (priorities[i], i))
    assert [name for name, _ in done.first_token] == [f"{i}" for i in order]


def test_under_pressure_the_more_urgent_text_keeps_its_blocks():
    engine = make_engine(tokens=256, block_size=4)
    done = Run(engine, *(request(f"{i}", tuple(range(i, i + 40)), max_new_tokens=60, priority=-i) for i in range(6)))
    done.drain()
    assert engine.statistics().preemptions > 0
    assert [name for name, _ in done.first_token] == ["5", "4", "3", "2", "1", "0"]


def test_a_running_text_gets_a_token_in_every_step_beside_a_long_prompt():
    engine = make_engine(token_budget=32)
    done = Run(engine, request("runs", max_new_tokens=40))
    done.step()
    done.add(request("long", tuple(range(250)) * 2, max_new_tokens=2))
    while "long" not in {name for name, _ in done.first_token}:
        assert [event for event in done.step() if isinstance(event, Delta) and event.request_id == "runs"]
    done.drain()


@pytest.mark.parametrize("moment", ["before a step", "in its prompt", "while decoding", "preempted", "forked"])
def test_an_abort_frees_everything_at_once_and_may_be_repeated(moment):
    engine = make_engine(chunk_limit=8)
    neighbour = request("neighbour", "beside", max_new_tokens=30)
    expected = run(make_engine(), neighbour).outcomes
    done = Run(
        engine, neighbour, request("gone", tuple(range(40)), n=3 if moment == "forked" else 1, max_new_tokens=30)
    )
    steps = {"before a step": 0, "in its prompt": 2, "while decoding": 8, "preempted": 8, "forked": 8}[moment]
    for _ in range(steps):
        done.step()
    if moment == "preempted":
        preempt(engine, leave=1)
    for name in ("gone", "gone", "never heard of"):
        engine.abort(name)
        engine.check()
    assert engine.running == 1
    told = {event.request_id for event in done.step()}
    assert told <= {"neighbour"}
    done.drain()
    assert done.texts["neighbour", 0].outcome == expected["neighbour", 0]
    assert run(engine, request("gone")).tokens("gone")


def test_an_abort_takes_back_an_end_that_was_not_told_yet():
    engine = make_engine()
    engine.add(request("done", max_new_tokens=1, prefix=(65,)))
    engine.abort("done")
    assert engine.running == 0
    assert engine.step() == []


def test_there_is_always_room_in_the_queue():
    engine = make_engine(max_batch=2)
    for i in range(20):
        engine.add(request(f"{i}"))
    assert engine.running == 20
    assert engine.capacity == 0
    engine.step()
    state = engine.statistics()
    assert (state.running, state.waiting) == (2, 18)


def test_an_id_cannot_be_used_twice_at_a_time_but_again_later():
    engine = make_engine()
    engine.add(request("a"))
    with pytest.raises(ValueError, match="here already"):
        engine.add(request("a"))
    engine.abort("a")
    assert len(run(engine, request("a")).tokens()) == 16


def test_more_samples_than_a_batch_holds_are_refused():
    engine = make_engine(max_batch=2)
    with pytest.raises(RequestRefusedError, match="n is more than the 2"):
        engine.add(request(n=3))
    assert engine.running == 0


def test_an_idle_engine_has_nothing_to_tell():
    engine = make_engine()
    assert engine.step() == []
    engine.check()
