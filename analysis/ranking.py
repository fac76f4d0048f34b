"""Which trial is best, and in which order the others follow."""

from __future__ import annotations

import math
from collections.abc import Iterable

from analysis.load import TrialRow
from train_entry.contract import State

# What was seen before what was not; within a place, by the objective, then by number.
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


def can_win(row: TrialRow) -> bool:
    """Only what was measured, to a finite number."""
    return row.state is State.MEASURED and _score(row) > -math.inf


def ranked(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """The best first."""
    return sorted(rows, key=lambda row: (PLACES[row.state], -_score(row), row.number))


def best(rows: Iterable[TrialRow]) -> TrialRow | None:
    """The winner; None where nothing can win. Of equals, the one tried first."""
    return next(iter(ranked(row for row in rows if can_win(row))), None)


def _score(row: TrialRow) -> float:
    """The objective, or minus infinity where it is not known: such rows come last in their place."""
    value = row.objective
    return value if value is not None and math.isfinite(value) else -math.inf
