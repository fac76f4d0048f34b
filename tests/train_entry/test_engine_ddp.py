from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from train_entry.contract import OptimizerPlan, Precision, TrialSpec
from train_entry.engine_ddp import DdpEngine, make_optimizer, warmup_lr
from train_entry.model import build_model

PEAK_LR = 3e-4
SGD = OptimizerPlan(name="sgd", lr=PEAK_LR, weight_decay=0.1, momentum=0.9)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_warmup_equals_deepspeeds(steps: int, deepspeed_warmup: type) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK_LR)
    scheduler = deepspeed_warmup(
        optimizer, warmup_max_lr=PEAK_LR, warmup_num_steps=steps, warmup_type="linear"
    )
    for updates in range(15):
        assert warmup_lr(PEAK_LR, steps, updates) == optimizer.param_groups[0]["lr"]
        scheduler.step()


def test_the_first_two_updates_of_a_warmup_have_no_effect() -> None:
    assert [warmup_lr(1.0, 4, updates) for updates in range(7)] == [0, 0, 0.25, 0.5, 0.75, 1, 1]


def test_without_warmup_the_learning_rate_is_constant() -> None:
    assert {warmup_lr(PEAK_LR, 0, updates) for updates in range(5)} == {PEAK_LR}


def test_weight_decay_applies_to_all_parameters() -> None:
    optimizer = make_optimizer(list(torch.nn.LayerNorm(4).parameters()), SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_an_unknown_optimizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="it may be adamw or sgd"):
        make_optimizer([], dataclasses.replace(SGD, name="lion"))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def open_alone(spec: TrialSpec, precision: Precision) -> DdpEngine:
    plan = dataclasses.replace(spec.plan, ranks=1, micro_batch=4, warmup_steps=0, precision=precision)
    return DdpEngine(build_model(spec.model, plan, torch.device("cpu")), plan, torch.device("cpu"))


def train(engine: DdpEngine, updates: int) -> list[float]:
    """Losses at one batch, twice for each update."""
    batch = torch.arange(128).reshape(4, 32)
    losses = []
    for _ in range(2 * updates):
        loss = engine.forward(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.usefixtures("alone")
def test_every_precision_learns_on_fp32_masters(spec: TrialSpec, precision: Precision) -> None:
    engine = open_alone(spec, precision)
    losses = train(engine, updates=10)
    assert losses[-1] < losses[0] - 0.1
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.float32}
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
