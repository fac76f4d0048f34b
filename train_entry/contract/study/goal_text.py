"""Format a goal and its values, for every place that shows them."""

from __future__ import annotations

from collections.abc import Iterable

from train_entry.contract.shared.text import GIB, digits, short
from train_entry.contract.study.goals import SECONDS_PER_HOUR, Goal

HOURS_PER_DAY = 24
_WORDS = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "time_to_tokens": "time to {tokens} tokens",
    "peak_bytes": "peak memory",
    "loss": "loss",
    "cost": "cost of {tokens} tokens",
}
# Seconds from which a time is given in a unit, the unit's name, and its length in seconds.
_TIME_UNITS = (
    (3 * HOURS_PER_DAY * SECONDS_PER_HOUR, "days", HOURS_PER_DAY * SECONDS_PER_HOUR),
    (SECONDS_PER_HOUR, "h", SECONDS_PER_HOUR),
    (60, "min", 60),
    (0, "s", 1),
)


def goal_words(goal: Goal) -> str:
    """The goal in words: `tokens/s/GPU`, `time to 1e9 tokens`."""
    return _WORDS.get(goal.name, goal.name).format(tokens=short(goal.tokens))


def goal_text(goal: Goal, value: float) -> str:
    """A value with its unit: `41,230 tokens/s/GPU`, `3.21 h`, `12.3 GiB`, `loss 3.250`, `cost 12.3`."""
    match goal.name:
        case "time_to_tokens":
            unit, unit_s = time_unit([value])
            return f"{digits(value / unit_s)} {unit}"
        case "peak_bytes":
            return f"{digits(value / GIB)} GiB"
        case "loss":
            return f"loss {value:.3f}"
        case "cost":
            return f"cost {digits(value)}"
    return f"{digits(value)} {goal_words(goal)}"


def goal_number(goal: Goal, value: float) -> str:
    """Return `goal_text` without `tokens/s`, `loss` or `cost`, for all but the first of several values."""
    text = goal_text(goal, value)
    return text.removesuffix(f" {goal_words(goal)}").removeprefix("loss ").removeprefix("cost ")


def time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """The most readable unit for the longest of these times, and its length in seconds."""
    longest = max(seconds, default=0.0)
    return next((name, unit_s) for least, name, unit_s in _TIME_UNITS if longest >= least)
