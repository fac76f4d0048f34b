"""What varies: dimensions and the points they span. Pure; knows neither Hydra nor Optuna."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sweeps.space.conditions import decision_rank, is_conditional
from train_entry.contract import Scalar

Point = dict[str, Scalar]  # knob to value; a knob that does not matter there is absent
IsActive = Callable[[str, Mapping[str, Scalar]], bool]  # whether a knob has an effect beside these values


def always(key: str, point: Mapping[str, Scalar]) -> bool:
    """Every knob matters everywhere."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A finite set of values, in the order written."""

    values: tuple[Scalar, ...]

    @property
    def is_ordinal(self) -> bool:
        """Numbers in order: a sampler may then learn from neighbours."""
        numbers = [v for v in self.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) > 2 and numbers == sorted(numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """All numbers from low to high, both included."""

    low: float
    high: float
    log: bool
    integral: bool
    digits: int | None = None  # significant digits that sampled values are rounded to, so that repeats meet

    def draw(self, source: random.Random) -> Scalar:
        if self.log:
            return self.snap(math.exp(source.uniform(math.log(self.low), math.log(self.high))))
        return self.snap(source.uniform(self.low, self.high))

    def snap(self, value: float) -> Scalar:
        if self.digits is not None and value != 0:
            value = round(value, self.digits - 1 - math.floor(math.log10(abs(value))))
        value = min(max(value, self.low), self.high)
        return round(value) if self.integral else float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One knob and its range. `text` is the range as written, in Hydra's grammar."""

    key: str
    text: str
    range: Choices | Interval

    def draw(self, source: random.Random) -> Scalar:
        return (
            source.choice(self.range.values) if isinstance(self.range, Choices) else self.range.draw(source)
        )

    def snap(self, value: Scalar) -> Scalar:
        if isinstance(self.range, Interval) and isinstance(value, (int, float)):
            return self.range.snap(value)
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Dimensions, as written. A point holds those alone that matter given its other knobs."""

    dimensions: tuple[Dimension, ...]
    _order: tuple[Dimension, ...] = field(init=False, repr=False, compare=False)  # of decision

    def __post_init__(self) -> None:
        object.__setattr__(self, "_order", _by_decision(self.dimensions))

    @property
    def is_finite(self) -> bool:
        return all(isinstance(dimension.range, Choices) for dimension in self.dimensions)

    @property
    def ends(self) -> SearchSpace:
        """The space of its corners: all choices, and both ends of each interval."""
        return SearchSpace(dimensions=tuple(_ends(dimension) for dimension in self.dimensions))

    def size(self, is_active: IsActive = always) -> int | None:
        """How many points it has; None: infinitely many."""
        return _count(self._order, {}, is_active) if self.is_finite else None

    def points(self, is_active: IsActive = always) -> Iterator[Point]:
        """Every point of a finite space once, the first dimension slowest, as Hydra's basic sweeper would go.

        Where a knob stands before one that decides whether it matters, the deciding one is the slower.
        """
        if not self.is_finite:
            raise ValueError("an infinite space cannot be enumerated")
        return (self._as_written(point) for point in _walk(self._order, {}, is_active))

    def build(self, choose: Callable[[Dimension], Scalar], is_active: IsActive = always) -> Point:
        """A point, knob by knob: each that matters, given those that decide it."""
        point: Point = {}
        for dimension in self._order:
            if is_active(dimension.key, point):
                point[dimension.key] = choose(dimension)
        return self._as_written(point)

    def draw(self, source: random.Random, is_active: IsActive = always) -> Point:
        """A random point, uniform over choices and, on their scale, over intervals."""
        return self.build(lambda dimension: dimension.draw(source), is_active)

    def reduce(self, point: Mapping[str, Scalar], is_active: IsActive = always) -> Point:
        """A point of this space, without what does not matter in it, snapped."""
        known = SearchSpace(dimensions=tuple(found for found in self.dimensions if found.key in point))
        return known.build(lambda dimension: dimension.snap(point[dimension.key]), is_active)

    def sample(self, most: int, source: random.Random, is_active: IsActive = always) -> list[Point]:
        """All points where there are no more than `most`; else up to `most` different ones, at random."""
        size = self.size(is_active)
        if size is not None and size <= most:
            return list(self.points(is_active))
        drawn = (self.draw(source, is_active) for _ in range(most))
        return list({tuple(point.items()): point for point in drawn}.values())

    def _as_written(self, point: Mapping[str, Scalar]) -> Point:
        return {found.key: point[found.key] for found in self.dimensions if found.key in point}


def _by_decision(dimensions: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    """As written, save that what decides whether a knob matters comes before it."""
    ranks = {dimension.key: decision_rank(dimension.key) for dimension in dimensions}
    deciding = sorted(dimensions, key=lambda found: ranks[found.key])
    ordered: dict[str, Dimension] = {}
    for dimension in dimensions:
        if is_conditional(dimension.key):
            ordered |= {found.key: found for found in deciding if ranks[found.key] < ranks[dimension.key]}
        ordered.setdefault(dimension.key, dimension)
    return tuple(ordered.values())


def _ends(dimension: Dimension) -> Dimension:
    found = dimension.range
    if isinstance(found, Choices):
        return dimension
    values = tuple(dict.fromkeys((found.snap(found.low), found.snap(found.high))))
    return dataclasses.replace(dimension, range=Choices(values=values))


def _values(dimension: Dimension) -> tuple[Scalar, ...]:
    return dimension.range.values if isinstance(dimension.range, Choices) else ()


def _walk(dimensions: tuple[Dimension, ...], point: Point, is_active: IsActive) -> Iterator[Point]:
    if not dimensions:
        yield point
        return
    first, *rest = dimensions
    if not is_active(first.key, point):
        yield from _walk(tuple(rest), point, is_active)
        return
    for value in _values(first):
        yield from _walk(tuple(rest), {**point, first.key: value}, is_active)


def _count(dimensions: tuple[Dimension, ...], point: Point, is_active: IsActive) -> int:
    """As many as _walk yields; only knobs that decide are gone through, the others multiply."""
    if not dimensions:
        return 1
    first, *rest = dimensions
    if not is_active(first.key, point):
        return _count(tuple(rest), point, is_active)
    if decision_rank(first.key) == math.inf:
        return len(_values(first)) * _count(tuple(rest), point, is_active)
    return sum(_count(tuple(rest), {**point, first.key: value}, is_active) for value in _values(first))


def powers_of_two(low: float, high: float) -> tuple[int, ...]:
    """Those from low to high, both included."""
    first = max(0, math.ceil(math.log2(max(low, 1))))
    return tuple(2**power for power in range(first, math.floor(math.log2(max(high, 1))) + 1))
