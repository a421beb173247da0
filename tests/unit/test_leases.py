"""How long a lease is, by the length of the job and the measured speed of its worker."""

from __future__ import annotations

import pytest

from horde.lifecycle.terms import Terms


@pytest.mark.parametrize(
    ("max_length", "speed", "seconds"),
    [
        (16, None, 150),
        (80, None, 150),
        # max_length / 2 + 30 takes over here.
        (240, None, 150),
        (241, None, 151),
        (512, None, 286),
        (1024, None, 542),
        # A fast worker has no less time than an unmeasured one.
        (512, 1000.0, 286),
        # Three times what it needs at its speed.
        (512, 2.0, 768),
        (80, 1.0, 240),
        (80, 1.6, 150),
        # Never more than an hour.
        (512, 0.1, 3600),
        (8192, None, 3600),
        (7140, None, 3600),
        (7139, None, 3600),
        (7138, None, 3599),
    ],
)
def test_a_lease_scales_with_the_length_and_the_measured_speed(
    max_length: int, speed: float | None, seconds: int
) -> None:
    assert Terms().lease(max_length=max_length, tokens_per_second=speed, posts_progress=False) == seconds


@pytest.mark.parametrize("max_length", [16, 512, 8192])
def test_a_worker_that_posts_progress_gets_a_minute_at_a_time(max_length: int) -> None:
    assert Terms().lease(max_length=max_length, tokens_per_second=0.1, posts_progress=True) == 60


@pytest.mark.parametrize(("fixed", "seconds"), [(20.0, 20), (0.2, 1), (20.1, 21), (7200.0, 7200)])
@pytest.mark.parametrize("posts_progress", [True, False])
def test_a_fixed_lease_overrides_the_formula(fixed: float, seconds: int, posts_progress: bool) -> None:
    terms = Terms(fixed_lease=fixed)
    assert terms.lease(max_length=512, tokens_per_second=1.0, posts_progress=posts_progress) == seconds
