"""Trials that are launched again: retries, longer runs for a loss, confirmations, looks for drift."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass

from sweeps.plan.ds_config import ds_config_text
from sweeps.search.confirmation import conclude, next_repeat, to_confirm
from sweeps.search.drift import drifts, due
from sweeps.search.ranking import best_value, contenders
from sweeps.search.verdicts import VERDICTS, Verdict
from sweeps.study.limits import NOISE, Spent, active_seconds, failures_in_a_row, without_improvement
from sweeps.study.recovery import Recovery
from train_entry.contract import (
    AttemptKind,
    Failure,
    FailureKind,
    Measurement,
    MeasureSpec,
    Origin,
    Outcome,
    Purpose,
    Repeat,
    Trial,
    dump,
    write_atomic,
)

FUTILITY_MARGIN = 2 * NOISE  # a trial goes on that may be slower than the best by less: it may be confirmed


@dataclass(kw_only=True)
class Repeating(Recovery):
    """What becomes of a job that is not a trial's first and only one."""

    # ------------------------------------------------------------------ submit

    def _submit(self, trial: Trial, kind: AttemptKind, slots: tuple[str, ...]) -> None:
        spec = self.planner.spec(trial, trial.attempts, kind)
        if kind in (AttemptKind.FIRST, AttemptKind.RETRY):
            spec = dataclasses.replace(spec, measure=self._with_futility(trial, spec.measure))
        spec = dataclasses.replace(spec, memory_limit_bytes=self.admission.memory_limit_bytes(trial))
        attempt = self.ledger.open_attempt(spec, ds_config_text(spec.plan))
        self._running[trial.number] = self.cluster.submit(attempt, spec, slots)

    def _with_futility(self, trial: Trial, measure: MeasureSpec) -> MeasureSpec:
        """Timing ends once the trial is known to be slower than the best so far."""
        goal, plan = self.study.goal, trial.plan
        best = best_value(self.ledger.trials, goal)
        is_compared = (
            len(self.study.goals) <= 1 and trial.origin is not Origin.USER and not trial.is_yardstick
        )
        if not self.futility or not is_compared or best is None or best <= 0 or plan is None:
            return measure
        step_s = goal.slowest_step_s(best, plan.tokens_per_step, plan.ranks)
        if step_s is None:
            return measure
        return dataclasses.replace(measure, beat_step_s=step_s * (1 + FUTILITY_MARGIN))

    # ------------------------------------------------------------------ longer runs, for a loss

    def _start_checks(self) -> bool:
        """Train the best trials longer, one after another; False when none is left to check."""
        if self._is_spent():
            return False
        for _, trial in contenders(self.ledger.trials, self.study.goal)[: self.check_best]:
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

    def _finish_check(self, number: int, outcome: Outcome, gpu_s: float) -> None:
        if is_cancelled(outcome) or self._is_retried(number, outcome):
            lost = self.ledger[number].lost + (not is_nobodys_fault(outcome))
            self._record(number, check_attempt=None, gpu_s=gpu_s, lost=lost)
        else:
            self._record(number, check=outcome, gpu_s=gpu_s)

    # ------------------------------------------------------------------ confirmation, drift

    def _start_confirmation(self) -> bool:
        """Measure the best once more, alone on the machine; False when it is clear who has won."""
        found = None if self._is_spent() else next_repeat(self.ledger.trials, self.study.goal, self.confirm)
        if found is None:
            return False
        self._start_repeat(found[0], Purpose.CONFIRM, found[1])
        return True  # where no slot is free, at the next turn

    def _is_spent(self) -> bool:
        """Whether nothing at all may be launched any more."""
        reason = self.limits.reached(self._spent())
        return self.interrupted() or (reason is not None and reason.is_spent)

    def _spent(self) -> Spent:
        trials = self.ledger.trials
        return Spent(
            launched=self.ledger.launched,
            active_s=active_seconds(trials, self.clock.now()),
            gpu_s=sum(trial.gpu_s for trial in trials),
            failures=len(failures_in_a_row(trials, self._started_at)),
            without_improvement=without_improvement(trials, self.study.goals or (self.study.goal,)),
        )

    def _reserve(self) -> Spent:
        """What a launch and the confirmation after it will take: two turns of whom it is about."""
        repeated = to_confirm(self.ledger.trials, self.study.goal, self.confirm)
        measured = [trial for _, trial in contenders(self.ledger.trials, self.study.goal)]
        if not repeated or not measured:
            return Spent(launched=0, active_s=0.0, gpu_s=0.0)
        runs = 1 + 2 * len(repeated)
        each_gpu_s = statistics.median(trial.gpu_s / max(1, trial.attempts) for trial in measured)
        ranks = statistics.median(trial.plan.ranks for trial in measured if trial.plan)
        return Spent(launched=0, active_s=runs * each_gpu_s / ranks, gpu_s=runs * each_gpu_s)

    def _start_drift_look(self) -> None:
        """Measure the reference once more, where it is time."""
        trial = due(self.ledger.trials, self.study.goal, self.confirm.drift_every)
        if trial is not None and not self._alone and trial.number not in self._running:
            self._start_repeat(trial, Purpose.DRIFT, 0)

    def _start_repeat(self, trial: Trial, purpose: Purpose, turn: int) -> bool:
        if trial.plan is None:
            return False
        slots = self.cluster.reserve(trial.plan.ranks)
        if slots is None:
            return False
        attempts = trial.attempts + 1
        if purpose is Purpose.CONFIRM:
            self.observer.message(f"confirming trial {trial.number:04d}, turn {turn}")
        repeat = Repeat(attempt=attempts, purpose=purpose, turn=turn, started_at=self.clock.now())
        repeated = self._record(
            trial.number, attempts=attempts, slots=slots, repeats=(*trial.repeats, repeat)
        )
        self._submit(repeated, AttemptKind.REPEAT, slots)
        return True

    def _finish_repeat(self, number: int, outcome: Outcome, gpu_s: float) -> None:
        *before, last = self.ledger[number].repeats
        if is_cancelled(outcome) or self._is_retried(number, outcome):
            lost = self.ledger[number].lost + (not is_nobodys_fault(outcome))
            self._record(number, repeats=tuple(before), gpu_s=gpu_s, lost=lost)
            return
        ended = dataclasses.replace(last, outcome=outcome, ended_at=self.clock.now())
        self._record(number, repeats=(*before, ended), gpu_s=gpu_s)
        if last.purpose is Purpose.DRIFT:
            self._correct_for_drift(self.ledger[number])

    def _correct_for_drift(self, reference: Trial) -> None:
        changed = {
            number: drift
            for number, drift in drifts(self.ledger.trials, self.study.goal).items()
            if drift != self.ledger[number].drift
        }
        for number, drift in changed.items():
            self._record(number, drift=drift)
        first, latest = reference.outcome, reference.repeats[-1].outcome
        if changed and isinstance(first, Measurement) and isinstance(latest, Measurement):
            speed = first.step_s / latest.step_s
            word = "slower" if speed < 1 else "faster"
            self.observer.message(
                f"the machine is {abs(speed - 1):.1%} {word} than at first; the ranking is corrected for it"
            )

    def _conclude(self) -> None:
        """Put the winner on record, from its repeats."""
        winner = conclude(self.ledger.trials, self.study.goal, self.confirm)
        if winner is not None:
            write_atomic(self.ledger.directory.winner, dump(winner))

    # ------------------------------------------------------------------ retries

    def _is_retried(self, number: int, outcome: Outcome) -> bool:
        if not isinstance(outcome, Failure) or VERDICTS[outcome.kind] is not Verdict.RETRY:
            return False
        if self.ledger[number].origin is Origin.USER and number != self._alone:
            return False
        if is_cancelled(outcome):  # by us, on Ctrl-C; or by hand while we were away
            return not self.interrupted()
        return is_nobodys_fault(outcome) or self.ledger[number].lost < self.limits.retries


def is_cancelled(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.kind is FailureKind.CANCELLED


def is_nobodys_fault(outcome: Outcome) -> bool:
    """Whether a lost attempt uses up no retry: its nodes were taken back, as often as others want them."""
    return isinstance(outcome, Failure) and outcome.kind in (FailureKind.CANCELLED, FailureKind.PREEMPTED)
