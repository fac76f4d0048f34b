"""Estimates of recorded trials after learning from some of them, for a growing number of learned trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from sweeps.estimate.memory.fitting import MemoryObservation, fit_memory
from sweeps.estimate.memory.model import memory_of
from sweeps.estimate.time.fitting import TimeObservation, fit_time
from sweeps.estimate.time.step import assemble, work_of
from tests.support.recorded import Row, tables

SIZES = (1, 2, 3, 5, 8, 12, 20)
DRAWS = 3


@dataclass(frozen=True, kw_only=True)
class LearnedEstimates:
    """A table's estimates after learning from `learned` of its rows, drawn with this seed."""

    table: str
    learned: int
    seed: int
    peak_bytes: tuple[int, ...]
    step_s: tuple[float, ...]


def learned_estimates() -> Iterator[LearnedEstimates]:
    """Learn from a few, many, and all rows of each recorded table, and yield the estimates of all rows."""
    for table, rows in tables().items():
        known = [row for row in rows if row.is_oom or row.peak_bytes]
        for size in (*(size for size in SIZES if size < len(known)), len(known)):
            for seed in range(DRAWS if size < len(known) else 1):
                some = Random(f"{table} {size} {seed}").sample(known, size)
                peaks, steps = _peaks(some, known), _steps(some, known)
                yield LearnedEstimates(
                    table=table, learned=size, seed=seed, peak_bytes=tuple(peaks), step_s=tuple(steps)
                )


def _peaks(learned: Sequence[Row], rows: Sequence[Row]) -> Iterator[int]:
    seen = [
        MemoryObservation(
            plan=row.plan,
            model=row.model,
            hardware=row.hardware,
            is_oom=row.is_oom,
            peak_bytes=None if row.is_oom else row.peak_bytes,
            limit_bytes=row.cap_bytes,
            reserved_bytes=row.reserved_bytes,
            card_bytes=row.card_bytes,
        )
        for row in learned
    ]
    factors = fit_memory(seen)
    return (round(memory_of(row.plan, row.model, row.hardware, factors).peak_bytes) for row in rows)


def _steps(learned: Sequence[Row], rows: Sequence[Row]) -> Iterator[float]:
    seen = [
        TimeObservation(plan=row.plan, model=row.model, hardware=row.hardware, step_s=median(row.steps_s[1:]))
        for row in learned
        if len(row.steps_s) > 1
    ]
    factors = fit_time(seen)
    for row in rows:
        yield assemble(work_of(row.plan, row.model, row.hardware), factors).step_s
