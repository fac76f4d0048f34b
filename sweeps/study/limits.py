"""Decide when a study ends. Limits are totals over all its starts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sweeps.config.schema import ConfirmConfig
from sweeps.search.confirmation import to_confirm
from train_entry.contract import (
    AttemptKind,
    Failure,
    Goal,
    Measurement,
    Origin,
    Ranking,
    State,
    Trial,
    launch_noise,
)

SECONDS_PER_HOUR = 3600
NOISE = 0.005  # relative error of a measurement that does not state one


class StopReason(StrEnum):
    """The reason why no further trial is launched. The text is shown to the user."""

    EXHAUSTED = "every configuration of the space has a result"
    TRIALS = "limits.trials is reached"
    HOURS = "limits.hours is reached"
    GPU_HOURS = "limits.gpu_hours is reached"
    COST = "limits.cost is reached"
    FAILURES = "limits.failures is reached: that many trials in a row failed in the same way"
    PATIENCE = "limits.patience is reached: that many trials in a row did not improve the best"
    NO_BETTER = "no remaining configuration is expected to beat the best by limits.improvement"
    UNPRODUCTIVE = "hundreds of proposals in a row led to no launch"
    INTERRUPTED = "interrupted"

    @property
    def is_spent(self) -> bool:
        """True if nothing at all may be launched any more."""
        return self in (StopReason.HOURS, StopReason.GPU_HOURS, StopReason.COST, StopReason.INTERRUPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The resources that a study has used, and its recent success."""

    launched: int
    active_s: float
    gpu_s: float
    failures: int = 0  # the latest trials in a row that failed in the same way
    without_improvement: int = 0  # trials since the last improvement


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    trials: int | None
    hours: float | None
    retries: int
    gpu_hours: float | None = None
    cost: float | None = None
    price_per_gpu_hour: float = 0.0
    failures: int | None = None
    patience: int | None = None

    def reached(self, spent: Spent, reserve: Spent | None = None) -> StopReason | None:
        """Return the first limit that is reached, or would be with the confirmation's reserve."""
        kept_s = reserve.active_s if reserve else 0.0
        gpu_h = (spent.gpu_s + (reserve.gpu_s if reserve else 0.0)) / SECONDS_PER_HOUR
        checks = (
            (StopReason.TRIALS, spent.launched, self.trials),
            (StopReason.HOURS, (spent.active_s + kept_s) / SECONDS_PER_HOUR, self.hours),
            (StopReason.GPU_HOURS, gpu_h, self.gpu_hours),
            (StopReason.COST, gpu_h * self.price_per_gpu_hour, self.cost),
            (StopReason.FAILURES, spent.failures, self.failures),
            (StopReason.PATIENCE, spent.without_improvement, self.patience),
        )
        return next((why for why, used, limit in checks if limit is not None and used >= limit), None)


def spent_by(trials: Sequence[Trial], goals: Sequence[Goal], now: float, since: float) -> Spent:
    """Return what a study has used by now.

    `since` is when this start began: failures before it do not count.
    """
    return Spent(
        launched=launched(trials),
        active_s=active_seconds(trials, now),
        gpu_s=sum(trial.gpu_s for trial in trials),
        failures=len(failures_in_a_row(trials, since)),
        without_improvement=without_improvement(trials, goals),
    )


def reserve_of(trials: Sequence[Trial], goal: Goal, confirm: ConfirmConfig) -> Spent:
    """Return what one more launch and the confirmation after it will take.

    The confirmation counts as two rounds of the trials that it would measure again.
    """
    repeated = to_confirm(trials, goal, confirm)
    measured = [trial for _, trial in Ranking(trials, goal).contenders]
    if not repeated or not measured:
        return Spent(launched=0, active_s=0.0, gpu_s=0.0)
    runs = 1 + 2 * len(repeated)
    each_gpu_s = statistics.median(trial.gpu_s / max(1, len(trial.attempts)) for trial in measured)
    ranks = statistics.median(trial.plan.ranks for trial in measured if trial.plan)
    return Spent(launched=0, active_s=runs * each_gpu_s / ranks, gpu_s=runs * each_gpu_s)


def launched(trials: Iterable[Trial]) -> int:
    """Return how many trials of the search cost a launch."""
    return sum(trial.is_launched and trial.origin is not Origin.USER for trial in trials)


def active_seconds(trials: Iterable[Trial], now: float) -> float:
    """Return how long the study had an open trial, or a trial that was measured again.

    Time between starts does not count.
    """
    total_s, until = 0.0, 0.0
    for begin, end in sorted(span for trial in trials for span in _spans(trial, now)):
        total_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total_s


def _spans(trial: Trial, now: float) -> Iterator[tuple[float, float]]:
    yield trial.created_at, trial.closed_at or now
    for attempt in trial.attempts:
        if attempt.kind in (AttemptKind.REPEAT, AttemptKind.CHECK) and attempt.started_at is not None:
            yield attempt.started_at, attempt.ended_at or now


def failures_in_a_row(trials: Iterable[Trial], since: float) -> Sequence[Trial]:
    """Return the latest trials that ended since then, as far back as they failed in the same way."""
    ended = [trial for trial in trials if trial.is_launched and (trial.closed_at or 0.0) >= since]
    latest_first = sorted(ended, key=lambda trial: (trial.closed_at or 0.0, trial.number), reverse=True)
    kinds = [trial.outcome.kind if isinstance(trial.outcome, Failure) else None for trial in latest_first[:1]]
    return list(
        itertools.takewhile(
            lambda trial: (
                trial.state is State.FAILED
                and isinstance(trial.outcome, Failure)
                and trial.outcome.kind is kinds[0]
            ),
            latest_first,
        )
    )


def without_improvement(trials: Iterable[Trial], goals: Sequence[Goal]) -> int:
    """Return how many launched trials of the search have ended since the last improvement.

    A trial is an improvement if it is better than any before it, beyond noise. With several goals, it is one
    if it joins the Pareto front: better than each trial before it by at least one goal.
    """
    known = list(trials)
    launches = launch_noise(known, goals[0])
    rankings = [Ranking(known, goal) for goal in goals]
    before: list[Trial] = []
    waited = 0
    ended = (trial for trial in known if trial.is_launched and trial.closed_at is not None)
    for trial in sorted(ended, key=lambda trial: (trial.closed_at or 0.0, trial.number)):
        if trial.origin is Origin.USER or trial.is_single_gpu:
            continue
        waited += 1
        if trial.state is not State.MEASURED or rankings[0].value(trial) is None:
            continue
        noise = _noise(trial) if launches is None else launches
        if all(any(_is_better(trial, other, ranking, noise) for ranking in rankings) for other in before):
            before.append(trial)
            waited = 0
    return waited


def _is_better(trial: Trial, other: Trial, ranking: Ranking, noise: float) -> bool:
    goal = ranking.goal
    value, its = ranking.value(trial), ranking.value(other)
    beyond = noise if goal.is_speed else NOISE
    return value is not None and its is not None and its > 0 and goal.gain(value, its) > 1 + beyond


def _noise(trial: Trial) -> float:
    seen = trial.outcome
    known = seen.relative_error if isinstance(seen, Measurement) else None
    return NOISE if known is None else known
