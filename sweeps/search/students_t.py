"""Student's t distribution. The only module that imports scipy, which takes a second: so when it is asked."""

from __future__ import annotations


def quantile(probability: float, freedom: int) -> float:
    """The value that a t variable of so many degrees of freedom stays below with this probability."""
    from scipy.stats import t

    return float(t.ppf(probability, freedom))
