"""The baselines: what one tries by hand, in the order in which one tries it. Pure.

Strategies from the plainest to the thriftiest, each beginning with the micro-batch that the one before found
best, doubled until that stops helping or fitting; then one plan that divides the model, by the rule of thumb.
Baselines are points of the space: knobs that it varies and the baselines does not are at their defaults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sweeps.config.keys import is_marked
from sweeps.config.knob import Mark
from sweeps.search.candidates import Candidate, PlanPoint, candidate_of
from sweeps.search.improvement import Predictor
from sweeps.space.dimensions import Choices, Dimension, IsActive, Point, SearchSpace, powers_of_two
from train_entry.contract import Engine, Offload, Plan, Ranking, Scalar, State, Trial

HELPS = 1.005  # a doubled micro-batch that gains less than this does not help
MOST_COMBINATIONS = 500
_OFFLOADED = (Offload.NONE, Offload.CPU, Offload.NVME)

Default = Callable[[str, Mapping[str, Scalar]], Scalar]  # a knob's value beside others, where nobody sets it


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A configuration that one would try by hand."""

    name: str  # of its strategy
    candidate: Candidate

    @property
    def plan(self) -> Plan:
        return self.candidate.plan


class NoBaseline(Enum):
    """Why there is no baseline to try."""

    YET = "yet"  # a running trial decides
    LEFT = "left"  # all that may be the best were tried


Tried = Mapping[str, Trial]  # trials by the fingerprints of their plans


@dataclass(frozen=True, kw_only=True, slots=True)
class Baselines:
    """Baselines in the order in which one tries them: strategy by strategy, micro-batches ascending."""

    by_strategy: tuple[tuple[Baseline, ...], ...]
    hybrids: tuple[Baseline, ...] = ()  # plans that divide the model, the least divided first

    def next(self, tried: Tried, predictor: Predictor, ranking: Ranking) -> Baseline | NoBaseline:
        """The next baseline to try.

        Leaves out one that cannot be the best even if its estimate is off by twice its error.
        """
        best: float | None = None
        start = 1
        likely = self._likely(predictor)
        for series in self.by_strategy:
            found = _next_of_series(series[_first(series, start, tried, predictor) :], tried, ranking)
            best, start = _so_far(series, tried, ranking, best, start)
            if found is NoBaseline.YET:
                return found
            bar = likely if best is None else best
            if isinstance(found, Baseline) and predictor.may_beat(found.plan, bar):
                return found
        return self._hybrid(tried, predictor, best)

    def _likely(self, predictor: Predictor) -> float | None:
        """The value that the best of all baselines is expected to reach: the bar until one is measured."""
        fitting = (one for series in self.by_strategy for one in series if predictor.fits(one.plan))
        values = [value for one in fitting if (value := predictor.expected(one.plan)) is not None]
        return max(values, key=predictor.score, default=None)

    def _hybrid(self, tried: Tried, predictor: Predictor, best: float | None) -> Baseline | NoBaseline:
        """Tensor until a layer fits, pipeline until the model does, data for the rest: what divides least."""
        known = [tried[print_] for one in self.hybrids if (print_ := one.candidate.fingerprint) in tried]
        if known:
            is_open = any(not trial.state.is_closed for trial in known)
            return NoBaseline.YET if is_open else NoBaseline.LEFT
        for _, group in itertools.groupby(self.hybrids, key=lambda one: _degrees(one.plan)):
            fitting = [one for one in group if predictor.fits(one.plan)]
            if fitting:
                fastest = max(fitting, key=lambda one: _expected_score(one, predictor))
                return fastest if predictor.may_beat(fastest.plan, best) else NoBaseline.LEFT
        return NoBaseline.LEFT


def _first(series: Sequence[Baseline], start: int, tried: Tried, predictor: Predictor) -> int:
    """The place to begin at: the fastest expected; of equals where the strategy before was best."""
    begun = (index for index, one in enumerate(series) if one.candidate.fingerprint in tried)
    if (first := next(begun, None)) is not None:
        return first
    scores = [_expected_score(one, predictor) for one in series]
    fastest = [index for index, score in enumerate(scores) if score == max(scores)]
    large = (index for index in fastest if series[index].plan.micro_batch >= start)
    return next(large, fastest[-1])


def _next_of_series(series: Sequence[Baseline], tried: Tried, ranking: Ranking) -> Baseline | NoBaseline:
    """The micro-batch to try next; none is left where a larger one neither fits nor helps."""
    before: float | None = None
    for one in series:
        trial = tried.get(one.candidate.fingerprint)
        if trial is None:
            return one
        if not trial.state.is_closed:
            return NoBaseline.YET
        value = ranking.value(trial)
        if value is None or trial.state is State.STOPPED:  # too large, or hopeless
            return NoBaseline.LEFT
        if before is not None and ranking.goal.gain(value, before) < HELPS:
            return NoBaseline.LEFT
        before = value
    return NoBaseline.LEFT


def _so_far(
    series: Sequence[Baseline], tried: Tried, ranking: Ranking, best: float | None, start: int
) -> tuple[float | None, int]:
    """The best value up to and including a strategy, and its micro-batch, at which the next one begins."""
    goal = ranking.goal
    for one in series:
        trial = tried.get(one.candidate.fingerprint)
        value = ranking.value(trial) if trial else None
        if value is not None and (best is None or goal.score(value) > goal.score(best)):
            best, start = value, one.plan.micro_batch
    return best, start


def _expected_score(baseline: Baseline, predictor: Predictor) -> float:
    """Larger is better; of what does not fit, or where nothing is known, without bound the worst."""
    value = predictor.expected(baseline.plan) if predictor.fits(baseline.plan) else None
    return -math.inf if value is None else predictor.score(value)


def _degrees(plan: Plan) -> tuple[int, int]:
    return plan.tensor, plan.pipeline


# ---------------------------------------------------------------------- building it


def make_baselines(space: SearchSpace, plan: PlanPoint, is_active: IsActive, default: Default) -> Baselines:
    """The baselines of a space."""
    found = _baselines(_combinations(space, is_active, default), plan)
    whole = [one for one in found if _degrees(one.plan) == (1, 1)]
    divided = [one for one in found if _degrees(one.plan) != (1, 1)]
    by_strategy = itertools.groupby(sorted(whole, key=_thrift), key=lambda one: one.name)
    return Baselines(
        by_strategy=tuple(tuple(series) for _, series in by_strategy),
        hybrids=tuple(sorted(divided, key=lambda one: (_degrees(one.plan), one.plan.zero.stage))),
    )


def single_gpu_baselines(
    space: SearchSpace, plan: PlanPoint, is_active: IsActive, default: Default
) -> tuple[Baseline, ...]:
    """Plans for one GPU alone, the plainest first: what the efficiency of scaling is measured by."""
    alone = ({**point, "ranks": 1} for point in _combinations(space, is_active, default))
    baselines = [baseline for baseline in _baselines(alone, plan) if baseline.candidate.plan.ranks == 1]
    return tuple(sorted(baselines, key=_thrift))


def _baselines(points: Iterator[Point], plan: PlanPoint) -> list[Baseline]:
    """One baseline for each strategy and micro-batch."""
    found: dict[tuple[str, int], Baseline] = {}
    for point in points:
        if (candidate := candidate_of(plan, point)) is not None:
            name = candidate.plan.strategy
            found.setdefault((name, candidate.plan.micro_batch), Baseline(name=name, candidate=candidate))
    return list(found.values())


def _thrift(baseline: Baseline) -> tuple[int, bool, int, str, int]:
    """How little memory a strategy is content with, then the micro-batch."""
    plan = baseline.candidate.plan
    offloaded = max(map(_OFFLOADED.index, plan.offload.devices), default=0)
    return offloaded, plan.engine is not Engine.DDP, plan.zero.stage, baseline.name, plan.micro_batch


def _combinations(space: SearchSpace, is_active: IsActive, default: Default) -> Iterator[Point]:
    """Points of the space: all values of the knobs that one changes by hand, the defaults of the others."""
    varied = [dimension for dimension in space.dimensions if is_marked(dimension.key, Mark.BY_HAND)]
    values = [_values(dimension) for dimension in varied]
    for chosen in itertools.islice(itertools.product(*values), MOST_COMBINATIONS):
        known = {dimension.key: value for dimension, value in zip(varied, chosen, strict=True)}
        yield space.build(lambda dim, known=known: _choose(dim, known, default), is_active)  # type: ignore[misc]


def _values(dimension: Dimension) -> tuple[Scalar, ...]:
    found = dimension.range
    if isinstance(found, Choices):
        return found.values
    return powers_of_two(found.low, found.high) or (found.snap(found.low),)


def _choose(dimension: Dimension, known: Mapping[str, Scalar], default: Default) -> Scalar:
    if dimension.key in known:
        return known[dimension.key]
    value = default(dimension.key, known)
    found = dimension.range
    if isinstance(found, Choices):
        return value if value in found.values else found.values[0]
    return found.snap(float(value)) if isinstance(value, (int, float)) else found.snap(found.low)
