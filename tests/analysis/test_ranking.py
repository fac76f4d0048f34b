from __future__ import annotations

import math

import pytest

from analysis.load import TrialRow
from analysis.ranking import PLACES, best, can_win, ranked
from train_entry.contract import Origin, State


def row(number: int, state: State = State.MEASURED, objective: float | None = None) -> TrialRow:
    return TrialRow(number=number, state=state, origin=Origin.SAMPLER, strategy="zero1", objective=objective)


def test_every_state_has_a_place() -> None:
    assert set(PLACES) == set(State)


def test_measured_trials_are_ordered_by_the_objective_the_largest_first() -> None:
    rows = [row(0, objective=5.0), row(1, objective=50.0), row(2, objective=7.0)]
    assert [found.number for found in ranked(rows)] == [1, 2, 0]


def test_what_was_seen_precedes_what_was_not() -> None:
    order = [
        State.MEASURED,
        State.REUSED,
        State.STOPPED,
        State.INFEASIBLE,
        State.FAILED,
        State.REJECTED,
        State.CANCELLED,
        State.RUNNING,
        State.QUEUED,
    ]
    rows = [row(number, state) for number, state in enumerate(reversed(order))]
    assert [found.state for found in ranked(rows)] == order


def test_stopped_and_suspect_trials_share_a_place_by_their_objective() -> None:
    rows = [row(0, State.STOPPED, 1.0), row(1, State.SUSPECT, 3.0), row(2, State.STOPPED, 2.0)]
    assert [found.number for found in ranked(rows)] == [1, 2, 0]


def test_equals_are_in_the_order_they_were_tried_and_the_first_is_best() -> None:
    rows = [row(4, objective=9.0), row(2, objective=9.0)]
    assert [found.number for found in ranked(rows)] == [2, 4]
    assert best(rows) == rows[1]


@pytest.mark.parametrize("state", [state for state in State if state is not State.MEASURED])
def test_only_a_measured_trial_can_win_however_fast_another_was(state: State) -> None:
    rows = [row(0, state, objective=1e9), row(1, objective=1.0)]
    assert best(rows) == rows[1]
    assert best(rows[:1]) is None


@pytest.mark.parametrize("objective", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_never_wins_and_comes_last_of_the_measured(objective: float | None) -> None:
    rows = [row(0, objective=objective), row(1, objective=-2.0), row(2, State.REUSED, 5.0)]
    assert [found.number for found in ranked(rows)] == [1, 0, 2]
    assert best(rows) == rows[1]
    assert not can_win(rows[0])


def test_nothing_is_best_where_there_are_no_trials() -> None:
    assert best([]) is None
