"""List the plans of a space: legal ones with estimates, broken rules for the others. Launches nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from sweeps.plan.resolve import Planned, Rejection
from sweeps.plan.warnings import Caution, cautions
from sweeps.space.dimensions import IsActive, Point, SearchSpace
from train_entry.contract import Estimate, Fit, Goal, Plan, Reason, Scalar

MAX_LISTED = 3000  # points of a listing; a larger space is sampled
PLACES = {Fit.FITS: 0, Fit.BORDERLINE: 1, Fit.TOO_LARGE: 2}

EstimatePlan = Callable[[Plan], Estimate]


@dataclass(frozen=True, kw_only=True, slots=True)
class LegalPoint:
    """A point that makes a legal plan, with its estimate."""

    number: int  # within the listing: 1 is the best
    point: Point
    plan: Plan
    estimate: Estimate
    overrides: tuple[str, ...]  # `python sweep.py <overrides>` runs it alone
    same_as: int | None  # number of an earlier point that would run the same job


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A rule, and the number of points that break it."""

    count: int
    example: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Wasteful:
    """A caution, and the number of legal points to which it applies."""

    count: int
    example: Caution


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The points of a space that were planned: all of a small space, a sample of a large one."""

    knobs: tuple[str, ...]  # that vary
    legal: tuple[LegalPoint, ...]  # the best first
    broken: tuple[BrokenRule, ...]  # the most frequent first; a point may break several rules
    wasteful: tuple[Wasteful, ...]  # the most frequent first
    looked_at: int
    points: int | None  # in the whole space; None: infinitely many
    seed: int  # of the sample
    goal: Goal  # orders the plans that fit
    basis: str = ""  # one line: how the estimates were made

    @property
    def distinct(self) -> int:
        """The number of different jobs that the legal points would run."""
        return sum(found.same_as is None for found in self.legal)

    def count(self, fit: Fit) -> int:
        """Count the legal points with this verdict."""
        return sum(found.estimate.fit is fit for found in self.legal)


def list_plans(
    space: SearchSpace,
    plan: Callable[[Mapping[str, Scalar]], Planned],
    is_active: IsActive,
    seed: int,
    estimate: EstimatePlan,
    goal: Goal,
    basis: str = "",
) -> Listing:
    """Plan every point of a finite space up to MAX_LISTED; else corners and random points, by the seed.

    Plans that fit come first, ordered by the goal's estimate; then the borderline ones, ordered likewise;
    then those that are too large, the smallest excess first.
    """
    points = _chosen(space, random.Random(seed), is_active)
    planned = [(point, plan(point)) for point in points]
    legal = _legal(planned, lru_cache(maxsize=None)(estimate), goal)
    return Listing(
        knobs=tuple(dimension.key for dimension in space.dimensions),
        legal=legal,
        broken=_broken(found.plan for _, found in planned),
        wasteful=_wasteful(found.plan for found in legal),
        looked_at=len(points),
        points=space.size(is_active),
        seed=seed,
        goal=goal,
        basis=basis,
    )


def _chosen(space: SearchSpace, source: random.Random, is_active: IsActive) -> list[Point]:
    if space.is_finite:
        return space.sample(MAX_LISTED, source, is_active)
    corners = space.ends.sample(MAX_LISTED // 2, source, is_active)
    drawn = space.sample(MAX_LISTED - len(corners), source, is_active)
    return list({tuple(point.items()): point for point in (*corners, *drawn)}.values())


def _legal(
    planned: Iterable[tuple[Point, Planned]], estimate: EstimatePlan, goal: Goal
) -> tuple[LegalPoint, ...]:
    found = [
        (point, one, one.plan, estimate(one.plan))
        for point, one in planned
        if not isinstance(one.plan, Rejection)
    ]
    found.sort(key=lambda each: _merit(each[3], goal))
    first: dict[str | None, int] = {}
    legal = []
    for number, (point, one, plan, expected) in enumerate(found, start=1):
        same_as = first.setdefault(one.fingerprint, number)
        legal.append(
            LegalPoint(
                number=number,
                point=point,
                plan=plan,
                estimate=expected,
                overrides=one.overrides,
                same_as=None if same_as == number else same_as,
            )
        )
    return tuple(legal)


def _merit(estimate: Estimate, goal: Goal) -> tuple[int, float]:
    """Return a sort key; a better estimate has a smaller one."""
    if estimate.fit is Fit.TOO_LARGE:
        return PLACES[estimate.fit], estimate.excess
    value = goal.value(estimate)  # an estimate has no loss: then order by speed
    return PLACES[estimate.fit], -estimate.tokens_per_s_per_gpu if value is None else -goal.score(value)


def _broken(plans: Iterable[Plan | Rejection]) -> tuple[BrokenRule, ...]:
    examples: dict[str, list[Reason]] = {}
    for plan in plans:
        for reason in plan.reasons if isinstance(plan, Rejection) else ():
            examples.setdefault(reason.rule, []).append(reason)
    by_count = sorted(examples.values(), key=len, reverse=True)
    return tuple(BrokenRule(count=len(reasons), example=reasons[0]) for reasons in by_count)


def _wasteful(plans: Iterable[Plan]) -> tuple[Wasteful, ...]:
    examples: dict[str, list[Caution]] = {}
    for plan in plans:
        for caution in cautions(plan):
            examples.setdefault(caution.name, []).append(caution)
    by_count = sorted(examples.values(), key=len, reverse=True)
    return tuple(Wasteful(count=len(found), example=found[0]) for found in by_count)
