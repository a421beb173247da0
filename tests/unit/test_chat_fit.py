"""Whether a prompt and its answer fit those who serve a model, what that takes of their caches, and the seeds of n answers."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.admission.chat import (
    MOST_LOGPROBS,
    USUAL_MOST_TOKENS,
    ChatOrder,
    Prompt,
    context_needed,
    fit,
    projected_blocks,
    seeds_of,
)
from horde.errors import ErrorCode, HordeError
from horde.registry.models import Serving, Target, best_target
from horde.registry.revisions import Manifest

MESSAGES = [{"role": "user", "content": "Hello"}]
MANIFEST = Manifest("weights-1", "tokens-1", context_length=100, block_size=16, blocks=10_000, kv_bytes_per_token=1)


def worker(
    context: int = 100, longest: int = 100, *, trusted: bool = True, published: int | None = None, **manifest: Any
) -> Serving:
    announced: dict[str, Any] = {"context_length": context, **manifest}
    return Serving(
        uuid.uuid4(),
        owner_id=1,
        trusted=trusted,
        threads=1,
        speed=None,
        max_length=longest,
        max_context_length=context,
        manifest=dataclasses.replace(MANIFEST, **announced),
        published_context=published,
        countable=True,
    )


def target(*workers: Serving) -> Target:
    return Target("m", workers)


def counted(tokens: int) -> Prompt:
    return Prompt("x", [7] * tokens, tokens, estimated=False)


def guessed(tokens: int) -> Prompt:
    return Prompt(None, None, tokens, estimated=True)


def wants(tokens: int | None = None, *, logprobs: int | None = None) -> ChatOrder:
    return ChatOrder(models=["m"], messages=MESSAGES, max_tokens=tokens, logprobs=logprobs)


def holds(serving: Serving) -> int:
    """Tokens of prompt and answer that a worker has room for."""
    manifest = serving.manifest
    return min(serving.max_context_length, manifest.context_length, manifest.blocks * manifest.block_size)


def could_do(serving: Serving, prompt: int, answer: int) -> bool:
    return prompt + answer <= holds(serving) and answer <= serving.max_length


def refusal(order: ChatOrder, prompt: Prompt, wanted: Target) -> HordeError:
    with pytest.raises(HordeError) as refused:
        fit(order, prompt, wanted)
    return refused.value


lengths = st.integers(1, 3000)
workers = st.builds(
    worker,
    context=lengths,
    longest=lengths,
    context_length=lengths,
    block_size=st.sampled_from([1, 16, 32]),
    blocks=st.integers(1, 200),
)
targets = st.lists(workers, min_size=1, max_size=4).map(lambda several: target(*several))
likely = st.none() | st.integers(0, 20)


# --- properties


@given(targets, st.builds(counted, lengths) | st.builds(guessed, lengths), st.none() | lengths, likely)
def test_what_is_let_in_fits_a_worker_that_is_there(
    serving: Target, prompt: Prompt, wanted: int | None, logprobs: int | None
) -> None:
    try:
        answer = fit(wants(wanted, logprobs=logprobs), prompt, serving)
    except HordeError:
        return
    assert answer >= 1
    # This is what the queue compares a worker's offer with.
    needed = context_needed(prompt, answer, serving)
    assert any(needed <= holds(worker) and answer <= worker.max_length for worker in serving.serving)
    if not prompt.estimated:
        assert needed == prompt.tokens + answer


@given(targets, lengths, lengths)
def test_a_counted_order_is_taken_as_it_is_exactly_if_some_worker_could_do_it(
    serving: Target, tokens: int, wanted: int
) -> None:
    if any(could_do(worker, tokens, wanted) for worker in serving.serving):
        assert fit(wants(wanted), counted(tokens), serving) == wanted
        return
    error = refusal(wants(wanted), counted(tokens), serving)
    if tokens + wanted > max(map(holds, serving.serving)):
        assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    else:
        assert error.code is ErrorCode.UNSUPPORTED_PARAMETER
        assert error.param == "max_tokens"


@given(targets, lengths, st.none() | lengths, likely)
def test_without_max_tokens_an_answer_gets_all_there_is_within_what_is_usual(
    serving: Target, tokens: int, most: int | None, logprobs: int | None
) -> None:
    limits = [USUAL_MOST_TOKENS, most, None if logprobs is None else MOST_LOGPROBS // (logprobs + 1)]
    usual = min(limit for limit in limits if limit is not None)
    if tokens >= max(map(holds, serving.serving)):
        assert refusal(wants(), counted(tokens), serving).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        return
    answer = fit(wants(logprobs=logprobs), counted(tokens), serving, most=most)
    assert answer <= usual
    assert answer == usual or not any(could_do(worker, tokens, answer + 1) for worker in serving.serving)


@given(targets, st.integers(1, 100_000), st.none() | lengths)
def test_an_estimate_never_refuses_a_prompt_for_its_length(serving: Target, tokens: int, wanted: int | None) -> None:
    context = max(map(holds, serving.serving))
    longest = max(worker.max_length for worker in serving.serving if holds(worker) == context)
    if wanted is None:
        assert fit(wants(), guessed(tokens), serving) >= 1
    elif wanted <= longest:
        assert fit(wants(wanted), guessed(tokens), serving) == wanted
    elif tokens >= context:
        assert refusal(wants(wanted), guessed(tokens), serving).code is ErrorCode.UNSUPPORTED_PARAMETER


@given(lengths, lengths, st.integers(1, 64))
def test_an_answer_of_full_length_takes_so_many_blocks_and_no_fewer(prompt: int, answer: int, size: int) -> None:
    serving = target(worker(block_size=size))
    blocks = projected_blocks(counted(prompt), answer, serving)
    assert (blocks - 1) * size < prompt + answer <= blocks * size


# --- what is said


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (wants(31), ["100 tokens", "70 prompt tokens", "max_tokens of 31", "101 in all"]),
        (wants(2**31 - 1), ["100 tokens", "70 prompt tokens", "max_tokens of 2147483647"]),
    ],
)
def test_both_numbers_are_told_of_what_is_too_long(order: ChatOrder, said: Sequence[str]) -> None:
    error = refusal(order, counted(70), target(worker(100)))
    assert error.status == 400
    assert error.rc == "TokenOverflow"
    assert [words for words in said if words not in error.message] == []
    # The prompt alone would fit.
    assert error.param == "max_tokens"
    assert fit(wants(30), counted(70), target(worker(100))) == 30


def test_a_prompt_that_fills_the_context_leaves_no_room_for_an_answer() -> None:
    error = refusal(wants(), counted(100), target(worker(100)))
    assert "100 tokens, and this is 100 prompt tokens, which leaves no room" in error.message
    assert fit(wants(), counted(99), target(worker(100))) == 1


@pytest.mark.parametrize(("tokens", "param"), [(99, "max_tokens"), (100, "prompt"), (101, "prompt")])
def test_a_completion_is_a_fault_of_its_prompt_only_where_no_shorter_answer_would_do(tokens: int, param: str) -> None:
    order = ChatOrder(models=["m"], prompt="x", max_tokens=31)
    assert refusal(order, counted(tokens), target(worker(100))).param == param


def test_strangers_do_not_say_how_long_what_a_trusted_worker_serves_may_be() -> None:
    stranger = worker(2**31 - 1, 2**31 - 1, trusted=False, block_size=2**31 - 1, blocks=2**31 - 1)
    assert target(stranger).context_length == 2**31 - 1
    serving = target(stranger, worker(100, 50))
    assert serving.context_length == 100
    assert fit(wants(), counted(20), serving) == 50
    assert refusal(wants(51), counted(20), serving).param == "max_tokens"
    assert refusal(wants(), counted(100), serving).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    # Nor of what blocks an answer takes.
    assert projected_blocks(counted(20), 12, serving) == 2


def test_what_was_published_bounds_all_who_serve_it() -> None:
    assert target(worker(1000, trusted=False, published=100), worker(50, trusted=False)).context_length == 100
    assert target(worker(1000, published=100)).context_length == 100
    assert fit(wants(10), counted(90), target(worker(1000, published=100))) == 10
    assert refusal(wants(11), counted(90), target(worker(1000, published=100))).param == "max_tokens"


# --- which revision


def offer(revision: str, threads: int = 1, **fields: Any) -> Serving:
    values = {"owner_id": 1, "trusted": False, "countable": False, "published_context": None, **fields}
    return dataclasses.replace(worker(model_revision=revision), threads=threads, **values)


@pytest.mark.parametrize(
    "worse",
    [
        [offer("b", 50, owner_id=2, countable=True), offer("b", 50, owner_id=3, countable=True)],
        [offer("b", 50, trusted=True, owner_id=2)],
        [offer("b", 50, trusted=True, countable=True, owner_id=2)],
        [offer("b", 9, trusted=True, countable=True, owner_id=2), offer("b", 50, owner_id=3)],
        [offer("b", 50, owner_id=2, countable=True, published_context=100) for _ in range(3)],
    ],
    ids=["strangers", "one that cannot be counted", "of fewer threads", "also with strangers", "of one owner's"],
)
@pytest.mark.parametrize("vouched", [{"trusted": True}, {"published_context": 100}], ids=["trusted", "published"])
def test_a_chat_goes_to_what_somebody_answers_for_then_what_can_be_counted_then_the_most_threads(
    worse: list[Serving], vouched: dict[str, Any]
) -> None:
    better = [offer("a", 15, countable=True, **vouched), offer("a", 15, owner_id=9, countable=True)]
    for serving in ([*better, *worse], [*worse, *better]):
        chosen = best_target("m", serving)
        assert chosen is not None
        assert {each.manifest.model_revision for each in chosen.serving} == {"a"}
    alone = best_target("m", worse)
    assert alone is not None
    assert list(alone.serving) == worse


def test_of_two_alike_it_is_always_the_same() -> None:
    serving = [offer("a"), offer("b")]
    assert best_target("m", serving) is not None
    assert len({target.key for order in (serving, serving[::-1]) if (target := best_target("m", order))}) == 1
    assert best_target("m", []) is None


@pytest.mark.parametrize(
    ("serving", "context"),
    [
        (worker(100, context_length=80), 80),
        (worker(80, context_length=100), 80),
        (worker(1000, context_length=1000, blocks=5, block_size=16), 80),
    ],
    ids=["what the model reads", "what the worker takes", "what its cache holds"],
)
def test_the_context_is_the_smallest_of_a_workers_bounds(serving: Serving, context: int) -> None:
    assert target(serving).context_length == context
    assert fit(wants(10), counted(context - 10), target(serving)) == 10
    assert str(context) in refusal(wants(11), counted(context - 10), target(serving)).message


def test_the_longest_answer_is_that_of_a_worker_whose_context_holds_it_too() -> None:
    serving = target(worker(context=1000, longest=50), worker(context=100, longest=90))
    error = refusal(wants(80), counted(500), serving)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "max_tokens")
    assert "50 tokens" in error.message
    assert fit(wants(80), counted(20), serving) == 80
    # Guessed at 20 tokens it may be offered to the second one; at 500 only the first one could ever take it.
    assert fit(wants(80), guessed(20), serving) == 80
    assert refusal(wants(80), guessed(500), serving).param == "max_tokens"
    assert fit(wants(), counted(500), serving) == 50
    assert fit(wants(), counted(20), serving) == 80


@pytest.mark.parametrize(("logprobs", "most"), [(0, 30_000), (1, 15_000), (5, 5_000), (20, 1_428)])
def test_an_answer_whose_likeliest_tokens_are_told_is_shorter(logprobs: int, most: int) -> None:
    serving = target(worker(context=100_000, longest=100_000))
    assert fit(wants(most, logprobs=logprobs), counted(5), serving) == most
    error = refusal(wants(most + 1, logprobs=logprobs), counted(5), serving)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "max_tokens")
    assert str(most) in error.message
    assert fit(wants(most + 1), counted(5), serving) == most + 1


# --- seeds


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 16))
def test_of_a_given_seed_the_first_answer_has_it_and_each_other_one_what_follows_from_it(seed: int, n: int) -> None:
    seeds = seeds_of(ChatOrder(models=["m"], n=n, seed=seed))
    assert seeds[0] == seed
    assert len(seeds) == len(set(seeds)) == n
    assert all(-(2**63) <= each < 2**63 for each in seeds)
    # However many are asked for, the third is the third.
    assert seeds_of(ChatOrder(models=["m"], n=16, seed=seed))[:n] == seeds


def test_seeds_that_follow_from_others_are_others() -> None:
    followers = [seeds_of(ChatOrder(models=["m"], n=16, seed=seed))[1:] for seed in range(50)]
    assert len({seed for each in followers for seed in each}) == 50 * 15


def test_without_a_seed_each_answer_has_one_of_its_own() -> None:
    first, second = (seeds_of(ChatOrder(models=["m"], n=16)) for _ in range(2))
    assert len({*first, *second}) == 32
