"""Proposes the next trial: baselines and their remedies first, then the prior, then the sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from sweeps.config.schema import SearchConfig, SweepConfig
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Planned
from sweeps.search.baselines import (
    Baseline,
    Baselines,
    Default,
    NoBaseline,
    make_baselines,
    single_gpu_baselines,
)
from sweeps.search.candidates import Candidate, Candidates
from sweeps.search.gate import Gate
from sweeps.search.improvement import Predictor
from sweeps.search.prior import Prior, spread
from sweeps.search.sampler import Proposal, Sampler
from sweeps.search.verdicts import lesson
from sweeps.space.dimensions import Choices, IsActive, Point, SearchSpace
from train_entry.contract import Estimate, Goal, Origin, Plan, Ranking, Scalar, State, Trial

GROWTH = 40  # points planned at once while jobs run: a tenth of a second
AMONG = 8  # proposals of the sampler, of which the one that promises most is tried
# These samplers begin with what is known. grid and random do not: others are compared with them.
LEARNING = ("tpe", "gp", "nsga2")
SINGLE_GPU = "1 GPU"
DEFAULT_IMPROVEMENT = 0.005  # as exactly as a trial is measured: measure.precision
SMALL = 16  # points that are worth measuring wholly: one who lists so few wants to see each in the table


class Pause(Enum):
    """Nothing to launch now."""

    WAIT = "wait"  # for a running trial, which decides what is next
    NO_BETTER = "no better"  # nothing left is expected to be better
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A point to try, its plan, and why."""

    point: Point
    planned: Planned
    origin: Origin
    proposal: Proposal | None = None  # None: no point of the space, and nothing that the sampler hears of
    baseline: str | None = None
    parent: int | None = None
    is_single_gpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How a study searches."""

    search: SearchConfig
    goals: tuple[Goal, ...]
    device: str  # cuda or cpu
    improvement: float  # expected of some plan left, as a share of the best; else the search ends. 0: never
    is_screened: bool  # whether the sampler's proposals are chosen among by what is expected of the goal
    measures_all: bool  # a small space, of which every point is measured in the end
    ranks: int

    @property
    def goal(self) -> Goal:
        """The goal that ranks."""
        return self.goals[0]


@dataclass(kw_only=True)
class Proposer:
    """Proposes. What it knows it reads from the trials it is given, so that a resumed study goes on alike."""

    rules: Rules
    space: SearchSpace
    plan: Callable[[Mapping[str, Scalar]], Planned]
    is_active: IsActive
    default: Default
    estimate: Callable[[Plan], Estimate]
    sampler: Sampler
    _predictor: Predictor = field(init=False)
    _candidates: Candidates = field(init=False)
    _prior: Prior = field(init=False)
    _baselines: Baselines | None = None
    _baselines_are_done: bool = False
    _open: dict[int, Proposal] = field(default_factory=dict)  # of open trials, by number

    def __post_init__(self) -> None:
        self._predictor = Predictor(self.estimate, self.rules.goal, self.rules.device)
        self._candidates = Candidates(self.space, self.plan, self.is_active, self.rules.search.seed)
        self._prior = Prior(self._candidates, self._predictor)

    # ------------------------------------------------------------------ what it hears

    def opened(self, number: int, found: Suggestion) -> None:
        """A suggestion has become the trial of this number."""
        if found.proposal is not None:
            self._open[number] = found.proposal

    def closed(self, trial: Trial) -> None:
        """A trial has ended. A cancelled one says nothing, and is launched again."""
        if trial.state is not State.CANCELLED and (proposal := self._open.pop(trial.number, None)):
            self.sampler.tell(proposal, lesson(trial, self.rules.goals))
        self.learn(trial)

    def remember(self, trial: Trial) -> None:
        """Teach the sampler a trial of an earlier start."""
        if trial.is_single_gpu:  # no point of the space
            return
        if (known := lesson(trial, self.rules.goals)) is not None:
            self.sampler.remember(known)
        else:
            self.sampler.skip(trial.values)

    def reopen(self, trial: Trial) -> None:
        """A trial of an earlier start goes on, or is launched again."""
        if not trial.is_single_gpu:
            self._open[trial.number] = self.sampler.resume(trial.values)

    def learn(self, trial: Trial) -> None:
        """What is expected of other plans follows from a trial that has closed."""
        self._predictor.learn(trial)

    @property
    def open_proposals(self) -> Mapping[int, Proposal]:
        return self._open

    @property
    def is_finite(self) -> bool:
        return self.sampler.is_finite

    @property
    def repeats_duplicates(self) -> bool:
        return self.rules.search.repeat_duplicates

    def think(self) -> None:
        """Prepare the next proposals while jobs run."""
        if self._informed and not self._candidates.is_complete:
            self._candidates.grow(GROWTH)

    # ------------------------------------------------------------------ what it says

    def next(self, trials: list[Trial]) -> Suggestion | Pause:
        """What to try, given all trials so far."""
        ours = [trial for trial in trials if trial.origin is not Origin.USER]
        known = {trial.fingerprint: trial for trial in ours if trial.fingerprint and not _is_copy(trial)}
        ranking = Ranking(trials, self.rules.goal)
        best = ranking.best_value
        if self._informed:
            found = (
                self._by_hand(ours, known, ranking)
                or self._by_remedy(ours, known, best)
                or self._by_estimate(ours, known, best)
            )
            if found is not None:
                return found
        return self._by_sampler(ours, best)

    @property
    def _informed(self) -> bool:
        return self.rules.search.sampler in LEARNING

    # ------------------------------------------------------------------ the baselines

    def _by_hand(
        self, trials: list[Trial], known: Mapping[str, Trial], ranking: Ranking
    ) -> Suggestion | None:
        if not self.rules.search.baselines or self._baselines_are_done:
            return None
        if (single_gpu := self._single_gpu_baseline(trials)) is not None:
            return single_gpu
        if self._baselines is None:
            self._baselines = make_baselines(self.space, self.plan, self.is_active, self.default)
        found = self._baselines.next(known, self._predictor, ranking)
        if isinstance(found, Baseline) and self.sampler.is_new(found.candidate.point):
            return Suggestion(
                point=found.candidate.point,
                planned=found.candidate.planned,
                origin=Origin.BASELINE,
                proposal=self.sampler.resume(found.candidate.point),
                baseline=found.name,
            )
        if found is NoBaseline.YET and any(not trial.state.is_closed for trial in trials):
            return None  # others use the slots that are free meanwhile
        self._baselines_are_done = True
        return None

    def _single_gpu_baseline(self, trials: list[Trial]) -> Suggestion | None:
        """The plan for one GPU alone that is expected to be fastest of those that fit; once."""
        asked = self.rules.search.single_gpu
        wanted = asked == "always" or (asked == "auto" and not self.rules.measures_all)
        if not wanted or self.rules.ranks == 1 or any(trial.is_single_gpu for trial in trials):
            return None
        baselines = single_gpu_baselines(self.space, self.plan, self.is_active, self.default)
        fitting = [baseline for baseline in baselines if self._predictor.fits(baseline.candidate.plan)]
        if not fitting:
            return None
        best = min(fitting, key=lambda baseline: self.estimate(baseline.candidate.plan).step_s)
        return Suggestion(
            point=best.candidate.point,
            planned=best.candidate.planned,
            origin=Origin.BASELINE,
            baseline=SINGLE_GPU,
            is_single_gpu=True,
        )

    # ------------------------------------------------------------------ remedies

    def _by_remedy(
        self, trials: list[Trial], known: Mapping[str, Trial], best: float | None
    ) -> Suggestion | None:
        """The plan advised after a baseline ran out of memory, if the space has it and it may be the best."""
        for trial in trials:
            if trial.advice is None or not (trial.baseline or trial.origin is Origin.REMEDY):
                continue
            point = {**trial.values, **trial.advice.changes}
            planned = self.plan(point) if is_in(self.space, point) else None
            if planned is None or not isinstance(planned.plan, Plan) or planned.fingerprint in known:
                continue
            if self.sampler.is_new(point) and self._predictor.may_beat(planned.plan, best):
                return Suggestion(
                    point=point,
                    planned=planned,
                    origin=Origin.REMEDY,
                    proposal=self.sampler.resume(point),
                    baseline=trial.baseline,
                    parent=trial.number,
                )
        return None

    # ------------------------------------------------------------------ the prior, the sampler

    def _by_estimate(
        self, trials: list[Trial], known: Mapping[str, Trial], best: float | None
    ) -> Suggestion | None:
        tried = [trial for trial in trials if trial.origin is Origin.PRIOR]
        if not self._predictor.knows or len(tried) >= self.rules.search.prior:
            return None
        self._candidates.complete()
        strategies = {trial.plan.strategy for trial in trials if trial.plan is not None}
        promising = [each for each in self._prior.promising(known, best) if self._is_new(each[1])]
        found = spread(promising, strategies)
        if found is None or (found[0] < self.rules.improvement and best is not None):
            return None
        candidate = found[1]
        return Suggestion(
            point=candidate.point,
            planned=candidate.planned,
            origin=Origin.PRIOR,
            proposal=self.sampler.resume(candidate.point),
        )

    def _is_new(self, candidate: Candidate) -> bool:
        return self.sampler.is_new(candidate.point)

    def _by_sampler(self, trials: list[Trial], best: float | None) -> Suggestion | Pause:
        if self._is_hopeless(trials, best):
            running = any(not trial.state.is_closed for trial in trials)
            return Pause.WAIT if running else Pause.NO_BETTER
        screened = self.rules.is_screened and self._informed and self._predictor.knows
        plan = lru_cache(maxsize=None)(lambda items: self.plan(dict(items)))
        merit = None
        if screened and best is not None:
            merit = lambda point: self._merit(plan(tuple(point.items())), best)  # noqa: E731
        proposal = self.sampler.ask(merit, AMONG)
        if proposal is None:
            return Pause.EXHAUSTED
        planned = plan(tuple(proposal.point.items()))
        return Suggestion(point=proposal.point, planned=planned, origin=Origin.SAMPLER, proposal=proposal)

    def _is_hopeless(self, trials: list[Trial], best: float | None) -> bool:
        """Whether no plan left is expected to improve on the best by as much as is asked."""
        if not self.rules.improvement or best is None or not (self._informed and self._predictor.knows):
            return False
        self._candidates.complete()
        known = {trial.fingerprint for trial in trials if trial.fingerprint}
        promising = self._prior.promising(known, best)
        return not promising or promising[0][0] < self.rules.improvement

    def _merit(self, planned: Planned, best: float) -> float:
        """Minus one for what is illegal or does not fit."""
        if not isinstance(planned.plan, Plan) or not self._predictor.fits(planned.plan):
            return -1.0
        return self._predictor.improvement(planned.plan, best)


def is_in(space: SearchSpace, point: Mapping[str, Scalar]) -> bool:
    """Whether the space has the point: each of its knobs varies there, and may have that value."""
    ranges = {dimension.key: dimension for dimension in space.dimensions}
    for key, value in point.items():
        if key not in ranges:
            return False
        found = ranges[key].range
        if isinstance(found, Choices) and value not in found.values:
            return False
        if not isinstance(found, Choices) and ranges[key].snap(value) != value:
            return False
    return True


def _is_copy(trial: Trial) -> bool:
    return trial.state in (State.REUSED, State.CANCELLED)


def make_proposer(
    rules: Rules, space: SearchSpace, planner: Planner, sampler: Sampler, gate: Gate
) -> Proposer:
    return Proposer(
        rules=rules,
        space=space,
        plan=planner.plan,
        is_active=planner.is_active,
        default=planner.default,
        estimate=gate.estimate,
        sampler=sampler,
    )


def rules_for(config: SweepConfig, goals: Sequence[Goal], machine: Machine, points: int | None) -> Rules:
    """How a study of so many points (None: infinitely many) searches.

    A small space is measured wholly, if the limits let one, unless an improvement is asked for. With
    several goals, a plan that is no better by the first may be better by another.
    """
    most, least = config.limits.trials, config.limits.improvement
    several = len(goals) > 1
    measures_all = points is not None and points <= min(SMALL, most or SMALL)
    return Rules(
        search=config.search,
        goals=tuple(goals),
        device=machine.device,
        improvement=(0.0 if measures_all or several else DEFAULT_IMPROVEMENT) if least is None else least,
        is_screened=not several,
        measures_all=measures_all,
        ranks=config.ranks or machine.default_ranks,
    )
