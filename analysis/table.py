"""The comparison table: for people on a terminal, for programs as table.csv."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal, TextIO

from rich.table import Table
from rich.text import Text

from analysis.load import LOSS_STEPS, Study, TrialRow
from analysis.notes import notes
from analysis.ranking import PLACES, best, can_win, ranked
from analysis.terminal import console_on, needed_width, plain_table, print_whole
from analysis.text import figure, raw, short, stacked
from train_entry.contract import MemoryKind, Scalar, State, write_atomic

MAX_ROWS = 40  # unless everything is asked for

# Column of table.csv to its value, so that a name and its numbers cannot come apart.
_CELLS: Mapping[str, Callable[[TrialRow], Scalar]] = {
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
}
_LARGEST_FIRST = ("tokens_per_s", "tokens_per_s_per_gpu")


class UnknownColumn(ValueError):
    """A table has no column of this name; the message lists those it has."""


def columns(study: Study) -> tuple[str, ...]:
    """Of table.csv. A knob that a fixed column shows already (strategy) has none of its own."""
    knobs = (knob for knob in study.knobs if knob not in _CELLS)
    return (*_CELLS, *knobs, "overrides")


def write_csv(study: Study) -> Path:
    """Replace table.csv: one row a trial, best first, raw numbers, blank where not known."""
    names = columns(study)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([raw(_cell(row, name)) for name in names] for row in ranked(study.rows))
    write_atomic(study.directory.table, text.getvalue())
    return study.directory.table


def show(study: Study, stream: TextIO, *, sort: str | None = None, everything: bool = False) -> None:
    """Print the table and what belongs below it. A number is never cut off, however narrow the terminal."""
    console = console_on(stream)
    table = render(study, sort=sort, everything=everything)
    if needed_width(console, table) > console.width:
        table = render(study, sort=sort, everything=everything, narrow=True)
    print_whole(console, table)
    for note in notes(study, everything=everything):
        console.print(note, soft_wrap=True)


def render(study: Study, *, sort: str | None = None, everything: bool = False, narrow: bool = False) -> Table:
    """The ranked table; `narrow` leaves out what other columns or table.csv tell. Raises UnknownColumn."""
    rows = ranked(study.rows) if sort is None else _sorted(study, sort)
    shown = [row for row in rows if everything or row.state is not State.REJECTED]
    shown = shown if everything else shown[:MAX_ROWS]
    table = plain_table(
        f"study {study.record.name}: {study.record.model.name}, by {study.record.objective}",
        "\n".join(_caption(study, len(rows) - len(shown), narrow)),
        narrow,
    )
    parts = [part for part in _columns(study) if not (narrow and part.wide_only)]
    for part in parts:
        table.add_column(Text(part.header), justify=part.justify, no_wrap=part.justify == "right")
    winner = best(study.rows)
    for row in shown:
        style = "bold green" if row is winner else "" if PLACES[row.state] < 3 else "dim"
        table.add_row(*(Text(part.text(row)) for part in parts), style=style)
    return table


def _caption(study: Study, hidden: int, narrow: bool) -> list[str]:
    rows = study.rows
    states = Counter(row.state for row in sorted(rows, key=lambda row: PLACES[row.state]))
    counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "none yet"
    lines = [f"trials: {counts}; {sum(row.gpu_s for row in rows) / 3600:.3g} GPU-hours in total"]
    if study.loss_tokens is not None:
        where = "of the checks" if study.checked else "the most that every measured trial reached"
        lines.append(f"loss at {study.loss_tokens:,} tokens, {where} (mean of the last {LOSS_STEPS} steps)")
    lines.append("± is the distance between the quartiles of the step times, over their median")
    if any(row.shared for row in rows):
        lines.append("* another trial ran on the same node meanwhile")
    if any(row.memory_kind is MemoryKind.HOST_RSS for row in rows):
        lines.append("memory is host RSS, the resident set of the fullest rank's process: a run without GPU")
    if any(row.is_refused and row.estimate for row in rows):
        lines.append("~ is estimated: the trial was not launched, as it cannot fit")
    if hidden:
        lines.append(f"not shown: {hidden} of {len(rows)} trials (rejected, or further down): --all")
    if narrow:
        lines.append("tokens/s and GPU time per trial: in table.csv, or on a wider terminal")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    header: str
    text: Callable[[TrialRow], str]
    justify: Literal["left", "right"] = "right"
    wide_only: bool = False


def _columns(study: Study) -> list[_Column]:
    ranks = {row.number: str(rank) for rank, row in enumerate(filter(can_win, ranked(study.rows)), 1)}
    kinds = {row.memory_kind for row in study.rows if row.memory_kind is not None}
    memory = "RSS GiB" if kinds == {MemoryKind.HOST_RSS} else "peak GiB"
    in_hours = any(row.gpu_s >= 3600 for row in study.rows)
    unit, unit_s = ("GPU-h", 3600) if in_hours else ("GPU-s", 1)
    mfu = _Column(header="MFU", text=lambda row: "" if row.mfu is None else f"{row.mfu:.1%}")
    return [
        _Column(header="#", text=lambda row: ranks.get(row.number, "")),
        _Column(header="trial", text=lambda row: f"{row.number:04d}"),
        _Column(header="state", text=_state, justify="left"),
        _Column(header="strategy", text=lambda row: row.strategy or "", justify="left"),
        *(_knob_column(knob) for knob in knobs_that_differ(study)),
        _Column(header="tokens/s\n/GPU", text=lambda row: figure(row.tokens_per_s_per_gpu)),
        _Column(header="±", text=_spread),
        _Column(header="tokens/s", text=lambda row: figure(row.tokens_per_s), wide_only=True),
        _Column(header="step\nms", text=lambda row: figure(row.step_s, 1e-3)),
        _Column(header=memory.replace(" ", "\n"), text=_memory),
        _Column(header="loss", text=lambda row: "" if row.loss is None else f"{row.loss:.3f}"),
        *([mfu] if any(row.mfu is not None for row in study.rows) else []),
        _Column(header=unit, text=lambda row: figure(row.gpu_s or None, unit_s), wide_only=True),
    ]


def knobs_that_differ(study: Study) -> list[str]:
    """Knobs with more than one value so far; all of them while there is but one trial to see."""
    knobs = [knob for knob in study.knobs if knob not in _CELLS]
    if len(study.rows) < 2:
        return knobs
    return [knob for knob in knobs if len({short(row.values.get(knob)) for row in study.rows}) > 1]


def _knob_column(knob: str) -> _Column:
    return _Column(header=stacked(knob), text=lambda row: short(row.values.get(knob)))


def _state(row: TrialRow) -> str:
    mark = "*" if row.shared else ""
    if row.state is State.REUSED and row.reused_from is not None:
        return f"{row.state}{mark} {row.reused_from:04d}"
    if row.is_refused:
        return f"{row.state} estimated"
    if row.failure is not None and row.failure.kind.value != row.state.value:
        return f"{row.state}{mark} {row.failure.kind}"
    return f"{row.state}{mark}"


def _memory(row: TrialRow) -> str:
    if row.is_refused and row.estimate:
        return f"~{figure(row.estimate.peak_bytes, 2**30)}"
    return figure(row.peak_bytes, 2**30)


def _spread(row: TrialRow) -> str:
    return f"{row.step_s_iqr / row.step_s:.1%}" if row.step_s and row.step_s_iqr is not None else ""


def _cell(row: TrialRow, column: str) -> Scalar:
    if column == "overrides":
        return shlex.join(row.overrides)
    return _CELLS[column](row) if column in _CELLS else row.values.get(column)


def _sorted(study: Study, column: str) -> list[TrialRow]:
    if column not in columns(study):
        raise UnknownColumn(f"no column '{column}'; sort by one of: {', '.join(columns(study))}")
    return sorted(ranked(study.rows), key=lambda row: _sort_key(column, _cell(row, column)))


def _sort_key(column: str, value: Scalar) -> tuple[int, float, str]:
    """Numbers, then words, then what is not known."""
    if isinstance(value, str):
        return (1, 0.0, value)
    if value is None or math.isnan(value):
        return (2, 0.0, "")
    return (0, -value if column in _LARGEST_FIRST else value, "")
