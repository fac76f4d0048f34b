from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from analysis.load import load_study
from analysis.ranking import PLACES, best, best_baseline, ranked
from analysis.row import TrialRow
from tests.analysis.conftest import StudyBuilder
from tests.support.examples import a_measurement
from train_entry.contract import Origin, State, on_front


def row(number: int, state: State = State.MEASURED, score: float | None = None) -> TrialRow:
    can_win = state is State.MEASURED
    return TrialRow(
        number=number, state=state, origin=Origin.SAMPLER, strategy="zero1", score=score, can_win=can_win
    )


def rows_of(built: StudyBuilder) -> tuple[TrialRow, ...]:
    return load_study(built.directory).rows


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
def test_only_a_measured_trial_can_win_however_fast_another_was(built: StudyBuilder, state: State) -> None:
    is_timed = state in (State.STOPPED, State.SUSPECT, State.REUSED)
    outcome = a_measurement(tokens_per_s_per_gpu=1e9) if is_timed else None
    twin = 99 if state is State.REUSED else None
    built.trial(0, state, outcome=outcome, reused_from=twin)
    built.measured(1, tokens_per_s_per_gpu=1.0)
    rows = rows_of(built)
    assert (rows[0].state, rows[0].objective) == (state, 1e9 if is_timed else None)
    assert best(rows) == rows[1]
    assert best(rows[:1]) is None


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_comes_last_of_the_measured(score: float | None) -> None:
    rows = [row(0, score=score), row(1, score=-2.0), row(2, State.REUSED, 5.0)]
    assert [found.number for found in ranked(rows)] == [1, 0, 2]
    assert best(rows) == rows[1]


@pytest.mark.parametrize(
    "seen",
    [*({"tokens_per_s_per_gpu": speed} for speed in (math.nan, math.inf, -math.inf)), {"loss": math.nan}],
)
def test_what_is_not_finite_never_wins(built: StudyBuilder, seen: dict[str, Any]) -> None:
    built.measured(0, **seen)
    built.measured(1, tokens_per_s_per_gpu=-2.0)
    built.reused(2, 1)
    rows = rows_of(built)
    assert [found.number for found in ranked(rows)] == [1, 0, 2]
    assert best(rows) == rows[1]
    assert not rows[0].can_win


def test_nothing_is_best_where_there_are_no_trials() -> None:
    assert best([]) is None


def test_a_single_gpu_baseline_never_wins_and_stands_behind_those_measured(built: StudyBuilder) -> None:
    built.measured(0, tokens_per_s_per_gpu=90.0, trial={"is_single_gpu": True})
    built.measured(1, tokens_per_s_per_gpu=1.0)
    built.reused(2, 1)
    rows = rows_of(built)
    assert [found.number for found in ranked(rows)] == [1, 0, 2]
    assert best(rows) == rows[1]
    assert not rows[0].can_win


def test_the_best_baseline_is_the_best_of_the_baselines() -> None:
    baselines = [dataclasses.replace(row(number, score=10.0 * number), baseline="zero1") for number in (1, 2)]
    failed = dataclasses.replace(row(3, State.FAILED, 90.0), baseline="zero3")
    assert best_baseline([*baselines, failed, row(4, score=99.0)]) == baselines[1]
    assert best_baseline([row(4, score=99.0)]) is None


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
    assert on_front(points) == expected
