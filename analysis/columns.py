"""The columns of table.csv: names that other programs rely on, and their values."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from analysis.load import Study
from analysis.ranking import pareto
from analysis.row import TrialRow
from analysis.text import cell_text
from train_entry.contract import Scalar

Cell = Callable[[TrialRow], Scalar]

# Each column with its value. New columns go to the end, since programs may read by position.
_CELLS: Mapping[str, Cell] = {
    "number": attrgetter("number"),
    "state": attrgetter("state.value"),
    "failure": lambda row: row.failure.kind.value if row.failure else None,
    "origin": attrgetter("origin.value"),
    "strategy": attrgetter("strategy"),
    "tokens_per_s": attrgetter("tokens_per_s"),
    "tokens_per_s_per_gpu": attrgetter("tokens_per_s_per_gpu"),
    "step_s": attrgetter("step_s"),
    "peak_bytes": attrgetter("peak_bytes"),
    "loss": attrgetter("loss"),
    "gpu_s": attrgetter("gpu_s"),
    "rung": attrgetter("baseline"),
    "parent": attrgetter("parent"),
    "yardstick": lambda row: row.is_single_gpu or None,
    "steps": attrgetter("steps"),
    "ended": lambda row: row.ended.value if row.ended else None,
    "spared_steps": lambda row: None if row.steps is None else row.spared_steps,
    "relative_error": attrgetter("relative_error"),
    "drift": lambda row: None if row.steps is None else row.drift,
    "throttled": lambda row: "+".join(row.cards.throttled) if row.cards else None,
    "clock_mhz": lambda row: row.cards.clock_mhz if row.cards else None,
    "temperature_c": lambda row: row.cards.temperature_c if row.cards else None,
    "repeats": lambda row: row.repeats or None,
}
# Columns whose values need more than the row.
_OF_STUDY = ("confirmed", "time_to_tokens_s", "cost", "pareto")
FIXED = (*_CELLS, *_OF_STUDY)
_LARGEST_FIRST = ("tokens_per_s", "tokens_per_s_per_gpu")


class UnknownColumn(ValueError):
    """The table has no column of this name; the message lists the columns it has."""


def columns(study: Study) -> tuple[str, ...]:
    """Return the columns of table.csv. A knob that a fixed column shows (strategy) gets no second one."""
    return (*FIXED, *knobs(study), "overrides")


def knobs(study: Study) -> list[str]:
    return [knob for knob in study.knobs if knob not in FIXED]


def knobs_that_differ(study: Study) -> list[str]:
    """Return the knobs with more than one value so far; all knobs while there is one trial."""
    if len(study.rows) < 2:
        return knobs(study)
    return [knob for knob in knobs(study) if len({cell_text(row.values.get(knob)) for row in study.rows}) > 1]


def cells(study: Study) -> dict[str, Cell]:
    """Map each column, in order, to the function that gives its value for a row."""
    repeated = {standing.trial: standing.value for standing in study.winner.standings} if study.winner else {}
    on_front = pareto(study)
    of_study: dict[str, Cell] = {
        "confirmed": lambda row: repeated.get(row.number),
        "time_to_tokens_s": _goal_cell(study, "time_to_tokens"),
        "cost": _goal_cell(study, "cost"),
        "pareto": lambda row: row.number in on_front or None,
    }
    of_knobs = {knob: _knob_cell(knob) for knob in knobs(study)}
    return {**_CELLS, **of_study, **of_knobs, "overrides": lambda row: shlex.join(row.overrides)}


def sorted_by(study: Study, column: str, rows: Iterable[TrialRow]) -> list[TrialRow]:
    """Sort rows by a column; equal rows stay in their order. Raises UnknownColumn."""
    cell = cells(study).get(column)
    if cell is None:
        raise UnknownColumn(f"no column '{column}'; sort by one of: {', '.join(columns(study))}")
    return sorted(rows, key=lambda row: _sort_key(column, cell(row)))


def goal_cell(study: Study, name: str) -> Cell | None:
    """Return the function that gives a goal's value, in its unit and without drift; None: no such goal."""
    place = next((place for place, goal in enumerate(study.goals) if goal.name == name), None)
    return None if place is None else lambda row: row.sought[place] if row.sought else None


def _goal_cell(study: Study, name: str) -> Cell:
    return goal_cell(study, name) or (lambda row: None)


def _knob_cell(knob: str) -> Cell:
    return lambda row: row.values.get(knob)


def _sort_key(column: str, value: Scalar) -> tuple[int, float, str]:
    """Order numbers before words, and words before unknown values."""
    if isinstance(value, str):
        return (1, 0.0, value)
    if value is None or math.isnan(value):
        return (2, 0.0, "")
    return (0, -value if column in _LARGEST_FIRST else value, "")
