"""Who proposes next: the ladder, its remedies, the prior, then the sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sweeps.config.schema import SearchConfig, SweepConfig
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Planned
from sweeps.search.baselines import Default, Ladder, Rung, make_ladder, single_gpu_rungs
from sweeps.search.candidates import Candidate, Candidates
from sweeps.search.gate import Admission
from sweeps.search.improvement import Outlook
from sweeps.search.prior import Prior, spread
from sweeps.search.ranking import best_value
from sweeps.search.sampler import Proposal, Searcher
from sweeps.space.dimensions import Choices, Matters, Point, SearchSpace
from train_entry.contract import Estimate, Goal, Origin, Plan, Scalar, State, Trial

GROWTH = 40  # points planned at once while jobs run: a tenth of a second
AMONG = 8  # proposals of the sampler, of which the one that promises most is tried
LEARNING = ("tpe", "gp", "nsga2")  # samplers that begin with what is known; grid and random are yardsticks
SINGLE_GPU = "1 GPU"
DEFAULT_IMPROVEMENT = 0.005  # as exactly as a trial is measured: measure.precision
SMALL = 16  # points that are worth measuring wholly: one who lists so few wants to see each in the table
OUTSIDE = -1  # the number of a proposal that no sampler has made


class Pause(Enum):
    """Nothing to launch now."""

    WAIT = "wait"  # for a running trial, which decides what is next
    NO_BETTER = "no better"  # nothing left is expected to be better
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A point to try, and why."""

    proposal: Proposal
    origin: Origin
    rung: str | None = None
    parent: int | None = None
    is_yardstick: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How a study searches."""

    search: SearchConfig
    goal: Goal
    device: str  # cuda or cpu
    improvement: float  # expected of some plan left, as a share of the best; else the search ends. 0: never
    is_screened: bool  # whether the sampler's proposals are chosen among by what is expected of the goal
    measures_all: bool  # a small space, of which every point is measured in the end
    ranks: int


@dataclass(kw_only=True)
class Director:
    """Proposes. What it knows it reads from the trials it is given, so that a resumed study goes on alike."""

    rules: Rules
    space: SearchSpace
    plan: Callable[[Mapping[str, Scalar]], Planned]
    matters: Matters
    default: Default
    estimate: Callable[[Plan], Estimate]
    searcher: Searcher
    _outlook: Outlook = field(init=False)
    _candidates: Candidates = field(init=False)
    _prior: Prior = field(init=False)
    _ladder: Ladder | None = None
    _is_climbed: bool = False

    def __post_init__(self) -> None:
        self._outlook = Outlook(self.estimate, self.rules.goal, self.rules.device)
        self._candidates = Candidates(self.space, self.plan, self.matters, self.rules.search.seed)
        self._prior = Prior(self._candidates, self._outlook)

    # ------------------------------------------------------------------ what it hears

    def learn(self, trial: Trial) -> None:
        """From a trial that has closed."""
        self._outlook.learn(trial)

    def think(self) -> None:
        """Prepare the next proposals while jobs run."""
        if self._informed and not self._candidates.is_complete:
            self._candidates.grow(GROWTH)

    # ------------------------------------------------------------------ what it says

    def next(self, trials: list[Trial]) -> Suggestion | Pause:
        """What to try, given all trials so far."""
        ours = [trial for trial in trials if trial.origin is not Origin.USER]
        known = {trial.fingerprint: trial for trial in ours if trial.fingerprint and not _is_copy(trial)}
        best = best_value(trials, self.rules.goal)
        if self._informed:
            for source in (self._by_hand, self._by_remedy, self._by_estimate):
                found = source(ours, known, best)
                if found is not None:
                    return found
        return self._by_sampler(ours, best)

    @property
    def _informed(self) -> bool:
        return self.rules.search.sampler in LEARNING

    # ------------------------------------------------------------------ the ladder

    def _by_hand(
        self, trials: list[Trial], known: Mapping[str, Trial], best: float | None
    ) -> Suggestion | Pause | None:
        if not self.rules.search.ladder or self._is_climbed:
            return None
        if (yardstick := self._yardstick(trials)) is not None:
            return yardstick
        if self._ladder is None:
            self._ladder = make_ladder(self.space, self.plan, self.matters, self.default)
        rung = self._ladder.next(known, self._outlook, self.rules.goal)
        if isinstance(rung, Rung):
            point = rung.candidate.point
            if self.searcher.is_new(point):
                return Suggestion(proposal=self.searcher.resume(point), origin=Origin.LADDER, rung=rung.name)
        elif rung and any(not trial.state.is_closed for trial in trials):
            return None  # others use the slots that are free meanwhile
        self._is_climbed = True
        return None

    def _yardstick(self, trials: list[Trial]) -> Suggestion | None:
        """The plan for one GPU alone that is expected to be fastest of those that fit; once."""
        asked = self.rules.search.single_gpu
        wanted = asked == "always" or (asked == "auto" and not self.rules.measures_all)
        if not wanted or self.rules.ranks == 1 or any(trial.is_yardstick for trial in trials):
            return None
        rungs = single_gpu_rungs(self.space, self.plan, self.matters, self.default)
        fitting = [rung for rung in rungs if self._outlook.fits(rung.candidate.plan)]
        if not fitting:
            return None
        best = min(fitting, key=lambda rung: self.estimate(rung.candidate.plan).step_s)
        return Suggestion(
            proposal=Proposal(point=best.candidate.point, number=OUTSIDE),
            origin=Origin.LADDER,
            rung=SINGLE_GPU,
            is_yardstick=True,
        )

    # ------------------------------------------------------------------ remedies

    def _by_remedy(
        self, trials: list[Trial], known: Mapping[str, Trial], best: float | None
    ) -> Suggestion | None:
        """The advice after a rung that ran out of memory, if the space has such a plan and it may be best."""
        for trial in trials:
            if trial.advice is None or not (trial.rung or trial.origin is Origin.REMEDY):
                continue
            point = {**trial.values, **trial.advice.changes}
            planned = self.plan(point) if is_in(self.space, point) else None
            if planned is None or not isinstance(planned.plan, Plan) or planned.fingerprint in known:
                continue
            if self.searcher.is_new(point) and self._outlook.may_beat(planned.plan, best):
                return Suggestion(
                    proposal=self.searcher.resume(point),
                    origin=Origin.REMEDY,
                    rung=trial.rung,
                    parent=trial.number,
                )
        return None

    # ------------------------------------------------------------------ the prior, the sampler

    def _by_estimate(
        self, trials: list[Trial], known: Mapping[str, Trial], best: float | None
    ) -> Suggestion | None:
        tried = [trial for trial in trials if trial.origin is Origin.PRIOR]
        if not self._outlook.knows or len(tried) >= self.rules.search.prior:
            return None
        self._candidates.complete()
        strategies = {trial.plan.strategy for trial in trials if trial.plan is not None}
        promising = [each for each in self._prior.promising(known, best) if self._is_new(each[1])]
        found = spread(promising, strategies)
        if found is None or (found[0] < self.rules.improvement and best is not None):
            return None
        return Suggestion(proposal=self.searcher.resume(found[1].point), origin=Origin.PRIOR)

    def _is_new(self, candidate: Candidate) -> bool:
        return self.searcher.is_new(candidate.point)

    def _by_sampler(self, trials: list[Trial], best: float | None) -> Suggestion | Pause:
        if self._is_hopeless(trials, best):
            running = any(not trial.state.is_closed for trial in trials)
            return Pause.WAIT if running else Pause.NO_BETTER
        screened = self.rules.is_screened and self._informed and self._outlook.knows
        merit = (lambda point: self._merit(point, best)) if screened and best is not None else None
        proposal = self.searcher.ask(merit, AMONG)
        if proposal is None:
            return Pause.EXHAUSTED
        return Suggestion(proposal=proposal, origin=Origin.SAMPLER)

    def _is_hopeless(self, trials: list[Trial], best: float | None) -> bool:
        """Whether no plan left is expected to improve on the best by as much as is asked."""
        if not self.rules.improvement or best is None or not (self._informed and self._outlook.knows):
            return False
        self._candidates.complete()
        known = {trial.fingerprint for trial in trials if trial.fingerprint}
        promising = self._prior.promising(known, best)
        return not promising or promising[0][0] < self.rules.improvement

    def _merit(self, point: Point, best: float | None) -> float:
        planned = self.plan(point)
        if not isinstance(planned.plan, Plan) or not self._outlook.fits(planned.plan):
            return -1.0
        return self._outlook.improvement(planned.plan, best)


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


def make_director(
    rules: Rules, space: SearchSpace, planner: Planner, searcher: Searcher, admission: Admission
) -> Director:
    return Director(
        rules=rules,
        space=space,
        plan=planner.plan,
        matters=planner.matters,
        default=planner.default,
        estimate=admission.estimate,
        searcher=searcher,
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
        goal=goals[0],
        device=machine.device,
        improvement=(0.0 if measures_all or several else DEFAULT_IMPROVEMENT) if least is None else least,
        is_screened=not several,
        measures_all=measures_all,
        ranks=config.ranks or machine.default_ranks,
    )
