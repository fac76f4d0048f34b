"""Means and ratios with 95% percentile intervals by the bootstrap."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

RESAMPLES = 2000
TAIL = 0.025


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Interval:
    return _bootstrap(lambda draws: fmean(draws.choices(values, k=len(values))), fmean(values))


def ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the ratio of two means. The two samples are resampled independently."""
    return _bootstrap(
        lambda draws: (
            fmean(draws.choices(values, k=len(values))) / fmean(draws.choices(others, k=len(others)))
        ),
        fmean(values) / fmean(others),
    )


def share(flags: Sequence[bool]) -> Interval:
    return mean([float(flag) for flag in flags])


def _bootstrap(resampled: Callable[[random.Random], float], value: float) -> Interval:
    draws = random.Random(0)
    found = sorted(resampled(draws) for _ in range(RESAMPLES))
    return Interval(
        value=value, low=found[int(TAIL * RESAMPLES)], high=found[int((1 - TAIL) * RESAMPLES) - 1]
    )
