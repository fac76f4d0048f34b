"""Decide which proposed plans are launched: a launch costs GPU time. No I/O."""

from __future__ import annotations

from sweeps.estimate.estimator import Estimator
from sweeps.plan.warnings import cautions
from sweeps.search.dominance import Dominance
from train_entry.contract import Estimate, Failure, FailureKind, Fit, Origin, Plan, Trial


class Gate:
    """The test before each launch. It refuses plans that cannot fit, and learns from each trial that ends."""

    def __init__(self, estimator: Estimator, enabled: bool, borderline: int, dominance: bool = True) -> None:
        self._estimator = estimator
        self._enabled = enabled
        self._borderline_left = borderline
        self._dominance = Dominance(estimate=estimator.estimate) if enabled and dominance else None

    def recall(self, trials: list[Trial]) -> None:
        """Restore what earlier starts of this study have learned and spent."""
        for trial in trials:
            self.learn(trial)
        self._borderline_left -= sum(map(_was_admitted_at_the_border, trials)) if self._enabled else 0

    @property
    def observations(self) -> int:
        """The number of trials that estimates have learned from."""
        return self._estimator.observations

    def estimate(self, plan: Plan) -> Estimate:
        return self._estimator.estimate(plan)

    def refusal(self, plan: Plan, estimate: Estimate, origin: Origin) -> Failure | None:
        """Return why a plan is not launched; None: it is launched.

        A plan that the user asked for directly is always launched.
        """
        if not self._enabled or origin is Origin.USER:
            return None
        objection = self._dominance.objection(plan, estimate) if self._dominance else None
        if objection is None and estimate.fit is Fit.FITS:
            return None
        if objection is None and estimate.fit is Fit.BORDERLINE and self._borderline_left > 0:
            self._borderline_left -= 1
            return None
        return Failure(kind=FailureKind.INFEASIBLE, message=f"not launched: {estimate.why or objection}")

    def doubts(self, trial: Trial) -> tuple[str, ...]:
        """Return warnings about a plan that is launched nevertheless."""
        if trial.plan is None or trial.estimate is None:
            return ()
        too_large = (f"may not fit: {trial.estimate.why}",) if trial.estimate.why else ()
        return (*too_large, *(caution.text for caution in cautions(trial.plan)))

    def learn(self, trial: Trial) -> None:
        """Learn from a trial that has ended."""
        self._estimator.learn([trial])
        if self._dominance is not None and trial.origin is not Origin.USER:
            self._dominance.learn(trial)

    def memory_limit_bytes(self, trial: Trial) -> int | None:
        """The most that torch may allocate on each GPU of the trial; None: only the GPU limits it."""
        return self._estimator.imposed_bytes(trial.estimate)


def _was_admitted_at_the_border(trial: Trial) -> bool:
    is_border = trial.estimate is not None and trial.estimate.fit is Fit.BORDERLINE
    return is_border and trial.origin is not Origin.USER and not trial.is_refused
