from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest

from sweeps.estimate.time.fitting import TimeObservation, fit_time, noise_of, quantile_s
from sweeps.estimate.time.step import COLD, TimeFactors, time_of
from tests.support.examples import a_plan
from tests.support.plans import H200, LLAMA_1B3, Case, cases

ELSEWHERE = TimeFactors(
    compute=1.3, launch=1.7, hooks=0.8, communication=1.5, offload=0.6, update=1.2, spread=0.25
)
PLAN = a_plan(seq_len=2048, micro_batch=16, global_batch=32)  # the device is always busy
FAST = time_of(PLAN, LLAMA_1B3, H200)


def seen(case: Case, step_s: float) -> TimeObservation:
    plan, model, hardware = case
    return TimeObservation(plan=plan, model=model, hardware=hardware, step_s=step_s)


def on_elsewhere(some: Sequence[Case], noise: float = 0.0) -> list[TimeObservation]:
    """Return what a machine with the factors ELSEWHERE would measure."""
    chooser = random.Random(1)
    return [seen(case, time_of(*case, ELSEWHERE).step_s * math.exp(chooser.gauss(0, noise))) for case in some]


def median_error(factors: TimeFactors, others: Sequence[Case]) -> float:
    ratios = [time_of(*case, factors).step_s / time_of(*case, ELSEWHERE).step_s for case in others]
    return sorted(abs(ratio - 1) for ratio in ratios)[len(ratios) // 2]


def on_one_machine(count: int) -> list[Case]:
    return [(plan, LLAMA_1B3, H200) for plan, _, _ in cases(count)]


def test_nothing_seen_changes_nothing() -> None:
    assert fit_time([]) == COLD


def test_what_was_expected_changes_no_factor() -> None:
    factors = fit_time([seen((PLAN, LLAMA_1B3, H200), FAST.step_s)])
    assert factors.named == pytest.approx(COLD.named)


def test_one_trial_moves_the_estimate_most_of_the_way() -> None:
    factors = fit_time([seen((PLAN, LLAMA_1B3, H200), 1.3 * FAST.step_s)])
    assert 1.2 < time_of(PLAN, LLAMA_1B3, H200, factors).step_s / FAST.step_s < 1.3


def test_a_factor_of_which_nothing_was_seen_stays() -> None:
    factors = fit_time([seen((PLAN, LLAMA_1B3, H200), 1.3 * FAST.step_s)])
    assert factors.compute > 1.2
    assert (factors.hooks, factors.offload) == pytest.approx((1, 1))


def test_more_trials_make_better_estimates() -> None:
    some = on_one_machine(60)
    errors = [median_error(fit_time(on_elsewhere(some[:count], 0.03)), some[30:]) for count in (0, 3, 8, 30)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.08 < 0.2 < errors[0]


def test_a_disturbed_trial_does_little_harm() -> None:
    some = on_one_machine(60)
    trials = on_elsewhere(some[:8], 0.03)
    disturbed = [dataclasses.replace(trials[0], step_s=10 * trials[0].step_s), *trials[1:]]
    assert median_error(fit_time(disturbed), some[30:]) < 0.12


def test_times_that_are_none_are_left_out() -> None:
    case = (PLAN, LLAMA_1B3, H200)
    assert fit_time([seen(case, step_s) for step_s in (0.0, -1.0, math.inf, math.nan)]) == COLD


def test_contradictions_leave_positive_factors() -> None:
    case = (PLAN, LLAMA_1B3, H200)
    factors = fit_time([seen(case, step_s) for step_s in (1e-6, 1e6, 1e6)])
    assert all(0 < factor < math.inf for factor in factors.named.values())
    assert factors.spread > COLD.spread


def test_the_same_trial_again_and_again_is_learned() -> None:
    case = (PLAN, LLAMA_1B3, H200)
    factors = fit_time([seen(case, 2 * FAST.step_s)] * 20)
    assert time_of(*case, factors).step_s == pytest.approx(2 * FAST.step_s, rel=0.01)


def test_agreement_narrows_the_spread() -> None:
    trials = on_elsewhere(on_one_machine(20), 0.02)
    spreads = [fit_time(trials[:count]).spread for count in (0, 1, 8, 20)]
    assert spreads == sorted(spreads, reverse=True)


def test_a_quantile_lies_above_the_estimate_by_the_spread() -> None:
    assert quantile_s(FAST, 0.5) == pytest.approx(FAST.step_s)
    one_sigma = quantile_s(FAST, 0.841345)
    assert one_sigma == pytest.approx(FAST.step_s * math.exp(COLD.spread), rel=0.01)
    assert quantile_s(FAST, 0.1) < FAST.step_s < quantile_s(FAST, 0.9) < quantile_s(FAST, 0.99)


def test_steps_that_wait_for_the_host_scatter_more() -> None:
    slow = time_of(a_plan(zero={"stage": 3}, micro_batch=1), LLAMA_1B3, H200)
    assert noise_of(slow) > 2 * noise_of(FAST)
