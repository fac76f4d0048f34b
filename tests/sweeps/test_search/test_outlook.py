"""How good a plan is expected to be, and how sure that is."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest

from sweeps.search.outlook import BYTES_ERROR, COLD_ERROR, COLD_WEIGHT, LATEST, LEAST_ERROR, Outlook
from tests.estimates import an_estimate
from tests.examples import a_measured_trial, a_measurement, a_plan, a_trial
from train_entry.contract import Fit, Goal, State, Trial

TOKENS_PER_S = Goal(name="tokens_per_s")
TIME = Goal(name="time_to_tokens", tokens=1e6)


def outlook(goal: Goal = TOKENS_PER_S, device: str = "cuda", **estimate: Any) -> Outlook:
    return Outlook(lambda plan: an_estimate(**estimate), goal, device)


def trial_off_by(factor: float, **changes: Any) -> Trial:
    """Measured to take so many times what was estimated."""
    seen = a_measurement(step_s=0.3 * factor)
    return a_measured_trial(outcome=seen, estimate=an_estimate(step_s=0.3), **changes)


def integrated(mean: float, error: float) -> float:
    """E[max(0, e^g - 1)] for g ~ N(mean, error^2), by the midpoint rule over eight deviations."""
    normal = NormalDist(mean, error)
    steps, width = 20_000, 16 * error / 20_000
    points = (mean - 8 * error + (index + 0.5) * width for index in range(steps))
    return sum(max(0.0, math.exp(gain) - 1) * normal.pdf(gain) * width for gain in points)


# ---------------------------------------------------------------------- expected improvement


@pytest.mark.parametrize("value", [80.0, 99.0, 100.0, 105.0, 150.0])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_expected_improvement_is_the_integral_over_what_may_be(value: float, device: str) -> None:
    found = outlook(tokens_per_s=value, device=device).improvement(a_plan(), 100.0)
    assert found == pytest.approx(integrated(math.log(value / 100), COLD_ERROR[device]), abs=1e-6)


def test_a_smaller_value_improves_on_a_goal_that_is_minimised() -> None:
    twice_as_fast = outlook(TIME, tokens_per_s=2e4).improvement(a_plan(), 100.0)  # 50 s
    assert twice_as_fast == pytest.approx(integrated(math.log(2), COLD_ERROR["cuda"]), abs=1e-6)
    half_as_fast = outlook(TIME, tokens_per_s=5e3).improvement(a_plan(), 100.0)  # 200 s
    assert half_as_fast == pytest.approx(0.0, abs=1e-5)


def test_an_improvement_is_never_negative() -> None:
    assert outlook(tokens_per_s=1.0).improvement(a_plan(), 1e9) == 0.0


def test_where_nothing_is_known_any_plan_may_improve_without_bound() -> None:
    assert outlook().improvement(a_plan(), None) == math.inf
    loss = outlook(Goal(name="loss"))
    assert not loss.knows
    assert loss.expected(a_plan()) is None
    assert loss.improvement(a_plan(), 3.0) == math.inf
    assert loss.may_beat(a_plan(), 3.0)


@pytest.mark.parametrize(
    ("value", "errors", "expected"),
    [(75.0, 2.0, True), (73.0, 2.0, False), (87.0, 1.0, True), (85.0, 1.0, False)],
)
def test_a_plan_may_beat_the_best_within_so_many_deviations(
    value: float, errors: float, expected: bool
) -> None:
    # exp(-0.3) = 0.741, exp(-0.15) = 0.861
    assert outlook(tokens_per_s=value).may_beat(a_plan(), 100.0, errors) is expected


def test_a_slower_plan_may_beat_a_minimised_goal_by_no_more_than_its_error() -> None:
    assert outlook(TIME, tokens_per_s=1e6 / 134).may_beat(a_plan(), 100.0)  # exp(0.3) = 1.35
    assert not outlook(TIME, tokens_per_s=1e6 / 136).may_beat(a_plan(), 100.0)


@pytest.mark.parametrize("fit", list(Fit))
def test_a_plan_fits_where_its_estimate_says_so_without_a_doubt(fit: Fit) -> None:
    assert outlook(fit=fit).fits(a_plan()) is (fit is Fit.FITS)


# ---------------------------------------------------------------------- how sure


def test_the_error_shrinks_with_trials_that_were_as_estimated() -> None:
    found = outlook()
    errors = [found.error]
    for _ in range(LATEST):
        found.learn(trial_off_by(1.0))
        errors.append(found.error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(0.15)
    assert errors[-1] == pytest.approx(0.15 * math.sqrt(COLD_WEIGHT / (COLD_WEIGHT + LATEST)))


def test_the_error_grows_with_trials_that_were_not_whichever_way() -> None:
    slower, faster = outlook(), outlook()
    slower.learn(trial_off_by(1.5))
    faster.learn(trial_off_by(1 / 1.5))
    expected = math.sqrt((COLD_WEIGHT * 0.15**2 + math.log(1.5) ** 2) / (COLD_WEIGHT + 1))
    assert slower.error == pytest.approx(expected)
    assert faster.error == pytest.approx(expected)


def test_errors_of_long_ago_are_forgotten() -> None:
    found, fresh = outlook(), outlook()
    found.learn(trial_off_by(5.0))
    for _ in range(LATEST):
        found.learn(trial_off_by(1.01))
        fresh.learn(trial_off_by(1.01))
    assert found.error == fresh.error


@pytest.mark.parametrize(
    "trial",
    [
        trial_off_by(5.0, shared=True),
        trial_off_by(5.0, state=State.REUSED),
        a_measured_trial(estimate=None),
        a_trial(estimate=an_estimate()),
    ],
    ids=["shared", "reused", "not estimated", "not measured"],
)
def test_nothing_is_learnt_from_a_trial_that_says_nothing_of_its_estimate(trial: Trial) -> None:
    found = outlook()
    found.learn(trial)
    assert found.error == pytest.approx(COLD_ERROR["cuda"])


def test_it_is_never_quite_sure() -> None:
    assert 0 < LEAST_ERROR < COLD_ERROR["cuda"]
    assert outlook(Goal(name="peak_bytes")).error == BYTES_ERROR
