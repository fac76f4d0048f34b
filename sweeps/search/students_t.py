"""Quantiles of Student's t distribution. The only module that imports scipy.

That takes a moment, so it is imported on the first call.
"""

from __future__ import annotations


def quantile(probability: float, freedom: int) -> float:
    """Return what a t variable with `freedom` degrees of freedom stays below with this probability."""
    from scipy.special import stdtrit  # scipy.stats has it too, and takes ten times as long to import

    return float(stdtrit(freedom, probability))
