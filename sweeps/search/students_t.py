"""Student's t distribution. The only module that imports scipy, which takes a moment: so when it is asked."""

from __future__ import annotations


def quantile(probability: float, freedom: int) -> float:
    """The value that a t variable of so many degrees of freedom stays below with this probability."""
    from scipy.special import stdtrit  # scipy.stats has it too, and takes ten times as long to import

    return float(stdtrit(freedom, probability))
