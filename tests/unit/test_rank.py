"""The rank of a new request: seconds earlier for kudos, seconds later for what its user has waiting."""

from __future__ import annotations

import pytest

from horde.queue.rank import rank_offset


@pytest.mark.parametrize(
    ("kudos", "seconds"),
    [(0, 0), (1_000, 60), (3_000, 120), (7_000, 180), (1_023_000, 600), (1_024_000, 600), (1e12, 600)],
)
def test_kudos_give_a_minute_per_doubling_and_ten_minutes_at_most(kudos: float, seconds: float) -> None:
    assert rank_offset(kudos, 0) == pytest.approx(-seconds)


def test_debts_cost_no_place() -> None:
    assert rank_offset(-50, 0) == 0


@pytest.mark.parametrize(("waiting", "seconds"), [(0, 0), (1, 2), (30, 60), (1000, 2000)])
def test_each_slot_that_waits_already_costs_two_seconds(waiting: int, seconds: float) -> None:
    assert rank_offset(0, waiting) == seconds
    assert rank_offset(1_000, waiting) == pytest.approx(seconds - 60)
