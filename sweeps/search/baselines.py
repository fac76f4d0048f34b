"""The baselines: the configurations that one tries by hand, in the order in which one tries them. Pure.

Strategies go from the plainest to the one that needs least memory. Each begins with the micro-batch that was
best before, and doubles it until that no longer helps or fits. Then comes one plan that divides the model, as
little as it takes to fit. Baselines are points of the space: a knob that the space varies and the baselines
do not is at its default.
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

HELPS = 1.005  # a doubled micro-batch that gains less than this factor does not help
MOST_COMBINATIONS = 500
_OFFLOADED = (Offload.NONE, Offload.CPU, Offload.NVME)

Default = Callable[[str, Mapping[str, Scalar]], Scalar]  # a knob's default, given the values of others


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A configuration that one would try by hand."""

    name: str  # the name of its strategy
    candidate: Candidate

    @property
    def plan(self) -> Plan:
        return self.candidate.plan


class NoBaseline(Enum):
    """The reason why there is no baseline to try."""

    YET = "yet"  # a running trial decides what is next
    LEFT = "left"  # all baselines that may be the best were tried


Tried = Mapping[str, Trial]  # trials by the fingerprints of their plans


@dataclass(frozen=True, kw_only=True, slots=True)
class Baselines:
    """The baselines in the order in which they are tried: by strategy, micro-batches ascending."""

    by_strategy: tuple[tuple[Baseline, ...], ...]
    hybrids: tuple[Baseline, ...] = ()  # plans that divide the model, the least divided first

    def next(self, tried: Tried, predictor: Predictor, ranking: Ranking) -> Baseline | NoBaseline:
        """Return the next baseline to try.

        A baseline that cannot be the best even if its estimate is off by twice its error is left out.
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
        """Return the value expected of the best baseline. Until one is measured, it is the value to beat."""
        fitting = (one for series in self.by_strategy for one in series if predictor.fits(one.plan))
        values = [value for one in fitting if (value := predictor.expected(one.plan)) is not None]
        return max(values, key=predictor.score, default=None)

    def _hybrid(self, tried: Tried, predictor: Predictor, best: float | None) -> Baseline | NoBaseline:
        """Return the plan that divides the model least and fits: lowest tensor, then lowest pipeline degree.

        Of these, the one that is expected to be fastest. Only one such plan is tried.
        """
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
    """Return the index of the micro-batch to begin with.

    It is the one that was begun with, else the one that is expected to be fastest. Of equally fast ones it is
    the first that is no smaller than `start`, the best micro-batch of the strategies before.
    """
    begun = (index for index, one in enumerate(series) if one.candidate.fingerprint in tried)
    if (first := next(begun, None)) is not None:
        return first
    scores = [_expected_score(one, predictor) for one in series]
    fastest = [index for index, score in enumerate(scores) if score == max(scores)]
    large = (index for index in fastest if series[index].plan.micro_batch >= start)
    return next(large, fastest[-1])


def _next_of_series(series: Sequence[Baseline], tried: Tried, ranking: Ranking) -> Baseline | NoBaseline:
    """Return the micro-batch to try next; none is left once a larger one does not fit or help."""
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
    """Return the best value up to and including this strategy, and its micro-batch.

    The next strategy begins with that micro-batch.
    """
    goal = ranking.goal
    for one in series:
        trial = tried.get(one.candidate.fingerprint)
        value = ranking.value(trial) if trial else None
        if value is not None and (best is None or goal.score(value) > goal.score(best)):
            best, start = value, one.plan.micro_batch
    return best, start


def _expected_score(baseline: Baseline, predictor: Predictor) -> float:
    """Return the expected score, larger is better; -inf where the plan does not fit or nothing is known."""
    value = predictor.expected(baseline.plan) if predictor.fits(baseline.plan) else None
    return -math.inf if value is None else predictor.score(value)


def _degrees(plan: Plan) -> tuple[int, int]:
    return plan.tensor, plan.pipeline


# ---------------------------------------------------------------------- building the baselines


def make_baselines(space: SearchSpace, plan: PlanPoint, is_active: IsActive, default: Default) -> Baselines:
    """Return the baselines of a space."""
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
    """Return the plans for a single GPU, the plainest first. They measure the efficiency of scaling."""
    alone = ({**point, "ranks": 1} for point in _combinations(space, is_active, default))
    baselines = [baseline for baseline in _baselines(alone, plan) if baseline.candidate.plan.ranks == 1]
    return tuple(sorted(baselines, key=_thrift))


def _baselines(points: Iterator[Point], plan: PlanPoint) -> list[Baseline]:
    """Return one baseline for each strategy and micro-batch."""
    found: dict[tuple[str, int], Baseline] = {}
    for point in points:
        if (candidate := candidate_of(plan, point)) is not None:
            name = candidate.plan.strategy
            found.setdefault((name, candidate.plan.micro_batch), Baseline(name=name, candidate=candidate))
    return list(found.values())


def _thrift(baseline: Baseline) -> tuple[int, bool, int, str, int]:
    """Sort key: strategies from the plainest to the one that needs least memory, then the micro-batch."""
    plan = baseline.candidate.plan
    offloaded = max(map(_OFFLOADED.index, plan.offload.devices), default=0)
    return offloaded, plan.engine is not Engine.DDP, plan.zero.stage, baseline.name, plan.micro_batch


def _combinations(space: SearchSpace, is_active: IsActive, default: Default) -> Iterator[Point]:
    """Yield points with all values of the knobs that one changes by hand, and defaults for the others."""
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
