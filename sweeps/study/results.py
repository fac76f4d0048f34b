"""Record the end of an attempt, and close its trial where that decides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sweeps.cluster.base import Cluster, JobHandle
from sweeps.plan.planner import Planner
from sweeps.search.advice import advice_for
from sweeps.search.gate import Gate
from sweeps.study.collect import collect
from sweeps.study.journal import Journal
from sweeps.study.retry import is_replaced
from train_entry.contract import (
    Advice,
    Attempt,
    Failure,
    FailureKind,
    Goal,
    Measurement,
    Outcome,
    Purpose,
    Ranking,
    Trial,
    TrialSpec,
    read_document,
)
from train_entry.contract.study.trial import TRIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The state of the loop when a job has ended."""

    is_cancelled: bool = False  # the orchestrator ended it
    is_interrupted: bool = False  # Ctrl-C was pressed: nothing is launched again
    is_alone: bool = False  # it is the only trial that this start runs


@dataclass(kw_only=True)
class Results:
    """The collector of ended jobs. It closes the trials that they decide."""

    journal: Journal
    cluster: Cluster
    planner: Planner
    gate: Gate
    goal: Goal
    retries: int

    def take(self, number: int, handle: JobHandle, ending: Ending) -> None:
        """Record an attempt whose job has ended."""
        spec = read_document(handle.attempt.spec, TrialSpec)
        if spec is None:
            raise FileNotFoundError(handle.attempt.spec)
        trial = self.journal.ledger[number]
        if trial.running is None:
            raise ValueError(f"trial {number} has no running attempt")
        attempt = self._ended(trial, collect(handle.attempt, spec, trial.running), handle, ending)
        closed = trial.with_attempt(attempt)
        if attempt.kind in TRIES and not attempt.is_replaced:
            self.gate.learn(closed)
            self.journal.close(dataclasses.replace(closed, advice=self._advice(closed, spec)))
            return
        before = self._drifts()
        self.journal.record(closed)
        if attempt.purpose is Purpose.DRIFT and not attempt.is_replaced:
            self._tell_drift(closed, before)

    def _ended(self, trial: Trial, attempt: Attempt, handle: JobHandle, ending: Ending) -> Attempt:
        outcome = attempt.outcome
        assert outcome is not None, "collect() fills it in"
        self._compare_cards(trial.number, outcome)
        if ending.is_cancelled and isinstance(outcome, Failure):  # a job that finished first still counts
            outcome = Failure(kind=FailureKind.CANCELLED, message="ended on request")
        return dataclasses.replace(
            attempt,
            outcome=outcome,
            ended_at=self.journal.clock.now(),
            is_replaced=is_replaced(
                trial, attempt.kind, outcome, self.retries, ending.is_interrupted, ending.is_alone
            ),
            # Other jobs may have started beside it while it ran.
            is_shared=attempt.is_shared or self.cluster.has_neighbours(handle.slots),
        )

    def _advice(self, trial: Trial, spec: TrialSpec) -> Advice | None:
        return advice_for(trial, spec, self.planner.plan, self.gate.estimate, self.journal.ledger.trials)

    def _compare_cards(self, number: int, outcome: Outcome) -> None:
        """Warn of trials on different GPUs, as where a site gives several models one name."""
        names = _cards(outcome)
        for trial in self.journal.ledger.trials if names else ():
            others = _cards(trial.outcome)
            if others and others != names:
                self.journal.say_once(
                    "cards",
                    f"trial {number:04d} ran on {names}, trial {trial.number:04d} on {others}: "
                    "they are not comparable; choose one GPU type by cluster.gpu_type or cluster.constraint",
                )
                return

    def _drifts(self) -> Mapping[int, float]:
        return Ranking(self.journal.ledger.trials, self.goal).drifts

    def _tell_drift(self, reference: Trial, before: Mapping[int, float]) -> None:
        """Show every trial whose value a drift repeat has corrected."""
        changed = [number for number, drift in self._drifts().items() if drift != before.get(number, 1.0)]
        for number in changed:
            self.journal.observer.changed(self.journal.ledger[number])
        first, latest = reference.outcome, reference.repeats[-1].outcome
        if changed and isinstance(first, Measurement) and isinstance(latest, Measurement):
            speed = first.step_s / latest.step_s
            word = "slower" if speed < 1 else "faster"
            self.journal.say(
                f"the machine is {abs(speed - 1):.1%} {word} than at first; the ranking is corrected for it"
            )


def _cards(outcome: Outcome | None) -> str:
    ranks = outcome.ranks if isinstance(outcome, Measurement) else ()
    return " and ".join(sorted({rank.device_name for rank in ranks}))
