"""Random numbers by (seed, sample, position)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.sampling.randomness import uniform

PINNED = [
    (0, 0, 0, 0.9267107892082962),
    (0, 0, 1, 0.8180638012981452),
    (0, 1, 0, 0.5416306264812325),
    (1, 0, 0, 0.8472321269319854),
    (42, 3, 1000, 0.8910808000433629),
    (18446744073709551615, 0, 7, 0.8416249269778467),
]


@pytest.mark.parametrize(("seed", "sample", "position", "expected"), PINNED)
def test_the_numbers_never_change(seed, sample, position, expected):
    """Another version or platform that continues a text must draw the same."""
    assert uniform(seed, sample, position) == expected


@given(st.integers(), st.integers(0, 100), st.integers(0, 10**6))
@settings(deadline=None)
def test_they_lie_in_the_unit_interval_and_repeat(seed, sample, position):
    assert 0 <= uniform(seed, sample, position) < 1
    assert uniform(seed, sample, position) == uniform(seed, sample, position)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, 2**64, 2**64 + 5, 10**400, -(10**400)])
def test_a_seed_counts_modulo_two_to_the_sixty_four(seed):
    assert uniform(seed, 0, 0) == uniform(seed % 2**64, 0, 0)


def test_seed_sample_and_position_all_matter_and_are_not_confused():
    assert (
        len({uniform(*numbers) for numbers in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]}) == 6
    )


@pytest.mark.parametrize("moving", [0, 1, 2], ids=["seed", "sample", "position"])
def test_they_are_evenly_spread_along_each_of_their_arguments(moving):
    """Chi-square over 64 bins: 63 degrees of freedom, 99.9th percentile 103.4; the numbers are fixed."""
    counts = [0] * 64
    for number in range(6400):
        arguments = [7, 7, 7]
        arguments[moving] = number
        counts[int(uniform(*arguments) * 64)] += 1
    assert sum((count - 100) ** 2 / 100 for count in counts) < 103.4


def test_the_global_random_numbers_are_left_alone():
    state = random.getstate()
    uniform(1, 2, 3)
    assert random.getstate() == state
