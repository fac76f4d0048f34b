"""When enough steps have been timed. Decides, and touches nothing.

Whoever looks at an ordinary confidence interval after every few steps, and stops when it pleases, is wrong
far more often than it says. The one here holds at all looks at once, whenever one stops: it comes from the
t-test martingale, the Bayes factor of a Gaussian mixture over effect sizes with the right Haar prior on the
scale (Lai 1976; Perez-Ortiz et al. 2022, arXiv 2208.07610; Wang & Ramdas 2023, arXiv 2310.03722), which
exceeds 1 / alpha at any time with probability alpha at most (Ville's inequality).

It supposes normal steps. Beyond that, by simulation (tests, and `make bench`): neighbouring steps may be
correlated by up to 0.25, or 0.3 where one looks after 4, 6, ... 18 steps; at 0.5 it is wrong twice as often
as it says. Where a few steps are far longer than the others it covers the typical step, which the median
estimates, and so a measurement; no one can know the mean who has not seen such a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from train_entry.contract import MeasureSpec, TimingEnd

# Variance of the mixture over (mean - mu) / sigma. Each number of steps has a value that makes its interval
# narrowest; with this one none of 4 to 20 steps has an interval more than 8% wider than that.
EFFECT_VARIANCE = 4.4
MAX_CORRELATION = 0.9  # where step times drift its estimate would reach 1, and the interval all times


def decide(steps_s: Sequence[float], measure: MeasureSpec) -> TimingEnd | None:
    """Why timing ends after these steps; None: it goes on."""
    if not (depends_on_times(measure) and is_due(len(steps_s), measure)):
        return None
    width_s = half_width_s(steps_s, measure.confidence)
    if width_s is None:
        return None
    mean_s = fmean(steps_s)
    if measure.beat_step_s is not None and mean_s - width_s > measure.beat_step_s:
        return TimingEnd.FUTILE
    if 0 < measure.precision and width_s <= measure.precision * mean_s:
        return TimingEnd.PRECISE
    return None


def depends_on_times(measure: MeasureSpec) -> bool:
    """Whether there is anything to decide: a run for its loss takes all its steps."""
    return measure.precision > 0 or measure.beat_step_s is not None


def is_due(timed: int, measure: MeasureSpec) -> bool:
    """Whether one looks after so many timed steps: not after the last, with which timing ends anyway."""
    since = timed - measure.min_steps
    return 0 <= since and timed < measure.steps and since % measure.look_every == 0


def half_width_s(steps_s: Sequence[float], confidence: float) -> float | None:
    """Of the interval around the mean step time; None while it is not bounded.

    The martingale at a mean mu, for t = sqrt(n) (mean - mu) / s and A = 1 + n g, is
    A^-1/2 ((1 + t^2 / (n - 1)) / (1 + t^2 / (A (n - 1))))^(n/2). The interval is where it is below 1 / alpha.
    """
    n = len(steps_s)
    if n < 2:
        return None
    spread = 1 + n * EFFECT_VARIANCE
    ratio = (spread / (1 - confidence) ** 2) ** (1 / n)
    if ratio >= spread:
        return None
    bound = (ratio - 1) / (1 - ratio / spread)  # of t^2 / (n - 1)
    return _deviation(steps_s) * math.sqrt((n - 1) * bound / n)


def _deviation(steps_s: Sequence[float]) -> float:
    """Standard deviation of a step; where slow follows slow, of independent steps that would say as much.

    A mean of n steps of a first-order autoregressive process of correlation r varies as that of
    n (1 - r) / (1 + r) independent ones. The usual estimate of r is too low by about (1 + 3 r) / n (Kendall
    1954; Marriott & Pope 1954), which is added. It is never taken to be negative.
    """
    n, mean_s = len(steps_s), fmean(steps_s)
    off = [seconds - mean_s for seconds in steps_s]
    squares = math.fsum(one * one for one in off)
    if squares == 0:
        return 0.0
    usual = math.fsum(one * other for one, other in pairwise(off)) / squares
    correlation = min(max(0.0, usual + (1 + 3 * usual) / n), MAX_CORRELATION)
    return math.sqrt(squares / (n - 1) * (1 + correlation) / (1 - correlation))
