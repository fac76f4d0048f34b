from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from train_entry.contract import DdpPlan, LossScalePlan, OptimizerPlan, Precision, SchedulePlan, TrialSpec
from train_entry.engines.ddp import DdpEngine, make_optimizer
from train_entry.model.build import build_model

PEAK_LR = 3e-4
SGD = OptimizerPlan(name="sgd", lr=PEAK_LR, weight_decay=0.1, momentum=0.9)


def test_weight_decay_applies_to_all_parameters() -> None:
    optimizer = make_optimizer(list(torch.nn.LayerNorm(4).parameters()), SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_an_unknown_optimizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="it must be adamw or sgd"):
        make_optimizer([], dataclasses.replace(SGD, name="lion"))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def open_alone(spec: TrialSpec, precision: Precision, **changes: Any) -> DdpEngine:
    alone = {"ranks": 1, "micro_batch": 4, "schedule": SchedulePlan(), "precision": precision}
    plan = dataclasses.replace(spec.plan, **{**alone, **changes})
    return DdpEngine(build_model(spec.model, plan, torch.device("cpu")), plan, torch.device("cpu"))


def train(engine: DdpEngine, updates: int) -> list[float]:
    """Train on one batch, and return the losses: two micro-batches for each update."""
    batch = torch.arange(128).reshape(4, 32)
    losses = []
    for _ in range(2 * updates):
        loss = engine.forward(batch)
        engine.backward(loss)
        engine.update()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.usefixtures("alone")
def test_every_precision_learns_on_fp32_masters(spec: TrialSpec, precision: Precision) -> None:
    engine = open_alone(spec, precision)
    losses = train(engine, updates=10)
    assert losses[-1] < losses[0] - 0.1
    assert {parameter.values.dtype for parameter in engine.held()} == {torch.float32}
    assert math.isfinite(engine.grad_norm() or math.nan)


@pytest.mark.usefixtures("alone")
def test_weights_change_at_the_accumulation_boundary_only(spec: TrialSpec) -> None:
    losses = train(open_alone(spec, Precision.FP32), updates=2)
    assert losses[0] == losses[1] != losses[2] == losses[3]


@pytest.mark.usefixtures("alone")
def test_the_gradient_norm_is_that_of_the_whole_batch_before_clipping(spec: TrialSpec) -> None:
    fp32, fp16 = open_alone(spec, Precision.FP32), open_alone(spec, Precision.FP16)
    train(fp32, updates=1)
    train(fp16, updates=1)
    norm = fp32.grad_norm()
    assert norm is not None and norm > spec.plan.gradient_clipping
    assert fp16.grad_norm() == pytest.approx(norm, rel=0.01)  # unscaled


OVERFLOWING = 2.0**40  # with this loss scale every gradient overflows in fp16
WARMUP = SchedulePlan(warmup_steps=2, warmup_from=1e-4)


@pytest.mark.parametrize("loss_scale", [LossScalePlan(static=OVERFLOWING), LossScalePlan(initial_power=40)])
@pytest.mark.usefixtures("alone")
def test_an_overflow_leaves_weights_and_schedule_where_they_are(
    spec: TrialSpec, loss_scale: LossScalePlan
) -> None:
    engine = open_alone(spec, Precision.FP16, loss_scale=loss_scale, schedule=WARMUP)
    before = engine.held()
    losses = train(engine, updates=3)
    assert set(losses) == {losses[0]}
    assert engine.lr() == WARMUP.warmup_from
    assert all(torch.equal(old.values, new.values) for old, new in zip(before, engine.held(), strict=True))


@pytest.mark.usefixtures("alone")
def test_a_static_scale_that_fits_learns_as_a_dynamic_one_does(spec: TrialSpec) -> None:
    static = open_alone(spec, Precision.FP16, loss_scale=LossScalePlan(static=256.0))
    dynamic = open_alone(spec, Precision.FP16, loss_scale=LossScalePlan(initial_power=8))
    assert train(static, updates=5) == train(dynamic, updates=5)


@pytest.mark.usefixtures("alone")
def test_buckets_are_as_the_plan_has_them(spec: TrialSpec) -> None:
    engine = open_alone(spec, Precision.FP32, ddp=DdpPlan(bucket_cap_mib=3, gradient_as_bucket_view=True))
    assert engine._model.bucket_bytes_cap == 3 * 2**20
    assert engine._model.gradient_as_bucket_view
