"""What a start of a study finds, and how it goes on from there: running jobs, lost ones, refused plans."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.cluster.base import Cluster, JobHandle
from sweeps.config.schema import ConfirmConfig
from sweeps.plan.planner import Planner
from sweeps.search.gate import Admission
from sweeps.search.proposer import Director
from sweeps.search.pruning import Pruning
from sweeps.search.sampler import Proposal, Searcher
from sweeps.search.verdicts import Lesson, lesson
from sweeps.study.ledger import Ledger
from sweeps.study.limits import Limits
from train_entry.contract import Origin, State, StudyRecord, Trial


class Observer(Protocol):
    """Hears of every change of a trial after it is on record; may be slow, may not raise."""

    def changed(self, trial: Trial) -> None: ...

    def tick(self, running: dict[int, JobHandle]) -> None:
        """Called at every turn of the loop."""

    def message(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Clock:
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@dataclass(kw_only=True)
class Recovery:
    """One start of a study: what it works with, and what earlier starts have left."""

    study: StudyRecord
    planner: Planner
    searcher: Searcher
    cluster: Cluster
    ledger: Ledger
    admission: Admission
    limits: Limits
    observer: Observer
    cancel_on_interrupt: bool = True
    check_best: int = 0
    director: Director
    confirm: ConfirmConfig = field(default_factory=ConfirmConfig)
    pruning: Pruning | None = None  # of trials whose loss falls behind; None: all run to their end
    futility: bool = True  # end trials that are known to be slower than the best
    interrupted: Callable[[], bool] = lambda: False
    clock: Clock = field(default_factory=Clock)
    _running: dict[int, JobHandle] = field(default_factory=dict)
    _proposals: dict[int, Proposal] = field(default_factory=dict)  # of open trials
    _alone: int | None = None  # the one trial to run; others of the study are left as they are
    _unproductive: int = 0
    _waiting_told: bool = False
    _failures_told: bool = False
    _cards_told: bool = False
    _started_at: float = 0.0  # this start; a failure of an earlier one may be mended by now
    _learned_from: int = -1  # trials, when refused plans were last judged again

    def _recover_own_trials(self) -> None:
        """Collect what a user's own trials, those without -m, have left; the search repeats none of them."""
        for trial in self.ledger.trials:
            if trial.origin is not Origin.USER or trial.state not in (State.QUEUED, State.RUNNING):
                continue
            if self._was_launched(trial):
                self._attach(trial)
            else:
                self._record(trial.number, state=State.CANCELLED, closed_at=self.clock.now())

    def _recover(self) -> None:
        """Go on from what earlier starts left: teach the sampler, find running jobs, requeue the rest."""
        for trial in self.ledger.trials:
            if trial.origin is Origin.USER:  # need not lie in the space, and is not the search's to repeat
                continue
            if trial.state in (State.QUEUED, State.RUNNING, State.CANCELLED):
                self._resume(trial)
            elif not trial.is_refused or not self._reopen(trial):
                self._remember(trial)
            self.director.learn(self.ledger[trial.number])
        for trial in self.ledger.trials:
            if trial.check_attempt is not None and trial.check is None:
                self._resume_check(trial)
            if trial.repeats and trial.repeats[-1].outcome is None:
                self._resume_repeat(trial)

    def _remember(self, trial: Trial) -> None:
        if trial.is_yardstick:  # no point of the space
            return
        if known := self._lesson(trial):
            self.searcher.remember(known)
        else:
            self.searcher.skip(trial.values)

    def _resume(self, trial: Trial) -> None:
        if not self._was_launched(trial):
            if not self._reopen(trial):
                self._remember(self.ledger[trial.number])
            return
        self._propose_again(trial)
        self._as_new(trial, state=State.RUNNING)
        self._attach(trial)

    def _reopen(self, trial: Trial) -> bool:
        """Queue a trial that was never launched, if by what is known now it may fit; else record why not."""
        if trial.plan is None:
            raise ValueError(f"trial {trial.number} has no plan")
        estimate = self.admission.estimate(trial.plan)
        is_free = trial.reused_from is not None or trial.attempts > 0  # of the gate
        refusal = None if is_free else self.admission.refusal(trial.plan, estimate, trial.origin)
        if refusal:
            if not trial.is_refused or trial.estimate != estimate:
                now = trial.closed_at or self.clock.now()
                self._record(
                    trial.number, state=State.INFEASIBLE, estimate=estimate, outcome=refusal, closed_at=now
                )
            return False
        self._propose_again(trial)
        self._as_new(trial, state=State.QUEUED, estimate=estimate)
        return True

    def _propose_again(self, trial: Trial) -> None:
        if not trial.is_yardstick:
            self._proposals[trial.number] = self.searcher.resume(trial.values)

    def _as_new(self, trial: Trial, **changes: object) -> None:
        """A cancelled attempt says nothing, and the time between two starts is not the study's."""
        now = self.clock.now()
        self._record(
            trial.number, created_at=now, closed_at=None, outcome=None, measured_attempt=None, **changes
        )

    def _reconsider(self) -> None:
        """Judge refused plans again, where estimates have learned since they were."""
        if self._learned_from == self.admission.observations:
            return
        self._learned_from = self.admission.observations
        for trial in self.ledger.trials:
            if trial.is_refused and trial.origin is not Origin.USER:
                self._reopen(trial)

    def _was_launched(self, trial: Trial) -> bool:
        """Whether a job may exist: submitit writes to its folder before it starts one."""
        attempt = self.ledger.attempt(trial.number)
        return trial.state is not State.QUEUED and attempt.spec.exists() and attempt.submitit.exists()

    def _resume_check(self, trial: Trial) -> None:
        if self._was_launched(trial):
            self._attach(trial)
        else:  # the earlier start ended before it launched it
            self._record(trial.number, check_attempt=None)

    def _resume_repeat(self, trial: Trial) -> None:
        *before, last = trial.repeats
        if self._was_launched(trial):
            again = dataclasses.replace(last, started_at=self.clock.now())
            self._attach(self._record(trial.number, repeats=(*before, again)))
        else:
            self._record(trial.number, repeats=tuple(before))

    def _attach(self, trial: Trial) -> None:
        attempt = self.ledger.attempt(trial.number)
        ranks = trial.plan.ranks if trial.plan else 1
        self._running[trial.number] = self.cluster.attach(attempt, ranks, trial.slots)

    def _lesson(self, trial: Trial) -> Lesson | None:
        return lesson(trial, self.study.goals or (self.study.goal,))

    def _record(self, number: int, **changes: object) -> Trial:
        trial = self.ledger.change(number, **changes)
        self.observer.changed(trial)
        return trial
