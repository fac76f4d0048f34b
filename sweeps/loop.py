"""The loop: ask, plan, submit, collect, tell. Each finished job frees its slot at once; there is no batch.

Order of writes: the job's outcome files, the ledger, the sampler, the tracker. Whatever ends this process,
the next start goes on from the ledger and the attempt directories.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sweeps.advisor import advice_for
from sweeps.cluster.base import JobHandle, JobState, share_a_node
from sweeps.collect import attempt_gpu_seconds, attempt_spent, collect
from sweeps.ds_config import ds_config_text
from sweeps.limits import StopReason, active_seconds
from sweeps.plan import Rejection
from sweeps.planner import Planned
from sweeps.recovery import Recovery
from sweeps.space import Point
from sweeps.study import Proposal
from sweeps.verdicts import VERDICTS, Verdict, state_of
from train_entry.contract import (
    Advice,
    AttemptKind,
    Failure,
    FailureKind,
    Measurement,
    Origin,
    Outcome,
    State,
    Trial,
    TrialSpec,
    read_document,
)

POLL_S = 0.2
MAX_UNPRODUCTIVE = 500  # proposals in a row that launch nothing, where there is no end of them
PROPOSALS_A_TURN = 20  # between two looks at the running jobs and at Ctrl-C


@dataclass(kw_only=True)
class StudyLoop(Recovery):
    """One start of a study. `run` returns why it ended."""

    # ------------------------------------------------------------------ the turns

    def run(self, point: Point | None = None) -> StopReason:
        """Search until a limit is reached or nothing is left; with a point, measure just that one, anew."""
        self.admission.recall(self.ledger.trials)
        self._recover_own_trials()
        if point is None:
            self._recover()
        else:
            self._alone = self.ledger.next_number()
            self._open(Proposal(point=point, number=-1), self.planner.plan(point), Origin.USER)
        while True:
            self._collect_ended()
            if self.interrupted():
                return self._ended(self._interrupt())
            self._launch_queued()
            reason = StopReason.EXHAUSTED if self._alone else self._limit_reached() or self._propose()
            if reason is StopReason.EXHAUSTED and not self._alone and not self._running:
                self._reconsider()
            if reason and not self._running and not self._queued() and not self._start_checks(reason):
                return self._ended(reason)
            self.observer.tick(dict(self._running))
            self.clock.sleep(POLL_S)

    def _ended(self, reason: StopReason) -> StopReason:
        self.observer.tick({})
        return reason

    def _limit_reached(self) -> StopReason | None:
        new = sum(trial.attempts == 0 for trial in self._launchable())
        active_s = active_seconds(self.ledger.trials, self.clock.now())
        return self.limits.reached(self.ledger.launched + new, active_s)

    def _interrupt(self) -> StopReason:
        fate = "cancelled" if self.cancel_on_interrupt else "left to themselves"
        self.observer.message(f"interrupted: {len(self._running)} running trials are {fate}")
        for number, handle in list(self._running.items()):
            if self.cancel_on_interrupt:
                self.cluster.cancel(handle)
                self._finish(number, handle, cancelled=True)
        for trial in self._queued():
            self._record(trial.number, state=State.CANCELLED, closed_at=self.clock.now())
        return StopReason.INTERRUPTED

    # ------------------------------------------------------------------ ask, plan

    def _propose(self) -> StopReason | None:
        """Ask while a slot is free; what needs no launch costs none."""
        for _ in range(PROPOSALS_A_TURN):
            if self.cluster.free_ranks() == 0 or self._launchable():
                break
            proposal = self.searcher.ask()
            if proposal is None:
                return StopReason.EXHAUSTED
            self._open(proposal, self.planner.plan(proposal.point), Origin.SAMPLER)
            self._unproductive += 1
            if self._unproductive > MAX_UNPRODUCTIVE and not self.searcher.is_finite:
                return StopReason.UNPRODUCTIVE
            self._launch_queued()
            if reason := self._limit_reached():
                return reason
        return None

    def _open(self, proposal: Proposal, planned: Planned, origin: Origin) -> None:
        number = self.ledger.next_number()
        trial = Trial(
            number=number,
            state=State.QUEUED,
            origin=origin,
            overrides=planned.overrides,
            values=proposal.point,
            created_at=self.clock.now(),
            fingerprint=planned.fingerprint,
        )
        if origin is not Origin.USER:
            self._proposals[number] = proposal
        if isinstance(planned.plan, Rejection):
            reasons = planned.plan.reasons
            closed = dataclasses.replace(
                trial, state=State.REJECTED, reasons=reasons, closed_at=trial.created_at
            )
            self._tell(self.ledger.put(closed))
            return
        twin = self._twin(planned) if origin is not Origin.USER else None
        estimate = self.admission.estimate(planned.plan)
        trial = dataclasses.replace(
            trial, plan=planned.plan, estimate=estimate, reused_from=twin.number if twin else None
        )
        refusal = None if twin else self.admission.refusal(estimate, origin)
        if refusal:
            trial = dataclasses.replace(
                trial, state=State.INFEASIBLE, outcome=refusal, closed_at=trial.created_at
            )
            self._tell(self.ledger.put(trial))
        else:
            self.observer.changed(self.ledger.put(trial))
            for doubt in self.admission.doubts(trial) if origin is Origin.USER else ():
                self.observer.message(doubt)

    def _twin(self, planned: Planned) -> Trial | None:
        """A trial whose result this one can share: known, or on its way to us."""
        twin = self.ledger.twin(planned.fingerprint or "")
        return None if twin and twin.state is State.RUNNING and twin.number not in self._running else twin

    # ------------------------------------------------------------------ submit

    def _queued(self) -> list[Trial]:
        return [
            trial
            for trial in self.ledger.trials
            if trial.state is State.QUEUED and self._alone in (None, trial.number)
        ]

    def _launchable(self) -> list[Trial]:
        """Queued trials that do not wait for a twin."""
        return [trial for trial in self._queued() if trial.reused_from is None]

    def _launch_queued(self) -> None:
        for trial in self._queued():
            if trial.reused_from is not None:
                self._settle_twin(trial)
        for trial in self._launchable():
            slots = self.cluster.reserve(trial.plan.ranks if trial.plan else 1)
            if slots is None:
                self._say_waiting(trial)
                return
            self._launch(trial, slots)

    def _settle_twin(self, trial: Trial) -> None:
        """Share the twin's result once it has one; launch the trial itself where it came to none."""
        twin = self.ledger[trial.reused_from or 0]
        if twin.state in (State.MEASURED, State.INFEASIBLE):
            self._close(trial.number, state=State.REUSED, outcome=twin.outcome)
        elif twin.state not in (State.RUNNING, State.QUEUED):
            self._record(trial.number, reused_from=None)

    def _say_waiting(self, trial: Trial) -> None:
        if not self._running and not self._waiting_told and trial.plan:
            self.observer.message(f"waiting for {trial.plan.ranks} free slots; another study holds them")
            self._waiting_told = True

    def _launch(self, trial: Trial, slots: tuple[str, ...]) -> None:
        kind = AttemptKind.FIRST if trial.attempts == 0 else AttemptKind.RETRY
        beside = [other for other, job in self._running.items() if share_a_node(job.slots, slots)]
        for other in beside:
            self._record(other, shared=True)
        trial = self._record(
            trial.number,
            state=State.RUNNING,
            attempts=trial.attempts + 1,
            slots=slots,
            shared=bool(beside) or self.cluster.has_neighbours(slots),
        )
        self._submit(trial, kind, slots)
        self._unproductive, self._waiting_told = 0, False

    def _submit(self, trial: Trial, kind: AttemptKind, slots: tuple[str, ...]) -> None:
        spec = self.planner.spec(trial, trial.attempts, kind)
        spec = dataclasses.replace(spec, memory_limit_bytes=self.admission.memory_limit_bytes(trial))
        attempt = self.ledger.open_attempt(spec, ds_config_text(spec.plan))
        self._running[trial.number] = self.cluster.submit(attempt, spec, slots)

    def _start_checks(self, reason: StopReason) -> bool:
        """Train the best trials longer, one after another; False when none is left to check."""
        if reason is StopReason.HOURS:
            return False
        ranked = sorted(self.ledger.measurements(), key=lambda found: -self._value(found[1]))
        for trial, _ in ranked[: self.check_best]:
            if trial.check is None and trial.plan is not None:
                slots = self.cluster.reserve(trial.plan.ranks)
                if slots is None:
                    return True
                attempts = trial.attempts + 1
                self.observer.message(f"trial {trial.number:04d} is trained longer, for a loss to compare")
                checked = self._record(trial.number, attempts=attempts, check_attempt=attempts, slots=slots)
                self._submit(checked, AttemptKind.CHECK, slots)
                return True
        return False

    # ------------------------------------------------------------------ collect, tell

    def _collect_ended(self) -> None:
        for number, handle in list(self._running.items()):
            if self.cluster.poll(handle) in (JobState.ENDED, JobState.LOST):
                self._finish(number, handle)

    def _finish(self, number: int, handle: JobHandle, cancelled: bool = False) -> None:
        """Put a job that ended on record. What we cancelled says nothing, unless it had finished before."""
        del self._running[number]
        spec = read_document(handle.attempt.spec, TrialSpec)
        if spec is None:
            raise FileNotFoundError(handle.attempt.spec)
        outcome = collect(handle.attempt, spec)
        if cancelled and isinstance(outcome, Failure):
            outcome = Failure(kind=FailureKind.CANCELLED, message="cancelled on request")
        self.ledger.change(number, spent=attempt_spent(handle.attempt, spec.plan.ranks))
        if self.cluster.has_neighbours(handle.slots):  # they may have come while it ran
            self._record(number, shared=True)
        gpu_s = self.ledger[number].gpu_s + attempt_gpu_seconds(handle.attempt, spec.plan.ranks)
        if spec.kind is AttemptKind.CHECK:
            self._finish_check(number, outcome, gpu_s)
        elif self._is_retried(number, outcome):
            lost = self.ledger[number].lost + (not _is_nobodys_fault(outcome))
            self._record(number, state=State.QUEUED, gpu_s=gpu_s, lost=lost)
        else:
            self.admission.learn(dataclasses.replace(self.ledger[number], outcome=outcome))
            self._close(
                number,
                state=state_of(outcome),
                outcome=outcome,
                gpu_s=gpu_s,
                measured_attempt=spec.attempt,
                advice=self._advice(number, outcome, spec),
            )

    def _advice(self, number: int, outcome: Outcome, spec: TrialSpec) -> Advice | None:
        trial = dataclasses.replace(self.ledger[number], outcome=outcome)
        return advice_for(trial, spec, self.planner.plan, self.admission.estimate, self.ledger.trials)

    def _finish_check(self, number: int, outcome: Outcome, gpu_s: float) -> None:
        if _is_cancelled(outcome) or self._is_retried(number, outcome):
            lost = self.ledger[number].lost + (not _is_nobodys_fault(outcome))
            self._record(number, check_attempt=None, gpu_s=gpu_s, lost=lost)
        else:
            self._record(number, check=outcome, gpu_s=gpu_s)

    def _is_retried(self, number: int, outcome: Outcome) -> bool:
        if not isinstance(outcome, Failure) or VERDICTS[outcome.kind] is not Verdict.RETRY:
            return False
        if self.ledger[number].origin is Origin.USER and number != self._alone:
            return False
        if _is_cancelled(outcome):  # by us, on Ctrl-C; or by hand while we were away
            return not self.interrupted()
        return _is_nobodys_fault(outcome) or self.ledger[number].lost < self.limits.retries

    def _close(self, number: int, **changes: object) -> None:
        self._tell(self.ledger.change(number, closed_at=self.clock.now(), **changes))

    def _tell(self, trial: Trial) -> None:
        """The sampler, then the observer, hear of a closed trial that is on record."""
        if trial.state is not State.CANCELLED and (proposal := self._proposals.pop(trial.number, None)):
            self.searcher.tell(proposal, self._lesson(trial))
        self.observer.changed(trial)

    def _value(self, measurement: Measurement) -> float:
        return float(getattr(measurement, self.study.objective))


def _is_cancelled(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.kind is FailureKind.CANCELLED


def _is_nobodys_fault(outcome: Outcome) -> bool:
    """Whether a lost attempt uses up no retry: its nodes were taken back, as often as others want them."""
    return isinstance(outcome, Failure) and outcome.kind in (FailureKind.CANCELLED, FailureKind.PREEMPTED)
