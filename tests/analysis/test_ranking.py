from __future__ import annotations

import dataclasses
import math

import pytest

from analysis.ranking import PLACES, best, best_rung, can_win, front, ranked
from analysis.row import TrialRow
from train_entry.contract import Origin, State


def row(number: int, state: State = State.MEASURED, score: float | None = None) -> TrialRow:
    return TrialRow(number=number, state=state, origin=Origin.SAMPLER, strategy="zero1", score=score)


def test_every_state_has_a_place() -> None:
    assert set(PLACES) == set(State)


def test_measured_trials_are_ordered_by_the_objective_the_largest_first() -> None:
    rows = [row(0, score=5.0), row(1, score=50.0), row(2, score=7.0)]
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
    rows = [row(4, score=9.0), row(2, score=9.0)]
    assert [found.number for found in ranked(rows)] == [2, 4]
    assert best(rows) == rows[1]


@pytest.mark.parametrize("state", [state for state in State if state is not State.MEASURED])
def test_only_a_measured_trial_can_win_however_fast_another_was(state: State) -> None:
    rows = [row(0, state, score=1e9), row(1, score=1.0)]
    assert best(rows) == rows[1]
    assert best(rows[:1]) is None


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_never_wins_and_comes_last_of_the_measured(score: float | None) -> None:
    rows = [row(0, score=score), row(1, score=-2.0), row(2, State.REUSED, 5.0)]
    assert [found.number for found in ranked(rows)] == [1, 0, 2]
    assert best(rows) == rows[1]
    assert not can_win(rows[0])


def test_nothing_is_best_where_there_are_no_trials() -> None:
    assert best([]) is None


def test_a_yardstick_never_wins_and_stands_behind_those_measured() -> None:
    alone = dataclasses.replace(row(0, score=90.0), is_yardstick=True)
    rows = [alone, row(1, score=1.0), row(2, State.REUSED, 5.0)]
    assert [found.number for found in ranked(rows)] == [1, 0, 2]
    assert best(rows) == rows[1]
    assert not can_win(alone)


def test_the_best_rung_is_the_best_of_the_ladder() -> None:
    rungs = [dataclasses.replace(row(number, score=10.0 * number), rung="zero1") for number in (1, 2)]
    failed = dataclasses.replace(row(3, State.FAILED, 90.0), rung="zero3")
    assert best_rung([*rungs, failed, row(4, score=99.0)]) == rungs[1]
    assert best_rung([row(4, score=99.0)]) is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], []),
        ([(1.0, 1.0)], [True]),
        ([(1.0, 9.0), (9.0, 1.0), (5.0, 5.0), (4.0, 4.0)], [True, True, True, False]),
        ([(1.0, 2.0), (1.0, 1.0)], [True, False]),  # no worse in one, worse in the other
        ([(3.0, 3.0), (3.0, 3.0)], [True, True]),  # equals do not dominate each other
        ([(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (1.0, 2.0, 1.0)], [True, True, False]),
        ([(-1.0, -9.0), (-2.0, -9.0)], [True, False]),
    ],
)
def test_the_front_holds_what_no_other_beats_by_every_goal(
    points: list[tuple[float, ...]], expected: list[bool]
) -> None:
    assert front(points) == expected
