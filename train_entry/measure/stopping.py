"""Decide when enough steps have been timed. Pure.

If one computes an ordinary confidence interval after every few steps and stops as soon as it is narrow
enough, it misses the true mean far more often than its confidence says. The interval used here is valid at
all looks together, no matter when one stops. It comes from the t-test martingale: the Bayes factor of a
Gaussian mixture over effect sizes with the right Haar prior on the scale (Lai 1976; Perez-Ortiz et al. 2022,
arXiv 2208.07610; Wang & Ramdas 2023, arXiv 2310.03722). The probability that it ever exceeds 1 / alpha is at
most alpha (Ville's inequality).

The theory assumes independent, normally distributed step times. Simulations (tests, and `make bench`) show
how far it holds beyond that: neighbouring steps may be correlated by up to 0.25, or by up to 0.3 with looks
after 4, 6, ... 18 steps; at 0.5 the interval misses twice as often as it says. If a few steps are far longer
than the others, the interval covers the typical step, which the median, and so the measurement, estimates. It
cannot cover the mean before such a step was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from train_entry.contract import MeasureSpec, TimingEnd

# Variance of the mixture over (mean - mu) / sigma. The value that gives the narrowest interval depends on the
# number of steps; with this one, for 4 to 20 steps, the interval is at most 8% wider than the narrowest.
EFFECT_VARIANCE = 4.4
MAX_CORRELATION = 0.9  # if step times drift, its estimate would approach 1 and the interval become infinite


def decide(steps_s: Sequence[float], measure: MeasureSpec) -> TimingEnd | None:
    """Return why timing ends after these steps; None if it goes on."""
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
    """True if step times can end timing early. A check, for instance, runs all its steps."""
    return measure.precision > 0 or measure.beat_step_s is not None


def is_due(timed: int, measure: MeasureSpec) -> bool:
    """True if a look is due after `timed` steps. After the last step none is: timing ends anyway."""
    since = timed - measure.min_steps
    return 0 <= since and timed < measure.steps and since % measure.look_every == 0


def half_width_s(steps_s: Sequence[float], confidence: float) -> float | None:
    """Return the half-width, in seconds, of the mean step time's interval; None while it is unbounded.

    The martingale at a mean mu, for t = sqrt(n) (mean - mu) / s and A = 1 + n g, is
    A^-1/2 ((1 + t^2 / (n - 1)) / (1 + t^2 / (A (n - 1))))^(n/2). The interval consists of all mu where it is
    below 1 / alpha. n is the number of steps, g the variance of effect sizes, alpha 1 - confidence.
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
    """Return the standard deviation of a step, in seconds, inflated if neighbouring steps are correlated.

    The mean of n steps of a first-order autoregressive process of correlation r varies like that of
    n (1 - r) / (1 + r) independent steps. The usual estimate of r is too low by about (1 + 3 r) / n (Kendall
    1954; Marriott & Pope 1954), which is added here. A negative estimate counts as zero.
    """
    n, mean_s = len(steps_s), fmean(steps_s)
    off = [seconds - mean_s for seconds in steps_s]
    squares = math.fsum(one * one for one in off)
    if squares == 0:
        return 0.0
    usual = math.fsum(one * other for one, other in pairwise(off)) / squares
    correlation = min(max(0.0, usual + (1 + 3 * usual) / n), MAX_CORRELATION)
    return math.sqrt(squares / (n - 1) * (1 + correlation) / (1 - correlation))
