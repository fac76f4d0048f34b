"""Tells a person and the tracker what the loop did, after it is on record."""

from __future__ import annotations

import time

from sweeps.cluster.base import JobHandle
from sweeps.display import Display, Progress, Reached
from sweeps.ledger import Ledger
from sweeps.limits import Limits, active_seconds
from sweeps.tracking import Tracker
from train_entry.contract import ContractError, Heartbeat, Trial, TrialSpec, read_document


class StudyObserver:
    """The loop's observer: live display and tracker."""

    def __init__(
        self, ledger: Ledger, limits: Limits, display: Display, tracker: Tracker, parallel: int
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._display = display
        self._tracker = tracker
        self._parallel = parallel

    def changed(self, trial: Trial) -> None:
        if trial.closed_at is not None:
            attempt = self._ledger.attempt(trial.number) if trial.attempts else None
            self._tracker.record(trial, attempt)

    def tick(self, running: dict[int, JobHandle]) -> None:
        trials = self._ledger.trials
        progress = Progress(
            launched=self._ledger.launched,
            elapsed_s=active_seconds(trials, time.time()),
            limit_trials=self._limits.trials,
            limit_s=self._limits.hours * 3600 if self._limits.hours else None,
            parallel=self._parallel,
            running={number: found for number, job in running.items() if (found := _reached(job))},
        )
        self._display.update(trials, progress)

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
