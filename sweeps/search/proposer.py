"""Propose the next trial: baselines and their remedies first, then the prior, then the sampler."""

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

GROWTH = 40  # points planned at once while jobs run, which takes a tenth of a second
AMONG = 8  # proposals of the sampler; the most promising one is tried
# Searches that begin with baselines and estimates. grid and random do not: others are compared with them.
LEARNING = ("tpe", "gp", "nsga2")
SINGLE_GPU = "1 GPU"
DEFAULT_IMPROVEMENT = 0.005  # the precision of a trial's measurement: measure.precision
SMALL = 16  # a space of so few points is measured completely: its user wants each in the table


class Pause(Enum):
    """The reason why nothing is proposed now."""

    WAIT = "wait"  # for a running trial, whose result decides what is next
    NO_BETTER = "no better"  # no plan left is expected to be better
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A point to try, its plan, and its origin."""

    point: Point
    planned: Planned
    origin: Origin
    proposal: Proposal | None = None  # None: the point is not in the space; the sampler does not hear of it
    baseline: str | None = None
    parent: int | None = None
    is_single_gpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules by which a study searches."""

    search: SearchConfig
    goals: tuple[Goal, ...]
    device: str  # cuda or cpu
    improvement: float  # the search ends if no plan left promises this share of the best; 0: it does not
    is_screened: bool  # whether the expected goal chooses among the sampler's proposals
    measures_all: bool  # whether the space is so small that every point is measured in the end
    ranks: int

    @property
    def goal(self) -> Goal:
        """The goal that ranks trials."""
        return self.goals[0]


@dataclass(kw_only=True)
class Proposer:
    """The source of a study's trials.

    It takes all it knows from the trials that it is given, so a resumed study goes on in the same way.
    """

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
    _open: dict[int, Proposal] = field(default_factory=dict)  # proposals of open trials, by trial number

    def __post_init__(self) -> None:
        self._predictor = Predictor(self.estimate, self.rules.goal, self.rules.device)
        self._candidates = Candidates(self.space, self.plan, self.is_active, self.rules.search.seed)
        self._prior = Prior(self._candidates, self._predictor)

    # ------------------------------------------------------------------ learning from trials

    def opened(self, number: int, found: Suggestion) -> None:
        """Note that a suggestion has become the trial of this number."""
        if found.proposal is not None:
            self._open[number] = found.proposal

    def closed(self, trial: Trial) -> None:
        """Learn from a trial that has ended. A cancelled trial says nothing, and is launched again."""
        if trial.state is not State.CANCELLED and (proposal := self._open.pop(trial.number, None)):
            self.sampler.tell(proposal, lesson(trial, self.rules.goals))
        self.learn(trial)

    def remember(self, trial: Trial) -> None:
        """Teach the sampler a trial of an earlier start."""
        if trial.is_single_gpu:  # its point is not in the space
            return
        if (known := lesson(trial, self.rules.goals)) is not None:
            self.sampler.remember(known)
        else:
            self.sampler.skip(trial.values)

    def reopen(self, trial: Trial) -> None:
        """Note that a trial of an earlier start goes on, or is launched again."""
        if not trial.is_single_gpu:
            self._open[trial.number] = self.sampler.resume(trial.values)

    def learn(self, trial: Trial) -> None:
        """Update what is expected of other plans after a trial has closed."""
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

    # ------------------------------------------------------------------ proposing

    def next(self, trials: list[Trial]) -> Suggestion | Pause:
        """Return what to try, given all trials so far."""
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
            return None  # the prior and the sampler use the slots that are free meanwhile
        self._baselines_are_done = True
        return None

    def _single_gpu_baseline(self, trials: list[Trial]) -> Suggestion | None:
        """Return the single-GPU baseline, once.

        Of the plans for one GPU that fit, it is the one that is expected to be fastest.
        """
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
        """Return the remedy that is advised after a baseline, or its remedy, ran out of memory.

        The space must contain its point, and the plan must have a chance to be the best.
        """
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
        """True if no plan left is expected to improve on the best by the required share."""
        if not self.rules.improvement or best is None or not (self._informed and self._predictor.knows):
            return False
        self._candidates.complete()
        known = {trial.fingerprint for trial in trials if trial.fingerprint}
        promising = self._prior.promising(known, best)
        return not promising or promising[0][0] < self.rules.improvement

    def _merit(self, planned: Planned, best: float) -> float:
        """Return the expected improvement; -1 for a plan that is illegal or does not fit."""
        if not isinstance(planned.plan, Plan) or not self._predictor.fits(planned.plan):
            return -1.0
        return self._predictor.improvement(planned.plan, best)


def is_in(space: SearchSpace, point: Mapping[str, Scalar]) -> bool:
    """True if the space contains the point: each of its knobs varies there and may have that value."""
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
    """Return how a study with so many points (None: infinitely many) searches.

    A small space is measured completely if the limits allow it, unless an improvement is asked for. With
    several goals the search neither screens proposals nor ends early, because a plan that is no better by the
    first goal may be better by another.
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
