"""How good a plan is expected to be, how sure that is, and what it may improve on. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import NormalDist

from train_entry.contract import Estimate, Fit, Goal, Measurement, Plan, State, Trial

# How far estimates of the step time are off before anything of the study is known, as a standard deviation of
# their logarithm: docs/estimates_accuracy.md. As much as so many trials' errors counts the assumption.
COLD_ERROR = {"cuda": 0.15, "cpu": 0.4}
COLD_WEIGHT = 0.5
LATEST = 8  # trials whose errors count: estimates get better
LEAST_ERROR = 0.01
BYTES_ERROR = 0.02  # of peak memory
_NORMAL = NormalDist()


class Outlook:
    """Estimates as a distribution: log-normal about what is expected, as wide as they were off lately."""

    def __init__(self, estimate: Callable[[Plan], Estimate], goal: Goal, device: str) -> None:
        self._estimate = estimate
        self._goal = goal
        self._cold = COLD_ERROR.get(device, COLD_ERROR["cpu"])
        self._errors: deque[float] = deque(maxlen=LATEST)

    @property
    def knows(self) -> bool:
        """Whether estimates say anything about the goal: they know no loss."""
        return self._goal.name != "loss"

    @property
    def error(self) -> float:
        """Standard deviation of the logarithm of what is seen over what was expected."""
        if self._goal.name == "peak_bytes":
            return BYTES_ERROR
        squares = COLD_WEIGHT * self._cold**2 + sum(error**2 for error in self._errors)
        return max(LEAST_ERROR, math.sqrt(squares / (COLD_WEIGHT + len(self._errors))))

    def learn(self, trial: Trial) -> None:
        """From a trial that was measured, by itself, and estimated before."""
        seen, expected = trial.outcome, trial.estimate
        if not isinstance(seen, Measurement) or expected is None or trial.state is State.REUSED:
            return
        if not trial.shared and seen.step_s > 0 and expected.step_s > 0:
            self._errors.append(math.log(seen.step_s / expected.step_s))

    def fits(self, plan: Plan) -> bool:
        return self._estimate(plan).fit is Fit.FITS

    def expected(self, plan: Plan) -> float | None:
        """The goal's value; None where estimates do not know it."""
        return self._goal.value(self._estimate(plan))

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
        mean, error = math.log(self._goal.gain(value, best)), self.error
        above = math.exp(mean + error**2 / 2) * _NORMAL.cdf((mean + error**2) / error)
        return max(0.0, above - _NORMAL.cdf(mean / error))

    def may_beat(self, plan: Plan, best: float | None, errors: float = 2.0) -> bool:
        """Whether a plan is better than the best when its estimate is off by so many standard deviations."""
        value = self.expected(plan)
        if best is None or value is None or value <= 0:
            return True
        return math.log(self._goal.gain(value, best)) + errors * self.error > 0
