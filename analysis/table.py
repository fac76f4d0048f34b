"""The comparison table: for people on a terminal, for programs as table.csv."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.table import Table
from rich.text import Text

from analysis.account import account, account_line
from analysis.columns import cells, goal_cell, knobs_that_differ, sorted_by
from analysis.headline import headline
from analysis.load import LOSS_STEPS, Study
from analysis.notes import notes
from analysis.ranking import PLACES, in_order, pareto, winner
from analysis.row import TrialRow, came_from
from analysis.terminal import console_on, needed_width, plain_table, print_whole
from analysis.text import cell_text, figure, raw, stacked, title
from train_entry.contract import GIB, MemoryKind, Origin, State, digits, short, write_atomic
from train_entry.contract.study.goal_text import time_unit

MAX_ROWS = 40  # unless everything is asked for


def write_csv(study: Study) -> Path:
    """Replace table.csv: one row a trial, best first, raw numbers, blank where not known."""
    cell_of = cells(study)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(cell_of)
    writer.writerows([raw(cell(row)) for cell in cell_of.values()] for row in in_order(study))
    write_atomic(study.directory.table, text.getvalue())
    return study.directory.table


def show(study: Study, stream: TextIO, *, sort: str | None = None, everything: bool = False) -> None:
    """Print the headline, the table and the notes.

    A number is never cut off, however narrow the terminal.
    """
    console = console_on(stream)
    table = render(study, sort=sort, everything=everything)
    if needed_width(console, table) > console.width:
        table = render(study, sort=sort, everything=everything, narrow=True)
    console.print(Text(title(study.record), style="italic"), soft_wrap=True)
    for line in headline(study):
        console.print(Text(line, style="bold"), soft_wrap=True)
    print_whole(console, table)
    for note in notes(study, everything=everything):
        console.print(note, soft_wrap=True)


def render(study: Study, *, sort: str | None = None, everything: bool = False, narrow: bool = False) -> Table:
    """Return the ranked table; `narrow` drops what other columns or table.csv show. Raises UnknownColumn."""
    rows = in_order(study)
    rows = rows if sort is None else sorted_by(study, sort, rows)
    shown = [row for row in rows if everything or row.state is not State.REJECTED]
    shown = shown if everything else shown[:MAX_ROWS]
    table = plain_table("", "\n".join(_caption(study, len(rows) - len(shown), narrow)), narrow)
    parts = [part for part in _columns(study) if not (narrow and part.wide_only)]
    for part in parts:
        table.add_column(Text(part.header), justify=part.justify, no_wrap=part.justify == "right")
    first = winner(study)
    for row in shown:
        is_shown_dim = PLACES[row.state] >= 3 or row.is_single_gpu
        style = "bold green" if row is first else "dim" if is_shown_dim else ""
        table.add_row(*(Text(part.text(row)) for part in parts), style=style)
    return table


def _caption(study: Study, hidden: int, narrow: bool) -> Iterator[str]:
    rows = study.rows
    states = Counter(row.state for row in sorted(rows, key=lambda row: PLACES[row.state]))
    yield f"trials: {', '.join(f'{count} {state}' for state, count in states.items()) or 'none yet'}"
    yield account_line(account(study))
    if study.loss_tokens is not None:
        where = "from the checks" if study.checked else "which every measured trial reached"
        yield f"loss: mean of the last {LOSS_STEPS} steps up to {study.loss_tokens:,} tokens, {where}"
    yield "±: interquartile range of the step times / their median"
    yield from _marks(study)
    if _repeats_column(study) and not narrow:
        yield "repeats: mean of the repeated runs; trials with repeats are ranked by it"
    if hidden:
        yield f"not shown: {hidden} of {len(rows)} trials (rejected, or ranked lower): --all shows them"
    if narrow:
        yield "tokens/s, GPU time and origin of each trial: in table.csv, or on a wider terminal"


def _marks(study: Study) -> Iterator[str]:
    """Explain the marks that this table uses."""
    rows = study.rows
    if pareto(study):
        yield "Pareto: no other trial is at least as good in every goal and better in one"
    if any(row.is_single_gpu for row in rows):
        yield "single-GPU baseline: measures scaling; it cannot win"
    if any(row.state is State.STOPPED for row in rows):
        yield "stopped: ended early, once the trial was certain to be slower than the best"
    if any(row.shared for row in rows):
        yield "*: another trial ran on the same node at the same time"
    if any(_is_corrected(row) for row in rows):
        yield "^: speed and time are corrected for the machine's drift; table.csv has them as measured"
    if any(row.memory_kind is MemoryKind.HOST_RSS for row in rows):
        yield "RSS: resident memory of the fullest rank's process, since the study ran without a GPU"
    if any(row.is_refused and row.estimate for row in rows):
        yield "~: estimated; the trial was not launched, because it cannot fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    header: str
    text: Callable[[TrialRow], str]
    justify: Literal["left", "right"] = "right"
    wide_only: bool = False


def _columns(study: Study) -> list[_Column]:
    winners = (row for row in in_order(study) if row.can_win)
    ranks = {row.number: str(rank) for rank, row in enumerate(winners, 1)}
    kinds = {row.memory_kind for row in study.rows if row.memory_kind is not None}
    memory = "RSS GiB" if kinds == {MemoryKind.HOST_RSS} else "peak GiB"
    in_hours = any(row.gpu_s >= 3600 for row in study.rows)
    unit, unit_s = ("GPU-h", 3600) if in_hours else ("GPU-s", 1)
    mfu = _Column(header="MFU", text=lambda row: "" if row.mfu is None else f"{row.mfu:.1%}")
    return [
        _Column(header="#", text=lambda row: ranks.get(row.number, "")),
        _Column(header="trial", text=lambda row: f"{row.number:04d}"),
        _Column(header="state", text=_state, justify="left"),
        *_from_column(study),
        _Column(header="strategy", text=lambda row: row.strategy or "", justify="left"),
        *(_knob_column(knob) for knob in knobs_that_differ(study)),
        *_goal_columns(study),
        _Column(header="tokens/s\n/GPU", text=lambda row: _speed(row, row.tokens_per_s_per_gpu)),
        _Column(header="±", text=_spread),
        *_repeats_column(study),
        _Column(header="tokens/s", text=lambda row: _speed(row, row.tokens_per_s), wide_only=True),
        _Column(header="step\nms", text=_step),
        _Column(header=memory.replace(" ", "\n"), text=_memory),
        _Column(header="loss", text=lambda row: "" if row.loss is None else f"{row.loss:.3f}"),
        *([mfu] if any(row.mfu is not None for row in study.rows) else []),
        *_pareto_column(study),
        _Column(header=unit, text=lambda row: figure(row.gpu_s or None, unit_s), wide_only=True),
    ]


def _from_column(study: Study) -> list[_Column]:
    """Return the column unless the sampler proposed every trial."""
    if all(row.origin is Origin.SAMPLER for row in study.rows):
        return []
    return [_Column(header="from", text=_origin, justify="left", wide_only=True)]


def _knob_column(knob: str) -> _Column:
    return _Column(header=stacked(knob), text=lambda row: cell_text(row.values.get(knob)))


def _goal_columns(study: Study) -> Iterator[_Column]:
    """Yield the columns of goals that no other column shows."""
    goals = {goal.name: goal for goal in study.goals}
    if (times := goal_cell(study, "time_to_tokens")) is not None:
        known = [float(value) for row in study.rows if (value := times(row)) is not None]
        unit, unit_s = time_unit(known)
        tokens = short(goals["time_to_tokens"].tokens)
        yield _Column(
            header=f"{tokens}\ntokens\n{unit}", text=lambda row: figure(_number(times(row)), unit_s)
        )
    if (costs := goal_cell(study, "cost")) is not None:
        tokens = short(goals["cost"].tokens)
        yield _Column(header=f"{tokens}\ntokens\ncost", text=lambda row: _digits(costs(row)))


def _repeats_column(study: Study) -> list[_Column]:
    """Return the column of the repeats' means, in the unit of the goal's own column."""
    mean = cells(study)["confirmed"]
    known = [float(value) for row in study.rows if (value := mean(row)) is not None]
    if not known:
        return []
    unit, unit_s = {"time_to_tokens": time_unit(known), "peak_bytes": ("GiB", GIB)}.get(
        study.goal.name, ("", 1.0)
    )
    header = f"repeats\n{unit}" if unit else "repeats"
    return [_Column(header=header, text=lambda row: figure(_number(mean(row)), unit_s), wide_only=True)]


def _pareto_column(study: Study) -> list[_Column]:
    on_front = pareto(study)
    text = _Column(header="Pareto", text=lambda row: "yes" if row.number in on_front else "", justify="left")
    return [text] if on_front else []


def _origin(row: TrialRow) -> str:
    return Origin.BASELINE.value if row.is_single_gpu else came_from(row)  # the state says the rest


def _state(row: TrialRow) -> str:
    mark = f"{'*' if row.shared else ''}{'^' if _is_corrected(row) else ''}"
    return " ".join((f"{row.state}{mark}", *_more_of_state(row)))


def _more_of_state(row: TrialRow) -> Iterator[str]:
    if row.state is State.REUSED and row.reused_from is not None:
        yield f"{row.reused_from:04d}"
    elif row.is_refused:
        yield "estimated"
    elif row.failure is not None and row.failure.kind.value != row.state.value:
        yield row.failure.kind.value
    elif row.is_mixed:
        yield "mixed GPUs"
    elif row.state is State.SUSPECT and row.cards:
        yield from row.cards.throttled[:1]
    if row.is_single_gpu:
        yield "single-GPU baseline"


def _is_corrected(row: TrialRow) -> bool:
    return row.step_s is not None and row.drift != 1.0


def _speed(row: TrialRow, tokens_per_s: float | None) -> str:
    """Return the speed corrected for the machine's drift."""
    return "" if tokens_per_s is None else figure(tokens_per_s / row.drift)


def _step(row: TrialRow) -> str:
    return "" if row.step_s is None else figure(row.step_s * row.drift, 1e-3)


def _memory(row: TrialRow) -> str:
    if row.is_refused and row.estimate:
        return f"~{figure(row.estimate.peak_bytes, GIB)}"
    return figure(row.peak_bytes, GIB)


def _spread(row: TrialRow) -> str:
    return f"{row.step_s_iqr / row.step_s:.1%}" if row.step_s and row.step_s_iqr is not None else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _digits(value: object) -> str:
    return digits(float(value)) if isinstance(value, (int, float)) else ""
