"""How good a plan is expected to be, how sure that is, and what it may improve on. Pure.

Estimates learn from trials, but what they leave out they leave out of all similar plans: of a strategy, of
small micro-batches. So what they are still wrong by where something was measured says how wrong they are
nearby, and how sure they are there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import NormalDist

from sweeps.search.features import features_of
from sweeps.search.gaussian_process import GaussianProcess, Posterior
from train_entry.contract import Estimate, Fit, Goal, Measurement, Plan, State, Trial

# How far estimates of the step time are off once they have learned from a few trials, as a standard deviation
# of their logarithm: FITTED_SPREAD of sweeps/estimate/time/fitting.py; on CPUs docs/estimates_accuracy.md.
DOUBT = {"cuda": 0.06, "cpu": 0.16}
LEAST_ERROR = 0.01
BYTES_ERROR = 0.02  # of peak memory
MOST_OBSERVATIONS = 100  # the latest: as many as the estimates learn from
_NORMAL = NormalDist()


class Predictor:
    """Estimates as a distribution: log-normal, corrected by what they are wrong by nearby."""

    def __init__(self, estimate: Callable[[Plan], Estimate], goal: Goal, device: str) -> None:
        self._estimate = estimate
        self._goal = goal
        self._doubt = DOUBT.get(device, DOUBT["cpu"])
        self._seen: deque[tuple[Plan, float]] = deque(maxlen=MOST_OBSERVATIONS)
        self._process: GaussianProcess | None = None  # of the errors of the estimates as they are now
        self._posteriors: dict[Plan, Posterior] = {}

    @property
    def knows(self) -> bool:
        """Whether estimates say anything about the goal: they know no loss."""
        return self._goal.name != "loss"

    def learn(self, trial: Trial) -> None:
        """From a trial that has closed. Whatever it was, estimates may have learned from it as well."""
        self._process = None
        self._posteriors.clear()
        seen = trial.outcome
        if not isinstance(seen, Measurement) or trial.plan is None or trial.state is State.REUSED:
            return
        if not trial.is_shared and seen.step_s > 0:
            self._seen.append((trial.plan, seen.step_s))

    def fits(self, plan: Plan) -> bool:
        return self._estimate(plan).fit is Fit.FITS

    def expected(self, plan: Plan) -> float | None:
        """The goal's value, corrected by what similar plans have shown; None where it is not known."""
        value = self._goal.value(self._estimate(plan))
        if value is None or not self._goal.is_speed:
            return value
        slower = math.exp(self._posterior(plan).mean)
        return value / slower if self._goal.is_maximized else value * slower

    def error(self, plan: Plan) -> float:
        """Standard deviation of the logarithm of what will be seen over what is expected."""
        if self._goal.name == "peak_bytes":
            return BYTES_ERROR
        return max(LEAST_ERROR, self._posterior(plan).deviation)

    def score(self, value: float) -> float:
        """Larger is better."""
        return self._goal.score(value)

    def improvement(self, plan: Plan, best: float | None) -> float:
        """Expected improvement on the best value so far, as a share of it; infinite where nothing is known.

        Jones, Schonlau and Welch 1998, on the logarithm: E[max(0, e^g - 1)] for a gain g ~ N(mean, error^2).
        """
        value = self.expected(plan)
        if best is None or value is None or value <= 0:
            return math.inf
        mean, error = math.log(self._goal.gain(value, best)), self.error(plan)
        above = math.exp(mean + error**2 / 2) * _NORMAL.cdf((mean + error**2) / error)
        return max(0.0, above - _NORMAL.cdf(mean / error))

    def may_beat(self, plan: Plan, best: float | None, errors: float = 2.0) -> bool:
        """Whether a plan is better than the best when its estimate is off by so many standard deviations."""
        value = self.expected(plan)
        if best is None or value is None or value <= 0:
            return True
        return math.log(self._goal.gain(value, best)) + errors * self.error(plan) > 0

    def _posterior(self, plan: Plan) -> Posterior:
        """Of the logarithm of what a step takes over what is estimated."""
        if plan not in self._posteriors:
            self._process = self._process or self._fitted()
            self._posteriors[plan] = self._process.at(features_of(plan, self._estimate(plan)))
        return self._posteriors[plan]

    def _fitted(self) -> GaussianProcess:
        estimates = [self._estimate(plan) for plan, _ in self._seen]
        errors = [
            math.log(step_s / estimate.step_s)
            for (_, step_s), estimate in zip(self._seen, estimates, strict=True)
        ]
        plans = (plan for plan, _ in self._seen)
        return GaussianProcess(
            [features_of(*each) for each in zip(plans, estimates, strict=True)], errors, self._doubt
        )
