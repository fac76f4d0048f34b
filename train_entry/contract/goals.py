"""What a study seeks: a number of a measurement, and in which direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from train_entry.contract.seen import Measurement

MAXIMIZED = ("tokens_per_s", "tokens_per_s_per_gpu")
MINIMIZED = ("time_to_tokens", "peak_bytes", "loss", "cost")
GOALS = (*MAXIMIZED, *MINIMIZED)
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A name of GOALS, with what it takes to say it of a measurement."""

    name: str
    tokens: float = 0.0  # to be trained: time_to_tokens, cost
    price_per_gpu_hour: float = 0.0  # cost; in whatever currency

    @property
    def is_maximized(self) -> bool:
        return self.name not in MINIMIZED

    @property
    def is_speed(self) -> bool:
        """Whether, at a given number of ranks, the faster plan is always the better one."""
        return self.name not in ("peak_bytes", "loss")

    def value(self, seen: Measurement) -> float | None:
        """In its own unit (tokens/s, seconds, bytes, money); None where it is not finite, or not known."""
        if self.name == "time_to_tokens":
            found = self.tokens / seen.tokens_per_s if seen.tokens_per_s else math.inf
        elif self.name == "cost":
            gpus = seen.tokens_per_s / seen.tokens_per_s_per_gpu if seen.tokens_per_s_per_gpu else 0.0
            hours = self.tokens / seen.tokens_per_s / SECONDS_PER_HOUR if seen.tokens_per_s else math.inf
            found = hours * gpus * self.price_per_gpu_hour
        else:
            found = getattr(seen, self.name, math.nan)
        return float(found) if math.isfinite(found) else None

    def score(self, value: float) -> float:
        """Larger is better, whatever the goal."""
        return value if self.is_maximized else -value
