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
    Target,
    context_needed,
    fit,
    projected_blocks,
    seeds_of,
)
from horde.errors import ErrorCode, HordeError
from horde.registry.models import Serving
from horde.registry.revisions import Manifest

MESSAGES = [{"role": "user", "content": "Hello"}]
MANIFEST = Manifest("weights-1", "tokens-1", context_length=100, block_size=16, blocks=10_000, kv_bytes_per_token=1)


def worker(context: int = 100, longest: int = 100, **manifest: Any) -> Serving:
    announced: dict[str, Any] = {"context_length": context, **manifest}
    return Serving(
        uuid.uuid4(),
        trusted=True,
        threads=1,
        speed=None,
        max_length=longest,
        max_context_length=context,
        manifest=dataclasses.replace(MANIFEST, **announced),
    )


def target(*workers: Serving) -> Target:
    return Target("m", MANIFEST, workers)


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
    serving = Target("m", dataclasses.replace(MANIFEST, block_size=size), [worker()])
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
    assert error.param == "messages"
    assert fit(wants(30), counted(70), target(worker(100))) == 30


def test_a_prompt_that_fills_the_context_leaves_no_room_for_an_answer() -> None:
    error = refusal(wants(), counted(100), target(worker(100)))
    assert "100 tokens, and this is 100 prompt tokens, which leaves no room" in error.message
    assert fit(wants(), counted(99), target(worker(100))) == 1


def test_a_completion_that_is_too_long_is_a_fault_of_its_prompt() -> None:
    order = ChatOrder(models=["m"], prompt="x", max_tokens=31)
    assert refusal(order, counted(70), target(worker(100))).param == "prompt"


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
