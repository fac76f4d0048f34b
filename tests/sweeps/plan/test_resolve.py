"""From a configuration to a plan: batches, degrees, learning rate, identity."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from sweeps.config.keys import with_value
from sweeps.config.schema import DataConfig, LrConfig, OptimizerConfig, SweepConfig, ZeroConfig
from sweeps.machine import Gpu, Machine
from sweeps.plan.resolve import (
    Rejection,
    data_spec,
    fingerprint,
    lr_factor,
    resolve,
    warmup_steps,
)
from tests.support.examples import a_plan
from train_entry.contract import DataSpec, ModelShape, OptimizerPlan, Plan, Schedule, SchedulePlan

DATA = DataSpec(kind="synthetic")
GPUS = Machine(
    device="cuda", nodes=1, ranks_per_node=1, gpus=(Gpu(index=0, uuid="GPU-1", name="H200", memory_bytes=1),)
)

Leaf = tuple[str, ...]  # names of fields, from the plan down


def leaves(record: Any, above: Leaf = ()) -> list[Leaf]:
    """Return the path of every value in a plan."""
    found: list[Leaf] = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        path = (*above, field.name)
        found += leaves(value, path) if dataclasses.is_dataclass(value) else [path]
    return found


def another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, StrEnum):
        return next(member for member in type(value) if member is not value)
    return f"{value}x" if isinstance(value, str) else (value or 0) + 1


def changed(record: Any, path: Leaf) -> Any:
    """Return the record with one leaf replaced by another value."""
    name, *below = path
    value = getattr(record, name)
    return dataclasses.replace(record, **{name: changed(value, tuple(below)) if below else another(value)})


LEAVES = [path for path in leaves(a_plan()) if path != ("zero", "allgather_bucket_size")]


def plan_of(config: SweepConfig, model: ModelShape, machine: Machine) -> Plan:
    plan = resolve(config, model, machine)
    assert not isinstance(plan, Rejection), plan.texts
    return plan


def test_a_plan_holds_what_its_configuration_says(shape: ModelShape, machine: Machine) -> None:
    config = SweepConfig(
        ranks=4,
        micro_batch=2,
        global_batch=32,
        seq_len=64,
        zero=ZeroConfig(stage=2, reduce_bucket_size=5e7),
        optimizer=OptimizerConfig(betas=[0.8, 0.9], weight_decay=0.2),
    )
    plan = plan_of(config, shape, machine)
    assert (plan.ranks, plan.data, plan.grad_accum, plan.tokens_per_step) == (4, 4, 4, 2048)
    assert (plan.zero.stage, plan.zero.reduce_bucket_size, plan.strategy) == (2, 50_000_000, "zero2")
    assert isinstance(plan.zero.reduce_bucket_size, int)
    assert plan.optimizer == OptimizerPlan(
        name="adamw", lr=3e-4, weight_decay=0.2, beta1=0.8, beta2=0.9, eps=1e-8
    )


def test_sgd_carries_momentum_and_nothing_of_adam(shape: ModelShape, machine: Machine) -> None:
    optimizer = OptimizerConfig(name="sgd", momentum=0.8, weight_decay=0.0, implementation="torch_fused")
    plan = plan_of(SweepConfig(optimizer=optimizer, seq_len=64), shape, machine)
    assert plan.optimizer == OptimizerPlan(name="sgd", lr=3e-4, weight_decay=0.0, momentum=0.8, fused=True)


def test_ranks_are_all_gpus_of_a_node_or_two_cores_unless_said(shape: ModelShape, machine: Machine) -> None:
    gpus = Machine(device="cuda", nodes=2, ranks_per_node=8)
    assert plan_of(SweepConfig(seq_len=64), shape, gpus).ranks == 8
    assert plan_of(SweepConfig(seq_len=64), shape, machine).ranks == 2
    assert plan_of(SweepConfig(seq_len=64, ranks=4), shape, machine).ranks == 4


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu"),
    [("auto", "fp32", "bf16"), ("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16")],
)
def test_automatic_precision_follows_the_machine(
    machine: Machine, asked: str, on_cpu: str, on_gpu: str
) -> None:
    assert (machine.precision(asked), GPUS.precision(asked)) == (on_cpu, on_gpu)


def test_a_card_without_bf16_takes_fp16_by_itself() -> None:
    t4 = Gpu(index=0, uuid="GPU-1", name="Tesla T4", memory_bytes=1, capability=(7, 5))
    assert dataclasses.replace(GPUS, gpus=(t4,)).precision("auto") == "fp16"


def test_an_illegal_configuration_gives_all_reasons(shape: ModelShape, machine: Machine) -> None:
    rejection = resolve(SweepConfig(ranks=3, seq_len=1024, engine="ddp"), shape, machine)
    assert isinstance(rejection, Rejection)
    assert len(rejection.reasons) == 2


# ---------------------------------------------------------------- the learning rate


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 4.0), ("linear", 16.0), ("none", 1.0)])
def test_sixteen_times_the_batch_changes_the_rate_by_the_rule(rule: str, factor: float) -> None:
    lr = LrConfig(rule=rule, base=3e-4, base_batch=32)
    assert lr_factor(lr, 512) == pytest.approx(factor)
    assert lr_factor(lr, 32) == 1


@pytest.mark.parametrize(
    ("warmup", "at_base", "at_sixteen_times", "at_three_times"),
    [("steps", 100, 100, 100), ("samples", 100, 7, 34), ("20", 20, 20, 20), ("0", 0, 0, 0)],
)
def test_warmup_keeps_steps_or_samples_or_a_number(
    warmup: str, at_base: int, at_sixteen_times: int, at_three_times: int
) -> None:
    lr = LrConfig(base_batch=32, base_warmup=100, warmup=warmup)
    assert warmup_steps(lr, 32) == at_base
    assert warmup_steps(lr, 512) == at_sixteen_times
    assert warmup_steps(lr, 96) == at_three_times


def test_the_scaled_rate_is_in_the_plan(shape: ModelShape, machine: Machine) -> None:
    lr = LrConfig(rule="linear", base=0.1, base_batch=32, base_warmup=10, warmup="samples")
    plan = plan_of(SweepConfig(lr=lr, global_batch=64, seq_len=64), shape, machine)
    assert (plan.optimizer.lr, plan.schedule.warmup_steps) == (0.2, 5)


def test_the_ends_of_the_schedule_are_scaled_like_its_peak(shape: ModelShape, machine: Machine) -> None:
    lr = LrConfig(base=0.1, base_batch=32, base_warmup=10, warmup_from=0.01, schedule="cosine", end=0.02)
    plan = plan_of(
        SweepConfig(lr=dataclasses.replace(lr, total_steps=90), global_batch=128, seq_len=64), shape, machine
    )
    assert plan.optimizer.lr == 0.2
    assert plan.schedule == SchedulePlan(
        kind=Schedule.COSINE, warmup_steps=10, warmup_from=0.02, total_steps=90, end=0.04
    )


# ---------------------------------------------------------------- identity


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_everything_in_a_plan_is_part_of_its_identity(shape: ModelShape, path: Leaf) -> None:
    plan = a_plan()
    assert fingerprint(changed(plan, path), shape, DATA) != fingerprint(plan, shape, DATA)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_allgather_bucket_never_is(shape: ModelShape, stage: int) -> None:
    plan = a_plan(zero={"stage": stage})
    other = changed(plan, ("zero", "allgather_bucket_size"))
    assert fingerprint(other, shape, DATA) == fingerprint(plan, shape, DATA)


@pytest.mark.parametrize(
    ("strategy", "idle"),
    [
        (
            {"engine": "ddp"},
            {"zero.reduce_bucket_size": 5e7, "zero.overlap_comm": True, "aio.queue_depth": 64},
        ),
        ({"zero.stage": 0}, {"zero.contiguous_gradients": False, "grad_accum_dtype": "fp32"}),
        (
            {"zero.stage": 2},
            {"zero.prefetch_bucket_size": 1e6, "zero.sub_group_size": 1e6, "offload.ratio": 0.5},
        ),
        (
            {"zero.stage": 3},
            {"zero.round_robin_gradients": True, "ddp.bucket_cap_mb": 50, "fp16.hysteresis": 4},
        ),
        (
            {"zero.stage": 1},
            {"allocator.expandable_segments": True, "lr.end": 1e-5, "optimizer.momentum": 0.5},
        ),
        ({"zero.stage": 2, "zero.offload_optimizer": "cpu"}, {"optimizer.implementation": "torch_fused"}),
    ],
    ids=["ddp", "zero0", "zero2", "zero3", "zero1", "zero2_offload"],
)
def test_knobs_without_effect_make_no_other_plan(
    shape: ModelShape, machine: Machine, strategy: dict[str, Any], idle: dict[str, Any]
) -> None:
    config = SweepConfig(seq_len=64)
    for key, value in strategy.items():
        config = with_value(config, key, value)
    other = config
    for key, value in idle.items():
        other = with_value(other, key, value)
    assert plan_of(other, shape, machine) == plan_of(config, shape, machine)


def test_model_and_data_are_part_of_the_identity(shape: ModelShape) -> None:
    other_model = dataclasses.replace(shape, layers=3)
    other_data = DataSpec(kind="stdlib")
    prints = {fingerprint(a_plan(), shape, DATA), fingerprint(a_plan(), other_model, DATA)}
    assert len(prints | {fingerprint(a_plan(), shape, other_data)}) == 3


def test_data_paths_are_absolute_since_a_job_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = SweepConfig(data=DataConfig(kind="text", path="books", tokenizer="../tok", max_bytes=2e3))
    found = data_spec(config)
    assert (found.path, found.tokenizer) == (str(tmp_path / "books"), str(tmp_path.parent / "tok"))
    assert (found.kind, found.max_bytes) == ("text", 2000)
