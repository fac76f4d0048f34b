"""Run a study: collect ended jobs, decide what is next, launch it. Each finished job frees its slot at once.

Order of writes: the job's outcome files, the ledger, the sampler, the tracker. Whatever ends this process,
the next start goes on from the ledger and the attempt directories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from sweeps.cluster.base import Cluster
from sweeps.config.schema import ConfirmConfig
from sweeps.plan.planner import Planner
from sweeps.search.confirmation import conclude
from sweeps.search.gate import Gate
from sweeps.search.proposer import Pause, Proposer, Suggestion
from sweeps.search.pruning import Pruning
from sweeps.space.dimensions import Point
from sweeps.study.futility import step_to_beat_s
from sweeps.study.intake import Intake
from sweeps.study.jobs import Jobs
from sweeps.study.journal import Clock, Journal, Observer
from sweeps.study.ledger import Ledger
from sweeps.study.limits import Limits, StopReason, failures_in_a_row, reserve_of, spent_by
from sweeps.study.next_launch import Done, Launch, Policy, Situation, Wait, next_launch
from sweeps.study.recovery import Recovery
from sweeps.study.results import Ending, Results
from train_entry.contract import (
    Attempt,
    AttemptKind,
    Closing,
    Failure,
    Origin,
    Purpose,
    State,
    StudyRecord,
    Trial,
    counted,
    dump,
    write_atomic,
)
from train_entry.contract.study.trial import TRIES

POLL_S = 0.2
MAX_UNPRODUCTIVE = 500  # proposals in a row that launch nothing, in an infinite space
STEPS_A_TURN = 40  # launches and proposals between two looks at the running jobs and at Ctrl-C
SEARCH_ENDS = {Pause.NO_BETTER: StopReason.NO_BETTER, Pause.EXHAUSTED: StopReason.EXHAUSTED}


@dataclass(kw_only=True)
class StudyLoop:
    """One start of a study. `run` returns why it ended."""

    study: StudyRecord
    planner: Planner
    proposer: Proposer
    cluster: Cluster
    ledger: Ledger
    gate: Gate
    limits: Limits
    observer: Observer
    cancel_on_interrupt: bool = True
    check_best: int = 0
    confirm: ConfirmConfig = field(default_factory=ConfirmConfig)
    pruning: Pruning | None = None  # ends trials whose loss falls behind; None: all run to their end
    futility: bool = True  # whether trials that are known to be slower than the best are ended
    interrupted: Callable[[], bool] = lambda: False
    clock: Clock = field(default_factory=Clock)
    _alone: int | None = None  # the number of the one trial to run; the study's others stay as they are
    _unproductive: int = 0
    _started_at: float = 0.0  # earlier failures do not count: their cause may be repaired by now

    def __post_init__(self) -> None:
        self._journal = Journal(
            ledger=self.ledger, proposer=self.proposer, observer=self.observer, clock=self.clock
        )
        self._jobs = Jobs(cluster=self.cluster, ledger=self.ledger, planner=self.planner, gate=self.gate)
        self._recovery = Recovery(journal=self._journal, jobs=self._jobs, gate=self.gate)
        self._intake = Intake(journal=self._journal, jobs=self._jobs, gate=self.gate)
        self._results = Results(
            journal=self._journal,
            cluster=self.cluster,
            planner=self.planner,
            gate=self.gate,
            goal=self.study.goal,
            retries=self.limits.retries,
        )

    # ------------------------------------------------------------------ the loop

    def run(self, point: Point | None = None) -> StopReason:
        """Search until a limit is reached or nothing is left; with a point, measure only that one, anew."""
        self._started_at = self.clock.now()
        self.gate.recall(self.ledger.trials)
        self._recovery.collect_own_trials()
        if point is None:
            self._recovery.resume_search()
        else:
            self._alone = self.ledger.next_number()
            own = Suggestion(point=point, planned=self.planner.plan(point), origin=Origin.USER)
            self._intake.open(own)
        while True:
            for number, handle in self._jobs.ended():
                self._results.take(number, handle, self._ending(number))
            if self.interrupted():
                return self._ended(self._interrupt())
            self._end_losers()
            if (reason := self._advance()) is not None:
                return self._ended(reason)
            self.observer.tick(dict(self._jobs.running))
            self.proposer.think()
            self.clock.sleep(POLL_S)

    def _advance(self) -> StopReason | None:
        """Launch and propose as far as slots are free. Return why the study has ended, once it has."""
        search_end = StopReason.EXHAUSTED if self._alone else None
        for _ in range(STEPS_A_TURN):
            for trial in self._queued():
                if trial.reused_from is not None:
                    self._intake.settle(trial)
            search_end = search_end or self._limit_reached()
            step = self._next(search_end)
            if isinstance(step, Done):
                return step.reason
            if isinstance(step, Launch):
                if self._launch(step):
                    continue
                if step.purpose is not Purpose.DRIFT:
                    return None
            # A drift repeat that finds no free slots does not keep a smaller trial from being proposed.
            if search_end is not None or self.cluster.free_ranks() == 0:
                return None
            found = self.proposer.next(self.ledger.trials)
            if found is Pause.WAIT:
                return None
            search_end = SEARCH_ENDS[found] if isinstance(found, Pause) else self._take_up(found)
        return None

    def _next(self, search_end: StopReason | None) -> Launch | Wait | Done:
        if search_end is StopReason.EXHAUSTED and self._alone is None and not self._jobs.running:
            self._recovery.judge_refused_again()
        is_spent = search_end is not None and self._is_spent()
        now = Situation(running=self._jobs.running, search_end=search_end, is_spent=is_spent)
        step = next_launch(self._trials(), self.study.goal, self._policy(), now)
        is_confirmed = isinstance(step, Done) or (isinstance(step, Launch) and step.kind is AttemptKind.CHECK)
        if is_confirmed and self._alone is None:
            self._conclude()
        return step

    def _policy(self) -> Policy:
        if self._alone is not None:
            return Policy(confirm=ConfirmConfig(best=0, drift_every=0), check_best=0)
        return Policy(confirm=self.confirm, check_best=self.check_best)

    def _conclude(self) -> None:
        """Record the winner, as its repeats show it."""
        winner = conclude(self.ledger.trials, self.study.goal, self.confirm)
        if winner is not None:
            write_atomic(self.ledger.directory.winner, dump(winner))

    def _ended(self, reason: StopReason) -> StopReason:
        self.observer.tick({})
        return reason

    def _trials(self) -> list[Trial]:
        """Return the trials that this start is about."""
        return [trial for trial in self.ledger.trials if self._alone in (None, trial.number)]

    def _queued(self) -> list[Trial]:
        return [trial for trial in self._trials() if trial.state is State.QUEUED]

    # ------------------------------------------------------------------ ending trials and the search

    def _ending(self, number: int, is_cancelled: bool = False) -> Ending:
        return Ending(
            is_cancelled=is_cancelled, is_interrupted=self.interrupted(), is_alone=number == self._alone
        )

    def _interrupt(self) -> StopReason:
        fate = "cancelled" if self.cancel_on_interrupt else "left running"
        self._journal.say(f"interrupted: {counted(len(self._jobs.running), 'running trial')} {fate}")
        if self.cancel_on_interrupt:
            over, problems = self._jobs.cancel_all()
            for problem in problems:
                self._journal.say(problem)
            for number, handle in over:
                self._results.take(number, handle, self._ending(number, is_cancelled=True))
        for trial in self._queued():
            self._journal.record(dataclasses.replace(trial, closing=Closing(at=self.clock.now())))
        return StopReason.INTERRUPTED

    def _end_losers(self) -> None:
        if self.pruning is None:
            return
        for number in self.pruning.look(self._jobs.running, self.proposer.open_proposals):
            self._journal.say(f"trial {number:04d} is pruned: its loss is behind")

    def _limit_reached(self) -> StopReason | None:
        """Return why no trial is proposed any more. What the confirmation will take is kept in reserve."""
        trials = self.ledger.trials
        new = sum(trial.reused_from is None and not trial.is_launched for trial in self._queued())
        spent = spent_by(trials, self.study.goals, self.clock.now(), self._started_at)
        spent = dataclasses.replace(spent, launched=spent.launched + new)
        reason = self.limits.reached(spent, reserve_of(trials, self.study.goal, self.confirm))
        if reason is StopReason.FAILURES:
            alike = failures_in_a_row(trials, self._started_at)
            assert isinstance(alike[0].outcome, Failure)
            last = f"{alike[0].outcome.kind}: {alike[0].outcome.message}"
            text = f"{counted(len(alike), 'trial')} in a row failed in the same way: {last}"
            self._journal.say_once("failures", text)
        return reason

    def _is_spent(self) -> bool:
        """True if nothing at all may be launched any more."""
        spent = spent_by(self.ledger.trials, self.study.goals, self.clock.now(), self._started_at)
        reason = self.limits.reached(spent)
        return self.interrupted() or (reason is not None and reason.is_spent)

    # ------------------------------------------------------------------ proposals, launches

    def _take_up(self, found: Suggestion) -> StopReason | None:
        """Make a proposal a trial. Return why the search ends, once hundreds have launched nothing."""
        self._intake.open(found)
        self._unproductive += 1
        is_endless = not self.proposer.is_finite and self._unproductive > MAX_UNPRODUCTIVE
        return StopReason.UNPRODUCTIVE if is_endless else None

    def _launch(self, step: Launch) -> bool:
        """Launch it; False if no slots are free for it now."""
        trial = step.trial
        if trial.plan is None:
            raise ValueError(f"trial {trial.number} has no plan")
        slots = self.cluster.reserve(trial.plan.ranks)
        if slots is None:
            if not self._jobs.running:
                text = f"waiting for {counted(trial.plan.ranks, 'free slot')}; another study holds them"
                self._journal.say_once("waiting", text)
            return False
        beside = self._jobs.beside(slots)
        for other in beside:
            self._mark_shared(other)
        attempt = Attempt(
            number=1 + max((known.number for known in trial.attempts), default=0),
            kind=step.kind,
            purpose=step.purpose,
            round=step.round,
            slots=slots,
            started_at=self.clock.now(),
            is_shared=bool(beside) or self.cluster.has_neighbours(slots),
        )
        self._announce(step)
        trial = self._journal.record(trial.with_attempt(attempt))
        is_ended_early = self.futility and step.kind in TRIES
        beat_s = step_to_beat_s(trial, self.ledger.trials, self.study.goals) if is_ended_early else None
        self._jobs.submit(trial, attempt, beat_s)
        self._unproductive = 0
        self._journal.drop("waiting")
        return True

    def _announce(self, step: Launch) -> None:
        name = f"trial {step.trial.number:04d}"
        if step.purpose is Purpose.CONFIRM:
            self._journal.say(f"confirming {name}, round {step.round}")
        elif step.kind is AttemptKind.CHECK:
            self._journal.say(f"checking {name}: a longer run, to compare its loss")

    def _mark_shared(self, number: int) -> None:
        trial = self.ledger[number]
        if trial.running is not None and not trial.running.is_shared:
            self._journal.record(trial.with_attempt(dataclasses.replace(trial.running, is_shared=True)))
