"""Who proposes what to try next. The only module that imports optuna.

Optuna lives in memory and is rebuilt from the ledger at each start: its journal does not survive a kill -9
(a stale lock, a torn last line), and SQLite breaks on network filesystems.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from sweeps.config.schema import SearchConfig
from sweeps.errors import ConfigError
from sweeps.space import Choices, Dimension, Interval, Point, SearchSpace
from sweeps.verdicts import Lesson
from train_entry.contract import Scalar

MAX_REPEATS = 25  # proposals of known points before we choose an unknown one ourselves
MAX_DRAWS = 1000  # random points before a space that cannot be listed counts as exhausted
MAX_ENUMERATED = 100_000  # points of a finite space that we are willing to list

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A point nobody has tried, and the sampler's number for it."""

    point: Point
    number: int


class Searcher:
    """Asks and tells. Never proposes a point twice; None when a finite space is exhausted."""

    def __init__(self, space: SearchSpace, search: SearchConfig, told: int = 0) -> None:
        require_searchable(space, search)
        self._space = space
        self._is_grid = search.sampler == "grid"
        self._distributions = {dim.key: _distribution(dim) for dim in space.dimensions}
        # Another seed on each start: otherwise a resumed study would hear its first proposals again.
        seed = search.seed + told
        self._random = random.Random(seed)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(search, seed))
        self._seen: set[tuple[Scalar, ...]] = set()
        self._open: dict[int, optuna.trial.Trial] = {}
        self._worst: float | None = None

    @property
    def is_finite(self) -> bool:
        return self._space.size is not None

    def remember(self, lesson: Lesson) -> None:
        """A lesson of an earlier start."""
        self._mark(lesson.point)
        trial = optuna.trial.create_trial(
            state=TrialState.COMPLETE,
            value=self._value(lesson),
            params=self._encode(lesson.point),
            distributions=dict(self._distributions),
            constraints=_constraints(lesson),
        )
        self._study.add_trial(trial)

    def skip(self, point: Mapping[str, Scalar]) -> None:
        """Never propose this point; it taught nothing."""
        self._mark(point)

    def resume(self, point: Mapping[str, Scalar]) -> Proposal:
        """A point that is being tried, or must be tried again."""
        self._mark(point)
        self._study.enqueue_trial(self._encode(point))
        return Proposal(point=dict(point), number=self._ask().number)

    def ask(self) -> Proposal | None:
        """A new point; None when there is none."""
        if self._space.size is not None and len(self._seen) >= self._space.size:
            return None
        for _ in range(0 if self._is_grid else MAX_REPEATS):
            trial = self._ask()
            point = self._space.snap(self._decode(trial.params))
            if self._mark(point):
                return Proposal(point=point, number=trial.number)
            self._forget(trial.number)
        return self._unseen()

    def tell(self, proposal: Proposal, lesson: Lesson | None) -> None:
        """What came of a proposal; None: nothing that the sampler should hear of."""
        if lesson is None:
            self._forget(proposal.number)
            return
        trial = self._open.pop(proposal.number)
        for name, value in _constraints(lesson).items():
            trial.set_constraint(name, value)
        self._study.tell(trial, self._value(lesson))

    def _forget(self, number: int) -> None:
        self._study.tell(self._open.pop(number), state=TrialState.FAIL)  # invisible to samplers

    def _ask(self) -> optuna.trial.Trial:
        with warnings.catch_warnings():  # experimental samplers, and dimensions they sample independently
            warnings.simplefilter("ignore")
            trial = self._study.ask(self._distributions)
        self._open[trial.number] = trial
        return trial

    def _unseen(self) -> Proposal | None:
        """The next point of a grid, or any unknown one where the sampler knows only known ones."""
        if self._space.size is None or self._space.size > MAX_ENUMERATED:
            drawn = (self._space.draw(self._random) for _ in range(MAX_DRAWS))
            return next((self.resume(point) for point in drawn if self._key(point) not in self._seen), None)
        points = [point for point in self._space.points() if self._key(point) not in self._seen]
        if not points:
            return None
        return self.resume(points[0] if self._is_grid else self._random.choice(points))

    def _value(self, lesson: Lesson) -> float:
        """FAIL is invisible to samplers, and the GP ignores PRUNED too: so a bad point gets a bad value."""
        if lesson.value is None:
            return self._worst if self._worst is not None else 0.0
        self._worst = lesson.value if self._worst is None else min(self._worst, lesson.value)
        return lesson.value

    def _mark(self, point: Mapping[str, Scalar]) -> bool:
        """Whether the point was new."""
        known = len(self._seen)
        self._seen.add(self._key(point))
        return len(self._seen) > known

    def _key(self, point: Mapping[str, Scalar]) -> tuple[Scalar, ...]:
        return tuple(point[dim.key] for dim in self._space.dimensions)

    def _encode(self, point: Mapping[str, Scalar]) -> dict[str, Any]:
        return {dim.key: _encode(dim, point[dim.key]) for dim in self._space.dimensions}

    def _decode(self, params: Mapping[str, Any]) -> Point:
        return {dim.key: _decode(dim, params[dim.key]) for dim in self._space.dimensions}


def require_searchable(space: SearchSpace, search: SearchConfig) -> None:
    """Raise ConfigError where the sampler cannot search the space."""
    if search.sampler == "grid" and space.size is None:
        raise ConfigError("search=grid needs a finite space; replace intervals by choices or ranges")


def _sampler(search: SearchConfig, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExperimentalWarning
        if search.sampler == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=search.startup_trials)
        if search.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=search.startup_trials)
        return optuna.samplers.RandomSampler(seed=seed)


def _distribution(dimension: Dimension) -> BaseDistribution:
    found = dimension.range
    if isinstance(found, Interval):
        if found.integral and found.high - found.low <= MAX_ENUMERATED:
            return IntDistribution(int(found.low), int(found.high), log=found.log)
        # Wider ones as real numbers, snapped when proposed: the GP lists every integer of an IntDistribution.
        return FloatDistribution(found.low, found.high, log=found.log)
    if found.is_ordinal:  # as positions: 1, 2, 4, 8 are then equally far apart
        return IntDistribution(0, len(found.values) - 1)
    return CategoricalDistribution(found.values)


def _encode(dimension: Dimension, value: Scalar) -> Scalar:
    found = dimension.range
    return found.values.index(value) if isinstance(found, Choices) and found.is_ordinal else value


def _decode(dimension: Dimension, value: Any) -> Scalar:
    found = dimension.range
    decoded: Scalar = found.values[value] if isinstance(found, Choices) and found.is_ordinal else value
    return decoded


def _constraints(lesson: Lesson) -> dict[str, float]:
    return {"legal": lesson.legal, "memory": lesson.memory, "trained": lesson.trained}
