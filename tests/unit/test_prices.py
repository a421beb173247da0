"""Prices against numbers worked out by hand from the published formula. Amounts are hundredths of a kudos."""

from __future__ import annotations

import dataclasses
import itertools
import uuid

import pytest

from horde.kudos.prices import (
    FEE,
    TEXT_TAX,
    billions_of_parameters,
    context_multiplier,
    estimate_text_price,
    estimate_tokens,
    is_validated,
    text_reward,
)
from horde.lifecycle.rows import JobFacts
from horde.lifecycle.store import Price, Result
from horde.lifecycle.words import Kind, ResultState
from horde.usecases.pricing import price_result


@pytest.mark.parametrize(
    ("prompt_tokens", "multiplier"),
    [
        (0, 1.2003757),  # 1.2 + 2.2 ^ -10, as for one token
        (1, 1.2003757),
        (256, 1.4066116),
        (512, 1.6545455),
        (1024, 2.2),
        (2048, 3.4),
        (4096, 6.04),
        (8192, 11.848),
        (32768, 30),
        (10_000_000, 30),
    ],
)
def test_a_long_prompt_costs_more_within_bounds(prompt_tokens: int, multiplier: float) -> None:
    assert context_multiplier(prompt_tokens) == pytest.approx(multiplier, rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "prompt_tokens", "model", "reward"),
    [
        (80, 1024, "a-7b", 986),  # 80 x 7 / 125 x 2.2
        (80, 1024, "a-13b", 1830),  # 80 x 13 / 125 x 2.2 = 18.304
        (80, 1024, "a-70b", 13802),  # (70 / 13) ^ 0.2 = 1.400332; 80 x 1.400332 x 70 / 125 x 2.2
        (512, 4096, "a-7b", 17318),  # 512 x 7 / 125 x 6.04 = 173.17888
        (20, 2, "SmolLM2-135M-Instruct", 3),  # 20 x 0.135 / 125 x (1.2 + 2.2 ^ -9) = 0.025938
        (0, 1024, "a-7b", 0),
    ],
)
def test_a_reward_grows_with_tokens_size_and_context(tokens: int, prompt_tokens: int, model: str, reward: int) -> None:
    def of(*, trusted: bool, validated: bool) -> int:
        return text_reward(
            tokens=tokens, prompt_tokens=prompt_tokens, model=model, trusted=trusted, validated=validated
        )

    assert of(trusted=True, validated=True) == reward
    assert of(trusted=True, validated=False) == pytest.approx(0.3 * reward, abs=1)
    # Anybody can name a model: a stranger's earns by the job, whatever size its name tells.
    by_the_job = round(100 * context_multiplier(prompt_tokens))
    assert of(trusted=False, validated=True) == by_the_job
    assert of(trusted=False, validated=False) == pytest.approx(0.3 * by_the_job, abs=1)


def test_a_model_of_unknown_size_pays_by_tokens_to_the_trusted_and_by_the_job_to_others() -> None:
    def of(*, trusted: bool) -> int:
        return text_reward(tokens=100, prompt_tokens=1024, model="mystery", trusted=trusted, validated=True)

    assert of(trusted=True) == 594  # 100 x 2.2 x 0.027
    assert of(trusted=False) == 220  # 2.2


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("koboldcpp/LLaMA2-13B-Psyfighter2", 13),
        ("aphrodite/mistralai/Mixtral-8x7B-v0.1", 7),
        ("SmolLM2-135M-Instruct", 0.135),
        ("Llama-3.1-8B", 8),
        ("Qwen2.5-0.5B", 0.5),
        ("gemma-2-2b-it", 2),
        ("model 7 b", 7),
        ("a-2000b", 2000),
        ("a-2001b", None),
        ("0b", None),
        # Whoever names a model like this would otherwise get a reward that no column holds.
        (f"{'9' * 30}b", None),
        (f"{'9' * 400}b", None),
        ("a 7B", 7),
        ("Phi-3.5", None),
        ("v0b", None),
        ("web2", None),
        ("4bit", None),
        ("", None),
    ],
)
def test_the_size_is_read_from_the_models_name(model: str, billions: float | None) -> None:
    assert billions_of_parameters(model) == billions


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 400, 100)])
def test_tokens_are_estimated_as_a_quarter_of_the_characters(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize(
    ("agent", "validated"),
    [
        ("AI Horde Worker:24:https://example.org", True),
        ("AI Horde Worker~aphrodite~oai:24:https://example.org", True),
        ("AI Horde Worker~aphrodite~kai:24:https://example.org", True),
        ("KoboldCppEmbedWorker:2:https://example.org", True),
        ("TabbyAPI:1:x", True),
        ("unknown:0:unknown", False),
        ("My TabbyAPI:1:x", False),
        ("AI Horde Worker~other:24:x", False),
    ],
)
def test_only_known_backends_earn_all_of_it(agent: str, validated: bool) -> None:
    assert is_validated(agent) is validated


def job(**changes: object) -> JobFacts:
    facts = JobFacts(
        id=uuid.uuid4(),
        request_id=uuid.uuid4(),
        slot_idx=0,
        worker_id=uuid.uuid4(),
        worker_name="worker",
        owner_id=1,
        model="a-7b",
        bridge_agent="AI Horde Worker:1:x",
        posts_progress=False,
        owner_trusted=True,
        kind=Kind.TEXT,
        user_id=2,
        max_length=80,
        models=["a-7b"],
        payload={"prompt": "x" * 4096},
        tokenizer_revision=None,
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def test_a_client_pays_one_kudos_more_than_the_worker_earns() -> None:
    assert price_result(job(), Result("", 80)) == Price(price=1086, reward=986)


def test_a_text_counts_for_twenty_tokens_at_least_and_for_what_was_ordered_at_most() -> None:
    shortest = Price(price=346, reward=246)  # 20 x 7 / 125 x 2.2 = 2.464
    assert price_result(job(), Result("", 0)) == shortest
    assert price_result(job(), Result("", 20)) == shortest
    assert price_result(job(), Result("", 21)).reward == 259
    assert price_result(job(), Result("", 81)) == price_result(job(), Result("", 80))
    assert price_result(job(max_length=16), Result("", 80)).reward == 197  # 16 x 7 / 125 x 2.2 = 1.9712


@pytest.mark.parametrize(
    ("kind", "state", "text", "tokens", "reward"),
    [
        (Kind.CHAT, ResultState.OK, "", 0, 0),
        (Kind.CHAT, ResultState.OK, "a", 1, 246),
        (Kind.CHAT, ResultState.CENSORED, "", 0, 246),
        (Kind.TEXT, ResultState.OK, "", 0, 246),
    ],
)
def test_a_chat_without_a_word_earns_nothing(
    kind: Kind, state: ResultState, text: str, tokens: int, reward: int
) -> None:
    facts = job(kind=kind, payload={"prompt_tokens": 1024, "estimated": False})
    assert price_result(facts, Result(text, tokens, state=state)) == Price(price=FEE + reward, reward=reward)


@pytest.mark.parametrize(
    ("prompt_tokens", "estimated", "reward"),
    [(1023, True, 985), (1024, True, 986), (1025, True, 986), (250_000, True, 986), (4096, False, 2706)],
)
def test_a_prompt_that_was_not_counted_is_believed_up_to_a_thousand_tokens(
    prompt_tokens: int, estimated: bool, reward: int
) -> None:
    facts = job(kind=Kind.CHAT, payload={"prompt_tokens": prompt_tokens, "estimated": estimated})
    assert price_result(facts, Result("a text", 80)).reward == reward


def test_an_image_costs_the_fee_alone() -> None:
    assert price_result(job(kind=Kind.IMAGE, payload={"steps": 30}), Result("", 0)) == Price(price=100, reward=0)


def test_a_stranger_is_paid_by_the_job_whatever_its_model_is_called() -> None:
    for model in ("a-7b", "nice-2000B", "mystery"):
        paid = price_result(job(owner_trusted=False, model=model, models=[model]), Result("", 80))
        assert paid == Price(price=320, reward=220)  # 2.2


def test_no_result_costs_more_than_the_order_was_quoted_for_the_models_it_named() -> None:
    quoted = estimate_text_price(n=1, max_length=80, prompt="x" * 4096, models=["a-7b"]) - TEXT_TAX
    for trusted in (True, False):
        paid = price_result(job(owner_trusted=trusted, model="nice-2000B"), Result("", 80))
        assert paid.price <= quoted
        assert paid.price - paid.reward == FEE
    assert price_result(job(model="nice-2000B"), Result("", 80)) == Price(price=1086, reward=986)
    # An order that named none takes whatever is served.
    assert price_result(job(model="a-13b", models=[]), Result("", 80)).reward == 1830


def test_a_dry_run_counts_every_result_in_full_on_the_largest_model_and_the_tax() -> None:
    price = estimate_text_price(n=2, max_length=80, prompt="x" * 4096, models=["a-7b", "a-13b", "mystery"])
    assert price == 100 + 2 * (1830 + 100)


@pytest.mark.parametrize(
    "models", [["a-70b"], ["a-7b", "mystery"], ["SmolLM2-135M-Instruct"], ["mystery"], ["nice-2000B", "m"]]
)
@pytest.mark.parametrize("max_length", [16, 80, 4096])
@pytest.mark.parametrize("prompt", ["", "Hello", "x" * 40_000])
def test_an_estimate_is_no_less_than_any_delivery_costs(models: list[str], max_length: int, prompt: str) -> None:
    quoted = estimate_text_price(n=3, max_length=max_length, prompt=prompt, models=models)
    worst = 0
    for model, trusted, agent, tokens in itertools.product(
        models, (True, False), ("AI Horde Worker:1:x", "unknown:0:unknown"), (0, 15, max_length)
    ):
        facts = job(
            model=model,
            models=models,
            owner_trusted=trusted,
            bridge_agent=agent,
            max_length=max_length,
            payload={"prompt": prompt},
        )
        worst = max(worst, price_result(facts, Result("", tokens)).price)
    assert quoted == TEXT_TAX + 3 * worst, "as much as the dearest of them, and no more"
