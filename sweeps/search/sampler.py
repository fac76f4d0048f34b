"""Propose points through optuna's samplers. The only module that imports optuna.

The optuna study lives in memory and is rebuilt from the ledger at each start: optuna's journal does not
survive a kill -9 (a stale lock, a torn last line), and SQLite breaks on network filesystems.

A knob is suggested only where it is active, after the knobs that decide that. TPE models such a space by
groups of knobs that occur together. The GP models the knobs that all trials have, and draws the others at
random.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from sweeps.config.schema import SearchConfig
from sweeps.errors import ConfigError
from sweeps.search.verdicts import Lesson
from sweeps.space.dimensions import Choices, Dimension, Interval, IsActive, Point, SearchSpace, always
from train_entry.contract import Scalar

# Proposals that we ask of the sampler, known points included, before we choose unknown points ourselves.
# Fewer where we can list the points, since a proposal takes longer the more trials the sampler knows.
LEAST_ASKED = 25
LEAST_ASKED_OF_LISTED = 8
MAX_DRAWS = 1000  # random points drawn before a space that cannot be listed counts as exhausted
MAX_ENUMERATED = 100_000  # the most points of a finite space that we list

Merit = Callable[[Point], float]  # how much a point promises, by knowledge that the sampler does not have
Key = tuple[tuple[str, Scalar], ...]  # identifies a point

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A point to try, and optuna's number for it."""

    point: Point
    number: int


class Sampler:
    """An ask-and-tell sampler. It never proposes a point twice; None when a finite space is exhausted."""

    def __init__(
        self,
        space: SearchSpace,
        search: SearchConfig,
        told: int = 0,
        is_active: IsActive = always,
        goals: int = 1,
    ) -> None:
        require_searchable(space, search)
        self._space = space
        self._is_active = is_active
        self._size = space.size(is_active)
        self._is_grid = search.sampler == "grid"
        # Another seed at each start: otherwise a resumed study would get its first proposals again.
        seed = search.seed + told
        self._random = random.Random(seed)
        self._study = optuna.create_study(
            directions=["maximize"] * goals, sampler=_sampler(search, seed), pruner=_pruner(search)
        )
        self._goals = goals
        self._seen: set[Key] = set()
        self._open: dict[int, optuna.trial.Trial] = {}
        self._worst: tuple[float, ...] | None = None

    @property
    def is_finite(self) -> bool:
        return self._size is not None

    @property
    def _is_listed(self) -> bool:
        return self._size is not None and self._size <= MAX_ENUMERATED

    def remember(self, lesson: Lesson) -> None:
        """Take in a lesson of an earlier start. Inactive knobs are left out, here and below."""
        point = self._space.reduce(lesson.point, self._is_active)
        self._mark(point)
        trial = optuna.trial.create_trial(
            state=TrialState.COMPLETE,
            values=self._scores(lesson),
            params=self._encode(point),
            distributions={dim.key: _distribution(dim) for dim in self._space.dimensions if dim.key in point},
            constraints=_constraints(lesson),
        )
        self._study.add_trial(trial)

    def skip(self, point: Mapping[str, Scalar]) -> None:
        """Never propose this point, which taught nothing."""
        self._mark(self._space.reduce(point, self._is_active))

    def resume(self, point: Mapping[str, Scalar]) -> Proposal:
        """Return a proposal for a point that is being tried, or must be tried again."""
        reduced = self._space.reduce(point, self._is_active)
        self._mark(reduced)
        self._study.enqueue_trial(self._encode(reduced))
        return Proposal(point=dict(point), number=self._ask().number)

    def ask(self, merit: Merit | None = None, among: int = 1) -> Proposal | None:
        """Return a new point, of several proposals the one with the most merit; None when there is none."""
        found = self._proposals(1 if merit is None else among)
        if merit is None or not found:
            return next(iter(found), None)
        best = max(found, key=lambda proposal: merit(proposal.point))
        for proposal in found:
            if proposal is not best:
                self._seen.discard(_key(self._space.reduce(proposal.point, self._is_active)))
                self._forget(proposal.number)
        return best

    def _proposals(self, count: int) -> list[Proposal]:
        """Return new points: the sampler's proposals, and any others where it repeats itself.

        It repeats itself in a small space.
        """
        found: list[Proposal] = []
        least = LEAST_ASKED_OF_LISTED if self._is_listed else LEAST_ASKED
        for _ in range(0 if self._is_grid else max(count, least)):
            if len(found) == count or (self._size is not None and len(self._seen) >= self._size):
                return found
            proposal = self._ask()
            if self._mark(proposal.point):
                found.append(proposal)
            else:
                self._forget(proposal.number)
        return found + [self.resume(point) for point in self._unseen(count - len(found))]

    def is_new(self, point: Mapping[str, Scalar]) -> bool:
        """True if the point has not been proposed yet."""
        return _key(self._space.reduce(point, self._is_active)) not in self._seen

    def tell(self, proposal: Proposal, lesson: Lesson | None) -> None:
        """Tell the sampler the result of a proposal; None: there is nothing that it should hear of."""
        if lesson is None:
            self._forget(proposal.number)
            return
        trial = self._open.pop(proposal.number)
        for name, value in _constraints(lesson).items():
            trial.set_constraint(name, value)
        if lesson.is_pruned and self._goals == 1:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, self._scores(lesson))

    def falls_behind(self, proposal: Proposal, step: int, score: float) -> bool:
        """True if the pruner would end a running trial with this score at this step. For a single goal."""
        trial = self._open.get(proposal.number)
        if trial is None or self._goals > 1:
            return False
        trial.report(score, step)
        return bool(trial.should_prune())

    def _forget(self, number: int) -> None:
        self._study.tell(self._open.pop(number), state=TrialState.FAIL)  # samplers ignore failed trials

    def _ask(self) -> Proposal:
        with warnings.catch_warnings():  # about experimental samplers, and dimensions sampled independently
            warnings.simplefilter("ignore")
            trial = self._study.ask()
            point = self._space.build(lambda dim: _suggested(trial, dim), self._is_active)
        self._open[trial.number] = trial
        return Proposal(point=point, number=trial.number)

    def _unseen(self, count: int) -> list[Point]:
        """Return the next points of a grid, or any unknown points."""
        if not self._is_listed:
            drawn = (self._space.draw(self._random, self._is_active) for _ in range(MAX_DRAWS))
            unknown = {_key(point): point for point in drawn if _key(point) not in self._seen}
            return list(itertools.islice(unknown.values(), count))
        unseen = (point for point in self._space.points(self._is_active) if _key(point) not in self._seen)
        if self._is_grid:
            return list(itertools.islice(unseen, count))
        points = list(unseen)
        return self._random.sample(points, min(count, len(points)))

    def _scores(self, lesson: Lesson) -> tuple[float, ...]:
        """Return the lesson's scores; for a bad point, the worst scores seen so far.

        Optuna's states do not serve for that: samplers ignore FAIL, and the GP ignores PRUNED too.
        """
        if lesson.scores is None:
            return self._worst if self._worst is not None else (0.0,) * self._goals
        worst = self._worst or lesson.scores
        self._worst = tuple(map(min, worst, lesson.scores))
        return lesson.scores

    def _mark(self, point: Point) -> bool:
        """Note that the point is known; True if it was new."""
        known = len(self._seen)
        self._seen.add(_key(point))
        return len(self._seen) > known

    def _encode(self, point: Point) -> dict[str, Any]:
        return {dim.key: _encode(dim, point[dim.key]) for dim in self._space.dimensions if dim.key in point}


def _key(point: Point) -> Key:
    """Return knobs and values in the order of the space, so that an absent knob differs from any value."""
    return tuple(point.items())


def require_searchable(space: SearchSpace, search: SearchConfig) -> None:
    """Raise ConfigError if the sampler cannot search the space."""
    if search.sampler == "grid" and not space.is_finite:
        raise ConfigError("search=grid needs a finite space; replace intervals by choices or ranges")


def _sampler(search: SearchConfig, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExperimentalWarning
        if search.sampler == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=search.startup_trials)
        if search.sampler == "tpe":
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=search.startup_trials, multivariate=True, group=True
            )
        if search.sampler == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(2, search.startup_trials))
        return optuna.samplers.RandomSampler(seed=seed)


def _pruner(search: SearchConfig) -> BasePruner:
    """Return the pruner that compares a running trial's loss with that of others at the same step."""
    startup = search.startup_trials
    makers: dict[str, Callable[[], BasePruner]] = {
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=startup),
        "percentile": lambda: optuna.pruners.PercentilePruner(25.0, n_startup_trials=startup),
        "hyperband": optuna.pruners.HyperbandPruner,
        "wilcoxon": optuna.pruners.WilcoxonPruner,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExperimentalWarning
        return makers.get(search.pruner, optuna.pruners.NopPruner)()


def _distribution(dimension: Dimension) -> IntDistribution | FloatDistribution | CategoricalDistribution:
    found = dimension.range
    if isinstance(found, Interval):
        if found.integral and found.high - found.low <= MAX_ENUMERATED:
            return IntDistribution(int(found.low), int(found.high), log=found.log)
        # Wider ones are real-valued, and snapped when proposed: the GP lists each integer of a distribution.
        return FloatDistribution(found.low, found.high, log=found.log)
    if found.is_ordinal:  # positions in the list: 1, 2, 4, 8 are then equally far apart
        return IntDistribution(0, len(found.values) - 1)
    return CategoricalDistribution(found.values)


def _suggested(trial: optuna.trial.Trial, dimension: Dimension) -> Scalar:
    """Return the suggested value, snapped at once because later suggestions may depend on it."""
    match _distribution(dimension):
        case IntDistribution(low=low, high=high, log=log):
            value: Any = trial.suggest_int(dimension.key, low, high, log=log)
        case FloatDistribution(low=low, high=high, log=log):
            value = trial.suggest_float(dimension.key, low, high, log=log)
        case CategoricalDistribution(choices=choices):
            value = trial.suggest_categorical(dimension.key, choices)
    return dimension.snap(_decode(dimension, value))


def _encode(dimension: Dimension, value: Scalar) -> Scalar:
    found = dimension.range
    return found.values.index(value) if isinstance(found, Choices) and found.is_ordinal else value


def _decode(dimension: Dimension, value: Any) -> Scalar:
    found = dimension.range
    decoded: Scalar = found.values[value] if isinstance(found, Choices) and found.is_ordinal else value
    return decoded


def _constraints(lesson: Lesson) -> dict[str, float]:
    return {"legal": lesson.legal, "memory": lesson.memory, "trained": lesson.trained}
