"""What goes wrong with one request stays with it: the others get the texts that they get without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.engine.paged_scenes import (
    GREEDY,
    WARM,
    Interference,
    Run,
    assert_greedy,
    fresh,
    make_engine,
    one_thread,
    preempt,
    pristine,
    request,
    run,
)
from tests.worker.tiny_model import EOS
from worker.engine.interface import Failed, FinishReason, GenerationRequest, RequestRefusedError, Sampling
from worker.engine.kernels.bindings import load_kernels
from worker.engine.paged import PagedEngine
from worker.engine.scheduling.step_plan import StepPlan

BACKENDS = ("gather",) if load_kernels() is None else ("kernels", "gather")
POISON = 200  # a token
LONG = tuple(range(60))

GOOD = [
    request("a", "The capital"),
    request("b", LONG[:33], sampling=WARM, n=3),
    request("c", LONG[:20], sampling=WARM, seed=8, max_new_tokens=24),
]


@pytest.fixture(autouse=True, scope="module")
def thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def expected(thread) -> dict[tuple[str, int], tuple[object, ...]]:
    return run(make_engine(), *GOOD).outcomes


def poisoned_engine(**options: Any) -> PagedEngine:
    """Whatever sees the token POISON becomes NaN."""
    loaded = fresh(pristine())
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[POISON] = float("nan")
    return make_engine(loaded=loaded, **options)


def survivors(done: Run, failed: str) -> dict[tuple[str, int], tuple[object, ...]]:
    assert set(done.failures) == {failed}
    return {key: text.outcome for key, text in done.texts.items() if key[0] != failed}


class Guilty:
    """Raises in every step that has this request in it, once it has so many tokens."""

    def __init__(self, request_id: str, length: int = 0, sample: int | None = None) -> None:
        self.request_id, self.length, self.sample = request_id, length, sample

    def __call__(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            sequence = entry.sequence
            if (
                sequence.request_id == self.request_id
                and sequence.length >= self.length
                and self.sample in (None, sequence.sample)
            ):
                raise MemoryError("this one is too much")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_text_that_turns_into_nan_fails_alone_and_leaves_nothing_behind(expected, backend, place):
    # So few blocks that those of the poisoned one are used again, with what it has left in them.
    engine = poisoned_engine(backend=backend, tokens=256, block_size=4, chunk_limit=16)
    poisoned = request("poisoned", (*LONG[:place], POISON, *LONG[:39]))
    done = run(engine, poisoned, *GOOD)
    assert survivors(done, "poisoned") == expected
    assert "not finite" in done.failures["poisoned"]
    hits = engine.statistics().prefix_hits
    again = run(engine, poisoned)
    assert set(again.failures) == {"poisoned"}
    # What comes before the poison is sound, and others may have computed it.
    assert engine.statistics().prefix_hits - hits <= place
    done = run(engine, *GOOD)
    assert done.outcomes == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_fit_of_the_machine_has_spoilt_is_not_found_by_the_same_prompt_later(backend):
    engine = make_engine(backend=backend)
    spoils = [True]

    def spoil(plan: StepPlan, logits: Tensor) -> None:
        if spoils.pop():
            logits.fill_(float("nan"))
        spoils.append(False)

    Interference(engine, after=spoil)
    done = run(engine, request("a", LONG))
    assert "not finite" in done.failures["a"]
    later = run(engine, request("a", LONG))
    assert later.cached("a") == 0
    assert_greedy(pristine(), [(LONG, later.tokens())])


def test_one_row_of_nan_takes_all_samples_of_its_request_and_nobody_else(expected):
    engine = make_engine()

    def spoil(plan: StepPlan, logits: Tensor) -> None:
        rows = [entry.sequence for entry in plan.entries if entry.samples]
        for row, sequence in zip(logits, rows, strict=True):
            if (sequence.request_id, sequence.sample) == ("bad", 1) and sequence.length > 24:
                row[3] = float("nan")

    Interference(engine, after=spoil)
    done = run(engine, request("bad", LONG[:20], n=3, sampling=WARM), *GOOD)
    assert survivors(done, "bad") == expected
    assert {len(done.tokens("bad", sample)) for sample in range(3)} == {6, 5}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_step_that_fails_loses_nothing_when_it_can_be_done_in_parts(expected, every, when):
    """It fails before anything or after everything has been computed, also when blocks are copied."""
    engine = make_engine(chunk_limit=8, block_size=4)
    tried: list[int] = []
    copied = [0]

    def fail(plan: StepPlan, *_: Tensor) -> None:
        step = engine.profile.steps
        if step % every or step in tried:
            return  # the parts of a step that has failed already
        tried.append(step)
        copied[0] += len(plan.copies)
        raise OSError("a fit of weakness")

    Interference(engine, **{when: fail})
    assert run(engine, *GOOD).outcomes == expected
    assert len(tried) >= 24 // every
    assert copied[0] > 0 or every > 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("length", [0, 34, 40])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_that_makes_every_step_fail_is_found_and_the_others_lose_nothing(expected, when, length, place):
    """Whatever is being copied in that step for the samples of another."""
    engine = make_engine()
    guilty = Guilty("guilty", length)
    Interference(engine, **{when: lambda plan, *_: guilty(plan)})
    prompt = LONG[33::-1][:33]
    done = run(engine, *GOOD[:place], request("guilty", prompt), *GOOD[place:])
    assert survivors(done, "guilty") == expected
    assert "MemoryError: this one is too much" in done.failures["guilty"]
    assert len(done.texts[("guilty", 0)].token_ids if length else []) == max(0, length - 33)
    # Nothing of it can be found.
    assert run(engine, request("later", prompt)).cached("later") == 0


@pytest.mark.parametrize("sample", [0, 1, 2])
@pytest.mark.parametrize("length", [34, 36])
def test_a_sample_that_makes_every_step_fail_takes_its_siblings_with_it_and_nobody_else(expected, sample, length):
    engine = make_engine()
    Interference(engine, before=Guilty("guilty", length, sample))
    done = run(engine, request("guilty", LONG[:33], n=3, sampling=WARM), *GOOD)
    assert survivors(done, "guilty") == expected


class Raises:
    def allowed(self, output: Sequence[int]) -> Any:
        if len(output) > 3:
            raise LookupError("no rule for this")
        return None


class AnswersNonsense:
    def allowed(self, output: Sequence[int]) -> Any:
        return torch.ones(5, dtype=torch.bool)


class AllowsNothing:
    def allowed(self, output: Sequence[int]) -> Any:
        return torch.zeros(257, dtype=torch.bool)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [(Raises(), "no rule for this"), (AnswersNonsense(), "the constraint answered"), (AllowsNothing(), "no token")],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_constraint_that_fails_fails_its_request_alone(expected, constraint, message, n):
    bad = request("bad", LONG[:33], n=n, sampling=Sampling(temperature=0.5, constraint=constraint))
    done = run(make_engine(max_batch=16), GOOD[0], bad, *GOOD[1:])
    assert survivors(done, "bad") == expected
    assert message in done.failures["bad"]


def test_all_tokens_banned_is_an_end_by_name():
    nothing = request(sampling=Sampling(banned_tokens=tuple(range(257))))
    assert "no token is left" in run(make_engine(), nothing).failures["a"]


def test_what_can_never_fit_is_refused_at_once_and_holds_up_nobody():
    """The pool is smaller than the model's context; one block more than it has is too much."""
    engine = make_engine(tokens=256, block_size=16)
    assert engine.context_length == 256
    done = Run(engine, request("first"))
    done.step()
    with pytest.raises(RequestRefusedError) as refused:
        engine.add(request("big", tuple(range(240)), max_new_tokens=17))
    assert refused.value.code == "context_length_exceeded"
    assert engine.running == 1
    small = [request(f"{i}", f"small {i}") for i in range(10)]
    done.add(*small).drain()
    assert len(done.texts) == 11
    biggest = run(engine, request("biggest", tuple(range(240)), max_new_tokens=16))
    assert len(biggest.tokens("biggest")) == 16


def test_samples_that_fill_the_pool_several_times_over_get_their_turns():
    engine = make_engine(tokens=256, block_size=16)
    done = run(engine, request("three", tuple(range(100)), n=3, max_new_tokens=156, sampling=WARM))
    assert engine.statistics().preemptions > 0
    alone = run(make_engine(), request("three", tuple(range(100)), n=3, max_new_tokens=156, sampling=WARM))
    assert done.outcomes == alone.outcomes


@pytest.mark.parametrize(("tokens", "fits"), [(63, True), (64, True), (65, False)])
def test_a_text_of_exactly_the_context_fits_and_no_longer_one(tokens, fits):
    engine = make_engine(context_length=64, tokens=64)
    prompt = LONG[: tokens - 5]
    wanted = request("edge", prompt, max_new_tokens=5)
    if fits:
        done = run(engine, wanted)
        assert_greedy(pristine(64), [(prompt, done.tokens("edge"))])
        end = done.texts["edge", 0].end
        assert end is not None
        assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 5)
    else:
        with pytest.raises(RequestRefusedError):
            engine.add(wanted)


@pytest.mark.parametrize("length", [62, 63])
def test_a_prompt_one_short_of_the_context_gets_one_token(length):
    engine = make_engine(context_length=64, tokens=64)
    prompt = tuple(range(length))
    assert len(run(engine, request("edge", prompt, max_new_tokens=64 - length)).tokens("edge")) == 64 - length
    with pytest.raises(RequestRefusedError):
        engine.add(request("beyond", prompt, max_new_tokens=65 - length))


@pytest.mark.parametrize(
    "options",
    [{"token_budget": 16, "max_batch": 4}, {"token_budget": 1, "max_batch": 1}, {"token_budget": 1, "max_batch": 3}],
)
@pytest.mark.parametrize("block_size", [1, 16])
def test_prompts_longer_than_the_budget_are_computed_in_parts(expected, options, block_size):
    done = run(make_engine(block_size=block_size, **options), GOOD[0], GOOD[2], request("long", LONG))
    assert_greedy(pristine(), [(LONG, done.tokens("long"))])
    assert {key: done.texts[key].outcome for key in (("a", 0), ("c", 0))} == {
        key: expected[key] for key in (("a", 0), ("c", 0))
    }


def test_the_end_token_in_a_prompt_ends_nothing():
    prompt = (EOS, 65, EOS, 66, EOS)
    done = run(make_engine(), request("a", prompt), request("only", (EOS,)))
    assert_greedy(pristine(), [(prompt, done.tokens()), ((EOS,), done.tokens("only"))])
    assert len(done.tokens()) == len(done.tokens("only")) == 16


def test_an_empty_prompt_begins_from_the_end_token():
    done = run(make_engine(), request("empty", ""), request("no ids", ()), request("end", (EOS,)))
    assert done.tokens("empty") == done.tokens("no ids") == done.tokens("end")


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": (257,)},
        {"prompt": (-1,)},
        {"max_new_tokens": 0},
        {"n": 0},
        {"stop_token_ids": (10**9,)},
        {"logprobs": -1},
        {"sampling": Sampling(logit_bias=((999_999, 5.0),))},
        {"sampling": Sampling(logit_bias=((5, float("nan")),))},
        {"sampling": Sampling(temperature=float("nan"))},
        {"sampling": Sampling(banned_tokens=(-1,))},
    ],
)
def test_a_request_that_makes_no_sense_is_refused_while_others_go_on(bad, expected):
    engine = make_engine()
    done = Run(engine, *GOOD)
    done.step()
    with pytest.raises(RequestRefusedError) as refused:
        engine.add(request("bad", **bad))
    assert refused.value.code == "invalid_request"
    assert done.drain().outcomes == expected


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e30])
def test_extreme_settings_give_texts(temperature):
    done = run(
        make_engine(),
        request("extreme", sampling=Sampling(temperature=temperature)),
        request("biased", sampling=Sampling(temperature=min(1.0, temperature), logit_bias=((65, 1e9), (66, -1e9)))),
        request("likeliest"),
    )
    assert len(done.tokens("extreme")) == 16
    assert (done.tokens("extreme") == done.tokens("likeliest")) is (temperature < 1)
    assert done.tokens("biased") == [65] * 16


def test_a_request_that_failed_can_come_again_under_its_name(expected):
    engine = make_engine()
    guilty = Guilty("a")
    Interference(engine, before=guilty)
    done = Run(engine, *GOOD).drain()
    assert set(done.failures) == {"a"}
    guilty.request_id = "nobody"
    again: GenerationRequest = GOOD[0]
    assert run(engine, again).outcomes == {("a", 0): expected["a", 0]}


def test_a_failure_is_told_once_and_nothing_after_it():
    engine = make_engine()
    Interference(engine, before=Guilty("a", 14))
    engine.add(request(n=2, sampling=GREEDY))
    events = [event for _ in range(30) for event in engine.step()]
    assert sum(isinstance(event, Failed) for event in events) == 1
    assert isinstance(events[-1], Failed)
    assert engine.running == 0


def test_preempted_and_failed_a_request_is_gone():
    engine = make_engine()
    Interference(engine, before=Guilty("a", 18))
    done = Run(engine, request(n=3, sampling=WARM)).drain(after_each=lambda: preempt(engine))
    assert set(done.failures) == {"a"}
