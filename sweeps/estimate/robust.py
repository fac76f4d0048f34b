"""Robust least squares with a prior: the fit that corrects the estimates of memory and of time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """A number to fit: its default, the standard deviation of the prior around it, and its bounds."""

    default: float
    deviation: float
    lowest: float
    highest: float


def robust_fit(
    errors: Callable[[Sequence[float]], Sequence[float]],
    thresholds: Sequence[float],
    unknowns: Sequence[Unknown],
    first: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Return the values that minimize Huber's loss of the errors plus the squared distance from the defaults.

    `errors` maps values of the unknowns to as many errors as there are thresholds, each in standard
    deviations. An error beyond its threshold counts linearly (Huber 1964), so that an outlier moves the
    result little. The search starts at `first`, or at the defaults.
    """
    defaults, deviations, lowest, highest = (
        np.array([getattr(unknown, name) for unknown in unknowns])
        for name in ("default", "deviation", "lowest", "highest")
    )

    def values(steps: Array) -> list[float]:
        return [float(value) for value in defaults + steps * deviations]

    def residuals(steps: Array) -> Array:
        return np.concatenate([np.asarray(errors(values(steps)), dtype=float), steps])

    bounds = ((lowest - defaults) / deviations, (highest - defaults) / deviations)
    start = np.zeros(len(unknowns)) if first is None else (np.array(first) - defaults) / deviations
    never = np.full(len(unknowns), np.inf)  # the squared distance from a default counts in full
    loss = _huber(np.concatenate([np.asarray(thresholds, dtype=float), never]))
    # dogbox is the method of SciPy that can start on a bound.
    found = least_squares(residuals, np.clip(start, *bounds), bounds=bounds, loss=loss, method="dogbox")
    return tuple(values(found.x))


def _huber(thresholds: Array) -> Callable[[Array], Array]:
    """Return Huber's loss of squared errors and its two derivatives, as the rows that SciPy expects."""

    def loss(squares: Array) -> Array:
        is_large = squares > thresholds**2
        size = np.sqrt(np.where(is_large, squares, 1.0))
        edge = np.where(is_large, thresholds, 0.0)
        return np.array(
            [
                np.where(is_large, 2 * edge * size - edge**2, squares),
                np.where(is_large, edge / size, 1.0),
                np.where(is_large, -edge / (2 * size**3), 0.0),
            ]
        )

    return loss
