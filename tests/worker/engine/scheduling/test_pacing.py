"""The pacer against made-up machines: steps stay near the target, whatever the machine costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from worker.engine.scheduling.pacing import PrefillPacer

TARGET = 0.2
Machine = Callable[[int, int], float]


def machine(base: float, decode: float, prefill: float) -> Machine:
    """Seconds of a step of so many prompt tokens and decodes."""
    return lambda tokens, decodes: base + decode * decodes + prefill * tokens


def run(pacer: PrefillPacer, seconds: Machine, decodes: int, steps: int) -> list[float]:
    """Steps that are filled with as much of a prompt as the pacer grants; what each took."""
    taken = []
    for _ in range(steps):
        tokens = pacer.limit(decodes)
        taken.append(seconds(tokens, decodes))
        pacer.observe(tokens, decodes, taken[-1])
    return taken


@pytest.mark.parametrize("decodes", [1, 8, 32])
@pytest.mark.parametrize("prefill", [0.0005, 0.001, 0.004])
def test_steps_settle_just_under_the_target(decodes, prefill):
    pacer = PrefillPacer(TARGET, 16, 2048)
    settled = run(pacer, machine(0.02, 0.001, prefill), decodes, 60)[-10:]
    assert max(settled) <= TARGET * 1.01
    assert min(settled) >= TARGET * 0.9


def test_what_decodes_cost_alone_is_taken_off_at_once():
    pacer = PrefillPacer(TARGET, 16, 2048)
    costs = machine(0.02, 0.002, 0.001)
    for _ in range(5):
        pacer.observe(0, 32, costs(0, 32))
    pacer.observe(512, 0, costs(512, 0))
    assert pacer.limit(32) == pytest.approx((TARGET - 0.084) / (0.532 / 512), abs=1)


def test_without_decodes_all_is_granted():
    pacer = PrefillPacer(TARGET, 16, 2048)
    assert pacer.limit(0) == 2048
    pacer.observe(2048, 0, 60.0)
    assert pacer.limit(0) == 2048


def test_without_any_experience_the_smallest_share_is_granted():
    assert PrefillPacer(TARGET, 16, 2048).limit(4) == 16


def test_prompts_get_on_even_where_decodes_alone_take_longer_than_the_target():
    pacer = PrefillPacer(TARGET, 16, 2048)
    run(pacer, machine(0.5, 0.0, 0.001), 4, 20)
    pacer.observe(0, 4, 0.5)
    assert pacer.limit(4) == 16


def test_a_fast_machine_gets_everything():
    pacer = PrefillPacer(TARGET, 16, 2048)
    run(pacer, machine(0.001, 0.00001, 0.00002), 4, 20)
    assert pacer.limit(4) == 2048


def test_a_step_no_slower_than_decodes_alone_does_no_harm():
    pacer = PrefillPacer(TARGET, 16, 2048)
    pacer.observe(0, 4, 0.1)
    pacer.observe(64, 4, 0.09)
    assert pacer.limit(4) == 2048


def test_single_slow_steps_change_nothing():
    costs = machine(0.02, 0.001, 0.001)
    calm, disturbed = PrefillPacer(TARGET, 16, 2048), PrefillPacer(TARGET, 16, 2048)
    run(calm, costs, 8, 60)
    for step in range(60):
        tokens = disturbed.limit(8)
        disturbed.observe(tokens, 8, costs(tokens, 8) * (20 if step % 4 == 0 else 1))
    assert disturbed.limit(8) == pytest.approx(calm.limit(8), rel=0.05)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_machine_that_changes_is_learnt_anew(factor):
    pacer = PrefillPacer(TARGET, 16, 4096)
    run(pacer, machine(0.02, 0.001, 0.001), 8, 40)
    changed = run(pacer, machine(0.02 * factor, 0.001 * factor, 0.001 * factor), 8, 60)
    assert changed[-1] == pytest.approx(TARGET, rel=0.1)


def test_more_decodes_leave_less():
    pacer = PrefillPacer(TARGET, 16, 2048)
    costs = machine(0.02, 0.003, 0.001)
    for decodes in (1, 2, 4, 8, 16, 32):
        pacer.observe(0, decodes, costs(0, decodes))
    run(pacer, costs, 1, 20)
    limits = [pacer.limit(decodes) for decodes in (1, 4, 8, 16, 32)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1]


def test_small_rests_of_prompts_are_no_measure_of_a_token():
    pacer = PrefillPacer(TARGET, 16, 2048)
    run(pacer, machine(0.02, 0.001, 0.001), 8, 40)
    before = pacer.limit(8)
    for _ in range(20):
        pacer.observe(1, 8, 0.1)
    assert pacer.limit(8) == before


@pytest.mark.parametrize(("target", "smallest", "largest"), [(0.0, 1, 2), (-1.0, 1, 2), (0.1, 0, 2), (0.1, 3, 2)])
def test_senseless_bounds_are_refused(target, smallest, largest):
    with pytest.raises(ValueError):
        PrefillPacer(target, smallest, largest)
