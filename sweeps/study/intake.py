"""Record new trials as queued, or close them at once where a launch would teach nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sweeps.plan.resolve import Planned, Rejection
from sweeps.search.gate import Gate
from sweeps.search.proposer import Suggestion
from sweeps.study.jobs import Jobs
from sweeps.study.journal import Journal
from train_entry.contract import Closing, Origin, State, Trial


@dataclass(kw_only=True)
class Intake:
    """The entry of new trials into a study.

    It numbers them, refuses those that cannot fit, and finds those that would repeat a job.
    """

    journal: Journal
    gate: Gate
    jobs: Jobs

    def open(self, found: Suggestion) -> None:
        """Record a proposal as a trial."""
        ledger, planned = self.journal.ledger, found.planned
        now = self.journal.clock.now()
        trial = Trial(
            number=ledger.next_number(),
            origin=found.origin,
            overrides=planned.overrides,
            values=found.point,
            created_at=now,
            fingerprint=planned.fingerprint,
            baseline=found.baseline,
            parent=found.parent,
            is_single_gpu=found.is_single_gpu,
        )
        self.journal.proposer.opened(trial.number, found)
        if isinstance(planned.plan, Rejection):
            self.journal.close(dataclasses.replace(trial, reasons=planned.plan.reasons))
            return
        is_own = found.origin is Origin.USER
        twin = None if is_own else self._twin(planned)
        estimate = self.gate.estimate(planned.plan)
        trial = dataclasses.replace(
            trial, plan=planned.plan, estimate=estimate, reused_from=twin.number if twin else None
        )
        refusal = None if twin else self.gate.refusal(planned.plan, estimate, found.origin)
        if refusal is not None:
            self.journal.close(dataclasses.replace(trial, closing=Closing(at=now, outcome=refusal)))
            return
        self.journal.record(trial)
        for doubt in self.gate.doubts(trial) if is_own else ():
            self.journal.say(doubt)

    def settle(self, waiting: Trial) -> None:
        """Close a trial with its twin's result, once there is one; if the twin has none, launch the trial."""
        twin = self.journal.ledger[waiting.reused_from or 0]
        if twin.state in (State.MEASURED, State.INFEASIBLE):
            closing = Closing(at=self.journal.clock.now(), outcome=twin.outcome)
            self.journal.close(dataclasses.replace(waiting, closing=closing))
        elif twin.state not in (State.RUNNING, State.QUEUED):
            self.journal.record(dataclasses.replace(waiting, reused_from=None))

    def _twin(self, planned: Planned) -> Trial | None:
        """Return a trial of the same plan whose result is known or on its way."""
        if self.journal.proposer.repeats_duplicates:
            return None
        twin = self.journal.ledger.twin(planned.fingerprint or "")
        is_lost = twin is not None and twin.state is State.RUNNING and twin.number not in self.jobs.running
        return None if is_lost else twin
