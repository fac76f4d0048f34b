"""Expected improvements, and how sure they are."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest

from sweeps.search.improvement import BYTES_ERROR, DOUBT, LEAST_ERROR, Predictor
from tests.support.estimates import an_estimate
from tests.support.examples import a_measured_trial, a_measurement, a_plan, a_trial
from train_entry.contract import Fit, Goal, State, Trial

TOKENS_PER_S = Goal(name="tokens_per_s")
TIME = Goal(name="time_to_tokens", tokens=1e6)
ZERO3 = a_plan(zero={"stage": 3})


def predictor(goal: Goal = TOKENS_PER_S, device: str = "cuda", **estimate: Any) -> Predictor:
    return Predictor(lambda plan: an_estimate(**estimate), goal, device)


def trial_off_by(factor: float, **changes: Any) -> Trial:
    """Return a trial whose step took `factor` times the estimate."""
    return a_measured_trial(**{"plan": a_plan(), "outcome": a_measurement(step_s=0.3 * factor)} | changes)


def integrated(mean: float, error: float) -> float:
    """Return E[max(0, e^g - 1)] for g ~ N(mean, error^2), by the midpoint rule over +-8 deviations."""
    normal = NormalDist(mean, error)
    steps, width = 20_000, 16 * error / 20_000
    points = (mean - 8 * error + (index + 0.5) * width for index in range(steps))
    return sum(max(0.0, math.exp(gain) - 1) * normal.pdf(gain) * width for gain in points)


# ---------------------------------------------------------------------- expected improvement


@pytest.mark.parametrize("value", [80.0, 99.0, 100.0, 105.0, 150.0])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_expected_improvement_is_the_integral_over_what_may_be(value: float, device: str) -> None:
    found = predictor(tokens_per_s=value, device=device)
    expected = integrated(math.log(value / 100), found.error(a_plan()))
    assert found.improvement(a_plan(), 100.0) == pytest.approx(expected, abs=1e-6)


def test_a_smaller_value_improves_on_a_goal_that_is_minimised() -> None:
    fast, slow = predictor(TIME, tokens_per_s=2e4), predictor(TIME, tokens_per_s=5e3)  # 50 s and 200 s
    twice = integrated(math.log(2), fast.error(a_plan()))
    assert fast.improvement(a_plan(), 100.0) == pytest.approx(twice, abs=1e-6)
    assert slow.improvement(a_plan(), 100.0) < 1e-3


def test_an_improvement_is_never_negative() -> None:
    assert predictor(tokens_per_s=1.0).improvement(a_plan(), 1e9) == 0.0


def test_where_nothing_is_known_any_plan_may_improve_without_bound() -> None:
    assert predictor().improvement(a_plan(), None) == math.inf
    loss = predictor(Goal(name="loss"))
    assert not loss.knows
    assert loss.expected(a_plan()) is None
    assert loss.improvement(a_plan(), 3.0) == math.inf
    assert loss.may_beat(a_plan(), 3.0)


@pytest.mark.parametrize("goal", [TOKENS_PER_S, TIME])
@pytest.mark.parametrize("errors", [1.0, 2.0])
def test_a_plan_may_beat_the_best_within_so_many_deviations(goal: Goal, errors: float) -> None:
    found = predictor(goal, tokens_per_s=100.0)
    within = math.exp(errors * found.error(a_plan()))
    expected = found.expected(a_plan())
    assert expected is not None
    sign = 1 if goal.is_maximized else -1
    assert found.may_beat(a_plan(), expected * (within * 0.99) ** sign, errors)
    assert not found.may_beat(a_plan(), expected * (within * 1.01) ** sign, errors)


@pytest.mark.parametrize("fit", list(Fit))
def test_a_plan_fits_where_its_estimate_says_so_without_a_doubt(fit: Fit) -> None:
    assert predictor(fit=fit).fits(a_plan()) is (fit is Fit.FITS)


# ---------------------------------------------------------------------- how sure


def test_a_plan_that_was_measured_is_known_best_and_one_unlike_it_least() -> None:
    found = predictor()
    before = found.error(a_plan())
    found.learn(trial_off_by(1.0))
    errors = [found.error(plan) for plan in (a_plan(), a_plan(micro_batch=8), ZERO3)]
    assert errors == sorted(errors)
    assert errors[-1] < before


def test_what_the_estimate_is_wrong_by_it_is_wrong_by_nearby_too() -> None:
    found = predictor()
    for _ in range(3):
        found.learn(trial_off_by(1.2))
    values = [found.expected(plan) for plan in (a_plan(), a_plan(micro_batch=8), ZERO3)]
    assert values[0] == pytest.approx(20_000 / 1.2, rel=0.03)
    assert None not in values
    assert values == sorted(filter(None, values))  # the correction shrinks with distance


def test_a_time_that_was_underestimated_is_expected_to_be_longer() -> None:
    found = predictor(TIME)
    before = found.expected(a_plan())
    found.learn(trial_off_by(1.2))
    after = found.expected(a_plan())
    assert before is not None
    assert after is not None
    assert after > 1.1 * before


def test_trials_that_were_not_as_estimated_leave_it_less_sure() -> None:
    right, wrong = predictor(), predictor()
    for size, factor in ((1, 1.3), (2, 0.8), (4, 1.25)):
        right.learn(trial_off_by(1.0, plan=a_plan(micro_batch=size)))
        wrong.learn(trial_off_by(factor, plan=a_plan(micro_batch=size)))
    assert wrong.error(ZERO3) > 2 * right.error(ZERO3)


def test_errors_are_those_of_the_estimates_as_they_are_now() -> None:
    step_s = [0.3]
    found = Predictor(lambda plan: an_estimate(step_s=step_s[0]), TOKENS_PER_S, "cuda")
    found.learn(trial_off_by(1.2))
    step_s[0] = 0.36  # the estimates have learned as well
    assert found.expected(a_plan()) == pytest.approx(20_000.0)


def test_a_device_that_waits_for_its_host_is_estimated_less_surely() -> None:
    steady, waiting = predictor(), predictor(parts={"waiting": 0.15, "forward": 0.15})
    for found in (steady, waiting):
        found.learn(trial_off_by(1.0))
    assert waiting.error(ZERO3) > steady.error(ZERO3)


@pytest.mark.parametrize(
    "trial",
    [
        trial_off_by(5.0, is_shared=True),
        trial_off_by(5.0, state=State.REUSED),
        a_measured_trial(plan=None),
        a_trial(estimate=an_estimate()),
    ],
    ids=["shared", "reused", "without a plan", "not measured"],
)
def test_nothing_is_learnt_from_a_trial_that_says_nothing_of_its_estimate(trial: Trial) -> None:
    found = predictor()
    before = found.error(a_plan())
    found.learn(trial)
    assert found.error(a_plan()) == before


def test_it_is_never_quite_sure() -> None:
    found = predictor()
    for _ in range(50):
        found.learn(trial_off_by(1.0))
    assert LEAST_ERROR <= found.error(a_plan()) < DOUBT["cuda"]
    assert predictor(Goal(name="peak_bytes")).error(a_plan()) == BYTES_ERROR
