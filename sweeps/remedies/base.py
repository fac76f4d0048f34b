"""What a remedy is: a change of knobs that takes less memory, why, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train_entry.contract import ModelShape, Plan, Scalar

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Changes = Mapping[str, Scalar]  # knobs and their new values


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One remedy applied to one plan."""

    changes: Changes
    why: str  # one line, with the numbers


Apply = Callable[[Plan, ModelShape], Step | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way to need less memory."""

    name: str
    explanation: str  # what it does, from the function's docstring
    cost: str
    apply: Apply

    def __call__(self, plan: Plan, model: ModelShape) -> Step | None:
        """The step; None where it was taken already, or would not help."""
        return self.apply(plan, model)


def remedy(cost: str) -> Callable[[Apply], Remedy]:
    """Make a remedy of a function that returns a step, or None."""

    def named(apply: Apply) -> Remedy:
        explanation = " ".join((apply.__doc__ or "").split())
        return Remedy(name=apply.__name__, explanation=explanation, cost=cost, apply=apply)

    return named


def size(count: float) -> str:
    """Bytes as a person reads them."""
    if count == 0:
        return "nothing"
    unit, name = next(((unit, name) for unit, name in UNITS if count >= unit), UNITS[-1])
    scaled = count / unit
    decimals = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:.{decimals}f} {name}"


def rounded_up(number: float) -> int:
    """To two significant digits: the grid of sizes, on which repeats meet."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return math.ceil(number / unit) * unit
