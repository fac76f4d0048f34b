"""The value of a trial by a goal, and the best trial."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.examples import a_measured_trial, a_measurement, a_repeat, a_trial
from train_entry.contract import (
    Attempt,
    Failure,
    FailureKind,
    Goal,
    Purpose,
    Ranking,
    State,
    Trial,
    launch_noise,
    on_front,
    undrifted,
)

SPEED = Goal(name="tokens_per_s")
TIME = Goal(name="time_to_tokens", tokens=1e6)
BYTES = Goal(name="peak_bytes")
FAILED = Failure(kind=FailureKind.CRASHED, message="no")


def trial(number: int, tokens_per_s: float = 100.0, peak_bytes: int = 100, **changes: Any) -> Trial:
    """A trial with 250 ms per step, measured at a time of ten seconds times its number."""
    seen = a_measurement(tokens_per_s=tokens_per_s, peak_bytes=peak_bytes)
    return a_measured_trial(**{"number": number, "outcome": seen, "closed_at": 10.0 * number, **changes})


def look(ended_at: float, slower: float) -> Attempt:
    """A drift repeat of the reference that takes `slower` times as long."""
    return a_repeat(Purpose.DRIFT, outcome=a_measurement(step_s=0.25 * slower), ended_at=ended_at)


def order(goal: Goal, *trials: Trial) -> list[int]:
    return [each.number for _, each in Ranking(trials, goal).contenders]


# ---------------------------------------------------------------------- the best trial


@pytest.mark.parametrize(("goal", "numbers"), [(SPEED, [2, 1, 3]), (TIME, [2, 1, 3]), (BYTES, [3, 1, 2])])
def test_the_best_comes_first_by_each_goal(goal: Goal, numbers: list[int]) -> None:
    trials = (trial(1, 100.0, 20), trial(2, 120.0, 30), trial(3, 90.0, 10))
    found = Ranking(trials, goal)
    assert order(goal, *trials) == numbers
    assert found.best is trials[numbers[0] - 1]
    assert found.best_value == found.value(trials[numbers[0] - 1])


def test_of_equals_the_one_tried_first_is_the_best() -> None:
    assert order(SPEED, trial(3), trial(1), trial(2)) == [1, 2, 3]


def test_only_measured_trials_of_the_studys_own_ranks_can_win() -> None:
    others = [trial(2, 900.0, state=State.SUSPECT), trial(3, 900.0, state=State.STOPPED)]
    others += [trial(4, 900.0, state=State.REUSED), trial(5, outcome=FAILED), a_trial(number=6)]
    assert order(SPEED, trial(1), *others, trial(7, 900.0, is_single_gpu=True)) == [1]


def test_where_training_is_broken_there_is_no_value() -> None:
    diverged = trial(1, outcome=a_measurement(tokens_per_s=900.0, loss=math.nan))
    assert Ranking([diverged], SPEED).value(diverged) is None
    assert order(SPEED, diverged, trial(2)) == [2]


def test_what_failed_or_never_ran_has_no_value() -> None:
    found = Ranking([trial(1, outcome=FAILED), a_trial(number=2)], SPEED)
    assert [found.value(each) for each in found.trials] == [None, None]
    assert (found.best, found.best_value, found.best_baseline) == (None, None, None)


def test_the_best_baseline_is_the_best_of_those_tried_by_hand() -> None:
    slow, fast = trial(1, 80.0, baseline="ddp"), trial(2, 90.0, baseline="zero1")
    alone = trial(3, 900.0, baseline="1 GPU", is_single_gpu=True)
    assert Ranking([slow, fast, alone, trial(4, 100.0)], SPEED).best_baseline is fast
    assert Ranking([trial(4, 100.0)], SPEED).best_baseline is None


# ---------------------------------------------------------------------- drift


def test_values_are_those_on_the_machine_as_it_was_at_first() -> None:
    """The speed falls linearly from 1 at 10 s to 0.8 at 30 s, so it is 0.9 at 20 s."""
    reference = trial(1, 100.0, baseline="ddp", repeats=(look(30.0, slower=1.25),))
    halfway, last = trial(2, 90.0), trial(3, 80.0)
    found = Ranking([reference, halfway, last], SPEED)
    assert [found.drift(each) for each in found.trials] == pytest.approx([1.0, 0.9, 0.8])
    assert [found.value(each) for each in found.trials] == pytest.approx([100.0, 100.0, 100.0])


def test_a_trial_measured_after_the_latest_look_is_corrected_by_it() -> None:
    reference = trial(1, 100.0, baseline="ddp", repeats=(look(20.0, slower=1.25),))
    after = trial(9, 88.0)
    found = Ranking([reference, after], SPEED)
    assert (found.drift(after), found.value(after)) == pytest.approx((0.8, 110.0))
    assert found.best is after


def test_times_are_corrected_the_other_way_and_bytes_not_at_all() -> None:
    reference = trial(1, 100.0, 70, repeats=(look(20.0, slower=1.25),))
    slowed = trial(2, 80.0, 60)
    trials = (reference, slowed)
    assert Ranking(trials, TIME).value(slowed) == pytest.approx(1e6 / 100.0)
    assert (Ranking(trials, BYTES).value(slowed), Ranking(trials, BYTES).drift(slowed)) == (60, 1.0)


@pytest.mark.parametrize(
    ("goal", "value", "expected"), [(SPEED, 80.0, 100.0), (TIME, 100.0, 80.0), (BYTES, 7, 7)]
)
def test_a_value_is_undrifted_by_its_goal(goal: Goal, value: float, expected: float) -> None:
    assert undrifted(goal, value, 0.8) == pytest.approx(expected)
    assert undrifted(goal, None, 0.8) is None


# ---------------------------------------------------------------------- noise, the front


def test_launches_differ_by_two_standard_deviations_of_their_logarithms() -> None:
    again = (a_repeat(outcome=a_measurement(tokens_per_s=110.0)), a_repeat(outcome=FAILED))
    expected = 2 * math.log(1.1) / math.sqrt(2)
    assert launch_noise([trial(1, 100.0, repeats=again), trial(2, 50.0)], SPEED) == pytest.approx(expected)


def test_where_nothing_was_measured_again_nothing_is_known_of_launches() -> None:
    assert launch_noise([trial(1), trial(2, 50.0)], SPEED) is None


def test_a_point_is_on_the_front_unless_another_is_as_good_everywhere_and_better_somewhere() -> None:
    assert on_front([(3, 1), (2, 2), (2, 1), (1, 3), (1, 3)]) == [True, True, False, True, True]
