"""The limits at which a study ends."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.study.limits import (
    Limits,
    Spent,
    StopReason,
    active_seconds,
    failures_in_a_row,
    launched,
    without_improvement,
)
from tests.support.examples import a_measured_trial, a_measurement, a_repeat, a_trial
from train_entry.contract import Failure, FailureKind, Goal, Origin, Purpose, State, Trial

GOAL = Goal(name="tokens_per_s")


@pytest.mark.parametrize(
    ("trials", "hours", "launches", "active_s", "reason"),
    [
        (3, None, 2, 1e9, None),
        (3, None, 3, 0.0, StopReason.TRIALS),
        (3, None, 4, 0.0, StopReason.TRIALS),
        (None, 2.0, 10**6, 7199.0, None),
        (None, 2.0, 0, 7200.0, StopReason.HOURS),
        (None, None, 10**6, 1e9, None),
    ],
)
def test_a_study_ends_at_the_first_limit(
    trials: int | None, hours: float | None, launches: int, active_s: float, reason: StopReason | None
) -> None:
    spent = Spent(launched=launches, active_s=active_s, gpu_s=0.0)
    assert Limits(trials=trials, hours=hours, retries=0).reached(spent) is reason


@pytest.mark.parametrize(
    ("spans", "active_s"),
    [
        ([], 0.0),
        ([(10, 20)], 10.0),
        ([(10, 20), (15, 30)], 20.0),
        ([(10, 40), (15, 30)], 30.0),
        ([(10, 20), (1000, 1010)], 20.0),
        ([(15, 30), (10, 20)], 20.0),
        ([(90, None)], 10.0),
        ([(10, 20), (90, None), (95, 97)], 20.0),
    ],
)
def test_time_counts_while_a_trial_is_open_and_once_for_all_open_ones(
    spans: list[tuple[float, float | None]], active_s: float
) -> None:
    trials = [a_measured_trial(created_at=begin, closed_at=end) for begin, end in spans]
    assert active_seconds(trials, now=100.0) == active_s


def limits(**changes: Any) -> Limits:
    return Limits(**{"trials": None, "hours": None, "retries": 0, **changes})


def spent(**changes: Any) -> Spent:
    return Spent(**{"launched": 0, "active_s": 0.0, "gpu_s": 0.0, **changes})


@pytest.mark.parametrize(
    ("asked", "below", "at", "reason"),
    [
        ({"gpu_hours": 2.0}, {"gpu_s": 7199.0}, {"gpu_s": 7200.0}, StopReason.GPU_HOURS),
        ({"cost": 6.0, "price_per_gpu_hour": 3.0}, {"gpu_s": 7199.0}, {"gpu_s": 7200.0}, StopReason.COST),
        ({"failures": 5}, {"failures": 4}, {"failures": 5}, StopReason.FAILURES),
        ({"patience": 9}, {"without_improvement": 8}, {"without_improvement": 9}, StopReason.PATIENCE),
    ],
)
def test_each_limit_is_reached_at_its_value(
    asked: dict[str, Any], below: dict[str, Any], at: dict[str, Any], reason: StopReason
) -> None:
    assert limits(**asked).reached(spent(**below)) is None
    assert limits(**asked).reached(spent(**at)) is reason
    assert limits().reached(spent(**at)) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"hours": 1.0}, StopReason.HOURS),
        ({"gpu_hours": 2.0}, StopReason.GPU_HOURS),
        ({"cost": 4.0, "price_per_gpu_hour": 2.0}, StopReason.COST),
    ],
)
def test_a_limit_is_reached_early_by_what_the_confirmation_will_need(
    asked: dict[str, Any], reason: StopReason
) -> None:
    used = spent(active_s=3000.0, gpu_s=6000.0)
    assert limits(**asked).reached(used) is None
    assert limits(**asked).reached(used, spent(active_s=599.0, gpu_s=1199.0)) is None
    assert limits(**asked).reached(used, spent(active_s=600.0, gpu_s=1200.0)) is reason


def test_the_confirmation_takes_nothing_from_the_trials() -> None:
    assert limits(trials=3).reached(spent(launched=2), spent(launched=9)) is None


def test_after_trials_patience_or_failures_the_confirmation_is_still_launched() -> None:
    ends = {reason for reason in StopReason if reason.is_spent}
    assert ends == {StopReason.HOURS, StopReason.GPU_HOURS, StopReason.COST, StopReason.INTERRUPTED}


def test_only_launched_trials_count_as_launched_and_each_once() -> None:
    assert launched([a_measured_trial(number=1, lost=1), a_trial(number=2, state=State.REJECTED)]) == 1


# ---------------------------------------------------------------------- failures in a row


def failed(number: int, kind: FailureKind = FailureKind.CRASHED, **changes: Any) -> Trial:
    """Return a failed trial that ended as many seconds after the start as its number says."""
    outcome = Failure(kind=kind, message="no")
    return a_trial(number=number, outcome=outcome, closed_at=float(number), **changes)


def measured(number: int, tokens_per_s: float = 100.0, error: float | None = None, **changes: Any) -> Trial:
    seen = a_measurement(tokens_per_s=tokens_per_s, relative_error=error)
    return a_measured_trial(**{"number": number, "outcome": seen, "closed_at": float(number), **changes})


@pytest.mark.parametrize(
    ("trials", "since", "row"),
    [
        ([], 0.0, []),
        ([failed(1), failed(2)], 0.0, [2, 1]),
        ([failed(1), measured(2), failed(3)], 0.0, [3]),
        ([failed(1), measured(2)], 0.0, []),
        ([failed(1, FailureKind.HUNG), failed(2), failed(3)], 0.0, [3, 2]),
        ([failed(1), failed(2), failed(3)], 2.0, [3, 2]),
        ([failed(3), failed(1), measured(2)], 0.0, [3]),
        ([failed(1), failed(2, FailureKind.GPU_OOM), failed(3)], 0.0, [3]),
        ([failed(1), failed(2, attempts=0), failed(3)], 0.0, [3, 1]),
        ([failed(1), a_trial(number=2, state=State.RUNNING)], 0.5, [1]),
    ],
    ids=[
        *("no trial", "alike", "one ran between", "the latest ran", "of two kinds", "of an earlier start"),
        *("by their ends", "out of memory is none", "one was not launched", "one still runs"),
    ],
)
def test_failures_in_a_row_are_of_one_kind_and_of_this_start(
    trials: list[Trial], since: float, row: list[int]
) -> None:
    assert [trial.number for trial in failures_in_a_row(trials, since)] == row


# ---------------------------------------------------------------------- patience


# The machine is a fifth faster when trial 2 ends, so what is left of its gain is less than launch noise.
FASTER = a_repeat(Purpose.DRIFT, outcome=a_measurement(tokens_per_s=120.0, step_s=0.25 / 1.2), ended_at=2.0)


@pytest.mark.parametrize(
    ("trials", "waited"),
    [
        ([], 0),
        ([measured(1)], 0),
        ([measured(1), measured(2, 90.0), failed(3)], 2),
        ([measured(1), measured(2, 110.0)], 0),
        ([measured(1), measured(2, 100.4)], 1),
        ([measured(1), measured(2, 100.4), measured(3, 100.8)], 0),
        ([measured(1), measured(2, 103.0, error=0.05)], 1),
        ([measured(1), measured(2, 100.4, error=0.001)], 0),
        ([measured(2, 110.0), measured(1)], 0),
        ([measured(1, repeats=(FASTER,)), measured(2, 130.0)], 1),
        ([measured(1), measured(2, 110.0, state=State.STOPPED)], 1),
        ([measured(1), measured(2, state=State.REUSED)], 0),
        ([measured(1), measured(2, origin=Origin.USER), measured(3, 50.0, is_single_gpu=True)], 0),
        ([failed(1), failed(2)], 2),
    ],
    ids=[
        *("no trial", "the first", "worse", "better", "better by noise", "better by noise twice"),
        *("noisy by its own word", "exact by its own word", "by their ends", "on a faster machine"),
        *("stopped", "reused", "not of the search", "nothing measured"),
    ],
)
def test_patience_counts_trials_of_the_search_since_the_best_improved_beyond_noise(
    trials: list[Trial], waited: int
) -> None:
    assert without_improvement(trials, [GOAL]) == waited


def test_less_is_an_improvement_where_the_goal_is_minimised() -> None:
    time = Goal(name="time_to_tokens", tokens=1e6)
    assert without_improvement([measured(1), measured(2, 110.0)], [time]) == 0
    assert without_improvement([measured(1), measured(2, 90.0)], [time]) == 1


def sized(number: int, tokens_per_s: float, peak_bytes: int) -> Trial:
    seen = a_measurement(tokens_per_s=tokens_per_s, peak_bytes=peak_bytes)
    return a_measured_trial(number=number, outcome=seen, closed_at=float(number))


@pytest.mark.parametrize(
    ("second", "waited"),
    [((90.0, 50), 0), ((110.0, 200), 0), ((90.0, 100), 1), ((100.2, 100), 1), ((90.0, 200), 1)],
    ids=["slower and smaller", "faster and larger", "slower", "faster by noise", "worse by both"],
)
def test_with_two_goals_a_trial_that_joins_the_front_is_an_improvement(
    second: tuple[float, int], waited: int
) -> None:
    goals = [GOAL, Goal(name="peak_bytes")]
    assert without_improvement([sized(1, 100.0, 100), sized(2, *second)], goals) == waited


def test_where_launches_are_known_to_differ_by_more_a_gain_must_be_larger() -> None:
    again = [a_measurement(tokens_per_s=speed) for speed in (94.0, 106.0)]
    repeats = [a_repeat(Purpose.DRIFT, outcome=seen) for seen in again]
    better = measured(2, 108.0)
    assert without_improvement([measured(1), better], [GOAL]) == 0
    assert without_improvement([measured(1, repeats=repeats), better], [GOAL]) == 1


def test_time_counts_while_a_closed_trial_is_measured_again() -> None:
    repeats = (
        a_repeat(round=1, outcome=a_measurement(), started_at=25.0, ended_at=40.0),
        a_repeat(round=2, started_at=90.0),
    )
    trial = a_measured_trial(created_at=10.0, closed_at=20.0, repeats=repeats)
    assert active_seconds([trial], now=100.0) == 10.0 + 15.0 + 10.0
