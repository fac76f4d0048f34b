"""Remedies for plans that tensor ranks or stages divide: degrees stay, rules are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine
from sweeps.plan.planner import Planner
from sweeps.search.advice import plan_of
from sweeps.search.remedies import ALL, Grounds, Option, options
from sweeps.search.remedies.base import parameters, rounded_up
from tests.support.examples import a_measured_trial, a_model, a_plan, a_trial
from train_entry.contract import Failure, FailureKind, Plan, Scalar, Trial

BILLION = a_model(
    parameters=10**9, layers=16, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=32_000, positions=2048
)
CARD = Gpu(index=0, uuid="GPU-0", name="H200", memory_bytes=2**37, capability=(9, 0))
EIGHT = Machine(device="cuda", nodes=1, ranks_per_node=8, gpus=(CARD,) * 8)


def divided(stage: int = 1, **changes: Any) -> Plan:
    return a_plan(zero={"stage": stage}, ranks=8, **changes)


def changes(name: str, plan: Plan) -> Mapping[str, Scalar] | None:
    return next((step.changes for step in ALL[name](plan, BILLION)), None)


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}])
def test_sharding_further_keeps_the_degrees(degrees: dict[str, Any]) -> None:
    assert changes("sharding", divided(1, **degrees)) == {"zero.stage": 2}


def test_offloading_keeps_the_degrees() -> None:
    knobs = {"zero.stage": 2, "zero.offload_optimizer": "cpu"}
    assert changes("optimizer_to_cpu", divided(0, tensor=2)) == knobs
    assert changes("optimizer_to_cpu", divided(2, tensor=2)) == {"zero.offload_optimizer": "cpu"}


def test_a_bucket_is_cut_to_what_a_rank_has_of_the_model() -> None:
    first = ALL["buckets"](divided(tensor=2, pipeline=2), BILLION)[0]
    own = parameters(divided(tensor=2, pipeline=2), BILLION)
    assert 250_000_000 < own < 300_000_000  # a stage's embedding is not split
    assert first.changes == {"zero.reduce_bucket_size": rounded_up(own)}
    assert first.how.endswith(f"; a rank's part of the model has only {own:,} parameters")


def after_oom(composer: Composer, *overrides: str) -> list[Option]:
    """Return all remedies tried after a trial, one after another, if each that is tried fits."""
    mine = composer.with_fixed((*overrides, "model=llama_7b", "micro_batch=4"))
    model = model_shape(mine.compose().model)
    planner = Planner(mine, model, EIGHT, "study")
    planned = planner.plan({})
    assert isinstance(planned.plan, Plan), planned.plan.texts
    full = Failure(kind=FailureKind.GPU_OOM, message="full")
    trial = a_trial(plan=planned.plan, fingerprint=planned.fingerprint, outcome=full, values={})
    config = mine.compose()
    room = room_of(config.cluster, config.gate, EIGHT)
    expect = Estimator(model, hardware_for(EIGHT), room, config.gate).estimate
    plans, tried = plan_of(planner.plan, {}), dict[str, Trial]()
    while True:
        grounds = Grounds(device="cuda", model=model, plan_of=plans, expect=expect, tried=tried)
        found = list(options(trial, grounds))
        if not found or not found[-1].is_open:
            return found
        last = found[-1].candidate
        tried[last.fingerprint] = a_measured_trial(plan=last.plan, fingerprint=last.fingerprint)


def test_a_pipeline_is_never_told_to_shard_or_offload(composer: Composer) -> None:
    found = after_oom(composer, "strategy=pp_zero1")
    plans = [option.candidate.plan for option in found]
    assert {plan.pipeline for plan in plans} == {2}
    assert {plan.zero.stage for plan in plans} == {1}
    assert not any(plan.offload.devices for plan in plans)
    assert [option.remedy.name for option in found][:2] == ["activation_checkpointing", "micro_batch"]


def test_tensor_parallel_is_told_to_shard_further_and_to_offload(composer: Composer) -> None:
    found = after_oom(composer, "strategy=tp_zero1")
    assert {option.candidate.plan.tensor for option in found} == {2}
    assert {"sharding", "optimizer_to_cpu"} <= {option.remedy.name for option in found}
    (sharded,) = [option for option in found if option.remedy.name == "sharding"]
    assert sharded.candidate.plan.strategy == "tp2_zero2"
