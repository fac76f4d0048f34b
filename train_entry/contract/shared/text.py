"""Format numbers, sizes and values: the same way in every table, message and page."""

from __future__ import annotations

from train_entry.contract.shared.words import Scalar

KIB = 2**10
MIB = 2**20
GIB = 2**30
_SIZES = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def digits(value: float) -> str:
    """A number with about three significant digits: 12,345; 123; 12.3; 1.23; 0.00123."""
    size = abs(value)
    if size < 0.1:
        return f"{value:.3g}"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:,.{decimals}f}"


def gib(size_bytes: float) -> str:
    """Bytes in GiB, without the unit: 12,345.67."""
    return f"{size_bytes / GIB:,.2f}"


def size_text(size_bytes: float) -> str:
    """Bytes in the largest unit that fits: 12.3 GiB, 500 MiB, 0.50 KiB; `nothing` for zero or less."""
    if size_bytes <= 0:
        return "nothing"
    unit, name = next((each for each in _SIZES if size_bytes >= each[0]), _SIZES[-1])
    return f"{digits(size_bytes / unit)} {name}"


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 trial, 1,200 trials."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def typed(value: object) -> str:
    """A value as the command line takes it, with every digit: true, null, 50000000.0."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def short(value: Scalar) -> str:
    """A value for people to read: true, null, 5e8, 0.0003. As short as possible without losing a digit."""
    if isinstance(value, (bool, str)) or value is None:
        return typed(value)
    if abs(value) < 1e5 or float(f"{value:.3g}") != value:
        return str(value).removesuffix(".0")
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
