"""What has to be on an account before a long answer is begun, against numbers worked out by hand. Amounts are hundredths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.kudos.upfront import LEAST_FREE_TOKENS, MOST_FREE_TOKENS, free_tokens, upfront

counts = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("threads", "queued", "tokens"),
    [
        (0, 0, 512),
        (50, 0, 512),
        (0, 1, 511),  # 512 - 0.9
        (0, 100, 422),  # 512 - 90
        (10, 100, 472),  # 512 + 50 - 90
        (10, 55, 512),  # 512 + 50 - 49.5, above the most
        (10, 56, 511),  # 512 + 50 - 50.4
        (0, 284, 256),  # 512 - 255.6
        (0, 285, 256),  # 512 - 256.5, below the least
        (1, 100_000, 256),
    ],
)
def test_what_anybody_may_ask_for_falls_as_the_queue_outgrows_the_threads(
    threads: int, queued: int, tokens: int
) -> None:
    assert free_tokens(threads=threads, queued=queued) == tokens


@given(threads=counts, queued=counts)
def test_more_threads_never_allow_less_nor_a_longer_queue_more(threads: int, queued: int) -> None:
    free = free_tokens(threads=threads, queued=queued)
    assert LEAST_FREE_TOKENS <= free <= MOST_FREE_TOKENS
    assert free_tokens(threads=threads + 1, queued=queued) >= free
    assert free_tokens(threads=threads, queued=queued + 1) <= free


@pytest.mark.parametrize(
    ("max_length", "model", "n", "hundredths"),
    [
        (1024, "a-7b", 1, 34_134),  # 1024 x 7 / 21 = 341.33...
        (600, "a-21B", 1, 60_000),
        (600, "a-21B", 3, 180_000),
        (1024, "a-135M", 1, 659),  # 1024 x 0.135 / 21 = 6.582...
        (1024, "a-135M", 2, 1_318),
        (100, "a-2000b", 1, 952_381),
        (513, "m", 1, 2_000),
        (4096, "m", 1, 2_000),
        (513, "m", 16, 32_000),
        (513, "a-9000b", 1, 2_000),  # more than is believed: no size
    ],
)
def test_a_long_answer_needs_kudos_by_its_length_and_the_size_that_the_models_name_tells(
    max_length: int, model: str, n: int, hundredths: int
) -> None:
    assert upfront(max_length=max_length, model=model, n=n) == hundredths


@given(length=st.integers(1, 100_000), n=st.integers(1, 16), billions=st.integers(1, 2000))
def test_nobody_gets_a_longer_or_a_larger_answer_for_less(length: int, n: int, billions: int) -> None:
    needed = upfront(max_length=length, model=f"m-{billions}b", n=n)
    assert needed > 0
    assert upfront(max_length=length + 1, model=f"m-{billions}b", n=n) >= needed
    assert upfront(max_length=length, model=f"m-{billions}b", n=n + 1) > needed
    if billions < 2000:
        assert upfront(max_length=length, model=f"m-{billions + 1}b", n=n) >= needed
