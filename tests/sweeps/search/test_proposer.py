"""The order in which a proposer proposes. Its plans and estimates are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from sweeps.config.compose import Composer
from sweeps.config.schema import SearchConfig
from sweeps.machine import Machine
from sweeps.plan.resolve import Planned, Rejection
from sweeps.search.proposer import (
    AMONG,
    DEFAULT_IMPROVEMENT,
    Pause,
    Proposer,
    Rules,
    Suggestion,
    is_in,
    rules_for,
)
from sweeps.search.sampler import Sampler
from sweeps.space.dimensions import Choices, Dimension, Interval, Point, SearchSpace, always
from tests.support.estimates import an_estimate
from tests.support.examples import a_measured_trial, a_measurement, a_plan, a_trial
from train_entry.contract import (
    Advice,
    Estimate,
    Fit,
    Goal,
    Origin,
    Plan,
    Reason,
    Scalar,
    State,
    Trial,
)

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
SIZES = (1, 2, 4)
SPACE = SearchSpace(
    dimensions=(
        Dimension(key="strategy", text="", range=Choices(values=tuple(STAGES))),
        Dimension(key="micro_batch", text="", range=Choices(values=SIZES)),
    )
)
# Tokens/s as estimated: a smaller stage and a larger micro-batch are faster.
SPEEDS = {(stage, size): 100.0 * size - 10 * stage for stage in (1, 2, 3) for size in SIZES}
TOKENS_PER_S = Goal(name="tokens_per_s")
CLOSE: dict[str, Any] = {"improvement": 0.005, "measures_all": False}


def plan(point: Mapping[str, Scalar]) -> Planned:
    size = int(str(point.get("micro_batch", 1)))
    if size not in SIZES:
        return Planned(plan=Rejection(reasons=(Reason(rule="r", text="no"),)), fingerprint=None, overrides=())
    made = a_plan(
        zero={"stage": STAGES[str(point.get("strategy", "zero1"))]},
        micro_batch=size,
        ranks=int(str(point.get("ranks", 2))),
    )
    return Planned(plan=made, fingerprint=fingerprint(made), overrides=())


def fingerprint(made: Plan) -> str:
    return f"{made.zero.stage} {made.micro_batch} {made.ranks}"


def estimate(made: Plan) -> Estimate:
    speed = SPEEDS[made.zero.stage, made.micro_batch]
    fit = Fit.FITS if (made.ranks, made.micro_batch) != (1, 4) else Fit.TOO_LARGE
    return an_estimate(
        fit=fit, step_s=made.tokens_per_step / speed, tokens_per_s=speed, tokens_per_s_per_gpu=speed / 2
    )


def proposer(search: dict[str, Any] | None = None, **rules: Any) -> Proposer:
    config = SearchConfig(**{"startup_trials": 2, "single_gpu": "never", **(search or {})})
    known: dict[str, Any] = {"improvement": 0.0, "measures_all": True, "ranks": 2, "goals": (TOKENS_PER_S,)}
    known["is_screened"] = True
    return Proposer(
        rules=Rules(search=config, device="cuda", **{**known, **rules}),
        space=SPACE,
        plan=plan,
        is_active=always,
        default=lambda key, point: None,
        estimate=estimate,
        sampler=Sampler(SPACE, config),
    )


def sampled(found: Proposer, strategy: str, micro_batch: int) -> Suggestion:
    """Return a suggestion that the sampler might have made."""
    point: Point = {"strategy": strategy, "micro_batch": micro_batch}
    return Suggestion(
        point=point, planned=plan(point), origin=Origin.SAMPLER, proposal=found.sampler.resume(point)
    )


def tried(found: Suggestion | Pause, number: int, factor: float = 1.0, **changes: Any) -> Trial:
    """Return the trial of a suggestion, measured at its estimate times a factor."""
    assert isinstance(found, Suggestion)
    made = found.planned.plan
    assert isinstance(made, Plan)
    speed = SPEEDS[made.zero.stage, made.micro_batch] * factor
    seen = {
        "outcome": a_measurement(tokens_per_s=speed, step_s=made.tokens_per_step / speed),
        "estimate": estimate(made),
        "fingerprint": fingerprint(made),
        "values": found.point,
        "origin": found.origin,
        "baseline": found.baseline,
        "is_single_gpu": found.is_single_gpu,
        "plan": made,
    }
    return a_measured_trial(number=number, **{**seen, **changes})


def running(found: Suggestion | Pause, number: int) -> Trial:
    return tried(found, number, state=State.RUNNING, outcome=None, closed_at=None)


def search(found: Proposer, most: int = 20, factor: float = 1.0) -> tuple[list[Trial], Pause | None]:
    """Run one trial after another until the proposer pauses."""
    trials: list[Trial] = []
    while len(trials) < most:
        said = found.next(trials)
        if isinstance(said, Pause):
            return trials, said
        trials.append(tried(said, len(trials) + 1, factor))
        found.learn(trials[-1])
    return trials, None


def names(trials: list[Trial]) -> list[str]:
    return [f"{trial.values['strategy']} x{trial.values['micro_batch']}" for trial in trials]


# ---------------------------------------------------------------- the order of sources


def test_by_hand_then_by_estimate_then_by_the_sampler_until_all_is_known() -> None:
    trials, end = search(proposer({"prior": 1}))
    origins = [trial.origin for trial in trials]
    assert origins == sorted(origins, key=[Origin.BASELINE, Origin.PRIOR, Origin.SAMPLER].index)
    assert (origins.count(Origin.PRIOR), origins[-1], end) == (1, Origin.SAMPLER, Pause.EXHAUSTED)
    assert sorted(names(trials)) == sorted(f"{strategy} x{size}" for strategy in STAGES for size in SIZES)
    assert [trial.baseline is not None for trial in trials] == [
        origin is Origin.BASELINE for origin in origins
    ]


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_samplers_that_others_are_compared_with_begin_with_nothing_that_is_known(sampler: str) -> None:
    trials, end = search(proposer({"sampler": sampler}))
    assert {trial.origin for trial in trials} == {Origin.SAMPLER}
    assert (len(trials), end) == (9, Pause.EXHAUSTED)


def test_a_search_whose_goal_estimates_do_not_know_has_no_prior_and_no_early_end() -> None:
    trials, end = search(proposer(goals=(Goal(name="loss"),), **CLOSE))
    assert Origin.PRIOR not in {trial.origin for trial in trials}
    assert (len(trials), end) == (9, Pause.EXHAUSTED)


def test_while_a_baseline_runs_free_slots_go_to_what_promises_most() -> None:
    found = proposer()
    baseline = found.next([])
    assert isinstance(baseline, Suggestion)
    other = found.next([running(baseline, 1)])
    assert isinstance(other, Suggestion)
    assert (baseline.origin, other.origin) == (Origin.BASELINE, Origin.PRIOR)
    assert other.point["strategy"] != baseline.point["strategy"]


def test_without_a_prior_free_slots_go_to_the_sampler_and_the_baselines_go_on_later() -> None:
    found = proposer({"prior": 0})
    baseline = found.next([])
    assert isinstance(baseline, Suggestion)
    other = found.next([running(baseline, 1)])
    assert isinstance(other, Suggestion)
    assert other.origin is Origin.SAMPLER
    trials = [tried(baseline, 1, 1.0), tried(other, 2, 1.0)]
    later = found.next(trials)
    assert isinstance(later, Suggestion)
    assert later.origin is Origin.BASELINE


def test_the_search_ends_when_nothing_left_may_improve_but_not_while_a_trial_runs() -> None:
    found = proposer({"prior": 0, "baselines": False}, improvement=0.05, measures_all=False)
    best = tried(sampled(found, "zero1", 4), 1)
    for _ in range(8):  # estimates were right
        found.learn(best)
    slow = running(sampled(found, "zero3", 1), 2)
    assert found.next([best, slow]) is Pause.WAIT
    assert found.next([best]) is Pause.NO_BETTER
    assert isinstance(found.next([slow]), Suggestion)  # nothing is measured yet: anything may be better


def test_a_search_that_asks_for_an_improvement_leaves_the_hopeless_untried() -> None:
    trials, end = search(proposer(improvement=0.05, measures_all=False))
    assert end is Pause.NO_BETTER
    assert "zero1 x4" in names(trials)
    assert len(trials) < 9


def test_the_sampler_is_asked_for_several_and_the_most_promising_is_tried() -> None:
    """Eight proposals are all the points that are left of nine, so the best point is among them."""
    found = proposer({"prior": 0, "baselines": False})
    slow = tried(sampled(found, "zero3", 1), 1)
    said = found.next([slow])
    assert isinstance(said, Suggestion)
    assert AMONG == 8
    assert said.point == {"strategy": "zero1", "micro_batch": 4}


# ---------------------------------------------------------------- one GPU alone, remedies


def test_one_gpu_alone_is_asked_for_once_and_outside_the_samplers_points() -> None:
    found = proposer({"single_gpu": "auto"}, measures_all=False)
    said = found.next([])
    assert isinstance(said, Suggestion)
    assert (said.is_single_gpu, said.proposal, said.baseline) == (True, None, "1 GPU")
    # The fastest that fits: a micro-batch of 4 does not.
    assert said.point == {"strategy": "zero1", "micro_batch": 2, "ranks": 1}
    trials, _ = search(found, most=5)
    assert [trial.is_single_gpu for trial in trials] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("single_gpu", "rules"),
    [("never", CLOSE), ("auto", {"measures_all": True}), ("always", {"ranks": 1})],
)
def test_one_gpu_alone_is_not_measured_where_it_says_nothing(single_gpu: str, rules: dict[str, Any]) -> None:
    said = proposer({"single_gpu": single_gpu}, **rules).next([])
    assert isinstance(said, Suggestion)
    assert not said.is_single_gpu


def out_of_memory(number: int, changes: dict[str, Scalar], **more: Any) -> Trial:
    """Return a trial at zero1 with micro-batch 4."""
    advice = Advice(remedy="made up", changes=changes, why="", overrides=())
    values = {"strategy": "zero1", "micro_batch": 4}
    known = {"state": State.INFEASIBLE, "origin": Origin.BASELINE, "baseline": "zero1"}
    return a_trial(
        number=number,
        values=values,
        advice=advice,
        closed_at=1.0,
        **{**known, "fingerprint": "1 4 2", **more},
    )


def test_after_a_baseline_out_of_memory_comes_its_remedy() -> None:
    found = proposer({"baselines": False, "prior": 0})
    said = found.next([out_of_memory(7, {"strategy": "zero3"})])
    assert isinstance(said, Suggestion)
    assert (said.origin, said.parent, said.baseline) == (Origin.REMEDY, 7, "zero1")
    assert said.point == {"strategy": "zero3", "micro_batch": 4}


@pytest.mark.parametrize(
    ("changes", "trial"),
    [
        ({"activation_checkpointing": "full"}, {}),  # the space does not have it
        ({"micro_batch": 3}, {}),  # nor that
        ({"strategy": "zero3"}, {"origin": Origin.SAMPLER, "baseline": None}),  # its trial is no baseline
        ({"strategy": "zero3"}, {"origin": Origin.USER}),
    ],
)
def test_other_advice_is_not_followed(changes: dict[str, Scalar], trial: dict[str, Any]) -> None:
    said = proposer({"baselines": False, "prior": 0}).next([out_of_memory(7, changes, **trial)])
    assert isinstance(said, Suggestion)
    assert said.origin is Origin.SAMPLER


# ---------------------------------------------------------------- what lies in a space


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ({"strategy": "zero1"}, True),
        ({"strategy": "ddp"}, False),
        ({"bucket": 50_000_000}, True),
        ({"bucket": 51_234_567}, False),  # it would be snapped
        ({"bucket": 10}, False),
        ({"tensor": 2}, False),
    ],
)
def test_a_point_lies_in_a_space_that_has_its_knobs_and_values(
    point: dict[str, Scalar], expected: bool
) -> None:
    interval = Interval(low=2e7, high=1e9, log=True, integral=True, digits=2)
    bucket = Dimension(key="bucket", text="", range=interval)
    space = SearchSpace(dimensions=(*SPACE.dimensions, bucket))
    assert is_in(space, point) is expected


# ---------------------------------------------------------------- how a study searches


@pytest.mark.parametrize(
    ("points", "trials", "improvement", "expected"),
    [
        (12, None, None, (0.0, True)),
        (12, 12, None, (0.0, True)),
        (12, 11, None, (0.005, False)),  # not all can be measured: the search may end early
        (16, None, None, (0.0, True)),
        (17, None, None, (0.005, False)),
        (None, None, None, (0.005, False)),
        (12, None, 0.02, (0.02, True)),
        (None, None, 0.0, (0.0, False)),
    ],
)
def test_a_small_space_is_measured_wholly_where_the_limits_let_one(
    composer: Composer,
    machine: Machine,
    points: int | None,
    trials: int | None,
    improvement: float | None,
    expected: tuple[float, bool],
) -> None:
    config = composer.compose()
    limits = dataclasses.replace(config.limits, trials=trials, improvement=improvement)
    config = dataclasses.replace(config, limits=limits, ranks=None)
    rules = rules_for(config, (TOKENS_PER_S,), machine, points)
    assert (rules.improvement, rules.measures_all) == expected
    assert rules.device == "cpu"


def test_with_several_goals_nothing_is_given_up_for_the_sake_of_the_first(
    composer: Composer, machine: Machine
) -> None:
    goals = (TOKENS_PER_S, Goal(name="peak_bytes"))
    rules = rules_for(composer.compose(), goals, machine, None)
    assert (rules.improvement, rules.is_screened) == (0.0, False)
    alone = rules_for(composer.compose(), goals[:1], machine, None)
    assert (alone.improvement, alone.is_screened) == (DEFAULT_IMPROVEMENT, True)
