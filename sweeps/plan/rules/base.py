"""The type of all rules. A rule gives its reason with the numbers, and says what would be legal.

Rules are checked before anything is launched, so a broken rule costs 0 GPU-seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sweeps.config.schema import SweepConfig
from sweeps.machine import Machine
from train_entry.contract import ModelShape, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A configuration and its context, before a plan exists."""

    config: SweepConfig
    model: ModelShape
    machine: Machine
    ranks: int
    precision: str  # resolved, never auto
    warmup_steps: int  # of the learning rate, at this global batch

    @property
    def data(self) -> int:
        return max(1, self.ranks // (self.config.tensor * self.config.pipeline))

    @property
    def tensor(self) -> int:
        """The degree in effect; 1 for ddp."""
        return self.config.tensor if self.is_deepspeed else 1

    @property
    def pipeline(self) -> int:
        """The degree in effect; 1 for ddp."""
        return self.config.pipeline if self.is_deepspeed else 1

    @property
    def largest_parameter(self) -> int:
        return self.model.largest_parameter

    @property
    def is_deepspeed(self) -> bool:
        return self.config.engine == "deepspeed"

    @property
    def stage(self) -> int:
        """The ZeRO stage in effect; 0 for ddp."""
        return self.config.zero.stage if self.is_deepspeed else 0


Check = Callable[[Draft], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A condition that every legal plan meets."""

    name: str
    explanation: str  # why the rule exists, from the check's docstring
    source: str  # where this is written, or how it was observed
    check: Check

    def __call__(self, draft: Draft) -> Reason | None:
        """Return the reason if the draft breaks the rule."""
        text = self.check(draft)
        return None if text is None else Reason(rule=self.name, text=text, source=self.source)


def rule(source: str) -> Callable[[Check], Rule]:
    """Make a rule of a function that returns the reason with the numbers and a way out, or None."""

    def named(check: Check) -> Rule:
        explanation = " ".join((check.__doc__ or "").split())
        return Rule(name=check.__name__, explanation=explanation, source=source, check=check)

    return named


def choices(items: list[object] | list[int] | list[str]) -> str:
    """Return `1, 2 or 4`; long lists are shortened."""
    shown = [str(item) for item in items]
    if len(shown) > 12:
        shown = [*shown[:11], shown[-1]]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}" if len(shown) > 1 else "".join(shown)


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
