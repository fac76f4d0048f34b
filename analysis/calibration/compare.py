"""Compare estimates with measurements: their errors, and whether the gate decided right. Pure."""

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
    counted,
    undrifted,
)

FEW = 5  # plans among which the fastest should be expected
LEARNED = 3  # trials after which estimates count as learned
OUT_OF_MEMORY = (FailureKind.GPU_OOM, FailureKind.HOST_OOM)
SPEED = Goal(name="tokens_per_s_per_gpu")  # compared where estimates do not cover the goal itself


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
        """Return the step time's error, drift removed; None if the time is not the plan's own."""
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
    """Trials whose plans the gate refused, or launched in spite of doubts."""

    refused: tuple[Trial, ...]  # not launched
    refuted: tuple[tuple[int, int], ...]  # refused, and the measured trial of the very same job
    ran_out: tuple[Trial, ...]  # launched
    missed: tuple[Trial, ...]  # ran out of memory though their estimates said that they fit
    borderline: tuple[Trial, ...]  # launched
    too_large: tuple[Trial, ...]  # launched because the user asked for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of trials by their estimates against the measured order."""

    goal: Goal  # that ranks trials
    timed: int  # number of trials that the correlation covers
    correlation: float | None  # of ranks by the goal; None: fewer than two, or all alike
    fastest: int | None  # the best of the trials that were estimated
    place: int | None  # its rank by the estimates, from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    pairs: tuple[Pair, ...]  # in the order of their numbers
    gate: Gate
    order: Order

    @property
    def on_host(self) -> bool:
        """True if memory is the processes' resident set, the only measure without a GPU."""
        return any(pair.seen.memory_kind is MemoryKind.HOST_RSS for pair in self.pairs)

    @property
    def groups(self) -> dict[str, tuple[Pair, ...]]:
        """Group pairs by what their estimates had learned from."""
        cold = tuple(pair for pair in self.pairs if pair.estimate.observations == 0)
        learned = tuple(pair for pair in self.pairs if pair.estimate.observations >= LEARNED)
        return {"all": self.pairs, "from formulas alone": cold, f"from {LEARNED} trials or more": learned}


def calibrate(study: Study) -> Calibration:
    """Compare every estimate of a study with its measurement."""
    pairs = tuple(_pairs(study))
    return Calibration(pairs=pairs, gate=_gate(study.trials), order=_order(study, pairs))


def peak_errors(pairs: Iterable[Pair]) -> list[float]:
    return [pair.peak_error for pair in pairs]


def step_errors(pairs: Iterable[Pair]) -> list[float]:
    return [error for pair in pairs if (error := pair.step_error) is not None]


def spread(errors: Sequence[float]) -> Spread | None:
    """Return the quantiles of errors; None if there are none."""
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
    """Return a quantile of sorted values, by linear interpolation."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None where there is no order to compare."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(_ranks(first), _ranks(second))


def off_line(study: Study) -> list[str]:
    """Return one line on the errors of estimates; none if no trial was both estimated and measured."""
    pairs = calibrate(study).pairs
    memory, step = spread(peak_errors(pairs)), spread(step_errors(pairs))
    if memory is None:
        return []
    parts = [f"{size(memory.median)} (memory)", *([f"{size(step.median)} (step time)"] if step else [])]
    off = f"median error of the estimates over {counted(len(pairs), 'trial')}: {', '.join(parts)}"
    return [f"{off}; details: python -m analysis calibration {study.directory.path}"]


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
    """Return the measured score, larger is better; None if the measured time is not the plan's own."""
    value = undrifted(goal, goal.value(pair.seen), pair.row.drift)
    return None if value is None or (pair.shared and goal.is_speed) else goal.score(value)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1, the smallest first; equal values share their mean rank."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]
