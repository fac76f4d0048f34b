"""The parts of a remedy: a change of knobs that takes less memory, how it does that, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sweeps.estimate.memory.share import shares
from train_entry.contract import ModelShape, Plan, Scalar

Changes = Mapping[str, Scalar]  # knobs and their new values


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One remedy applied to one plan."""

    changes: Changes
    how: str  # why it takes less memory, in a few words; estimates say how much less


Apply = Callable[[Plan, ModelShape], Iterable[Step]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way to need less memory."""

    name: str
    explanation: str  # what the remedy does: the function's docstring
    cost: str
    is_minor: bool  # may save so little that no launch is worth it
    apply: Apply

    def __call__(self, plan: Plan, model: ModelShape) -> tuple[Step, ...]:
        """Return steps, of which the first that saves memory is taken; none if the plan has it already."""
        return tuple(self.apply(plan, model))


def remedy(cost: str, is_minor: bool = False) -> Callable[[Apply], Remedy]:
    """Make a remedy from a function that yields steps."""

    def named(apply: Apply) -> Remedy:
        explanation = " ".join((apply.__doc__ or "").split())
        return Remedy(name=apply.__name__, explanation=explanation, cost=cost, is_minor=is_minor, apply=apply)

    return named


def parameters(plan: Plan, model: ModelShape) -> int:
    """Return the number of parameters of the fullest rank, before ZeRO partitions them."""
    return round(max(share.parameters for share in shares(plan, model)))


def rounded_up(number: float) -> int:
    """Round up to two significant digits, so that nearly equal sizes make the same plan."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return math.ceil(number / unit) * unit
