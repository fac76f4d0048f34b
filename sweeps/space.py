"""What varies: dimensions and the points they span. Pure; knows neither Hydra nor Optuna."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from train_entry.contract import Scalar

Point = dict[str, Scalar]  # knob to value


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

    def snap(self, value: Scalar) -> Scalar:
        if isinstance(self.range, Interval) and isinstance(value, (int, float)):
            return self.range.snap(value)
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    dimensions: tuple[Dimension, ...]

    @property
    def size(self) -> int | None:
        """How many points it has; None: infinitely many."""
        sizes = [len(d.range.values) if isinstance(d.range, Choices) else None for d in self.dimensions]
        return None if None in sizes else math.prod(size or 0 for size in sizes)

    def points(self) -> Iterator[Point]:
        """Every point of a finite space, the first dimension slowest, as Hydra's basic sweeper would go."""
        keys = [dimension.key for dimension in self.dimensions]
        values = [d.range.values for d in self.dimensions if isinstance(d.range, Choices)]
        if len(values) != len(keys):
            raise ValueError("an infinite space cannot be enumerated")
        return (dict(zip(keys, point, strict=True)) for point in itertools.product(*values))

    def draw(self, source: random.Random) -> Point:
        """A random point, uniform over choices and, on their scale, over intervals."""
        return {
            dim.key: source.choice(dim.range.values)
            if isinstance(dim.range, Choices)
            else dim.range.draw(source)
            for dim in self.dimensions
        }

    def snap(self, point: Mapping[str, Scalar]) -> Point:
        return {dimension.key: dimension.snap(point[dimension.key]) for dimension in self.dimensions}


def powers_of_two(low: float, high: float) -> tuple[int, ...]:
    """Those from low to high, both included."""
    first = max(0, math.ceil(math.log2(max(low, 1))))
    return tuple(2**power for power in range(first, math.floor(math.log2(max(high, 1))) + 1))
