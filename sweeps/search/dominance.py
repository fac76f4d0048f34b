"""Refuse plans that need at least as much memory or time as a plan that ran out of it. Pure.

Needs are those of the current estimates. They are compared only among plans whose memory follows the same
rules, where the order of estimates is more certain than their size. A plan that needed as much and ran
refutes the objection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sweeps.estimate.memory.classes import class_of
from train_entry.contract import Estimate, Failure, FailureKind, Measurement, Plan, Trial

Need = Callable[[Estimate], float]
# The resource that was too small, by the kind of failure: how to read the need for it, and its name.
NEEDS: dict[FailureKind, tuple[Need, str]] = {
    FailureKind.GPU_OOM: (lambda found: found.needed_bytes, "memory"),
    FailureKind.HOST_OOM: (lambda found: found.host_bytes, "host memory"),
    FailureKind.TIMED_OUT: (lambda found: found.step_s, "time"),
}


@dataclass(kw_only=True)
class Dominance:
    """Plans that failed for lack of a resource, and plans that ran."""

    estimate: Callable[[Plan], Estimate]
    _failed: list[tuple[Trial, FailureKind]] = field(default_factory=list)
    _ran: list[Plan] = field(default_factory=list)

    def learn(self, trial: Trial) -> None:
        """Learn from a trial that was launched and has ended."""
        if trial.plan is None or not trial.is_launched:
            return
        match trial.outcome:
            case Measurement():
                self._ran.append(trial.plan)
            case Failure(kind=kind) if kind in NEEDS:
                self._failed.append((trial, kind))

    def objection(self, plan: Plan, estimate: Estimate) -> str | None:
        """Return why a plan would fail as another did; None: nothing speaks against it."""
        for trial, kind in self._failed:
            need, what = NEEDS[kind]
            if trial.plan is None or class_of(trial.plan) is not class_of(plan):
                continue
            if need(estimate) >= need(self.estimate(trial.plan)) and not self._is_refuted(plan, need):
                failed = f"trial {trial.number:04d}, which failed: {kind.explanation}"
                return f"needs at least as much {what} as {failed}"
        return None

    def _is_refuted(self, plan: Plan, need: Need) -> bool:
        """True if a plan of the same memory class that needed as much has run."""
        asked = need(self.estimate(plan))
        alike = (known for known in self._ran if class_of(known) is class_of(plan))
        return any(need(self.estimate(known)) >= asked for known in alike)
