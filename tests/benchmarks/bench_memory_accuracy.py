"""Print the errors of memory estimates on recorded trials: `make bench`. Almost nothing is asserted.

Errors are those of the peak that torch allocated. SHARDSWEEP_TABLES adds tables (see recorded.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence

import pytest

from sweeps.estimate.memory.classes import class_of
from sweeps.estimate.memory.fitting import MemoryObservation, fit_memory
from sweeps.estimate.memory.model import COLD, MemoryFactors, memory_of, needed_bytes
from tests.benchmarks.rivals import RIVALS
from tests.support.recorded import Row, tables

CALIBRATIONS = (1, 3, 8)
CHOICES = 100
FEW_CHOICES = 8
WRONG = 1.2
QUANTILES = (0.5, 0.8, 0.95)
Refuses = Callable[[Row], bool]


def observation(row: Row) -> MemoryObservation:
    return MemoryObservation(
        plan=row.plan,
        model=row.model,
        hardware=row.hardware,
        is_oom=row.is_oom,
        peak_bytes=None if row.is_oom else row.peak_bytes,
        limit_bytes=row.cap_bytes,
        reserved_bytes=row.reserved_bytes,
        card_bytes=row.card_bytes,
    )


def fit(rows: Sequence[Row]) -> MemoryFactors:
    return fit_memory([observation(row) for row in rows])


def peak(row: Row, factors: MemoryFactors = COLD) -> int:
    return memory_of(row.plan, row.model, row.hardware, factors).peak_bytes


def errors(rows: Sequence[Row], factors: MemoryFactors = COLD) -> list[float]:
    """Return the signed relative errors for the trials that ran."""
    return [peak(row, factors) / row.peak_bytes - 1 for row in rows if not row.is_oom and row.peak_bytes]


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def sizes(values: Sequence[float]) -> str:
    """Format quantiles of the absolute errors."""
    absolute = [abs(value) for value in values]
    shares = [100 * quantile(absolute, share) for share in (0.5, 0.95)]
    largest = 100 * max(absolute, default=float("nan"))
    return f"median {shares[0]:6.2f}%   95% below {shares[1]:6.2f}%   largest {largest:6.2f}%"


def gate(rows: Sequence[Row], refuses: Refuses) -> str:
    failed = [row for row in rows if row.is_oom]
    ran = [row for row in rows if not row.is_oom]
    caught = sum(refuses(row) for row in failed)
    lost = sum(refuses(row) for row in ran)
    best = max([row for row in ran if row.steps_s], key=speed, default=None)
    verdict = "no trial timed" if best is None else "best refused" if refuses(best) else "best kept"
    return (
        f"{caught:3d} of {len(failed):3d} that ran out refused ({percent(caught, len(failed))}), "
        f"{lost:3d} of {len(ran):3d} that ran ({percent(lost, len(ran))}), {verdict}"
    )


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "none"


def speed(row: Row) -> float:
    """Tokens per second, without the first step."""
    steps = row.steps_s[1:]
    return row.plan.tokens_per_step * len(steps) / sum(steps) if steps else 0.0


def ours(factors: MemoryFactors, share: float) -> Refuses:
    def refuses(row: Row) -> bool:
        memory = memory_of(row.plan, row.model, row.hardware, factors)
        return needed_bytes(memory, factors, share) > row.cap_bytes

    return refuses


def test_estimates_without_any_measurement() -> None:
    for name, rows in tables().items():
        print(f"\n{name}: {len(rows)} trials, {sum(row.is_oom for row in rows)} ran out of memory")
        print(f"  cold: {sizes(errors(rows))}")
        for share in QUANTILES:
            print(f"  gate at quantile {share:.2f}: {gate(rows, ours(COLD, share))}")
        ran = [row for row in rows if row.reserved_bytes and row.card_bytes and not row.is_oom]
        for label, of in (("reserved", "reserved_bytes"), ("card's use", "card_bytes")):
            ratios = [getattr(row, of) / row.peak_bytes for row in ran if row.peak_bytes]
            if not ratios:
                continue
            low, middle, high = [quantile(ratios, share) for share in (0.05, 0.5, 0.95)]
            print(f"  {label} over peak allocated: {low:.2f} to {high:.2f}, median {middle:.2f}")
        assert rows


def test_estimates_after_some_measurements() -> None:
    """Calibrate on k random trials of a table, OOMs included, and print the errors on all others."""
    for name, rows in tables().items():
        chooser = random.Random(0)
        print(f"\n{name}: {CHOICES} random choices of trials to calibrate on")
        for count in CALIBRATIONS:
            others: list[float] = []
            caught = failed = lost = ran = 0
            for _ in range(CHOICES):
                chosen = set(chooser.sample(range(len(rows)), min(count, len(rows) - 1)))
                factors = fit([rows[index] for index in chosen])
                left = [row for index, row in enumerate(rows) if index not in chosen]
                others += errors(left, factors)
                refused = [ours(factors, 0.5)(row) for row in left]
                caught += sum(no for no, row in zip(refused, left, strict=True) if row.is_oom)
                lost += sum(no for no, row in zip(refused, left, strict=True) if not row.is_oom)
                failed += sum(row.is_oom for row in left)
                ran += sum(not row.is_oom for row in left)
            print(f"  after {count}: {sizes(others)}")
            print(f"    gate: {percent(caught, failed)} of OOMs refused, {percent(lost, ran)} of others")
        print(f"  all of them: {fit(rows)}")
        assert rows


def test_estimates_after_another_table() -> None:
    """Fit to all trials of one table, and print errors on tables with other GPU counts, models and plans."""
    everything = tables()
    for name, rows in everything.items():
        factors = fit(rows)
        for other, held_out in everything.items():
            if other != name:
                print(f"\nfitted to {name}, scored on {other}: {sizes(errors(held_out, factors))}")
                print(f"  before any trial: {sizes(errors(held_out))}")
                print(f"  fitted to itself: {sizes(errors(held_out, fit(held_out)))}")
        assert rows


@pytest.mark.parametrize("kind", ["pipeline", "tensor", "zero3", "offload"])
def test_estimates_where_one_kind_is_counted_wrongly(kind: str) -> None:
    """Multiply one kind's measurements by 1.2, learn from 8 trials, and print the errors on all others."""
    rows = [
        dataclasses.replace(row, peak_bytes=round(row.peak_bytes * WRONG ** (class_of(row.plan) == kind)))
        for table in tables().values()
        for row in table
        if row.peak_bytes and not row.is_oom
    ]
    chooser = random.Random(0)
    others: list[float] = []
    for _ in range(FEW_CHOICES):
        chosen = set(chooser.sample(range(len(rows)), max(CALIBRATIONS)))
        factors = fit([rows[index] for index in chosen])
        others += errors([row for index, row in enumerate(rows) if index not in chosen], factors)
    print(f"\n{kind} x {WRONG}: {sizes(others)}")
    assert others


def test_each_rank() -> None:
    """Print signed errors for each rank's peak and for host memory, where a table has all ranks' peaks."""
    for name, rows in tables().items():
        for row in [row for row in rows if row.rank_peak_bytes]:
            memory = memory_of(row.plan, row.model, row.hardware)
            peaks = [stage.peak for stage in memory.stages]
            said = [
                f"{estimated.phase} {estimated.total / seen - 1:+.2%}"
                for estimated, seen in zip(itertools.cycle(peaks), row.rank_peak_bytes, strict=False)
            ]
            host = f", host {memory.host_bytes / row.host_peak_bytes - 1:+.1%}" if row.host_peak_bytes else ""
            print(f"\n{name} {row.label}: {', '.join(said)}{host}", end="")
        assert rows


def test_other_tools_on_the_same_trials() -> None:
    for name, rows in tables().items():
        print(f"\n{name}: estimated over measured peak")
        for tool, rival in RIVALS.items():
            said = [(row, rival(row.plan, row.model)) for row in rows]
            known = [(row, count) for row, count in said if count is not None]
            wrong = [count / row.peak_bytes - 1 for row, count in known if row.peak_bytes and not row.is_oom]
            by_label = {id(row): count for row, count in known}
            print(f"  {tool:28s} {sizes(wrong)}   ({len(known)} trials)")
            print(f"  {'':28s} {gate([row for row, _ in known], _over(by_label))}")
        print(f"  {'ours, cold':28s} {sizes(errors(rows))}")
        print(f"  {'':28s} {gate(rows, ours(COLD, 0.5))}")
        assert rows


def _over(counts: dict[int, float]) -> Refuses:
    return lambda row: counts[id(row)] > row.cap_bytes


def test_an_estimate_costs() -> None:
    rows = [row for table in tables().values() for row in table]
    began = time.process_time()
    for row in rows * 10:
        peak(row)
    spent = time.process_time() - began
    print(f"\n{1e3 * spent / len(rows) / 10:.3f} ms per plan")
    assert rows
