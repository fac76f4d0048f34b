"""From a point to a plan: conditional knobs, legal points, and the command that runs one alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Rejection
from sweeps.space.dimensions import Point
from sweeps.space.grammar import Request, read_request, without_inactive
from sweeps.study.limits import Limits, StopReason
from tests.support.studies import Bench
from train_entry.contract import Plan, State

CPU = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)


def planned(composer: Composer, *arguments: str) -> tuple[Planner, Request]:
    request = read_request(arguments, composer)
    model = model_shape(request.composer.compose().model)
    planner = Planner(request.composer, model, CPU, "study")
    return planner, without_inactive(request, planner.is_active)


def points(composer: Composer, *arguments: str) -> list[Point]:
    planner, request = planned(composer, *arguments)
    return list(request.space.points(planner.is_active))


def test_a_knob_of_stage_3_makes_no_second_point_of_ddp(composer: Composer) -> None:
    assert points(composer, "strategy=ddp,zero3", "zero.prefetch_bucket_size=1e7,5e7") == [
        {"strategy": "ddp"},
        {"strategy": "zero3", "zero.prefetch_bucket_size": 1e7},
        {"strategy": "zero3", "zero.prefetch_bucket_size": 5e7},
    ]


def test_a_study_runs_each_of_these_once(bench: Callable[..., Bench]) -> None:
    study = bench()
    reason = study.start("strategy=ddp,zero3", "zero.prefetch_bucket_size=1e7,5e7")
    assert reason is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 3
    assert sorted(len(trial.values) for trial in study.trials) == [1, 2, 2]


def test_a_study_that_is_resumed_knows_its_conditional_points(bench: Callable[..., Bench]) -> None:
    study = bench()
    for most in (1, 2, None):
        limits = Limits(trials=most, hours=None, retries=1)
        study.start("strategy=ddp,zero3", "zero.prefetch_bucket_size=1e7,5e7", limits=limits)
    assert study.states == [State.MEASURED] * 3
    assert len({tuple(trial.values.items()) for trial in study.trials}) == 3


def test_a_decision_may_hang_on_another(composer: Composer) -> None:
    found = points(
        composer, "zero.offload_param=none,cpu", "zero.offload_optimizer=none,cpu", "zero.stage=0,3"
    )
    assert len(found) == 1 + 2 * 2
    assert found[0] == {"zero.stage": 0}


def test_a_group_decides_as_its_keys_do(composer: Composer) -> None:
    found = points(composer, "optimizer=adamw,sgd", "optimizer.eps=1e-8,1e-6", "optimizer.momentum=0.8,0.9")
    assert [list(point)[1:] for point in found] == [["optimizer.eps"]] * 2 + [["optimizer.momentum"]] * 2


def test_what_is_pinned_decides_too(composer: Composer) -> None:
    found = points(composer, "zero.stage=3", "strategy=zero1,zero2", "zero.prefetch_bucket_size=1e7,5e7")
    assert len(found) == 4


def test_a_point_without_idle_knobs_is_planned_as_one_with_them(composer: Composer) -> None:
    planner, _ = planned(composer, "space=none")
    idle: Point = {"strategy": "ddp", "zero.prefetch_bucket_size": 1e7}
    assert planner.plan(idle).fingerprint == planner.plan({"strategy": "ddp"}).fingerprint


def test_a_point_says_only_what_matters_in_it(composer: Composer) -> None:
    planner, _ = planned(composer, "space=none", "seq_len=64")
    assert planner.plan({"strategy": "ddp"}).overrides == ("seq_len=64", "strategy=ddp")


def test_a_point_that_cannot_be_composed_is_rejected_with_its_problem(composer: Composer) -> None:
    planner, _ = planned(composer, "space=none")
    plan = planner.plan({"lr.schedule": "cosine"}).plan
    assert isinstance(plan, Rejection)
    assert [reason.rule for reason in plan.reasons] == ["configuration"]
    assert plan.texts[0].startswith("lr.total_steps: is not set")


def test_a_space_with_a_legal_point_may_start(composer: Composer) -> None:
    planner, request = planned(composer, "strategy=zero1", "micro_batch=3,4")
    planner.require_legal(request.space)


def test_a_space_without_a_legal_point_is_refused_with_all_reasons(composer: Composer) -> None:
    planner, request = planned(composer, "strategy=zero1", "micro_batch=3,5")
    with pytest.raises(ConfigError) as caught:
        planner.require_legal(request.space)
    assert ["micro_batch=3" in text or "micro_batch=5" in text for text in caught.value.problems] == [
        True
    ] * 2


def test_a_legal_point_is_found_though_thousands_before_it_are_not(composer: Composer) -> None:
    harmless = ("seed=range(0,60)", "lr.warmup=range(0,60)")  # 3,600 points per micro-batch
    planner, request = planned(composer, "micro_batch=3,1", "strategy=zero1", *harmless)
    first = next(request.space.points(planner.is_active))
    assert not isinstance(planner.plan(first).plan, Plan)
    planner.require_legal(request.space)
