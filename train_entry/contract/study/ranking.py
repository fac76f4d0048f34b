"""Rank trials by a goal: each trial's value and the best trial, for all modules that need them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from train_entry.contract.job.results import Measurement, Outcome
from train_entry.contract.shared.words import State
from train_entry.contract.study.drift import drifts_of
from train_entry.contract.study.goals import Goal
from train_entry.contract.study.trial import Trial


class Ranking:
    """The trials of a study by one goal, corrected for the machine's drift."""

    def __init__(self, trials: Iterable[Trial], goal: Goal) -> None:
        self.goal = goal
        self.trials = tuple(trials)
        self.drifts: Mapping[int, float] = drifts_of(self.trials, goal, self._best_baseline_uncorrected())

    def drift(self, trial: Trial) -> float:
        """The machine's speed when the trial was measured, over its initial speed."""
        return self.drifts.get(trial.number, 1.0)

    def value(self, trial: Trial) -> float | None:
        """The goal's value, corrected for drift; None if there is none or if the loss is not finite."""
        return undrifted(self.goal, _value(trial.outcome, self.goal), self.drift(trial))

    @property
    def contenders(self) -> list[tuple[float, Trial]]:
        """The trials that can win, with their values, best first. Ties go to the earlier trial."""
        values = ((self.value(trial), trial) for trial in self.trials if _may_win(trial))
        return _ordered(self.goal, values)

    @property
    def best(self) -> Trial | None:
        return next((trial for _, trial in self.contenders), None)

    @property
    def best_value(self) -> float | None:
        return next((value for value, _ in self.contenders), None)

    @property
    def best_baseline(self) -> Trial | None:
        """The best baseline: baselines are the configurations that one would try by hand."""
        return next((trial for _, trial in self.contenders if trial.baseline is not None), None)

    def _best_baseline_uncorrected(self) -> Trial | None:
        baselines = (trial for trial in self.trials if trial.baseline is not None and _may_win(trial))
        ordered = _ordered(self.goal, ((_value(trial.outcome, self.goal), trial) for trial in baselines))
        return next((trial for _, trial in ordered), None)


def undrifted(goal: Goal, value: float | None, drift: float) -> float | None:
    """Return the value that the trial would have had at the machine's initial speed."""
    if value is None or not goal.is_speed:
        return value
    return value / drift if goal.is_maximized else value * drift


def launch_noise(trials: Iterable[Trial], goal: Goal) -> float | None:
    """Return two standard deviations between launches of one plan, as a share of the value; None: not known.

    It is computed from all trials with repeats. Drift between the repeats thus counts as noise.
    """
    squares, freedom = 0.0, 0
    for trial in trials:
        outcomes = [trial.outcome, *(repeat.outcome for repeat in trial.repeats)]
        seen = [goal.value(outcome) for outcome in outcomes if isinstance(outcome, Measurement)]
        logs = [math.log(value) for value in seen if value is not None and value > 0]
        if len(logs) > 1:
            mean = fmean(logs)
            squares += sum((value - mean) ** 2 for value in logs)
            freedom += len(logs) - 1
    return 2 * math.sqrt(squares / freedom) if freedom else None


def on_front(points: Sequence[Sequence[float]]) -> list[bool]:
    """Return for each point whether it is on the Pareto front. Larger is better.

    It is if no other point is at least as good in every coordinate and better in one.
    """
    return [not any(_dominates(other, point) for other in points) for point in points]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _may_win(trial: Trial) -> bool:
    return trial.state is State.MEASURED and not trial.is_single_gpu


def _value(outcome: Outcome | None, goal: Goal) -> float | None:
    if not isinstance(outcome, Measurement) or not math.isfinite(outcome.loss):
        return None
    return goal.value(outcome)


def _ordered(goal: Goal, values: Iterable[tuple[float | None, Trial]]) -> list[tuple[float, Trial]]:
    """Sort trials by value, best first; ties by number. Trials without a value are left out."""
    known = [(value, trial) for value, trial in values if value is not None]
    return sorted(known, key=lambda each: (-goal.score(each[0]), each[1].number))
