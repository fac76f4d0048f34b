"""Numbers, values and names as a table writes them."""

from __future__ import annotations

import re

from train_entry.contract import Advice, Scalar, StudyRecord, digits, short, typed


def figure(value: float | None, unit: float = 1.0) -> str:
    """Write a number in a unit, to about three digits but at most two decimals; empty for None."""
    if value is None:
        return ""
    scaled = value / unit
    return f"{scaled:.2f}" if abs(scaled) < 0.1 else digits(scaled)


def cell_text(value: Scalar) -> str:
    """Write a knob's value for people; empty if the trial has none."""
    return "" if value is None else short(value)


def raw(value: Scalar) -> str:
    """Write a cell for programs, every digit kept; empty for None."""
    return "" if value is None else typed(value)


def stacked(name: str, width: int = 8) -> str:
    """Break a dotted name into lines, so that its column is hardly wider than its values."""
    lines = [""]
    for part in re.findall(r"[^._]*[._]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def advised(advice: Advice) -> str:
    """Write advice: `activation_checkpointing=full: 3 GiB less`."""
    changes = " ".join(f"{key}={short(value)}" for key, value in advice.changes.items())
    return one_line(f"{changes}: {advice.why}")


def title(study: StudyRecord) -> str:
    """`study demo: tiny, by time_to_tokens for 1e9 tokens, then peak_bytes`"""
    goals = study.goals
    names = (f"{g.name} for {short(g.tokens)} tokens" if _has_budget(g.name) else g.name for g in goals)
    return f"study {study.name}: {study.model.name}, by {', then '.join(names)}"


def _has_budget(goal: str) -> bool:
    return goal in ("time_to_tokens", "cost")


def signed(share: float | None) -> str:
    """Write a relative error: +3.2%, -10.1%."""
    return "" if share is None else f"{share:+.1%}"


def hours(seconds: float) -> str:
    """Write seconds in hours, to two or three digits: 0.11, 1.24, 12,345."""
    found = seconds / 3600
    if found >= 1000:
        return f"{found:,.0f}"
    return f"{found:.3g}" if found >= 1 else f"{found:.2g}"


def size(share: float) -> str:
    """Write the size of a relative error: 0.4%, 12%."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
