"""When a study ends. Limits are totals over all its starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from train_entry.contract import Trial


class StopReason(StrEnum):
    """Why no further trial is launched; the text is what a person reads."""

    EXHAUSTED = "every point of the space is known"
    TRIALS = "limits.trials is reached"
    HOURS = "limits.hours is reached"
    UNPRODUCTIVE = "hundreds of proposals in a row gave nothing to launch"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    trials: int | None
    hours: float | None
    retries: int

    def reached(self, launched: int, active_s: float) -> StopReason | None:
        if self.trials is not None and launched >= self.trials:
            return StopReason.TRIALS
        if self.hours is not None and active_s >= self.hours * 3600:
            return StopReason.HOURS
        return None


def active_seconds(trials: Iterable[Trial], now: float) -> float:
    """How long the study has had an open trial: time between its starts does not count."""
    total_s, until = 0.0, 0.0
    for begin, end in sorted((trial.created_at, trial.closed_at or now) for trial in trials):
        total_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total_s
