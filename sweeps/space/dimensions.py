"""Dimensions and the points that they span. Pure; knows neither Hydra nor Optuna."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sweeps.space.conditions import decision_rank, is_conditional
from train_entry.contract import Scalar

Point = dict[str, Scalar]  # knob to value, without knobs that have no effect there
IsActive = Callable[[str, Mapping[str, Scalar]], bool]  # (knob, other values): True if it has an effect


def always(key: str, point: Mapping[str, Scalar]) -> bool:
    """True: every knob has an effect everywhere."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A finite set of values, in the order in which they were written."""

    values: tuple[Scalar, ...]

    @property
    def is_ordinal(self) -> bool:
        """True for at least three numbers in ascending order: a sampler may learn from neighbours."""
        numbers = [v for v in self.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) > 2 and numbers == sorted(numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """All numbers from low to high, both included."""

    low: float
    high: float
    log: bool
    integral: bool
    digits: int | None = None  # significant digits of sampled values, so that they repeat

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
    """Dimensions in the order written. A point has only knobs that have an effect given its other knobs."""

    dimensions: tuple[Dimension, ...]
    _order: tuple[Dimension, ...] = field(init=False, repr=False, compare=False)  # deciding knobs first

    def __post_init__(self) -> None:
        object.__setattr__(self, "_order", _by_decision(self.dimensions))

    @property
    def is_finite(self) -> bool:
        return all(isinstance(dimension.range, Choices) for dimension in self.dimensions)

    @property
    def ends(self) -> SearchSpace:
        """The space of the corners: all choices, and both ends of each interval."""
        return SearchSpace(dimensions=tuple(_ends(dimension) for dimension in self.dimensions))

    def size(self, is_active: IsActive = always) -> int | None:
        """Return the number of points, or None if it is infinite."""
        return _count(self._order, {}, is_active) if self.is_finite else None

    def points(self, is_active: IsActive = always) -> Iterator[Point]:
        """Yield every point of a finite space once, as Hydra's basic sweeper: the first dimension is slowest.

        If a knob is written before one that decides whether it has an effect, the deciding one is slower.
        """
        if not self.is_finite:
            raise ValueError("an infinite space cannot be enumerated")
        return (self._as_written(point) for point in _walk(self._order, {}, is_active))

    def build(self, choose: Callable[[Dimension], Scalar], is_active: IsActive = always) -> Point:
        """Build a point: choose a value for each knob that has an effect given the values chosen before."""
        point: Point = {}
        for dimension in self._order:
            if is_active(dimension.key, point):
                point[dimension.key] = choose(dimension)
        return self._as_written(point)

    def draw(self, source: random.Random, is_active: IsActive = always) -> Point:
        """Return a random point, uniform over choices and over intervals (linear or logarithmic)."""
        return self.build(lambda dimension: dimension.draw(source), is_active)

    def reduce(self, point: Mapping[str, Scalar], is_active: IsActive = always) -> Point:
        """Return the point with values snapped to this space, without knobs that have no effect in it."""
        known = SearchSpace(dimensions=tuple(found for found in self.dimensions if found.key in point))
        return known.build(lambda dimension: dimension.snap(point[dimension.key]), is_active)

    def sample(self, most: int, source: random.Random, is_active: IsActive = always) -> list[Point]:
        """Return all points if there are at most `most`, else up to `most` different random ones."""
        size = self.size(is_active)
        if size is not None and size <= most:
            return list(self.points(is_active))
        drawn = (self.draw(source, is_active) for _ in range(most))
        return list({tuple(point.items()): point for point in drawn}.values())

    def _as_written(self, point: Mapping[str, Scalar]) -> Point:
        return {found.key: point[found.key] for found in self.dimensions if found.key in point}


def _by_decision(dimensions: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    """Return the dimensions as written, but with deciding knobs before the knobs that depend on them."""
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
    """Count the points that _walk yields: iterate over deciding knobs, multiply the sizes of the others."""
    if not dimensions:
        return 1
    first, *rest = dimensions
    if not is_active(first.key, point):
        return _count(tuple(rest), point, is_active)
    if decision_rank(first.key) == math.inf:
        return len(_values(first)) * _count(tuple(rest), point, is_active)
    return sum(_count(tuple(rest), {**point, first.key: value}, is_active) for value in _values(first))


def powers_of_two(low: float, high: float) -> tuple[int, ...]:
    """Return the powers of two from low to high, both included."""
    first = max(0, math.ceil(math.log2(max(low, 1))))
    return tuple(2**power for power in range(first, math.floor(math.log2(max(high, 1))) + 1))
