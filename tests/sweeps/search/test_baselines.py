"""The baselines, their order, and where a series ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sweeps.plan.resolve import Planned, Rejection
from sweeps.search.baselines import Baseline, Baselines, NoBaseline, make_baselines, single_gpu_baselines
from sweeps.search.improvement import Predictor
from sweeps.space.dimensions import Choices, Dimension, Interval, SearchSpace, always
from tests.support.estimates import an_estimate
from tests.support.examples import a_measured_trial, a_measurement, a_plan, a_trial
from train_entry.contract import (
    Engine,
    Estimate,
    Failure,
    FailureKind,
    Fit,
    Goal,
    Offload,
    OffloadPlan,
    Plan,
    Ranking,
    Scalar,
    State,
    Trial,
)

GOAL = Goal(name="tokens_per_s")
SPEEDS = {1: 100.0, 2: 110.0, 4: 115.0, 8: 112.0}  # by micro-batch
Known = dict[str, Trial]


def plan(point: Mapping[str, Scalar]) -> Planned:
    strategy = str(point.get("strategy", "zero2"))
    offload = OffloadPlan(optimizer=Offload.CPU) if strategy == "offload" else OffloadPlan()
    stage = int(strategy[-1]) if strategy.startswith("zero") else 2 if strategy == "offload" else 0
    made = a_plan(
        zero={"stage": stage, "reduce_bucket_size": int(str(point.get("zero.reduce_bucket_size", 5)))},
        engine=Engine.DDP if strategy == "ddp" else Engine.DEEPSPEED,
        micro_batch=int(str(point["micro_batch"])),
        ranks=int(str(point.get("ranks", 4))),
        tensor=int(str(point.get("tensor", 1))),
        pipeline=int(str(point.get("pipeline", 1))),
        offload=offload,
    )
    if made.engine is Engine.DDP and made.tensor * made.pipeline > 1:
        return Planned(plan=Rejection(reasons=()), fingerprint=None, overrides=())
    return Planned(plan=made, fingerprint=repr(made), overrides=())


def space(**choices: tuple[Scalar, ...]) -> SearchSpace:
    dimensions = (
        Dimension(key=key, text="", range=Choices(values=values)) for key, values in choices.items()
    )
    return SearchSpace(dimensions=tuple(dimensions))


def baselines(default: Scalar = 5, **choices: tuple[Scalar, ...]) -> Baselines:
    return make_baselines(space(**choices), plan, always, lambda key, known: default)


def estimated(speed: Callable[[Plan], float] = lambda plan: 100.0, **changes: Any) -> Predictor:
    """Return a predictor: all plans fit and are equally fast, unless the arguments say otherwise."""

    def estimate(plan: Plan) -> Estimate:
        return an_estimate(tokens_per_s=speed(plan), **changes)

    return Predictor(estimate, GOAL, "cuda")


def measured(baseline: Baseline, tokens_per_s: float, **changes: Any) -> Trial:
    seen = a_measurement(tokens_per_s=tokens_per_s)
    known = {"plan": baseline.plan, "fingerprint": baseline.candidate.fingerprint, "outcome": seen}
    return a_measured_trial(**known, **changes)


def out_of_memory(baseline: Baseline) -> Trial:
    outcome = Failure(kind=FailureKind.GPU_OOM, message="out of memory")
    return a_trial(plan=baseline.plan, outcome=outcome)


def by_size(baseline: Baseline) -> Trial:
    return measured(baseline, SPEEDS[baseline.plan.micro_batch])


def said(found: Baselines, trials: Known, predictor: Predictor | None = None) -> Baseline | NoBaseline:
    return found.next(trials, predictor or estimated(), Ranking(trials.values(), GOAL))


def tried_in_order(
    found: Baselines, run: Callable[[Baseline], Trial] = by_size, predictor: Predictor | None = None
) -> list[tuple[str, int]]:
    """Return the baselines in the order tried, each run before the next is asked for."""
    trials: Known = {}
    tried = []
    while isinstance(baseline := said(found, trials, predictor), Baseline):
        trials[baseline.candidate.fingerprint] = run(baseline)
        tried.append((baseline.name, baseline.plan.micro_batch))
    assert baseline is NoBaseline.LEFT
    return tried


def test_strategies_go_from_the_plainest_to_the_thriftiest_however_they_are_written() -> None:
    found = baselines(strategy=("offload", "zero3", "ddp", "zero2", "zero1"), micro_batch=(4,))
    names = ["ddp", "zero1", "zero2", "zero3", "zero2_offload"]
    assert [name for name, _ in tried_in_order(found)] == names


def test_a_strategy_begins_with_the_micro_batch_that_was_best_before() -> None:
    found = baselines(strategy=("zero1", "zero2"), micro_batch=(8, 4, 2, 1))
    sizes = [("zero1", 1), ("zero1", 2), ("zero1", 4), ("zero1", 8), ("zero2", 4), ("zero2", 8)]
    assert tried_in_order(found) == sizes


def test_it_begins_with_that_micro_batch_also_where_smaller_ones_are_not_legal() -> None:
    def legal(point: Mapping[str, Scalar]) -> Planned:
        planned = plan(point)
        refused = point["strategy"] == "zero1" and point["micro_batch"] == 1
        return dataclasses.replace(planned, plan=Rejection(reasons=())) if refused else planned

    varied = space(strategy=("zero1", "zero2"), micro_batch=(1, 2, 4, 8))
    found = make_baselines(varied, legal, always, lambda key, known: 5)
    assert tried_in_order(found) == [("zero1", 2), ("zero1", 4), ("zero1", 8), ("zero2", 4), ("zero2", 8)]


def test_doubling_ends_where_it_gains_less_than_half_a_percent() -> None:
    gains = {1: 100.0, 2: 101.0, 4: 101.4, 8: 130.0}
    found = baselines(strategy=("zero1",), micro_batch=(1, 2, 4, 8))
    tried = tried_in_order(found, lambda baseline: measured(baseline, gains[baseline.plan.micro_batch]))
    assert tried == [("zero1", 1), ("zero1", 2), ("zero1", 4)]


def test_doubling_ends_where_memory_does_and_the_next_strategy_begins_before_that() -> None:
    def run(baseline: Baseline) -> Trial:
        return out_of_memory(baseline) if baseline.plan.micro_batch > 2 else by_size(baseline)

    found = baselines(strategy=("ddp", "zero1"), micro_batch=(1, 2, 4, 8))
    assert tried_in_order(found, run) == [("ddp", 1), ("ddp", 2), ("ddp", 4), ("zero1", 2), ("zero1", 4)]


def test_doubling_ends_where_a_trial_was_stopped() -> None:
    found = baselines(strategy=("zero1",), micro_batch=(1, 2, 4))
    tried = tried_in_order(found, lambda baseline: measured(baseline, 100.0, state=State.STOPPED))
    assert tried == [("zero1", 1)]


def test_a_baseline_that_cannot_be_best_by_twice_the_error_is_left_out() -> None:
    margin = math.exp(-2 * estimated().error(a_plan()))
    speeds = {1: 100.0, 2: 100 * margin * 0.98, 3: 100 * margin * 1.02}
    predictor = estimated(lambda plan: speeds[plan.zero.stage])
    found = baselines(strategy=("zero1", "zero2", "zero3"), micro_batch=(1,))
    assert tried_in_order(found, predictor=predictor) == [("zero1", 1), ("zero3", 1)]


def test_the_first_baseline_is_left_out_too_where_another_is_expected_to_be_far_better() -> None:
    speeds = {0: 10.0, 2: 100.0}
    predictor = estimated(lambda plan: speeds[0 if plan.engine is Engine.DDP else 2])
    found = baselines(strategy=("ddp", "zero2"), micro_batch=(4,))
    assert tried_in_order(found, predictor=predictor) == [("zero2", 4)]


def test_a_strategy_begins_with_the_micro_batch_that_is_expected_to_be_fastest() -> None:
    predictor = estimated(lambda plan: SPEEDS[plan.micro_batch])
    found = baselines(strategy=("zero1", "zero2"), micro_batch=(1, 2, 4, 8))
    sizes = [("zero1", 4), ("zero1", 8), ("zero2", 4), ("zero2", 8)]
    assert tried_in_order(found, predictor=predictor) == sizes


def test_micro_batches_that_are_known_to_be_too_small_are_passed_over() -> None:
    predictor = estimated(lambda plan: 25.0 * plan.micro_batch)
    found = baselines(strategy=("zero1",), micro_batch=(1, 2, 4))
    assert tried_in_order(found, predictor=predictor) == [("zero1", 4)]


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING])
def test_it_waits_for_a_baseline_that_is_not_done(state: State) -> None:
    found = baselines(strategy=("zero1", "zero2"), micro_batch=(1, 2))
    first = said(found, {})
    assert isinstance(first, Baseline)
    open_trial = a_trial(plan=first.plan, state=state)
    assert said(found, {first.candidate.fingerprint: open_trial}) is NoBaseline.YET


# ---------------------------------------------------------------------- plans that divide the model


def fits_from(least: int) -> Predictor:
    """Return a predictor for which plans fit that divide the model by at least `least`.

    Larger micro-batches are faster.
    """

    def estimate(plan: Plan) -> Estimate:
        fit = Fit.FITS if plan.tensor * plan.pipeline >= least else Fit.TOO_LARGE
        return an_estimate(fit=fit, tokens_per_s=100.0 + plan.micro_batch)

    return Predictor(estimate, GOAL, "cuda")


@pytest.mark.parametrize(("least", "degrees"), [(1, (1, 2)), (2, (1, 2)), (4, (2, 2))])
def test_the_one_hybrid_baseline_is_the_fastest_of_those_that_divide_least(
    least: int, degrees: tuple[int, int]
) -> None:
    found = baselines(strategy=("zero1",), tensor=(1, 2), pipeline=(1, 2), micro_batch=(1, 2))
    plans = []

    def run(baseline: Baseline) -> Trial:
        plans.append(baseline.plan)
        return by_size(baseline)

    tried_in_order(found, run, fits_from(least))
    divided = [plan for plan in plans if plan.tensor * plan.pipeline > 1]
    assert [(plan.tensor, plan.pipeline, plan.micro_batch) for plan in divided] == [(*degrees, 2)]


def test_no_hybrid_is_tried_that_does_not_fit_or_cannot_be_best() -> None:
    found = baselines(strategy=("zero1",), tensor=(1, 2), micro_batch=(1,))
    assert tried_in_order(found, predictor=fits_from(4)) == [("zero1", 1)]
    slow = estimated(lambda plan: 100.0 if plan.tensor == 1 else 50.0)
    assert tried_in_order(found, predictor=slow) == [("zero1", 1)]


def test_it_waits_for_the_hybrid_baseline() -> None:
    found = baselines(strategy=("zero1",), tensor=(2,), micro_batch=(1,))
    baseline = said(found, {}, fits_from(1))
    assert isinstance(baseline, Baseline)
    running = a_trial(plan=baseline.plan, state=State.RUNNING)
    assert said(found, {baseline.candidate.fingerprint: running}, fits_from(1)) is NoBaseline.YET


# ---------------------------------------------------------------------- points


@pytest.mark.parametrize(("default", "value"), [(7, 7), (8, 5)])
def test_a_knob_outside_the_baselines_is_at_its_default_or_the_first_choice(default: int, value: int) -> None:
    varied = {"micro_batch": (1, 2), "zero.reduce_bucket_size": (5, 6, 7)}
    by_strategy = baselines(default, **varied).by_strategy
    assert [baseline.candidate.point for baseline in by_strategy[0]] == [
        {"micro_batch": size, "zero.reduce_bucket_size": value} for size in (1, 2)
    ]


@pytest.mark.parametrize(("default", "value"), [(50, 50), (500, 100), (1, 10), (None, 10)])
def test_within_an_interval_it_is_at_the_value_nearest_to_its_default(
    default: int | None, value: int
) -> None:
    buckets = Interval(low=10, high=100, log=False, integral=True)
    sizes = Interval(low=1, high=9, log=True, integral=True)
    varied = SearchSpace(
        dimensions=(
            Dimension(key="micro_batch", text="", range=sizes),
            Dimension(key="zero.reduce_bucket_size", text="", range=buckets),
        )
    )
    (series,) = make_baselines(varied, plan, always, lambda key, known: default).by_strategy
    assert [tuple(baseline.candidate.point.values()) for baseline in series] == [
        (size, value) for size in (1, 2, 4, 8)
    ]


def test_plans_of_one_gpu_are_those_of_the_baselines_the_plainest_first() -> None:
    varied = space(strategy=("zero1", "ddp"), micro_batch=(2, 1))
    found = single_gpu_baselines(varied, plan, always, lambda key, known: 5)
    assert [(baseline.name, baseline.plan.micro_batch) for baseline in found] == [
        *(("ddp", 1), ("ddp", 2)),
        *(("zero1", 1), ("zero1", 2)),
    ]
    assert {baseline.plan.ranks for baseline in found} == {1}
    assert {baseline.candidate.point["ranks"] for baseline in found} == {1}
