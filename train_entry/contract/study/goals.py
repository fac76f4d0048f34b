"""The goals of a study: a value of a measurement, to be maximized or minimized."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

MAXIMIZED = ("tokens_per_s", "tokens_per_s_per_gpu")
MINIMIZED = ("time_to_tokens", "peak_bytes", "loss", "cost")
GOALS = (*MAXIMIZED, *MINIMIZED)
SECONDS_PER_HOUR = 3600


class Figures(Protocol):
    """A measurement or an estimate. An estimate has no loss."""

    @property
    def tokens_per_s(self) -> float: ...
    @property
    def tokens_per_s_per_gpu(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One of GOALS, with the parameters that its value depends on."""

    name: str
    tokens: float = 0.0  # time_to_tokens and cost: the number of tokens to train on
    price_per_gpu_hour: float = 0.0  # cost: in any currency

    @property
    def is_maximized(self) -> bool:
        return self.name not in MINIMIZED

    @property
    def is_speed(self) -> bool:
        """True if, at a given number of ranks, the faster plan is always the better one."""
        return self.name not in ("peak_bytes", "loss")

    def value(self, seen: Figures) -> float | None:
        """Return the goal's value in its unit (tokens/s, seconds, bytes, money), or None.

        It is None if it is not finite, or not known.
        """
        if self.name == "time_to_tokens":
            found = self.tokens / seen.tokens_per_s if seen.tokens_per_s else math.inf
        elif self.name == "cost":
            gpu_s = self.tokens / seen.tokens_per_s_per_gpu if seen.tokens_per_s_per_gpu else math.inf
            found = gpu_s / SECONDS_PER_HOUR * self.price_per_gpu_hour
        else:
            found = getattr(seen, self.name, math.nan)
        is_number = isinstance(found, (int, float)) and math.isfinite(found)
        return float(found) if is_number else None

    def score(self, value: float) -> float:
        """Return a score for a value. For every goal a larger score is better."""
        return value if self.is_maximized else -value

    def gain(self, value: float, over: float) -> float:
        """The factor by which `value` is better than `over`: 1.1 is a tenth better. Both are positive."""
        return value / over if self.is_maximized else over / value

    def slowest_step_s(self, value: float, tokens_per_step: int, ranks: int) -> float | None:
        """Return the step time, in seconds, at which a plan of `ranks` ranks reaches a value of the goal.

        Return None if the goal is not a speed.
        """
        match self.name:
            case "tokens_per_s":
                return tokens_per_step / value
            case "tokens_per_s_per_gpu":
                return tokens_per_step / (value * ranks)
            case "time_to_tokens":
                return value / self.tokens * tokens_per_step
            case "cost":
                gpu_s = value / self.price_per_gpu_hour * SECONDS_PER_HOUR
                return gpu_s / self.tokens * tokens_per_step / ranks
        return None
