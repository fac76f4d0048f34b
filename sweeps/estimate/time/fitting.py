"""What finished trials teach of time: factors for this model on this machine, and how sure they are. Pure.

A few factors, each with a meaning, and each held near 1 until measurements speak against it: so one trial
helps, eight help more, and a trial that was disturbed does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from sweeps.estimate.hardware import Hardware
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
ROUNDS = 12  # of reweighting and linearizing; four or five suffice
SLOPE = 1e-4  # step of the numerical derivative
LONGEST = 0.7  # no round changes a factor more than twofold
LARGEST = 2.5  # and none ends beyond twelve times, or a twelfth

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

    def residuals(change: Sequence[float]) -> list[float]:
        factors = _moved(start, names, change)
        return [log - math.log(assemble(work, factors).step_s) for log, work in zip(logs, works, strict=True)]

    noises = [noise_of(assemble(work, start)) for work in works]
    change = _most_plausible(residuals, noises, [DOUBT[name] for name in names])
    scores = [left / noise for left, noise in zip(residuals(change), noises, strict=True)]
    return replace(_moved(start, names, change), spread=_spread(scores))


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


def _most_plausible(
    residuals: Callable[[Sequence[float]], list[float]], noises: Sequence[float], doubts: Sequence[float]
) -> list[float]:
    """Gauss-Newton on Huber's loss plus (change / doubt) squared."""
    change = [0.0] * len(doubts)
    for _ in range(ROUNDS):
        now = residuals(change)
        slopes = [_slope(residuals, change, now, index) for index in range(len(doubts))]
        weights = [_trust(left / noise) / noise**2 for left, noise in zip(now, noises, strict=True)]
        matrix = [[_dot(weights, one, other) for other in slopes] for one in slopes]
        target = [-_dot(weights, slope, now) for slope in slopes]
        for index, doubt in enumerate(doubts):
            matrix[index][index] += 1 / doubt**2
            target[index] -= change[index] / doubt**2
        steps = solve(matrix, target)
        change = [_bounded(at, by) for at, by in zip(change, steps, strict=True)]
        if max(map(abs, steps)) < SLOPE:
            break
    return change


def _slope(
    residuals: Callable[[Sequence[float]], list[float]],
    change: Sequence[float],
    now: Sequence[float],
    index: int,
) -> list[float]:
    """Of every residual, by one of the changes."""
    moved = [by + (SLOPE if at == index else 0.0) for at, by in enumerate(change)]
    return [(after - before) / SLOPE for after, before in zip(residuals(moved), now, strict=True)]


def _trust(score: float) -> float:
    return 1.0 if abs(score) <= TRUSTED else TRUSTED / abs(score)


def _bounded(at: float, by: float) -> float:
    moved = at + min(LONGEST, max(-LONGEST, by))
    return min(LARGEST, max(-LARGEST, moved))


def _dot(weights: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float:
    return sum(weight * a * b for weight, a, b in zip(weights, one, other, strict=True))


def _spread(scores: Sequence[float]) -> float:
    """Of the next trial, from what is left of these: few of them say little, since they were fitted."""
    count = len(scores)
    expected = FITTED_SPREAD + COLD_SPREAD / (1 + count)
    squares = sum((NOISE * score) ** 2 for score in scores)
    return math.sqrt((SPREAD_WEIGHT * expected**2 + squares) / (SPREAD_WEIGHT + count))


def solve(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x of matrix x = target, for a positive definite matrix: Gauss's elimination, no pivoting needed."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    size = len(rows)
    for column, pivot in enumerate(rows):
        for row in rows[column + 1 :]:
            ratio = row[column] / pivot[column]
            for index in range(column, size + 1):
                row[index] -= ratio * pivot[index]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][later] * solution[later] for later in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
