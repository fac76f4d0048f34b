"""Estimates against measurements: how far they were off, and whether the gate was right. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import correlation, median

from analysis.load import Study
from analysis.ranking import best
from analysis.row import TrialRow, is_refused
from analysis.text import size
from train_entry.contract import (
    Estimate,
    Failure,
    FailureKind,
    Fit,
    Goal,
    Measurement,
    MemoryKind,
    State,
    Trial,
    undrifted,
)

FEW = 5  # plans among which the fastest should be expected
LEARNED = 3  # trials after which estimates count as learned
OUT_OF_MEMORY = (FailureKind.GPU_OOM, FailureKind.HOST_OOM)
SPEED = Goal(name="tokens_per_s_per_gpu")  # compared where estimates know nothing of the goal itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A trial that was estimated, then measured. Errors are relative: 0.1 is a tenth too much."""

    row: TrialRow
    estimate: Estimate
    seen: Measurement
    shared: bool  # timed beside another trial, of which estimates know nothing

    @property
    def peak_error(self) -> float:
        return self.estimate.peak_bytes / self.seen.peak_bytes - 1

    @property
    def step_error(self) -> float | None:
        """None where the measured time is not the plan's own. Drift is the machine's, not the estimate's."""
        return None if self.shared else self.estimate.step_s / (self.seen.step_s * self.row.drift) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Quantiles of the sizes of errors; `bias` is the median of the errors themselves."""

    count: int
    median: float
    p90: float
    p95: float
    largest: float
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What became of plans that were refused, or launched in spite of doubts. By trial."""

    refused: tuple[Trial, ...]  # not launched
    refuted: tuple[tuple[int, int], ...]  # refused, and the measured trial of the very same job
    ran_out: tuple[Trial, ...]  # launched
    missed: tuple[Trial, ...]  # of those: their estimates said that they fit
    borderline: tuple[Trial, ...]  # launched
    too_large: tuple[Trial, ...]  # launched all the same, as their user asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Whether the estimates would have found the best."""

    goal: Goal  # by which
    timed: int  # trials, of which the correlation is
    correlation: float | None  # of ranks, by the goal; None: fewer than two, or all alike
    fastest: int | None  # of the trials that were estimated, the winner
    place: int | None  # where it was expected, from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    pairs: tuple[Pair, ...]  # in the order of their numbers
    gate: Gate
    order: Order

    @property
    def on_host(self) -> bool:
        """Whether memory is the resident set of processes, all that a run without GPU can say."""
        return any(pair.seen.memory_kind is MemoryKind.HOST_RSS for pair in self.pairs)

    @property
    def groups(self) -> dict[str, tuple[Pair, ...]]:
        """By what an estimate had to go by."""
        cold = tuple(pair for pair in self.pairs if pair.estimate.observations == 0)
        learned = tuple(pair for pair in self.pairs if pair.estimate.observations >= LEARNED)
        return {"all": self.pairs, "from formulas alone": cold, f"from {LEARNED} trials or more": learned}


def calibrate(study: Study) -> Calibration:
    """What the trials of a study tell of its estimates."""
    pairs = tuple(_pairs(study))
    return Calibration(pairs=pairs, gate=_gate(study.trials), order=_order(study, pairs))


def peak_errors(pairs: Iterable[Pair]) -> list[float]:
    return [pair.peak_error for pair in pairs]


def step_errors(pairs: Iterable[Pair]) -> list[float]:
    return [error for pair in pairs if (error := pair.step_error) is not None]


def spread(errors: Sequence[float]) -> Spread | None:
    """None of nothing."""
    if not errors:
        return None
    sizes = sorted(abs(error) for error in errors)
    return Spread(
        count=len(sizes),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        p95=quantile(sizes, 0.95),
        largest=sizes[-1],
        bias=median(errors),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, on the line between the two nearest."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's. None where there is no order to compare."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(_ranks(first), _ranks(second))


def off_line(study: Study) -> list[str]:
    """One line on how far estimates were off; none where nothing was estimated and measured."""
    pairs = calibrate(study).pairs
    memory, step = spread(peak_errors(pairs)), spread(step_errors(pairs))
    if memory is None:
        return []
    parts = [f"{size(memory.median)} (memory)", *([f"{size(step.median)} (step time)"] if step else [])]
    trials = "1 trial" if len(pairs) == 1 else f"{len(pairs)} trials"
    off = f"estimates were off by {' and '.join(parts)} in the median of {trials}"
    return [f"{off}: python -m analysis calibration {study.directory.path}"]


def _pairs(study: Study) -> Iterable[Pair]:
    for row, trial in zip(study.rows, study.trials, strict=True):
        seen, estimate = trial.outcome, trial.estimate
        if trial.state is not State.MEASURED or estimate is None or not isinstance(seen, Measurement):
            continue
        if seen.peak_bytes > 0 and seen.step_s > 0:
            yield Pair(row=row, estimate=estimate, seen=seen, shared=trial.is_shared)


def _gate(trials: Sequence[Trial]) -> Gate:
    measured = {
        trial.fingerprint: trial.number
        for trial in trials
        if trial.state is State.MEASURED and trial.fingerprint is not None
    }
    refused = tuple(trial for trial in trials if is_refused(trial.state, trial.outcome))
    launched = [trial for trial in trials if trial.is_launched and trial.estimate is not None]
    ran_out = tuple(trial for trial in launched if ran_out_of_memory(trial))
    return Gate(
        refused=refused,
        refuted=tuple(
            (trial.number, measured[trial.fingerprint]) for trial in refused if trial.fingerprint in measured
        ),
        ran_out=ran_out,
        missed=_that_are(Fit.FITS, ran_out),
        borderline=_that_are(Fit.BORDERLINE, launched),
        too_large=_that_are(Fit.TOO_LARGE, launched),
    )


def ran_out_of_memory(trial: Trial) -> bool:
    return isinstance(trial.outcome, Failure) and trial.outcome.kind in OUT_OF_MEMORY


def _that_are(fit: Fit, trials: Iterable[Trial]) -> tuple[Trial, ...]:
    return tuple(trial for trial in trials if trial.estimate is not None and trial.estimate.fit is fit)


def _order(study: Study, pairs: Sequence[Pair]) -> Order:
    goal = study.goal if study.goal.name != "loss" else SPEED
    expected = {
        pair.row.number: goal.score(said)
        for pair in pairs
        if not pair.row.is_single_gpu and (said := goal.value(pair.estimate)) is not None
    }
    seen = {pair.row.number: score for pair in pairs if (score := _score(pair, goal)) is not None}
    both = [number for number in expected if number in seen]
    winner = best(pair.row for pair in pairs if pair.row.number in expected)
    first = winner.number if winner else None
    return Order(
        goal=goal,
        timed=len(both),
        correlation=rank_correlation([expected[n] for n in both], [seen[n] for n in both]),
        fastest=first,
        place=None if first is None else 1 + sum(s > expected[first] for s in expected.values()),
    )


def _score(pair: Pair, goal: Goal) -> float | None:
    """What was seen, larger is better; None where the measured time is not the plan's own."""
    value = undrifted(goal, goal.value(pair.seen), pair.row.drift)
    return None if value is None or (pair.shared and goal.is_speed) else goal.score(value)


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1, the least first; equal values share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]
