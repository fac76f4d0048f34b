"""The ladder: what one tries by hand, in the order in which one tries it. Pure.

Strategies from the plainest to the thriftiest, each beginning with the micro-batch that the one before found
best, doubled until that stops helping or fitting; then one plan that divides the model, by the rule of thumb.
Rungs are points of the space: knobs that it varies and the ladder does not are at their defaults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sweeps.search.candidates import Candidate, PlanPoint, candidate_of
from sweeps.search.improvement import Outlook
from sweeps.search.ranking import value_of
from sweeps.space.dimensions import Choices, Dimension, Matters, Point, SearchSpace, powers_of_two
from train_entry.contract import Engine, Goal, Offload, Plan, Scalar, State, Trial

# What one changes by hand. All else stays as it is.
LADDER_KNOBS = (
    *("strategy", "engine", "zero.stage", "zero.offload_optimizer", "zero.offload_param"),
    *("tensor", "pipeline", "micro_batch"),
)
HELPS = 1.005  # a doubled micro-batch that gains less than this does not help
MOST_COMBINATIONS = 500
_OFFLOADED = (Offload.NONE, Offload.CPU, Offload.NVME)

Default = Callable[[str, Mapping[str, Scalar]], Scalar]  # a knob's value beside others, where nobody sets it


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One plan of the ladder."""

    name: str
    candidate: Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """Rungs in the order of climbing: a flight is one strategy, its micro-batches ascending."""

    flights: tuple[tuple[Rung, ...], ...]
    hybrids: tuple[Rung, ...] = ()  # plans that divide the model, the least divided first

    def next(self, trials: Mapping[str, Trial], outlook: Outlook, goal: Goal) -> Rung | bool:
        """The next rung to try, given the trials of each fingerprint; True: wait for one; False: climbed.

        A rung that cannot be the best, were its estimate wrong by as much as twice its error, is left out.
        """
        best: float | None = None
        start = 1
        likely = self._likely(outlook)
        for flight in self.flights:
            step = _climb(flight[_first(flight, start, trials, outlook) :], trials, goal)
            best, start = _so_far(flight, trials, goal, best, start)
            if step is True:
                return True
            bar = likely if best is None else best
            if isinstance(step, Rung) and outlook.may_beat(step.candidate.plan, bar):
                return step
        return self._hybrid(trials, outlook, best)

    def _likely(self, outlook: Outlook) -> float | None:
        """What the best of all rungs is expected to reach: the bar while nothing is measured."""
        rungs = [rung for flight in self.flights for rung in flight if outlook.fits(rung.candidate.plan)]
        values = [value for rung in rungs if (value := outlook.expected(rung.candidate.plan)) is not None]
        return max(values, key=outlook.score, default=None)

    def _hybrid(self, trials: Mapping[str, Trial], outlook: Outlook, best: float | None) -> Rung | bool:
        """Tensor until a layer fits, pipeline until the model does, data for the rest: what divides least."""
        prints = [rung.candidate.fingerprint for rung in self.hybrids]
        tried = [trials[fingerprint] for fingerprint in prints if fingerprint in trials]
        if tried:
            return any(not trial.state.is_closed for trial in tried)
        for _, group in itertools.groupby(self.hybrids, key=_degrees_of):
            rungs = [rung for rung in group if outlook.fits(rung.candidate.plan)]
            if rungs:
                rung = max(rungs, key=lambda each: _expected_score(each, outlook))
                return rung if outlook.may_beat(rung.candidate.plan, best) else False
        return False


def _first(flight: Sequence[Rung], start: int, trials: Mapping[str, Trial], outlook: Outlook) -> int:
    """Where to begin: where it is expected to be fastest; of equals where the flight before was best."""
    tried = (index for index, rung in enumerate(flight) if rung.candidate.fingerprint in trials)
    if (begun := next(tried, None)) is not None:
        return begun
    scores = [_expected_score(rung, outlook) for rung in flight]
    fastest = [index for index, score in enumerate(scores) if score == max(scores)]
    large = (index for index in fastest if flight[index].candidate.plan.micro_batch >= start)
    return next(large, fastest[-1])


def _climb(flight: Sequence[Rung], trials: Mapping[str, Trial], goal: Goal) -> Rung | bool:
    """The micro-batch to try next; True: wait for one; False: a larger one neither fits nor helps."""
    before: float | None = None
    for rung in flight:
        trial = trials.get(rung.candidate.fingerprint)
        if trial is None:
            return rung
        if not trial.state.is_closed:
            return True
        value = value_of(trial, goal)
        if value is None or trial.state is State.STOPPED:
            return False  # too large, or hopeless
        if before is not None and goal.gain(value, before) < HELPS:
            return False
        before = value
    return False


def _so_far(
    flight: Sequence[Rung], trials: Mapping[str, Trial], goal: Goal, best: float | None, start: int
) -> tuple[float | None, int]:
    """The best value up to and with a flight, and the micro-batch it is of, at which the next begins."""
    for rung in flight:
        trial = trials.get(rung.candidate.fingerprint)
        value = value_of(trial, goal) if trial else None
        if value is not None and (best is None or goal.score(value) > goal.score(best)):
            best, start = value, rung.candidate.plan.micro_batch
    return best, start


def _expected_score(rung: Rung, outlook: Outlook) -> float:
    """Larger is better; of what does not fit, or where nothing is known, without bound the worst."""
    value = outlook.expected(rung.candidate.plan) if outlook.fits(rung.candidate.plan) else None
    return -math.inf if value is None else outlook.score(value)


def _degrees_of(rung: Rung) -> tuple[int, int]:
    return _degrees(rung.candidate.plan)


def _degrees(plan: Plan) -> tuple[int, int]:
    return plan.tensor, plan.pipeline


# ---------------------------------------------------------------------- building it


def make_ladder(space: SearchSpace, plan: PlanPoint, matters: Matters, default: Default) -> Ladder:
    """The ladder of a space."""
    rungs = _rungs(_combinations(space, matters, default), plan)
    whole = [rung for rung in rungs if _degrees(rung.candidate.plan) == (1, 1)]
    divided = [rung for rung in rungs if _degrees(rung.candidate.plan) != (1, 1)]
    flights = itertools.groupby(sorted(whole, key=_thrift), key=lambda rung: rung.name)
    return Ladder(
        flights=tuple(tuple(flight) for _, flight in flights),
        hybrids=tuple(
            sorted(divided, key=lambda rung: (_degrees(rung.candidate.plan), rung.candidate.plan.zero.stage))
        ),
    )


def single_gpu_rungs(
    space: SearchSpace, plan: PlanPoint, matters: Matters, default: Default
) -> tuple[Rung, ...]:
    """Plans for one GPU alone, the plainest first: what the efficiency of scaling is measured by."""
    alone = ({**point, "ranks": 1} for point in _combinations(space, matters, default))
    rungs = [rung for rung in _rungs(alone, plan) if rung.candidate.plan.ranks == 1]
    return tuple(sorted(rungs, key=_thrift))


def _rungs(points: Iterator[Point], plan: PlanPoint) -> list[Rung]:
    """One rung for each strategy and micro-batch."""
    found: dict[tuple[str, int], Rung] = {}
    for point in points:
        if (candidate := candidate_of(plan, point)) is not None:
            name = candidate.plan.strategy
            found.setdefault((name, candidate.plan.micro_batch), Rung(name=name, candidate=candidate))
    return list(found.values())


def _thrift(rung: Rung) -> tuple[int, bool, int, str, int]:
    """How little memory a strategy is content with, then the micro-batch."""
    plan = rung.candidate.plan
    offloaded = max(map(_OFFLOADED.index, plan.offload.devices), default=0)
    return offloaded, plan.engine is not Engine.DDP, plan.zero.stage, rung.name, plan.micro_batch


def _combinations(space: SearchSpace, matters: Matters, default: Default) -> Iterator[Point]:
    """Points of the space: all values of the ladder's knobs, the defaults of the others."""
    varied = [dimension for dimension in space.dimensions if dimension.key in LADDER_KNOBS]
    values = [_values(dimension) for dimension in varied]
    for chosen in itertools.islice(itertools.product(*values), MOST_COMBINATIONS):
        known = {dimension.key: value for dimension, value in zip(varied, chosen, strict=True)}
        yield space.build(lambda dim, known=known: _choose(dim, known, default), matters)  # type: ignore[misc]


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
