"""What is kept of a worker's text: enough for whatever it was asked, and no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from horde.usecases.submit import CHARACTERS_KEPT_PER_TOKEN
from tests.support.broker import Broker, open_broker


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner, who is trusted."""
    return broker.user("owner", "trusted").api_key


@pytest.mark.parametrize("letter", ["x", "é", "🙂"])
def test_a_text_that_is_too_long_is_cut_and_stored(broker: Broker, key: str, letter: str) -> None:
    request = broker.order(max_length=16, n=2)
    most = 16 * CHARACTERS_KEPT_PER_TOKEN
    full, over = broker.pop(key, amount=2).jobs
    as_long, longer = broker.submit(key, full.id, letter * most), broker.submit(key, over.id, letter * 500_000)

    assert longer == as_long, "it is paid like one of full length"
    status = broker.status(request)
    assert status.done
    assert [generation.text for generation in status.generations] == [letter * most] * 2


def test_a_text_of_ordinary_length_is_kept_whole(broker: Broker, key: str) -> None:
    request = broker.order(max_length=80)
    text = "".join(chr(97 + i % 26) for i in range(80 * CHARACTERS_KEPT_PER_TOKEN))
    broker.submit(key, broker.job(key, amount=1).id, text)
    (generation,) = broker.status(request).generations
    assert generation.text == text


def test_the_answer_to_a_used_key_does_not_depend_on_the_body(broker: Broker, key: str) -> None:
    request = broker.order()
    job = broker.job(key)
    first = broker.submit(key, job.id, "x" * 80, idempotency_key="submit-1")
    assert broker.submit(key, job.id, "another text", idempotency_key="submit-1") == first
    assert broker.submit(key, job.id, state="faulted", idempotency_key="submit-1") == first
    (generation,) = broker.status(request).generations
    assert generation.text == "x" * 80
