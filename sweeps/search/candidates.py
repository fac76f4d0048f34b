"""List the legal plans of a space as far as possible, each plan once. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sweeps.plan.resolve import Planned, Rejection
from sweeps.space.dimensions import IsActive, Point, SearchSpace
from train_entry.contract import Plan, Scalar

MOST = 2000  # points that are planned at most: milliseconds each
PlanPoint = Callable[[Mapping[str, Scalar]], Planned]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A point, and the legal plan that it makes."""

    point: Point
    planned: Planned
    plan: Plan
    fingerprint: str


def candidate_of(plan: PlanPoint, point: Point) -> Candidate | None:
    """Return the point with its plan; None if it makes no legal plan."""
    planned = plan(point)
    if isinstance(planned.plan, Rejection) or planned.fingerprint is None:
        return None
    return Candidate(point=point, planned=planned, plan=planned.plan, fingerprint=planned.fingerprint)


class Candidates:
    """The candidates of a space. The list grows while jobs run, so that no slot waits for it."""

    def __init__(self, space: SearchSpace, plan: PlanPoint, is_active: IsActive, seed: int) -> None:
        self._plan = plan
        size = space.size(is_active)
        self.covers_space = size is not None and size <= MOST
        self._points = self._of(space, is_active, random.Random(seed))
        self._found: dict[str, Candidate] = {}
        self.is_complete = False

    def _of(self, space: SearchSpace, is_active: IsActive, source: random.Random) -> Iterator[Point]:
        if self.covers_space:
            return space.points(is_active)
        return (space.draw(source, is_active) for _ in range(MOST))

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._found.values())

    def grow(self, most: int) -> None:
        """Plan up to `most` further points."""
        points = list(itertools.islice(self._points, most))
        self.is_complete = len(points) < most
        for point in points:
            if (found := candidate_of(self._plan, point)) is not None:
                self._found.setdefault(found.fingerprint, found)

    def complete(self) -> None:
        while not self.is_complete:
            self.grow(MOST)
