"""What the trials of a study have shown so far: the best value, by its goal. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from train_entry.contract import Goal, Measurement, State, Trial


def value_of(trial: Trial, goal: Goal) -> float | None:
    """The goal's value of a trial, without the machine's drift; None where it has none."""
    if not isinstance(trial.outcome, Measurement):
        return None
    value = goal.value(trial.outcome)
    if value is None or not goal.is_speed:
        return value
    return value / trial.drift if goal.is_maximized else value * trial.drift


def contenders(trials: Iterable[Trial], goal: Goal) -> list[tuple[float, Trial]]:
    """Trials that can win with their values, the best first; of equals the one tried first."""
    found = [
        (value, trial)
        for trial in trials
        if trial.state is State.MEASURED
        and not trial.is_yardstick
        and (value := value_of(trial, goal)) is not None
    ]
    return sorted(found, key=lambda each: (-goal.score(each[0]), each[1].number))


def best_value(trials: Iterable[Trial], goal: Goal) -> float | None:
    return next((value for value, _ in contenders(trials, goal)), None)


def best_rung(trials: Iterable[Trial], goal: Goal) -> Trial | None:
    """The best of what one tries by hand."""
    return next((trial for _, trial in contenders(trials, goal) if trial.rung is not None), None)


def launch_noise(trials: Iterable[Trial], goal: Goal) -> float | None:
    """What a launch is off by, as a share: two standard deviations; None where nothing was launched twice.

    From trials that were measured again, to confirm them or to see drift: which then counts as noise.
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
