"""The calibration report: for people on a terminal and in a browser, for programs as CSV."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TextIO

from rich.text import Text

from analysis.calibration.compare import (
    FEW,
    Calibration,
    Gate,
    Pair,
    calibrate,
    peak_errors,
    ran_out_of_memory,
    spread,
    step_errors,
)
from analysis.calibration.page import PAGE, Grid, Scatter, page
from analysis.calibration.scatter import Point
from analysis.columns import knobs_that_differ
from analysis.load import Study
from analysis.row import came_from
from analysis.terminal import console_on, plain_table, print_whole
from analysis.text import cell_text, figure, raw, signed, stacked
from train_entry.contract import GIB, Fit, Measurement, Origin, Scalar, Trial, counted, short, write_atomic
from train_entry.contract.study.goal_text import goal_words

MS = 1e-3

# Column of the CSV to its value; knobs and overrides follow.
_CELLS: Mapping[str, Callable[[Pair], Scalar]] = {
    "number": attrgetter("row.number"),
    "strategy": attrgetter("row.strategy"),
    "fit": attrgetter("estimate.fit.value"),
    "observations": attrgetter("estimate.observations"),
    "memory_kind": attrgetter("seen.memory_kind.value"),
    "estimated_peak_bytes": attrgetter("estimate.peak_bytes"),
    "peak_bytes": attrgetter("seen.peak_bytes"),
    "peak_error": attrgetter("peak_error"),
    "estimated_step_s": attrgetter("estimate.step_s"),
    "step_s": attrgetter("seen.step_s"),
    "step_error": attrgetter("step_error"),
    "estimated_tokens_per_s": attrgetter("estimate.tokens_per_s"),
    "tokens_per_s": attrgetter("seen.tokens_per_s"),
}


def show_calibration(study: Study, stream: TextIO) -> None:
    """Print trials, quantiles of the errors, and whether the gate decided right."""
    calibration = calibrate(study)
    console = console_on(stream)
    for grid in (trials_grid(study, calibration), errors_grid(calibration)):
        table = plain_table(grid.title, grid.caption)
        for number, header in enumerate(grid.headers):
            left = number in grid.left
            table.add_column(Text(header), justify="left" if left else "right", no_wrap=not left)
        for cells in grid.rows:
            table.add_row(*map(Text, cells))
        if grid.rows:
            print_whole(console, table)
            console.print()
    for line in lines(calibration):
        console.print(Text(line), soft_wrap=True)


def write_page(study: Study) -> Path:
    """Replace calibration.html in the study's directory."""
    calibration = calibrate(study)
    text = page(
        title=f"{study.record.name}: estimates against measurements",
        scatters=_scatters(calibration),
        grids=(errors_grid(calibration), trials_grid(study, calibration)),
        lines=tuple(lines(calibration)),
    )
    path = study.directory.path / PAGE
    write_atomic(path, text)
    return path


def write_calibration_csv(study: Study, path: Path) -> None:
    """Return a row for each trial that was estimated and measured: raw numbers, errors as fractions."""
    knobs = [knob for knob in study.knobs if knob not in _CELLS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_CELLS, *knobs, "overrides"))
    for pair in calibrate(study).pairs:
        values = [cell(pair) for cell in _CELLS.values()]
        values += [pair.row.values.get(knob) for knob in knobs]
        writer.writerow((*map(raw, values), shlex.join(pair.row.overrides)))
    write_atomic(path, text.getvalue())


def trials_grid(study: Study, calibration: Calibration) -> Grid:
    """Tabulate the trials in the order in which they were estimated."""
    knobs = knobs_that_differ(study)
    memory = "RSS" if calibration.on_host else "peak"
    has_origins = any(pair.row.origin is not Origin.SAMPLER for pair in calibration.pairs)
    headers: tuple[str, ...] = ("trial", *(["from"] if has_origins else []), "strategy")
    words = (*range(1, len(headers)),)
    headers += (*map(stacked, knobs), f"{memory} GiB\nestimated", "measured", "error")
    headers += ("step ms\nestimated", "measured", "error", "learned\nfrom", "verdict")
    rows = []
    for pair in calibration.pairs:
        row, said = pair.row, pair.estimate
        mark = "*" if pair.shared else ""
        rows.append(
            (
                f"{row.number:04d}",
                *([came_from(row)] if has_origins else []),
                row.strategy or "",
                *(cell_text(row.values.get(knob)) for knob in knobs),
                *(figure(said.peak_bytes, GIB), figure(pair.seen.peak_bytes, GIB), signed(pair.peak_error)),
                *(figure(said.step_s, MS), figure(pair.seen.step_s, MS) + mark, signed(pair.step_error)),
                str(said.observations),
                _SAID[said.fit],
            )
        )
    return Grid(
        title=f"study {study.record.name}: estimates against measurements",
        caption="\n".join(_trials_caption(calibration)),
        headers=headers,
        rows=tuple(rows),
        left=(*words, len(headers) - 1),
    )


_SAID = {Fit.FITS: "fits", Fit.BORDERLINE: "borderline", Fit.TOO_LARGE: "too large"}


def _trials_caption(calibration: Calibration) -> Iterator[str]:
    yield "error: estimated / measured - 1; above 0, the estimate was too high"
    yield "learned from: number of finished trials that corrected the estimate; 0: formulas alone"
    if calibration.on_host:
        yield "RSS: resident memory of the fullest rank's process, since the study ran without a GPU"
    if any(pair.shared for pair in calibration.pairs):
        yield "*: another trial ran on the same node at the same time; such times are not compared"


def errors_grid(calibration: Calibration) -> Grid:
    """Tabulate quantiles of the errors of memory and time, by what the estimates had learned from."""
    kinds = {"memory": peak_errors, "step time": step_errors}
    rows = []
    for kind, errors in kinds.items():
        for group, pairs in calibration.groups.items():
            if found := spread(errors(pairs)):
                sizes = (found.median, found.p90, found.p95, found.largest)
                figures = (f"{size:.1%}" for size in sizes)
                rows.append((kind, group, str(found.count), *figures, signed(found.bias)))
    return Grid(
        title="errors of the estimates",
        caption="absolute errors by quantile; bias: median of the signed errors",
        headers=("", "estimated", "trials", "median", "90%", "95%", "largest", "bias"),
        rows=tuple(rows),
        left=(0, 1),
    )


def lines(calibration: Calibration) -> Iterator[str]:
    """Say whether the estimates would have found the fastest trial, and whether the gate decided right."""
    if not calibration.pairs:
        yield "no trial has both an estimate and a measurement yet"
    yield from _order(calibration)
    yield from _gate(calibration.gate)


def _order(calibration: Calibration) -> Iterator[str]:
    order, pairs = calibration.order, len(calibration.pairs)
    if order.correlation is not None:
        of = f"of estimated and measured {goal_words(order.goal)}, over {order.timed} trials"
        yield f"order: rank correlation {order.correlation:.2f} {of} (1: the same order)"
    if order.fastest is not None and order.place is not None and pairs > 1:
        among = "among" if order.place <= FEW else "not among"
        few = f": {among} the first {FEW}" if pairs > FEW else ""
        word = "fastest" if order.goal.is_speed else "best"
        yield f"{word}: trial {order.fastest:04d}, place {order.place} of {pairs} by the estimates{few}"


def _gate(gate: Gate) -> Iterator[str]:
    if gate.refused:
        doubtful = sum(trial.estimate.fit is Fit.BORDERLINE for trial in gate.refused if trial.estimate)
        perhaps = f" ({doubtful} of them borderline)" if doubtful else ""
        yield f"not launched: {counted(len(gate.refused), 'plan')} estimated not to fit{perhaps}"
        known = ", ".join(f"{refused:04d} (measured as {seen:04d})" for refused, seen in gate.refuted)
        yield f"refused but known to fit: {known or 'none'}"
    if gate.ran_out:
        missed = _numbers(gate.missed) or "none"
        yield f"ran out of memory: trial {_numbers(gate.ran_out)}; of these estimated to fit: {missed}"
    if gate.borderline:
        yield f"borderline, launched to learn: {_fates(gate.borderline)}"
    if gate.too_large:
        yield f"too large by the estimate, launched at the user's request: {_fates(gate.too_large)}"


def _fates(trials: Sequence[Trial]) -> str:
    measured = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    ran_out = [trial for trial in trials if ran_out_of_memory(trial)]
    others = [trial for trial in trials if trial not in measured and trial not in ran_out]
    fates = {"fitted": measured, "ran out of memory": ran_out, "no answer": others}
    return "; ".join(f"{fate}: {_numbers(found)}" for fate, found in fates.items() if found)


def _numbers(trials: Sequence[Trial]) -> str:
    return ", ".join(f"{trial.number:04d}" for trial in trials)


def _scatters(calibration: Calibration) -> tuple[Scatter, ...]:
    memory = "resident memory" if calibration.on_host else "peak memory"
    peaks = [
        _point(pair, pair.seen.peak_bytes / GIB, pair.estimate.peak_bytes / GIB, "GiB", pair.peak_error)
        for pair in calibration.pairs
    ]
    steps = [
        _point(pair, pair.seen.step_s / MS, pair.estimate.step_s / MS, "ms", pair.step_error)
        for pair in calibration.pairs
        if not pair.shared
    ]
    scatters = (
        Scatter(title=f"{memory}, GiB", points=tuple(peaks)),
        Scatter(title="step time, ms", points=tuple(steps)),
    )
    return tuple(scatter for scatter in scatters if scatter.points)


def _point(pair: Pair, measured: float, estimated: float, unit: str, error: float | None) -> Point:
    knobs = " ".join(
        f"{knob}={short(value)}" for knob, value in pair.row.values.items() if knob != "strategy"
    )
    numbers = f"estimated {figure(estimated)}, measured {figure(measured)} {unit} ({signed(error)})"
    return Point(
        x=measured,
        y=estimated,
        series=pair.row.strategy or "",
        hollow=pair.estimate.observations == 0,
        label=f"trial {pair.row.number:04d} {pair.row.strategy} {knobs}: {numbers}",
    )
