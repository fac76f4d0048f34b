"""The machine's drift in speed, and when to measure it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.examples import a_measured_trial, a_measurement, a_repeat, a_trial
from train_entry.contract import (
    Attempt,
    Failure,
    FailureKind,
    Goal,
    Origin,
    Purpose,
    Ranking,
    State,
    Trial,
)
from train_entry.contract.study.drift import drifts_of, due, reference_of

GOAL = Goal(name="tokens_per_s")


def look(ended_at: float | None, step_s: float = 0.25, **changes: Any) -> Attempt:
    seen = a_measurement(step_s=step_s, relative_error=0.005)
    return a_repeat(**{"purpose": Purpose.DRIFT, "outcome": seen, "ended_at": ended_at, **changes})


def reference(*looks: Attempt, **changes: Any) -> Trial:
    """The best baseline, measured at time 100 s with 250 ms per step."""
    fields = {"number": 1, "baseline": "zero2", "closed_at": 100.0, "repeats": looks}
    outcome = a_measurement(relative_error=0.005)
    return a_measured_trial(**{"outcome": outcome, **fields, **changes})


def trial(number: int, closed_at: float | None, **changes: Any) -> Trial:
    return a_measured_trial(
        **{"number": number, "closed_at": closed_at, "outcome": a_measurement(tokens_per_s=1.0), **changes}
    )


def later(count: int, after: float = 100.0) -> list[Trial]:
    return [trial(2 + index, after + 1 + index) for index in range(count)]


def due_by(trials: list[Trial], every: int, goal: Goal = GOAL) -> Trial | None:
    return due(trials, goal, Ranking(trials, goal).best_baseline, every)


def reference_among(*trials: Trial) -> Trial | None:
    return reference_of(trials, Ranking(trials, GOAL).best_baseline)


def drifts(*trials: Trial) -> Mapping[int, float]:
    return drifts_of(trials, GOAL, Ranking(trials, GOAL).best_baseline)


# ---------------------------------------------------------------------- when a repeat is due


def test_the_best_baseline_is_due_after_so_many_trials() -> None:
    baseline = reference()
    assert due_by([baseline, *later(2)], 3) is None
    assert due_by([baseline, *later(3)], 3) is baseline


def test_trials_are_counted_from_the_latest_look() -> None:
    baseline = reference(look(110.0))
    assert due_by([baseline, *later(3, after=100.0)], 3) is None
    assert due_by([baseline, *later(3, after=110.0)], 3) is baseline


@pytest.mark.parametrize(
    "changes",
    [
        {"state": State.REUSED},
        {"origin": Origin.USER},
        {"state": State.RUNNING, "outcome": None, "closed_at": None},
    ],
    ids=["reused", "the user's", "open"],
)
def test_trials_that_the_search_has_not_run_do_not_count(changes: dict[str, Any]) -> None:
    others = [trial(5, **{"closed_at": 150.0, **changes})]
    assert due_by([reference(), *later(2), *others], 3) is None


def test_it_is_not_due_while_it_runs_again() -> None:
    running = look(None, outcome=None)
    assert due_by([reference(running), *later(9)], 3) is None


@pytest.mark.parametrize("goal", ["loss", "peak_bytes"])
def test_it_is_never_due_where_the_goal_is_no_speed(goal: str) -> None:
    assert due_by([reference(), *later(9)], 3, Goal(name=goal)) is None


def test_it_is_never_due_where_that_is_not_asked_or_no_baseline_is_measured() -> None:
    assert due_by([reference(), *later(9)], 0) is None
    assert due_by(later(9), 3) is None


def test_one_and_the_same_trial_is_measured_again_even_if_another_baseline_is_better_now() -> None:
    baseline = reference(look(110.0))
    better = trial(2, 150.0, baseline="zero1", outcome=a_measurement(tokens_per_s=1e9))
    assert reference_among(better, baseline) is baseline
    assert reference_among(better, reference()) is better


# ---------------------------------------------------------------------- the drift


def test_between_two_measurements_the_machine_drifts_on_a_straight_line() -> None:
    baseline = reference(look(200.0, step_s=0.25 / 0.9), look(300.0, step_s=0.25 / 0.95))
    times = {2: 50.0, 3: 150.0, 4: 200.0, 5: 280.0, 6: 900.0}
    found = drifts(baseline, *(trial(number, at) for number, at in times.items()))
    expected = {1: 1.0, 2: 1.0, 3: 0.95, 4: 0.9, 5: 0.94, 6: 0.95}
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("factor", "expected"), [(1.014, 1.0), (1 / 1.014, 1.0), (1.02, 1 / 1.02)])
def test_a_change_within_three_times_the_noise_is_none(factor: float, expected: float) -> None:
    baseline = reference(look(200.0, step_s=0.25 * factor))
    assert drifts(baseline, trial(2, 200.0))[2] == pytest.approx(expected, abs=1e-4)


def test_the_noise_is_the_most_that_a_measurement_says_of_itself() -> None:
    noisy = a_measurement(step_s=0.25 * 1.1, relative_error=0.05)
    baseline = reference(look(200.0, outcome=noisy))
    assert drifts(baseline, trial(2, 200.0))[2] == 1.0


def test_a_measurement_that_does_not_say_has_half_a_percent_of_noise() -> None:
    silent = {factor: a_measurement(step_s=0.25 * factor) for factor in (1.0, 1.014, 1.017)}
    found = [
        drifts(reference(look(200.0, outcome=silent[factor]), outcome=silent[1.0]), trial(2, 200.0))[2]
        for factor in (1.014, 1.017)
    ]
    assert found == [1.0, pytest.approx(1 / 1.017, abs=1e-4)]


def test_repeats_that_failed_or_confirm_say_nothing_of_drift() -> None:
    failed = look(200.0, outcome=Failure(kind=FailureKind.CRASHED, message="no"))
    confirming = look(200.0, step_s=0.5, purpose=Purpose.CONFIRM, round=1)
    assert drifts(reference(failed, confirming), trial(2, 200.0)) == {1: 1.0, 2: 1.0}


def test_trials_without_a_measurement_have_no_drift() -> None:
    assert drifts(a_trial(number=3), trial(2, 200.0)) == {2: 1.0}
