"""Tell the display and the tracker what the loop did, after it is on record."""

from __future__ import annotations

import time

from sweeps.cluster.base import JobHandle
from sweeps.show.display import Display, Reached, StudyProgress
from sweeps.study.ledger import Ledger
from sweeps.study.limits import Limits, active_seconds, launched
from sweeps.tracking.background import Tracker
from sweeps.tracking.mlflow import shown_attempt
from train_entry.contract import (
    ContractError,
    Goal,
    Heartbeat,
    Origin,
    Ranking,
    Trial,
    TrialSpec,
    read_document,
)


class StudyObserver:
    """The loop's observer: live display and tracker."""

    def __init__(
        self,
        ledger: Ledger,
        goal: Goal,
        limits: Limits,
        display: Display,
        tracker: Tracker,
        parallel: int,
        points: int | None,
    ) -> None:
        self._ledger = ledger
        self._goal = goal
        self._limits = limits
        self._display = display
        self._tracker = tracker
        self._parallel = parallel
        self._points = points  # in the space; None: infinitely many

    def changed(self, trial: Trial) -> None:
        if trial.closed_at is not None:
            folder = self._ledger.directory.trial(trial.number)
            drift = Ranking(self._ledger.trials, self._goal).drift(trial)
            self._tracker.record(trial, shown_attempt(folder, trial), drift)

    def tick(self, running: dict[int, JobHandle]) -> None:
        trials = self._ledger.trials
        progress = StudyProgress(
            launched=launched(trials),
            elapsed_s=active_seconds(trials, time.time()),
            limit_trials=self._launches_to_come(),
            limit_s=self._limits.hours * 3600 if self._limits.hours else None,
            parallel=self._parallel,
            running={number: found for number, job in running.items() if (found := _reached(job))},
            waiting=frozenset(number for number, job in running.items() if not job.attempt.job.exists()),
        )
        self._display.update(trials, progress)

    def _launches_to_come(self) -> int | None:
        """Return the most trials that the study will launch: a small space ends before the limit."""
        known = sum(trial.origin is not Origin.USER for trial in self._ledger.trials)
        left = None if self._points is None else launched(self._ledger.trials) + max(0, self._points - known)
        return min((total for total in (left, self._limits.trials) if total is not None), default=None)

    def message(self, text: str) -> None:
        self._display.message(text)


def _reached(job: JobHandle) -> Reached | None:
    try:
        beat = read_document(job.attempt.heartbeat(0), Heartbeat)
        spec = read_document(job.attempt.spec, TrialSpec)
    except ContractError:
        return None
    if beat is None or spec is None:
        return None
    measure = spec.measure
    return Reached(beat.phase, beat.step, measure.warmup_steps + measure.steps + measure.split_steps)
