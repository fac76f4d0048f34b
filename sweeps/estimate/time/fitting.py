"""What finished trials teach of time: factors for this model on this machine, and how sure they are. Pure.

A few factors, each with a meaning, and each held near 1 until measurements speak against it: so one trial
helps, eight help more, and a trial that was disturbed does no harm.
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

# How far off a factor may well be before anything was measured: standard deviations of its logarithm. Cards
# of one data sheet differ little; hosts, their wires and disks differ much.
DOUBT = {
    "compute": 0.25,
    "launch": 0.4,
    "hooks": 0.2,
    "communication": 0.5,
    "offload": 0.5,
    "update": 0.3,
}
# What a trial's step time scatters by, and what such a model leaves out: logarithm again. Where the device
# waits for the host, whose other work disturbs it, steps of one trial differ by 10 to 25%; else by 1%
# (llama_1b3 on two H200s).
NOISE = 0.04
HOST_NOISE = 0.12
TRUSTED = 1.5  # deviations up to so many times that count fully, larger ones less and less (Huber)
LARGEST = 2.5  # of a factor's logarithm: it ends within twelve times and a twelfth of its default

# Spread of what is measured around what is estimated, for a device that never waits: after many trials, and
# what is added to it before the first.
FITTED_SPREAD = 0.06
COLD_SPREAD = 0.19
SPREAD_WEIGHT = 4  # so many trials' worth of belief in the above


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeObservation:
    """A finished trial: what was planned, where, and the seconds a step took."""

    plan: Plan
    model: ModelShape
    hardware: Hardware
    step_s: float


def fit_time(observations: Sequence[TimeObservation], start: TimeFactors = COLD) -> TimeFactors:
    """Factors under which these trials take what they took, as far as doubt allows; `start` without any."""
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
    """Standard deviation of the logarithm of a step's time, from trial to trial of one plan."""
    return math.hypot(NOISE, HOST_NOISE * step.waiting_s / step.step_s)


def quantile_s(step: StepTime, share: float, factors: TimeFactors = COLD) -> float:
    """Seconds that a step stays below in this share of cases."""
    return step.step_s * math.exp(NormalDist().inv_cdf(share) * factors.spread * noise_of(step) / NOISE)


def _moved(start: TimeFactors, names: Sequence[str], change: Sequence[float]) -> TimeFactors:
    named = start.named
    return TimeFactors(
        **{name: named[name] * math.exp(by) for name, by in zip(names, change, strict=True)},
        spread=start.spread,
    )


def _spread(scores: Sequence[float]) -> float:
    """Of the next trial, from what is left of these: few of them say little, since they were fitted."""
    count = len(scores)
    expected = FITTED_SPREAD + COLD_SPREAD / (1 + count)
    squares = sum((NOISE * score) ** 2 for score in scores)
    return math.sqrt((SPREAD_WEIGHT * expected**2 + squares) / (SPREAD_WEIGHT + count))
