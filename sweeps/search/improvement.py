"""Predict how good a plan is, how sure that is, and how much it may improve on the best. Pure.

Estimates learn from trials, but similar plans (one strategy, small micro-batches) share the error that
remains. So the remaining errors of measured plans tell how wrong the estimates of similar plans are, and how
sure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import NormalDist

from sweeps.search.features import features_of
from sweeps.search.gaussian_process import GaussianProcess, Posterior
from train_entry.contract import Estimate, Fit, Goal, Measurement, Plan, State, Trial

# Standard deviation of log(measured / estimated step time) once the estimates have learned from a few trials:
# FITTED_SPREAD of sweeps/estimate/time/fitting.py; on CPUs docs/estimates_accuracy.md.
DOUBT = {"cuda": 0.06, "cpu": 0.16}
LEAST_ERROR = 0.01
BYTES_ERROR = 0.02  # of an estimate of peak memory
MOST_OBSERVATIONS = 100  # only the latest ones, as many as the estimates learn from
_NORMAL = NormalDist()


class Predictor:
    """Estimates as log-normal distributions, corrected by the errors that similar plans have shown."""

    def __init__(self, estimate: Callable[[Plan], Estimate], goal: Goal, device: str) -> None:
        self._estimate = estimate
        self._goal = goal
        self._doubt = DOUBT.get(device, DOUBT["cpu"])
        self._seen: deque[tuple[Plan, float]] = deque(maxlen=MOST_OBSERVATIONS)
        self._process: GaussianProcess | None = None  # fitted to the errors of the current estimates
        self._posteriors: dict[Plan, Posterior] = {}

    @property
    def knows(self) -> bool:
        """True if estimates predict the goal. They do not predict the loss."""
        return self._goal.name != "loss"

    def learn(self, trial: Trial) -> None:
        """Learn from a closed trial.

        Every trial discards what is cached, because the estimates may have learned from it as well.
        """
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
        """Return the goal's value, corrected by the errors of similar plans; None where it is not known."""
        value = self._goal.value(self._estimate(plan))
        if value is None or not self._goal.is_speed:
            return value
        slower = math.exp(self._posterior(plan).mean)
        return value / slower if self._goal.is_maximized else value * slower

    def error(self, plan: Plan) -> float:
        """Return the standard deviation of log(measured / expected value)."""
        if self._goal.name == "peak_bytes":
            return BYTES_ERROR
        return max(LEAST_ERROR, self._posterior(plan).deviation)

    def score(self, value: float) -> float:
        """Return the value as a score: larger is better."""
        return self._goal.score(value)

    def improvement(self, plan: Plan, best: float | None) -> float:
        """Return the expected improvement on the best value so far, as a share of that value.

        It is infinite where nothing is known. Jones, Schonlau and Welch 1998, on the logarithm, for a gain g
        ~ N(mean, error^2): E[max(0, e^g - 1)].
        """
        value = self.expected(plan)
        if best is None or value is None or value <= 0:
            return math.inf
        mean, error = math.log(self._goal.gain(value, best)), self.error(plan)
        above = math.exp(mean + error**2 / 2) * _NORMAL.cdf((mean + error**2) / error)
        return max(0.0, above - _NORMAL.cdf(mean / error))

    def may_beat(self, plan: Plan, best: float | None, errors: float = 2.0) -> bool:
        """True if the plan may beat the best.

        It may if it does so when its estimate is too pessimistic by `errors` standard deviations.
        """
        value = self.expected(plan)
        if best is None or value is None or value <= 0:
            return True
        return math.log(self._goal.gain(value, best)) + errors * self.error(plan) > 0

    def _posterior(self, plan: Plan) -> Posterior:
        """Return the distribution of log(measured / estimated step time)."""
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
