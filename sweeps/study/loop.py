"""The loop: ask, plan, submit, collect, tell. Each finished job frees its slot at once; there is no batch.

Order of writes: the job's outcome files, the ledger, the sampler, the tracker. Whatever ends this process,
the next start goes on from the ledger and the attempt directories.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sweeps.cluster.base import JobHandle, JobState, share_a_node
from sweeps.plan.resolve import Planned, Rejection
from sweeps.search.advice import advice_for
from sweeps.search.proposer import OUTSIDE, Pause, Suggestion
from sweeps.search.sampler import Proposal
from sweeps.search.verdicts import state_of
from sweeps.space.dimensions import Point
from sweeps.study.collect import attempt_elapsed, attempt_gpu_seconds, collect
from sweeps.study.limits import StopReason, failures_in_a_row
from sweeps.study.repeating import Repeating, is_nobodys_fault
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
class StudyLoop(Repeating):
    """One start of a study. `run` returns why it ended."""

    # ------------------------------------------------------------------ the turns

    def run(self, point: Point | None = None) -> StopReason:
        """Search until a limit is reached or nothing is left; with a point, measure just that one, anew."""
        self._started_at = self.clock.now()
        self.admission.recall(self.ledger.trials)
        self._recover_own_trials()
        if point is None:
            self._recover()
        else:
            self._alone = self.ledger.next_number()
            alone = Suggestion(proposal=Proposal(point=point, number=OUTSIDE), origin=Origin.USER)
            self._open(alone, self.planner.plan(point))
        while True:
            self._collect_ended()
            if self.interrupted():
                return self._ended(self._interrupt())
            self._end_losers()
            self._launch_queued()
            reason = StopReason.EXHAUSTED if self._alone else self._limit_reached() or self._propose()
            if reason is StopReason.EXHAUSTED and not self._alone and not self._running:
                self._reconsider()
            if reason and not self._running and not self._queued() and not self._start_last_runs():
                return self._ended(reason)
            self.observer.tick(dict(self._running))
            self.director.think()
            self.clock.sleep(POLL_S)

    def _start_last_runs(self) -> bool:
        """What follows the search, one run after another: confirmation, then checks. False: all is done."""
        if self._alone:
            return False
        if self._start_confirmation():
            return True
        self._conclude()
        return self._start_checks()

    def _ended(self, reason: StopReason) -> StopReason:
        self.observer.tick({})
        return reason

    def _limit_reached(self) -> StopReason | None:
        """With what the confirmation will take in reserve."""
        new = sum(trial.attempts == 0 for trial in self._launchable())
        spent = self._spent()
        reason = self.limits.reached(
            dataclasses.replace(spent, launched=spent.launched + new), self._reserve()
        )
        if reason is StopReason.FAILURES and not self._failures_told:
            self._failures_told = True
            for trial in failures_in_a_row(self.ledger.trials, self._started_at)[:1]:
                assert isinstance(trial.outcome, Failure)
                kind, message = trial.outcome.kind, trial.outcome.message
                self.observer.message(f"{spent.failures} trials in a row failed alike: {kind}: {message}")
        return reason

    def _interrupt(self) -> StopReason:
        fate = "cancelled" if self.cancel_on_interrupt else "left to themselves"
        self.observer.message(f"interrupted: {len(self._running)} running trials are {fate}")
        if self.cancel_on_interrupt:
            for problem in self.cluster.cancel(*self._running.values()):
                self.observer.message(problem)
            for number, handle in list(self._running.items()):
                self._finish(number, handle, cancelled=True)
        for trial in self._queued():
            self._record(trial.number, state=State.CANCELLED, closed_at=self.clock.now())
        return StopReason.INTERRUPTED

    # ------------------------------------------------------------------ ask, plan

    def _propose(self) -> StopReason | None:
        """Ask while a slot is free; what needs no launch costs none."""
        self._start_drift_look()
        for _ in range(PROPOSALS_A_TURN):
            if self.cluster.free_ranks() == 0 or self._launchable():
                break
            found = self.director.next(self.ledger.trials)
            if found is Pause.WAIT:
                return None
            if isinstance(found, Pause):
                return StopReason.NO_BETTER if found is Pause.NO_BETTER else StopReason.EXHAUSTED
            self._open(found, self.planner.plan(found.proposal.point))
            self._unproductive += 1
            if self._unproductive > MAX_UNPRODUCTIVE and not self.searcher.is_finite:
                return StopReason.UNPRODUCTIVE
            self._launch_queued()
            if reason := self._limit_reached():
                return reason
        return None

    def _open(self, found: Suggestion, planned: Planned) -> None:
        number, origin = self.ledger.next_number(), found.origin
        trial = Trial(
            number=number,
            state=State.QUEUED,
            origin=origin,
            overrides=planned.overrides,
            values=found.proposal.point,
            created_at=self.clock.now(),
            fingerprint=planned.fingerprint,
            rung=found.rung,
            parent=found.parent,
            is_yardstick=found.is_yardstick,
        )
        if found.proposal.number != OUTSIDE:
            self._proposals[number] = found.proposal
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
        refusal = None if twin else self.admission.refusal(planned.plan, estimate, origin)
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
        if self.director.rules.search.repeat_duplicates:
            return None
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

    # ------------------------------------------------------------------ collect, tell

    def _end_losers(self) -> None:
        for number in self.pruning.look(self._running, self._proposals) if self.pruning else ():
            self.observer.message(f"trial {number:04d} falls behind, and is asked to end")

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
        self._compare_cards(number, outcome)
        if cancelled and isinstance(outcome, Failure):
            outcome = Failure(kind=FailureKind.CANCELLED, message="cancelled on request")
        self.ledger.change(number, elapsed=attempt_elapsed(handle.attempt, spec.plan.ranks))
        if self.cluster.has_neighbours(handle.slots):  # they may have come while it ran
            self._record(number, shared=True)
        gpu_s = self.ledger[number].gpu_s + attempt_gpu_seconds(handle.attempt, spec.plan.ranks)
        if spec.kind is AttemptKind.CHECK:
            self._finish_check(number, outcome, gpu_s)
        elif spec.kind is AttemptKind.REPEAT:
            self._finish_repeat(number, outcome, gpu_s)
        elif self._is_retried(number, outcome):
            lost = self.ledger[number].lost + (not is_nobodys_fault(outcome))
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

    def _compare_cards(self, number: int, outcome: Outcome) -> None:
        """Where a site gives several models one name, trials may run on different cards."""
        names = _cards(outcome)
        for trial in self.ledger.trials if names and not self._cards_told else ():
            others = _cards(trial.outcome)
            if others and others != names:
                self._cards_told = True
                self.observer.message(
                    f"trial {number:04d} ran on {names}, trial {trial.number:04d} on {others}: they do not "
                    "compare; cluster.gpu_type or cluster.constraint chooses one kind"
                )
                return

    def _advice(self, number: int, outcome: Outcome, spec: TrialSpec) -> Advice | None:
        trial = dataclasses.replace(self.ledger[number], outcome=outcome)
        return advice_for(trial, spec, self.planner.plan, self.admission.estimate, self.ledger.trials)

    def _close(self, number: int, **changes: object) -> None:
        self._tell(self.ledger.change(number, closed_at=self.clock.now(), **changes))

    def _tell(self, trial: Trial) -> None:
        """The sampler, then the observer, hear of a closed trial that is on record."""
        if trial.state is not State.CANCELLED and (proposal := self._proposals.pop(trial.number, None)):
            self.searcher.tell(proposal, self._lesson(trial))
        self.director.learn(trial)
        self.observer.changed(trial)


def _cards(outcome: Outcome | None) -> str:
    ranks = outcome.ranks if isinstance(outcome, Measurement) else ()
    return " and ".join(sorted({rank.device_name for rank in ranks}))
