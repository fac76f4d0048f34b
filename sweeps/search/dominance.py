"""What a failure says of plans that need no less: they would fail alike. Pure.

By the model's estimates as they are now, and only among plans whose memory follows the same rules, where the
order of estimates is surer than their size. One plan that needed more and ran all the same speaks against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sweeps.estimate.memory.classes import class_of
from train_entry.contract import Estimate, Failure, FailureKind, Measurement, Plan, Trial

Need = Callable[[Estimate], float]
# What there was too little of, by how a trial failed.
NEEDS: dict[FailureKind, tuple[Need, str]] = {
    FailureKind.GPU_OOM: (lambda found: found.needed_bytes, "memory"),
    FailureKind.HOST_OOM: (lambda found: found.host_bytes, "host memory"),
    FailureKind.TIMED_OUT: (lambda found: found.step_s, "time"),
}


@dataclass(kw_only=True)
class Dominance:
    """Plans that failed for want of something, and plans that ran."""

    estimate: Callable[[Plan], Estimate]
    _failed: list[tuple[Trial, FailureKind]] = field(default_factory=list)
    _ran: list[Plan] = field(default_factory=list)

    def learn(self, trial: Trial) -> None:
        """From a trial that was launched and has ended."""
        if trial.plan is None or not trial.is_launched:
            return
        match trial.outcome:
            case Measurement():
                self._ran.append(trial.plan)
            case Failure(kind=kind) if kind in NEEDS:
                self._failed.append((trial, kind))

    def objection(self, plan: Plan, estimate: Estimate) -> str | None:
        """Why a plan would fail as another did; None: nothing speaks against it."""
        for trial, kind in self._failed:
            need, what = NEEDS[kind]
            if trial.plan is None or class_of(trial.plan) is not class_of(plan):
                continue
            if need(estimate) >= need(self.estimate(trial.plan)) and not self._is_refuted(plan, need):
                return f"needs no less {what} than trial {trial.number:04d}, which failed: {kind.explanation}"
        return None

    def _is_refuted(self, plan: Plan, need: Need) -> bool:
        """Whether a plan of the same kind that needed as much has run."""
        asked = need(self.estimate(plan))
        alike = (known for known in self._ran if class_of(known) is class_of(plan))
        return any(need(self.estimate(known)) >= asked for known in alike)
