"""Continue from what earlier starts left: running jobs, lost jobs, refused plans."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sweeps.search.gate import Gate
from sweeps.study.jobs import Jobs
from sweeps.study.journal import Journal
from train_entry.contract import Attempt, Closing, Failure, FailureKind, Origin, State, Trial

OPEN = (State.QUEUED, State.RUNNING, State.CANCELLED)
NEVER_LAUNCHED = Failure(
    kind=FailureKind.CANCELLED, message="never launched: its orchestrator ended before that"
)


@dataclass(kw_only=True)
class Recovery:
    """The recovery at a start. It reads the ledger, and records every change."""

    journal: Journal
    jobs: Jobs
    gate: Gate
    _judged_by: int = -1  # how many trials estimates had learned from when refused plans were judged

    def collect_own_trials(self) -> None:
        """Watch the user's own trials, started without -m, that still run. The search repeats none."""
        for trial in self.journal.ledger.trials:
            if trial.origin is not Origin.USER or trial.state not in (State.QUEUED, State.RUNNING):
                continue
            if trial.running and self.jobs.was_submitted(trial, trial.running):
                self.jobs.attach(trial, trial.running)
            elif trial.running:
                self.journal.record(trial.with_attempt(_unlaunched(trial.running)))
            else:
                self.journal.record(dataclasses.replace(trial, closing=Closing(at=self.journal.clock.now())))

    def resume_search(self) -> None:
        """Teach the sampler, find running jobs, queue the rest again."""
        for trial in self.journal.ledger.trials:
            if trial.origin is Origin.USER:  # may lie outside the space, and the search does not repeat it
                continue
            if trial.state in OPEN:
                self._resume(trial)
            elif not trial.is_refused or not self._reopen(trial):
                self.journal.proposer.remember(trial)
            self.journal.proposer.learn(self.journal.ledger[trial.number])
        for trial in self.journal.ledger.trials:
            if trial.state not in OPEN and trial.running is not None:
                self._resume_repeat(trial, trial.running)

    def judge_refused_again(self) -> None:
        """Queue refused plans that fit by what estimates have learned since."""
        if self._judged_by == self.gate.observations:
            return
        self._judged_by = self.gate.observations
        for trial in self.journal.ledger.trials:
            if trial.is_refused and trial.origin is not Origin.USER:
                self._reopen(trial)

    def _resume(self, trial: Trial) -> None:
        """Continue an open trial, or queue it again.

        A job that could not be cancelled may have gone on, so cancelled jobs are looked for as well.
        """
        attempt = trial.counted
        if attempt is None or trial.closing is not None or not self.jobs.was_submitted(trial, attempt):
            if not self._reopen(trial):
                self.journal.proposer.remember(self.journal.ledger[trial.number])
            return
        self.journal.proposer.reopen(trial)
        again = dataclasses.replace(attempt, outcome=None, ended_at=None)
        # The time between two starts does not count as the study's.
        resumed = dataclasses.replace(trial, created_at=self.journal.clock.now()).with_attempt(again)
        self.jobs.attach(self.journal.record(resumed), again)

    def _resume_repeat(self, trial: Trial, attempt: Attempt) -> None:
        """Continue a repeat or a check, or record that it was never launched."""
        if self.jobs.was_submitted(trial, attempt):
            again = dataclasses.replace(attempt, started_at=self.journal.clock.now())
            self.jobs.attach(self.journal.record(trial.with_attempt(again)), again)
        else:
            self.journal.record(trial.with_attempt(_unlaunched(attempt, is_replaced=True)))

    def _reopen(self, trial: Trial) -> bool:
        """Queue a trial that was never launched, if it may fit by current estimates.

        Else record why it is refused, and return False.
        """
        if trial.plan is None:
            raise ValueError(f"trial {trial.number} has no plan")
        estimate = self.gate.estimate(trial.plan)
        is_exempt = trial.reused_from is not None or trial.is_launched
        refusal = None if is_exempt else self.gate.refusal(trial.plan, estimate, trial.origin)
        if refusal is not None:
            if not trial.is_refused or trial.estimate != estimate:
                closing = Closing(at=trial.closed_at or self.journal.clock.now(), outcome=refusal)
                self.journal.record(dataclasses.replace(trial, estimate=estimate, closing=closing))
            return False
        self.journal.proposer.reopen(trial)
        if trial.counted is not None:
            trial = trial.with_attempt(_unlaunched(trial.counted, is_replaced=True))
        self.journal.record(
            dataclasses.replace(trial, estimate=estimate, created_at=self.journal.clock.now(), closing=None)
        )
        return True


def _unlaunched(attempt: Attempt, is_replaced: bool = False) -> Attempt:
    """Close an attempt that was recorded but never launched, with no time of its own."""
    return dataclasses.replace(
        attempt,
        outcome=attempt.outcome or NEVER_LAUNCHED,
        ended_at=attempt.ended_at or attempt.started_at,
        is_replaced=is_replaced,
    )
