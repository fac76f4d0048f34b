"""trial.json: one configuration and all its launches. Everything that follows from them is a property."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_entry.contract.job.results import Failure, Measurement, Outcome
from train_entry.contract.job.spec import Plan
from train_entry.contract.shared.words import (
    AttemptKind,
    FailureKind,
    Origin,
    Purpose,
    Scalar,
    State,
    TimingEnd,
)
from train_entry.contract.study.estimate import Advice, Estimate, Reason
from train_entry.contract.study.upgrade import upgraded_trial

TRIES = (AttemptKind.FIRST, AttemptKind.RETRY)
# A plan that runs out of memory is infeasible, not failed, exactly as if its estimate had refused it.
INFEASIBLE = (FailureKind.INFEASIBLE, FailureKind.GPU_OOM, FailureKind.HOST_OOM)
# A lost attempt of these kinds uses up no retry, however often the nodes are taken away.
NOBODYS_FAULT = (FailureKind.CANCELLED, FailureKind.PREEMPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elapsed:
    """An attempt's wall-clock time by phase, in seconds. None: not known."""

    queue_s: float | None  # waiting for nodes
    startup_s: float | None  # until the slowest rank's first step had ended
    run_s: float | None  # from then on


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One launch of a trial, and its outcome."""

    number: int  # part of its directory's name; no other attempt ever uses that directory
    kind: AttemptKind
    purpose: Purpose | None = None  # repeats only
    round: int = 0  # of the confirmation, counted from 1
    slots: tuple[str, ...] = ()
    started_at: float | None = None  # time of day; None: not recorded
    ended_at: float | None = None
    outcome: Outcome | None = None  # None: it is running
    is_replaced: bool = False  # it was lost through no fault of the plan, and another attempt replaces it
    is_shared: bool = False  # another trial ran on the same node at the same time
    gpu_s: float = 0.0  # ranks x seconds
    elapsed: Elapsed | None = None

    @property
    def is_running(self) -> bool:
        return self.outcome is None

    @property
    def uses_up_a_retry(self) -> bool:
        blameless = isinstance(self.outcome, Failure) and self.outcome.kind in NOBODYS_FAULT
        return self.is_replaced and not blameless


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """The end of a trial that was not launched: it was refused, reused, or cancelled in the queue."""

    at: float  # time of day
    outcome: Outcome | None = None  # why it was refused, or the reused trial's outcome; None: cancelled


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One configuration and everything known about it."""

    number: int
    origin: Origin
    overrides: tuple[str, ...]  # `python sweep.py <overrides>` runs it alone
    values: Mapping[str, Scalar]  # of the knobs that vary in this study
    created_at: float  # time of day; that of the later start if a resumed study took the trial up again
    plan: Plan | None = None  # None: rejected
    fingerprint: str | None = None
    estimate: Estimate | None = None  # made before the launch; None: rejected, or from an earlier edition
    reasons: tuple[Reason, ...] = ()  # why it was rejected
    reused_from: int | None = None  # the earlier trial with exactly the same job
    parent: int | None = None
    baseline: str | None = None  # the name of the baseline; None: it is not a baseline
    is_single_gpu: bool = False  # the single-GPU baseline: for comparison only, cannot win
    attempts: tuple[Attempt, ...] = ()
    closing: Closing | None = None  # None: the trial is open, or an attempt closed it
    advice: Advice | None = None  # after running out of memory

    @staticmethod
    def upgraded(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded_trial(raw)

    # ------------------------------------------------------------------ attempts

    @property
    def counted(self) -> Attempt | None:
        """The attempt whose outcome is the trial's: the latest try; None if it is missing or replaced."""
        tries = [attempt for attempt in self.attempts if attempt.kind in TRIES]
        return tries[-1] if tries and not tries[-1].is_replaced else None

    @property
    def repeats(self) -> tuple[Attempt, ...]:
        """Further measurements of the trial in fresh processes, running ones included."""
        return self._standing(AttemptKind.REPEAT)

    @property
    def check(self) -> Attempt | None:
        """The check: a longer run over the study's fixed number of tokens."""
        return next(iter(self._standing(AttemptKind.CHECK)), None)

    @property
    def running(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.is_running), None)

    @property
    def latest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def shown(self) -> Attempt | None:
        """The attempt whose files to show: the counted one if it has ended, else the latest."""
        return self.counted if self.counted and self.counted.outcome else self.latest

    @property
    def is_launched(self) -> bool:
        return bool(self.attempts)

    @property
    def used_retries(self) -> int:
        return sum(attempt.uses_up_a_retry for attempt in self.attempts)

    @property
    def gpu_s(self) -> float:
        """GPU-seconds (ranks x seconds) of all attempts together."""
        return sum((attempt.gpu_s for attempt in self.attempts), start=0.0)

    def with_attempt(self, attempt: Attempt) -> Trial:
        """Return the trial with this attempt added, or replaced if it has an attempt of this number."""
        others = (known for known in self.attempts if known.number != attempt.number)
        ordered = sorted((*others, attempt), key=lambda known: known.number)
        return dataclasses.replace(self, attempts=tuple(ordered))

    def _standing(self, kind: AttemptKind) -> tuple[Attempt, ...]:
        return tuple(one for one in self.attempts if one.kind is kind and not one.is_replaced)

    # ------------------------------------------------------------------ outcome and state

    @property
    def outcome(self) -> Outcome | None:
        if self.closing is not None:
            return self.closing.outcome
        return self.counted.outcome if self.counted else None

    @property
    def state(self) -> State:
        if self.plan is None:
            return State.REJECTED
        if self.closing is not None:
            if self.closing.outcome is None:
                return State.CANCELLED
            return State.INFEASIBLE if self.reused_from is None else State.REUSED
        if self.counted is None:
            return State.QUEUED
        return State.RUNNING if self.counted.outcome is None else state_of(self.counted.outcome)

    @property
    def closed_at(self) -> float | None:
        """The time of day at which the trial closed; None while it is open."""
        if self.plan is None:
            return self.created_at
        if self.closing is not None:
            return self.closing.at
        return self.counted.ended_at if self.counted else None

    @property
    def is_refused(self) -> bool:
        """True if the trial was never launched because its estimate says that it does not fit."""
        return self.state is State.INFEASIBLE and not self.attempts

    @property
    def is_shared(self) -> bool:
        """True if another trial ran on the same node while this one was measured."""
        return self.counted is not None and self.counted.is_shared


def state_of(outcome: Outcome) -> State:
    """The state of a trial that closes with this outcome."""
    match outcome:
        case Measurement(ended=TimingEnd.FUTILE | TimingEnd.ASKED):
            return State.STOPPED
        case Measurement():
            return State.SUSPECT if outcome.is_suspect else State.MEASURED
        case Failure(kind=FailureKind.CANCELLED):
            return State.CANCELLED
        case Failure(kind=kind):
            return State.INFEASIBLE if kind in INFEASIBLE else State.FAILED
