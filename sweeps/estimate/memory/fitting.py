"""Fit the factors of the memory estimate to measurements. Pure.

The fit is least squares on relative errors. A prior draws each factor to its default, so that few
observations correct what they can see and leave the rest. Large errors count linearly (Huber 1964), so one
outlier moves little. A plan that ran out of memory needed more than its limit: it counts as long as the
estimate says less. A plan that ran shows that it fits.

All plans share the factors, so a class of plans that is counted wrongly must not bend them: observations that
the factors cannot explain together count less, and the remaining error goes to a ratio of that class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from sweeps.estimate.hardware import Hardware
from sweeps.estimate.memory.account import ACTIVATIONS, LOGITS, STEP, Memory, PhaseMemory
from sweeps.estimate.memory.classes import PlanClass, class_of
from sweeps.estimate.memory.model import COLD, MemoryFactors, memory_of
from sweeps.estimate.robust import Unknown, robust_fit
from train_entry.contract import GIB, ModelShape, Plan

# Relative error of a measured peak that a good estimate leaves: rounding in torch's allocator, timing.
NOISE = 0.015
# A limit tells less exactly what was needed: gaps between tensors differ from run to run.
LIMIT_NOISE = 0.03
LARGE_ERROR = 0.05  # larger errors count linearly
# The prior of each factor: standard deviation around its default, lowest and highest value.
BELIEFS = {
    "activations": (0.10, 0.25, 4.0),
    "logits": (0.10, 0.25, 4.0),
    "optimizer_step": (0.10, 0.25, 4.0),
    "unseen_bytes": (0.25 * GIB, 0.0, 16.0 * GIB),
    "fragmentation": (0.03, 0.0, 0.3),
}
NAMES = tuple(BELIEFS)
CONTEXT_BOUNDS = (0.25, 4.0)
CONTEXT_WEIGHT = 1.0  # weight of the default, in observations
SPREAD_WEIGHT = 4.0  # weight of the default spread, in observations
NOISE_WEIGHT = 4.0  # weight of NOISE, in observations
CLASS_WEIGHT = 1.0  # weight of a ratio of 1, in observations
CLASS_ERROR = 0.35  # cap of a residual in a class's ratio: an observation counts as at most about 40% off
CLASS_BOUNDS = (0.5, 2.0)
PASSES = 4
OVER = 0.01  # a plan that ran out needed more than its limit by this share
GROWN = 1.01  # the fit is repeated if its noise has grown by at least this factor


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryObservation:
    """The memory that a trial took, or the fact that it ran out of memory."""

    plan: Plan
    model: ModelShape
    hardware: Hardware
    is_oom: bool
    peak_bytes: int | None  # allocated on the fullest rank, over all phases; None if it ran out
    limit_bytes: int | None  # what torch could reserve; None: unknown
    reserved_bytes: int | None = None
    card_bytes: int | None = None  # in use on the GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One observation as numbers."""

    phases: tuple[tuple[float, float, float, float], ...]  # fixed, activations, logits, optimizer's step
    gaps: float
    peak: float | None
    limit: float | None
    kind: PlanClass


def fit_memory(observations: Sequence[MemoryObservation], prior: MemoryFactors = COLD) -> MemoryFactors:
    """Return the factors that explain the observations, or the prior if there are none."""
    rows = [_row(each) for each in observations if _is_usable(each)]
    if not rows:
        return prior
    start = tuple([float(getattr(prior, name)) for name in NAMES])
    noise, best = NOISE, start
    for _ in range(PASSES):
        best = _fitted(rows, best, start, noise)
        left = _noise_left(rows, best)
        if left < GROWN * noise:
            break
        noise = left
    activations, logits, step, unseen, fragmentation = best
    ratios = _ratios(rows, best)
    return replace(
        prior,
        activations=activations,
        logits=logits,
        optimizer_step=step,
        unseen_bytes=unseen,
        fragmentation=fragmentation,
        by_class=tuple([(kind, ratio) for kind, ratio in ratios.items() if ratio != 1]),
        context=_context(observations, prior),
        spread=_spread(rows, best, ratios, prior),
        observations=len(rows),
    )


def _fitted(
    rows: Sequence[_Row], values: Sequence[float], start: Sequence[float], noise: float
) -> tuple[float, ...]:
    """Return the best factors, searched from `values` on, if measured peaks have this noise."""
    unknowns = [
        Unknown(default=default, deviation=deviation, lowest=lowest, highest=highest)
        for default, (deviation, lowest, highest) in zip(start, BELIEFS.values(), strict=True)
    ]

    def errors(at: Sequence[float]) -> list[float]:
        return [error for row in rows for error in _errors(row, at, noise)]

    thresholds = [LARGE_ERROR / deviation for row in rows for deviation in _noises(row, noise)]
    return robust_fit(errors, thresholds, unknowns, values)


def _noise_left(rows: list[_Row], values: tuple[float, ...]) -> float:
    """Noise of measured peaks around the estimates with these factors: large if observations contradict."""
    squares = [_residual(row, values) ** 2 for row in rows if row.peak is not None]
    return math.sqrt((NOISE_WEIGHT * NOISE**2 + sum(squares)) / (NOISE_WEIGHT + len(squares)))


def _residual(row: _Row, values: tuple[float, ...]) -> float:
    """Logarithm of measured over estimated peak. For a plan that ran out: limit over what it must hold."""
    estimate = _peak(row, values)
    if row.peak is not None:
        return math.log(row.peak / estimate)
    assert row.limit is not None, "a plan that ran out is usable only with its limit"
    return max(0.0, math.log((1 + OVER) * row.limit / (estimate * (1 + values[4] * row.gaps))))


def _ratios(rows: list[_Row], values: tuple[float, ...]) -> dict[PlanClass, float]:
    """Return measured over estimated by class of plans, closer to 1 if there are few observations.

    If all plans of a class ran out, they need at least what their limits say.
    """
    ratios = {}
    lowest, highest = CLASS_BOUNDS
    for kind in PlanClass:
        ran = [_residual(row, values) for row in rows if row.kind is kind and row.peak is not None]
        ran = [max(-CLASS_ERROR, min(CLASS_ERROR, residual)) for residual in ran]
        ran_out = [_residual(row, values) for row in rows if row.kind is kind and row.peak is None]
        if not ran and not ran_out:
            continue
        above = [min(CLASS_ERROR, residual) for residual in ran_out if residual > 0]
        shrunk = (sum(ran) + sum(above)) / (len(ran) + len(above) + CLASS_WEIGHT)
        ratio = math.exp(shrunk if ran else max(ran_out))
        ratios[kind] = min(highest, max(lowest, ratio))
    return ratios


def _is_usable(seen: MemoryObservation) -> bool:
    if seen.is_oom:
        return bool(seen.limit_bytes and seen.limit_bytes > 0)
    return bool(seen.peak_bytes and seen.peak_bytes > 0)


def _row(seen: MemoryObservation) -> _Row:
    memory = memory_of(seen.plan, seen.model, seen.hardware)
    return _Row(
        phases=tuple([_by_factor(phase) for stage in memory.stages for phase in stage.phases]),
        gaps=memory.gaps,
        peak=None if seen.is_oom or not seen.peak_bytes else float(seen.peak_bytes),
        limit=float(seen.limit_bytes) if seen.limit_bytes else None,
        kind=class_of(seen.plan),
    )


def _by_factor(phase: PhaseMemory) -> tuple[float, float, float, float]:
    sums = {"": 0.0, ACTIVATIONS: 0.0, LOGITS: 0.0, STEP: 0.0}
    for component in phase.components:
        sums[component.factor] += component.bytes
    return sums[""], sums[ACTIVATIONS], sums[LOGITS], sums[STEP]


def _peak(row: _Row, values: Sequence[float]) -> float:
    activations, logits, step, unseen = values[:4]
    return max(at[0] + activations * at[1] + logits * at[2] + step * at[3] for at in row.phases) + unseen


def _errors(row: _Row, values: Sequence[float], noise: float) -> list[float]:
    """Return the relative errors of one observation, each over its own noise."""
    estimate, loose = _peak(row, values), 1 + values[4] * row.gaps
    errors = [] if row.peak is None else [(estimate / row.peak - 1) / noise]
    if row.limit is None:
        return errors
    if row.peak is None:  # it ran out: the error is how far the estimate is below the limit
        return [*errors, min(0.0, estimate * loose / row.limit - 1) / LIMIT_NOISE]
    # It ran: the error is how far peak and gaps together exceed the limit.
    return [*errors, max(0.0, row.peak * loose / row.limit - 1) / LIMIT_NOISE]


def _noises(row: _Row, noise: float) -> list[float]:
    """Return the noise of each of the row's errors."""
    return [*([] if row.peak is None else [noise]), *([] if row.limit is None else [LIMIT_NOISE])]


def _spread(
    rows: list[_Row], values: tuple[float, ...], ratios: dict[PlanClass, float], prior: MemoryFactors
) -> float:
    """Standard deviation of log(measured / estimated); few observations leave it near the prior."""
    left = [_residual(row, values) - math.log(ratios[row.kind]) for row in rows if row.peak is not None]
    total = SPREAD_WEIGHT * prior.spread**2 + sum(each**2 for each in left)
    return math.sqrt(total / (SPREAD_WEIGHT + len(left)))


def _context(observations: Sequence[MemoryObservation], prior: MemoryFactors) -> float:
    """Measured over estimated memory of a GPU outside of torch's allocator."""
    ratios = [
        (seen.card_bytes - seen.reserved_bytes) / expected
        for seen in observations
        if seen.card_bytes and seen.reserved_bytes and not seen.is_oom
        if (expected := _memory(seen).context_bytes) > 0 and seen.card_bytes > seen.reserved_bytes
    ]
    if not ratios:
        return prior.context
    weight = CONTEXT_WEIGHT / (CONTEXT_WEIGHT + len(ratios))
    lowest, highest = CONTEXT_BOUNDS
    return min(highest, max(lowest, weight * prior.context + (1 - weight) * median(ratios)))


def _memory(seen: MemoryObservation) -> Memory:
    return memory_of(seen.plan, seen.model, seen.hardware)
