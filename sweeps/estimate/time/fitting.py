"""Fit the factors of step time on this machine, and their uncertainty, to finished trials. Pure.

There are a few factors, each with a meaning, and each stays near 1 until measurements contradict it. So one
trial helps, eight help more, and a trial that was disturbed does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from sweeps.estimate.hardware import Hardware
from sweeps.estimate.robust import Unknown, robust_fit
from sweeps.estimate.time.step import COLD, StepTime, TimeFactors, assemble, work_of
from train_entry.contract import ModelShape, Plan

# Doubt in each factor before anything is measured: the standard deviation of its logarithm. GPUs of one data
# sheet differ little; hosts, links and disks differ much.
DOUBT = {
    "compute": 0.25,
    "launch": 0.4,
    "hooks": 0.2,
    "communication": 0.5,
    "offload": 0.5,
    "update": 0.3,
}
# Scatter of a trial's step time, and error of the time model: the standard deviation of the logarithm. If
# the device waits for the host, whose other work disturbs it, steps of one trial differ by 10 to 25%; else by
# 1% (llama_1b3 on two H200s).
NOISE = 0.04
HOST_NOISE = 0.12
TRUSTED = 1.5  # errors up to so many deviations count fully, larger ones less and less (Huber)
LARGEST = 2.5  # of a factor's logarithm: it stays within twelve times and a twelfth of its default

# Spread of measured around estimated step times, for a device that never waits: after many trials, and what
# is added to that before the first.
FITTED_SPREAD = 0.06
COLD_SPREAD = 0.19
SPREAD_WEIGHT = 4  # weight of these two, in trials


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeObservation:
    """A finished trial: its plan, model and hardware, and the seconds per step."""

    plan: Plan
    model: ModelShape
    hardware: Hardware
    step_s: float


def fit_time(observations: Sequence[TimeObservation], start: TimeFactors = COLD) -> TimeFactors:
    """Return the factors that best explain these step times, held near `start`; `start` if there are none."""
    usable = [seen for seen in observations if 0 < seen.step_s < math.inf]
    if not usable:
        return start
    works = [work_of(seen.plan, seen.model, seen.hardware) for seen in usable]
    logs = [math.log(seen.step_s) for seen in usable]
    names = list(DOUBT)

    noises = [noise_of(assemble(work, start)) for work in works]

    def scores(change: Sequence[float]) -> list[float]:
        factors = _moved(start, names, change)
        seen = zip(logs, works, noises, strict=True)
        return [(log - math.log(assemble(work, factors).step_s)) / noise for log, work, noise in seen]

    unknowns = [
        Unknown(default=0.0, deviation=DOUBT[name], lowest=-LARGEST, highest=LARGEST) for name in names
    ]
    change = robust_fit(scores, [TRUSTED] * len(works), unknowns)
    return replace(_moved(start, names, change), spread=_spread(scores(change)))


def noise_of(step: StepTime) -> float:
    """Standard deviation of the logarithm of a step's time, between trials of one plan."""
    return math.hypot(NOISE, HOST_NOISE * step.waiting_s / step.step_s)


def quantile_s(step: StepTime, share: float, factors: TimeFactors = COLD) -> float:
    """Return the seconds below which a step stays in this share of cases."""
    return step.step_s * math.exp(NormalDist().inv_cdf(share) * factors.spread * noise_of(step) / NOISE)


def _moved(start: TimeFactors, names: Sequence[str], change: Sequence[float]) -> TimeFactors:
    named = start.named
    return TimeFactors(
        **{name: named[name] * math.exp(by) for name, by in zip(names, change, strict=True)},
        spread=start.spread,
    )


def _spread(scores: Sequence[float]) -> float:
    """Return the spread expected of the next trial. Few errors say little, since the factors fit them."""
    count = len(scores)
    expected = FITTED_SPREAD + COLD_SPREAD / (1 + count)
    squares = sum((NOISE * score) ** 2 for score in scores)
    return math.sqrt((SPREAD_WEIGHT * expected**2 + squares) / (SPREAD_WEIGHT + count))
