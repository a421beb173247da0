"""Random walks of the whole engine over the tiny model: the books agree, and each text is the one it would be alone.

What a text would be alone is worked out here from the plain model's logits: the likeliest token, or the one where the
cumulated probabilities pass the random number of that place. As fp32 rounds, tokens that come that close are all right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from tests.worker.engine.paged_scenes import (
    GREEDY,
    Interference,
    Run,
    Text,
    assert_greedy,
    make_engine,
    one_thread,
    plain_logits,
    preempt,
    pristine,
    request,
    run,
)
from tests.worker.tiny_model import EOS
from worker.engine.interface import Failed, FinishReason, GenerationRequest, Sampling
from worker.engine.kernels.bindings import load_kernels
from worker.engine.sampling.randomness import uniform
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import StepPlan

BACKENDS = ["gather"] if load_kernels() is None else ["kernels", "kernels", "kernels", "gather"]
CONTEXT = 64
LIVE_REQUESTS = 8
LOGIT_SLACK = 1e-4
PROBABILITY_SLACK = 1e-5
WEIGHED = Sampling()  # drawn by the model's own probabilities
picks = st.integers(0, 7)


@pytest.fixture(autouse=True, scope="module")
def thread() -> Iterator[None]:
    with one_thread():
        yield


def right_tokens(logits: Tensor, each: GenerationRequest, sample: int, position: int) -> set[int]:
    """What may be chosen by a row of logits: one token, or a few between which rounding decides."""
    if each.sampling.temperature == 0:
        return set((logits >= logits.max() - LOGIT_SLACK).nonzero().flatten().tolist())
    ends = logits.double().softmax(-1).cumsum(-1)
    starts = torch.cat([torch.zeros(1, dtype=torch.float64), ends[:-1]])
    point = uniform(each.seed, sample, position)
    hit = (starts - PROBABILITY_SLACK <= point) & (point <= ends + PROBABILITY_SLACK)
    return set(hit.nonzero().flatten().tolist())


def assert_right(each: GenerationRequest, sample: int, text: Text, logits: Tensor) -> None:
    """See that a finished text is what the plain model would have written.

    Args:
        each: what was asked for.
        sample: which one.
        text: what came.
        logits: of prompt and output, by the plain model.
    """
    assert text.end is not None
    rows = logits[len(each.prompt) - 1 :]
    ending = {EOS, *each.stop_token_ids}
    for position, token in enumerate(text.token_ids):
        assert token in right_tokens(rows[position], each, sample, position)
        assert token not in ending
    whole = pristine(CONTEXT).tokenizer.decode(text.token_ids)
    hits = [whole.index(stop) for stop in each.stop if stop in whole]
    assert text.text == whole[: min(hits, default=len(whole))]
    assert text.end.completion_tokens == len(text.token_ids)
    if text.end.reason is FinishReason.LENGTH:
        assert len(text.token_ids) == each.max_new_tokens
        assert not hits
    elif text.end.stop_string is None:
        assert ending & right_tokens(rows[len(text.token_ids)], each, sample, len(text.token_ids))
    else:
        assert hits


class Walk(RuleBasedStateMachine):
    """The machine; `wanted` are the requests that should get their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[str, GenerationRequest] = {}
        self.added = 0
        self.guilty: str | None = None
        self.weak = False

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8, 16]),
        more_tokens=st.sampled_from([0, 0, 32]),
        max_batch=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk_limit=st.sampled_from([None, 1, 7]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        backend=st.sampled_from(BACKENDS),
    )
    def begin(self, more_tokens, **options):
        self.engine = make_engine(context_length=CONTEXT, tokens=CONTEXT + more_tokens, **options)
        self.made = Run(self.engine)
        Interference(self.engine, before=self.disturb)

    def disturb(self, plan: StepPlan) -> None:
        if self.weak:
            self.weak = False
            raise OSError("a fit of weakness")
        if any(entry.sequence.request_id == self.guilty for entry in plan.entries):
            raise MemoryError("this one is too much")

    @rule(
        beginning=st.sampled_from([(), (65,) * 16, (65, 66) * 10, (65,) * 10 + (66,) * 10]),
        length=st.integers(1, 20),
        ending=st.lists(st.integers(65, 66), max_size=6),
        max_new_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 1),
        cache_salt=st.sampled_from(["", "", "other"]),
        seed=st.integers(0, 3),
        sampling=st.sampled_from([GREEDY, WEIGHED]),
        stop=st.sampled_from([(), (), ("e", "x"), ("t",)]),
        stop_token_ids=st.sampled_from([(), (), tuple(range(100, 200, 7))]),
    )
    def add(self, beginning, length, ending, n, **settings):
        if len(self.engine._samples) >= LIVE_REQUESTS:
            return
        prompt = (*beginning[:length], *ending) or (65,)
        each = request(f"{self.added}", prompt, n=min(n, self.engine.max_batch), **settings)
        self.added += 1
        self.engine.add(each)
        self.wanted[each.id] = each

    @rule()
    def step(self):
        before = set(self.engine._samples)
        for event in self.made.step():
            assert event.request_id in before
            if isinstance(event, Failed):
                assert event.request_id == self.guilty
                self._forget(event.request_id)

    @rule(count=st.integers(2, 10))
    def steps(self, count):
        for _ in range(count):
            self.step()
            self.nobody_shares_across_salts()

    @rule(leave=st.integers(0, 3))
    def rob(self, leave):
        preempt(self.engine, leave)

    @rule()
    def weaken(self):
        """The next step fails, and can be done again."""
        self.weak = True

    @rule(pick=picks)
    def blame(self, pick):
        """From now on every step with that one in it fails."""
        live = list(self.engine._samples)
        if live and self.guilty is None:
            self.guilty = live[pick % len(live)]

    @rule(pick=picks)
    def abort(self, pick):
        live = list(self.engine._samples)
        name = live[pick % len(live)] if live else "nobody"
        self.engine.abort(name)
        self.engine.abort(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        if name == self.guilty:
            self.guilty = None
        self.wanted.pop(name, None)
        for key in [key for key in self.made.texts if key[0] == name]:
            del self.made.texts[key]

    @invariant()
    def nobody_shares_across_salts(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        blocks: dict[str, set[int]] = {"": set(), "other": set()}
        for sequence in self.engine._scheduler._running:
            blocks[sequence.salt].update(sequence.block_table)
        assert not blocks[""] & blocks["other"]
        state = self.engine.statistics()
        assert state.running + state.waiting == self.engine.running
        assert state.running <= self.engine.max_batch

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.guilty = None
        self.made.drain()
        asked = {(each.id, sample) for each in self.wanted.values() for sample in range(each.n)}
        assert set(self.made.texts) == asked
        if not asked:
            return
        texts = [(self.wanted[name], sample, text) for (name, sample), text in self.made.texts.items()]
        logits = plain_logits(pristine(CONTEXT), [[*each.prompt, *text.token_ids] for each, _, text in texts])
        for (each, sample, text), rows in zip(texts, logits, strict=True):
            assert_right(each, sample, text, rows)


def test_random_walks_of_the_engine() -> None:
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_a_thousand_requests_aborted_at_random_leave_the_others_as_they_are() -> None:
    dice = random.Random(20261130)
    prompts = [tuple(dice.choice((65, 66)) for _ in range(length)) for length in range(1, 41)]
    alone = run(make_engine(), *(request(f"{i}", prompt, max_new_tokens=12) for i, prompt in enumerate(prompts)))
    assert_greedy(pristine(), [(prompt, alone.tokens(f"{i}")) for i, prompt in enumerate(prompts)])
    engine = make_engine(tokens=256, block_size=4, chunk_limit=8)
    done = Run(engine)
    aborted: set[str] = set()
    moments = dict.fromkeys(("waiting", "prefill", "decode", "forked", "over"), 0)
    asked: dict[str, tuple[int, int, int]] = {}
    while len(asked) < 1000:
        while len(engine._samples) < 14:
            which, count = dice.randrange(len(prompts)), dice.randrange(1, 13)
            name = f"{len(asked)}"
            asked[name] = which, count, dice.choice([1, 1, 1, 2, 3])
            engine.add(request(name, prompts[which], max_new_tokens=count, n=asked[name][2]))
        done.step()
        for _ in range(dice.randrange(4)):
            name = dice.choice([*engine._samples, f"{dice.randrange(len(asked) + 1)}"])
            if name in engine._samples:
                aborted.add(name)
            moments[_moment(engine._scheduler.sequences(name))] += 1
            engine.abort(name)
    done.drain()
    assert min(moments.values()) > 20, moments
    assert 200 < len(aborted) < 800
    survivors = {key: text for key, text in done.texts.items() if key[0] not in aborted}
    assert {name for name, _ in survivors} == asked.keys() - aborted
    for (name, _), text in survivors.items():
        which, count, _ = asked[name]
        assert text.token_ids == alone.tokens(f"{which}")[:count]
        assert text.end is not None


def _moment(sequences: list[Sequence]) -> str:
    if not sequences:
        return "over"
    if len(sequences) > 1:
        return "forked"
    (sequence,) = sequences
    if not sequence.block_table:
        return "waiting"
    return "prefill" if sequence.computed < sequence.prompt_length else "decode"
