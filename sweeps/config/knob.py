"""A key of the schema, with its meaning and its limits."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def knob(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    integral: bool = False,
    grid: str = "",
) -> Any:
    """A key with its meaning and limits. `grid`: sampled values snap to `pow2` or to two `digits`."""
    metadata = {
        "help": help,
        "unit": unit,
        "low": low,
        "above": above,
        "high": high,
        "choices": choices,
        "integral": integral,
        "grid": grid,
    }
    if isinstance(default, (list, dict)) or callable(default):
        factory = default if callable(default) else lambda: type(default)(default)
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
