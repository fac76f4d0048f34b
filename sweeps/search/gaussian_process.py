"""Predict an estimate's error from the errors of other plans. Only this module of `sweeps` imports numpy.

A Gaussian process of mean 0 (Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", 2.25,
2.26, 2.30). An error is the sum of three. Errors in one step component are correlated across plans, in
proportion to its share of the step (the covariance of a linear model, their 2.1). A second error is
correlated by exp(-d / reach) between plans at distance d. A third is a plan's own, and includes the noise of
its measurement. The size of the second and third together, the reach, and the third one's share are averaged
over a grid, weighted by marginal likelihood.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweeps.search.features import Features

REACHES = (1.0, 2.0, 4.0)  # distances over which errors stay correlated
OWN = (0.05, 0.3, 1.0)  # share of the variance that is a plan's own
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of errors, relative to `doubt`
DOUBLED = 1.0  # standard deviation of the prior over SIZES, in doublings
LARGEST = 3.0  # times `doubt`: larger errors are clipped, or one odd plan would put all others in doubt
LEAST_VARIANCE = 1e-8

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior:
    """The distribution of one plan's error."""

    mean: float
    deviation: float


class GaussianProcess:
    """The errors of known plans, and what they predict for any other plan."""

    def __init__(self, known: Sequence[Features], errors: Sequence[float], doubt: float) -> None:
        """`doubt` is the expected standard deviation of errors, apart from those of the step components."""
        self._codes: dict[object, int] = {}
        self._counts = np.array([features.counts for features in known])
        self._kinds = np.array([self._coded(features) for features in known])
        self._parts = np.array([features.parts for features in known])
        self._widths = np.array([features.width for features in known])
        grid = np.array(list(itertools.product(SIZES, OWN, REACHES)))
        sizes, own, self._reaches = grid.T
        self._variances = np.square(doubt * sizes)
        self._shared = (1 - own) * self._variances
        self._plausible = np.exp(-np.square(np.log2(sizes) / DOUBLED) / 2)
        self._plausible /= self._plausible.sum()
        self._count = len(errors)
        if self._count:
            largest = LARGEST * doubt * self._widths
            self._condition(known, np.clip(np.array(errors), -largest, largest))

    def _condition(self, known: Sequence[Features], errors: Numbers) -> None:
        covariances = np.stack([self._covariances(features) for features in known], axis=1)
        own = (self._variances - self._shared)[:, None] * np.square(self._widths)
        covariances += own[:, :, None] * np.eye(self._count)
        self._roots = np.linalg.inv(np.linalg.cholesky(covariances))  # a root of each inverse covariance
        whitened = self._roots @ errors
        self._weights = np.einsum("gij,gi->gj", self._roots, whitened)
        likelihoods = np.log(np.diagonal(self._roots, axis1=1, axis2=2)).sum(axis=1)
        likelihoods -= np.square(whitened).sum(axis=1) / 2
        self._plausible *= np.exp(likelihoods - likelihoods.max())
        self._plausible /= self._plausible.sum()

    def at(self, features: Features) -> Posterior:
        """Return mean and standard deviation, averaged over the grid by plausibility."""
        variances = self._variances * features.width**2 + np.square(features.parts).sum()
        means = np.zeros(len(variances))
        if self._count:
            shared = self._covariances(features)
            means = np.einsum("gi,gi->g", shared, self._weights)
            variances = variances - np.square(self._roots @ shared[:, :, None]).sum(axis=(1, 2))
        mean = float(self._plausible @ means)
        variance = float(self._plausible @ (variances + np.square(means - mean)))
        return Posterior(mean=mean, deviation=max(LEAST_VARIANCE, variance) ** 0.5)

    def _covariances(self, features: Features) -> Numbers:
        """Return the covariances of a plan's error with those of the known plans, per grid entry.

        They leave out a plan's own error.
        """
        apart = np.abs(self._counts - np.array(features.counts)).sum(axis=1)
        apart += (self._kinds != np.array(self._coded(features))).sum(axis=1)
        decay = np.exp(-apart / self._reaches[:, None])
        alike = self._parts @ np.array(features.parts)
        found: Numbers = alike + self._shared[:, None] * decay * self._widths * features.width
        return found

    def _coded(self, features: Features) -> list[int]:
        return [self._codes.setdefault(kind, len(self._codes)) for kind in enumerate(features.kinds)]
