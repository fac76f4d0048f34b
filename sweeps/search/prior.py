"""Rank untried plans by what is expected of them, before a sampler proposes any. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sweeps.search.candidates import Candidate
from sweeps.search.improvement import Predictor

RANKED = 200  # plans whose estimates are updated at once: half a millisecond each
WORTH_SPREADING = 0.1  # an untried strategy goes first if it promises this share of the most promising plan


class Prior:
    """Plans ordered by their expected improvement on the best so far."""

    def __init__(self, candidates: Iterable[Candidate], predictor: Predictor) -> None:
        self._candidates = candidates
        self._predictor = predictor
        self._ranks: dict[str, float] = {}  # scores of earlier calls, by fingerprint

    def promising(self, known: Collection[str], best: float | None) -> list[tuple[float, Candidate]]:
        """Return untried plans that fit and their expected improvement, the most promising first."""
        untried = [found for found in self._candidates if found.fingerprint not in known]
        fresh = [found for found in untried if found.fingerprint not in self._ranks]
        seen = [found for found in untried if found.fingerprint in self._ranks]
        seen.sort(key=lambda found: -self._ranks[found.fingerprint])
        for found in (*fresh, *seen[:RANKED]):
            self._ranks[found.fingerprint] = self._score(found)
        leading = sorted(untried, key=lambda found: -self._ranks[found.fingerprint])[:RANKED]
        fitting = (found for found in leading if self._predictor.fits(found.plan))
        gains = [(self._predictor.improvement(found.plan, best), found) for found in fitting]
        return sorted(gains, key=lambda each: (-each[0], -self._ranks[each[1].fingerprint]))

    def _score(self, found: Candidate) -> float:
        value = self._predictor.expected(found.plan)
        return -float("inf") if value is None else self._predictor.score(value)


def spread(
    promising: list[tuple[float, Candidate]], strategies: Collection[str]
) -> tuple[float, Candidate] | None:
    """Return the most promising plan of a strategy that has not been tried.

    Where there is none, or where it promises too little, return the most promising plan of all.
    """
    if not promising:
        return None
    first = promising[0]
    others = (each for each in promising if each[1].plan.strategy not in strategies)
    other = next(others, None)
    return other if other is not None and other[0] >= WORTH_SPREADING * first[0] else first
