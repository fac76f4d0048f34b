from __future__ import annotations

import dataclasses

import pytest
import torch

from train_entry.contract import OptimizerPlan
from train_entry.engine_ddp import make_optimizer, warmup_lr

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
