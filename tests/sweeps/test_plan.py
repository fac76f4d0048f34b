"""From a configuration to a plan: batches, degrees, learning rate, identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.config.schema import DataConfig, LrConfig, OptimizerConfig, SweepConfig, ZeroConfig
from sweeps.machine import Gpu, Machine
from sweeps.plan import Rejection, data_spec, fingerprint, resolve, resolve_precision, scaled_lr, warmup_steps
from tests.examples import a_plan
from train_entry.contract import Checkpointing, DataSpec, Engine, ModelShape, OptimizerPlan, Plan, Precision

DATA = DataSpec(kind="synthetic")
GPUS = Machine(
    device="cuda", nodes=1, ranks_per_node=1, gpus=(Gpu(index=0, uuid="GPU-1", name="H200", memory_bytes=1),)
)

# Each field of a plan, changed such that another job runs.
PLAN_CHANGES: dict[str, Any] = {
    "engine": Engine.DDP,
    "ranks": 4,
    "tensor": 2,
    "pipeline": 2,
    "micro_batch": 8,
    "global_batch": 64,
    "seq_len": 64,
    "precision": Precision.FP32,
    "activation_checkpointing": Checkpointing.FULL,
    "gradient_clipping": 0.0,
    "warmup_steps": 10,
    "seed": 1,
}
OPTIMIZER_CHANGES: dict[str, Any] = {
    "name": "sgd",
    "lr": 1e-3,
    "weight_decay": 0.0,
    "beta1": 0.8,
    "beta2": 0.99,
    "eps": 1e-6,
    "momentum": 0.9,
    "fused": True,
}
ZERO_CHANGES: dict[str, Any] = {
    "stage": 1,
    "reduce_bucket_size": 50_000_000,
    "overlap_comm": True,
    "contiguous_gradients": False,
}


def plan_of(config: SweepConfig, model: ModelShape, machine: Machine) -> Plan:
    plan = resolve(config, model, machine)
    assert not isinstance(plan, Rejection), plan.reasons
    return plan


@pytest.fixture
def identity(shape: ModelShape) -> Callable[..., str]:
    """The fingerprint of the standard plan with changes."""
    return lambda **changes: fingerprint(a_plan(**changes), shape, DATA)


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
    assert (resolve_precision(asked, machine), resolve_precision(asked, GPUS)) == (on_cpu, on_gpu)


def test_an_illegal_configuration_gives_all_reasons(shape: ModelShape, machine: Machine) -> None:
    rejection = resolve(SweepConfig(ranks=3, seq_len=1024, engine="ddp"), shape, machine)
    assert isinstance(rejection, Rejection)
    assert len(rejection.reasons) == 2


# ---------------------------------------------------------------- the learning rate


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 4.0), ("linear", 16.0), ("none", 1.0)])
def test_sixteen_times_the_batch_changes_the_rate_by_the_rule(rule: str, factor: float) -> None:
    lr = LrConfig(rule=rule, base=3e-4, base_batch=32)
    assert scaled_lr(lr, 512) == pytest.approx(3e-4 * factor)
    assert scaled_lr(lr, 32) == 3e-4


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
    assert (plan.optimizer.lr, plan.warmup_steps) == (0.2, 5)


# ---------------------------------------------------------------- identity


def test_the_fingerprint_table_covers_every_field() -> None:
    plan = a_plan()
    assert {field.name for field in dataclasses.fields(plan)} == {*PLAN_CHANGES, "optimizer", "zero"}
    assert {field.name for field in dataclasses.fields(plan.optimizer)} == set(OPTIMIZER_CHANGES)
    assert {field.name for field in dataclasses.fields(plan.zero)} == {*ZERO_CHANGES, "allgather_bucket_size"}


@pytest.mark.parametrize("name", PLAN_CHANGES)
def test_every_field_of_a_plan_is_part_of_its_identity(identity: Callable[..., str], name: str) -> None:
    assert identity(**{name: PLAN_CHANGES[name]}) != identity()


@pytest.mark.parametrize("name", OPTIMIZER_CHANGES)
def test_every_field_of_the_optimizer_is_part_of_it(identity: Callable[..., str], name: str) -> None:
    assert identity(optimizer={name: OPTIMIZER_CHANGES[name]}) != identity()


@pytest.mark.parametrize("name", ZERO_CHANGES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_zero_reads_is_part_of_it(identity: Callable[..., str], stage: int, name: str) -> None:
    changed = {"stage": stage, name: {**ZERO_CHANGES, "stage": stage % 3 + 1}[name]}
    assert identity(zero=changed) != identity(zero={"stage": stage})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_allgather_bucket_never_is(identity: Callable[..., str], stage: int) -> None:
    zero = {"stage": stage}
    assert identity(zero=zero) == identity(zero={**zero, "allgather_bucket_size": 1})


@pytest.mark.parametrize("name", ["reduce_bucket_size", "overlap_comm", "contiguous_gradients"])
@pytest.mark.parametrize("engine", [Engine.DDP, Engine.DEEPSPEED])
def test_without_zero_its_knobs_are_not(identity: Callable[..., str], engine: Engine, name: str) -> None:
    changed = {"stage": 0, name: ZERO_CHANGES[name]}
    assert identity(engine=engine, zero=changed) == identity(engine=engine, zero={"stage": 0})


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
