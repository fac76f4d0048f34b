"""Rank trials: the best, the order of the others, the Pareto front. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from analysis.load import Study
from analysis.row import TrialRow
from train_entry.contract import State, on_front

# What was seen before what was not; within a place, by the first goal, then by number.
PLACES = {
    State.MEASURED: 0,
    State.REUSED: 1,
    State.STOPPED: 2,
    State.SUSPECT: 2,
    State.INFEASIBLE: 3,
    State.FAILED: 4,
    State.REJECTED: 5,
    State.CANCELLED: 6,
    State.RUNNING: 7,
    State.QUEUED: 8,
}


def ranked(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """Sort trials by their first measurements, the best first; single-GPU baselines come last."""
    return sorted(rows, key=lambda row: (PLACES[row.state], row.is_single_gpu, -_score(row), row.number))


def best(rows: Iterable[TrialRow]) -> TrialRow | None:
    """Return the best trial that can win, of equals the one tried first; None if no trial can win."""
    return next(iter(ranked(row for row in rows if row.can_win)), None)


def best_baseline(rows: Iterable[TrialRow]) -> TrialRow | None:
    """Return the best of the baselines that can win."""
    return best(row for row in rows if row.baseline is not None)


def winner(study: Study) -> TrialRow | None:
    """Return the winner of the confirmation, or else the best of the trials measured once."""
    return confirmed(study) or best(study.rows)


def confirmed(study: Study) -> TrialRow | None:
    """Return the winner of the confirmation; None if there was none, or if its trial cannot win any more."""
    number = study.winner.trial if study.winner else None
    return next((row for row in study.rows if row.number == number and row.can_win), None)


def in_order(study: Study) -> list[TrialRow]:
    """Return all trials as tables list them: the winner first, confirmed ones in the order of their repeats.

    Confirmed trials share the places of their first measurements: the machine may be a little faster or
    slower when it repeats them, so repeats compare with each other only.
    """
    rows = ranked(study.rows)
    first = confirmed(study)
    if study.winner is None or first is None:
        return rows
    repeated = [first.number, *(s.trial for s in study.winner.standings if s.trial != first.number)]
    by_number = {row.number: row for row in rows if row.can_win}
    known = [number for number in repeated if number in by_number]
    turn = iter(known)
    rows = [by_number[next(turn)] if row.number in known else row for row in rows]
    return [first, *(row for row in rows if row is not first)]


def pareto(study: Study) -> frozenset[int]:
    """Return the numbers of the trials on the Pareto front; none if the study has one goal."""
    if len(study.goals) < 2:
        return frozenset()
    points = {row.number: _scores(study, row) for row in study.rows if row.can_win}
    complete = {number: scores for number, scores in points.items() if scores is not None}
    are_on = on_front(list(complete.values()))
    return frozenset(number for number, is_on in zip(complete, are_on, strict=True) if is_on)


def _scores(study: Study, row: TrialRow) -> tuple[float, ...] | None:
    """Return the score of each goal, larger is better; None if a goal's value is unknown."""
    pairs = list(zip(study.goals, row.sought, strict=True))
    found = [goal.score(value) for goal, value in pairs if value is not None]
    return tuple(found) if len(found) == len(pairs) else None


def _score(row: TrialRow) -> float:
    """Return the score, or minus infinity if it is unknown, so that such rows come last of their group."""
    return row.score if row.score is not None and math.isfinite(row.score) else -math.inf
