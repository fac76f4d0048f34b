"""Whether the machine has become faster or slower."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.search.drift import drifts, due, reference_of
from tests.support.examples import a_measured_trial, a_measurement, a_trial
from train_entry.contract import Failure, FailureKind, Goal, Origin, Outcome, Purpose, Repeat, State, Trial

GOAL = Goal(name="tokens_per_s")


def repeat(ended_at: float | None, step_s: float = 0.25, **changes: Any) -> Repeat:
    outcome: Outcome | None = a_measurement(step_s=step_s, relative_error=0.005)
    fields = {"attempt": 2, "purpose": Purpose.DRIFT, "turn": 0, "outcome": outcome, "ended_at": ended_at}
    return Repeat(**{**fields, **changes})


def reference(*repeats: Repeat, **changes: Any) -> Trial:
    """The best rung, measured at 100 s to take 250 ms a step."""
    fields = {"number": 1, "rung": "zero2", "closed_at": 100.0, "repeats": repeats}
    outcome = a_measurement(relative_error=0.005)
    return a_measured_trial(**{"outcome": outcome, **fields, **changes})


def trial(number: int, closed_at: float | None, **changes: Any) -> Trial:
    return a_measured_trial(
        **{"number": number, "closed_at": closed_at, "outcome": a_measurement(tokens_per_s=1.0), **changes}
    )


def later(count: int, after: float = 100.0) -> list[Trial]:
    return [trial(2 + index, after + 1 + index) for index in range(count)]


# ---------------------------------------------------------------------- when


def test_the_best_rung_is_due_after_so_many_trials() -> None:
    rung = reference()
    assert due([rung, *later(2)], GOAL, 3) is None
    assert due([rung, *later(3)], GOAL, 3) is rung


def test_trials_are_counted_from_the_latest_repeat() -> None:
    rung = reference(repeat(110.0))
    assert due([rung, *later(3, after=100.0)], GOAL, 3) is None
    assert due([rung, *later(3, after=110.0)], GOAL, 3) is rung


@pytest.mark.parametrize(
    "changes",
    [{"attempts": 0, "state": State.REUSED}, {"origin": Origin.USER}, {"closed_at": None}],
    ids=["reused", "the user's", "open"],
)
def test_trials_that_the_search_has_not_run_do_not_count(changes: dict[str, Any]) -> None:
    others = [trial(5, **{"closed_at": 150.0, **changes})]
    assert due([reference(), *later(2), *others], GOAL, 3) is None


def test_it_is_not_due_while_it_runs_again() -> None:
    running = repeat(None, outcome=None)
    assert due([reference(running), *later(9)], GOAL, 3) is None


@pytest.mark.parametrize("goal", ["loss", "peak_bytes"])
def test_it_is_never_due_where_the_goal_is_no_speed(goal: str) -> None:
    assert due([reference(), *later(9)], Goal(name=goal), 3) is None


def test_it_is_never_due_where_that_is_not_asked_or_no_rung_is_measured() -> None:
    assert due([reference(), *later(9)], GOAL, 0) is None
    assert due(later(9), GOAL, 3) is None


def test_one_and_the_same_trial_is_measured_again_even_if_another_rung_is_better_now() -> None:
    rung = reference(repeat(110.0))
    better = trial(2, 150.0, rung="zero1", outcome=a_measurement(tokens_per_s=1e9))
    assert reference_of([better, rung], GOAL) is rung
    assert reference_of([better, reference()], GOAL) is better


# ---------------------------------------------------------------------- how much


def test_between_two_measurements_the_machine_drifts_on_a_straight_line() -> None:
    rung = reference(repeat(200.0, step_s=0.25 / 0.9), repeat(300.0, step_s=0.25 / 0.95))
    times = {2: 50.0, 3: 150.0, 4: 200.0, 5: 280.0, 6: 900.0}
    found = drifts([rung, *(trial(number, at) for number, at in times.items())], GOAL)
    expected = {1: 1.0, 2: 1.0, 3: 0.95, 4: 0.9, 5: 0.94, 6: 0.95}
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("factor", "expected"), [(1.014, 1.0), (1 / 1.014, 1.0), (1.02, 1 / 1.02)])
def test_a_change_within_three_times_the_noise_is_none(factor: float, expected: float) -> None:
    rung = reference(repeat(200.0, step_s=0.25 * factor))
    assert drifts([rung, trial(2, 200.0)], GOAL)[2] == pytest.approx(expected, abs=1e-4)


def test_the_noise_is_the_most_that_a_measurement_says_of_itself() -> None:
    noisy = a_measurement(step_s=0.25 * 1.1, relative_error=0.05)
    rung = reference(repeat(200.0, outcome=noisy))
    assert drifts([rung, trial(2, 200.0)], GOAL)[2] == 1.0


def test_a_measurement_that_does_not_say_has_half_a_percent_of_noise() -> None:
    silent = {factor: a_measurement(step_s=0.25 * factor) for factor in (1.0, 1.014, 1.017)}
    found = [
        drifts(
            [reference(repeat(200.0, outcome=silent[factor]), outcome=silent[1.0]), trial(2, 200.0)], GOAL
        )[2]
        for factor in (1.014, 1.017)
    ]
    assert found == [1.0, pytest.approx(1 / 1.017, abs=1e-4)]


def test_repeats_that_failed_or_confirm_say_nothing_of_drift() -> None:
    failed = repeat(200.0, outcome=Failure(kind=FailureKind.CRASHED, message="no"))
    confirming = repeat(200.0, step_s=0.5, purpose=Purpose.CONFIRM, turn=1)
    assert drifts([reference(failed, confirming), trial(2, 200.0)], GOAL) == {1: 1.0, 2: 1.0}


def test_trials_without_a_measurement_have_no_drift() -> None:
    assert drifts([a_trial(number=3), trial(2, 200.0)], GOAL) == {2: 1.0}
