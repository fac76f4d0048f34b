"""The learning rate of every update, compared with DeepSpeed's own schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sweeps.plan.ds_config import deepspeed_config
from tests.support.examples import a_plan
from train_entry.contract import Schedule, SchedulePlan
from train_entry.engines.schedule import rate

PEAK = 3e-4
TOTAL_STEPS = 20


def a_schedule(kind: Schedule, warmup_steps: int, begin: float = 0.0, end: float = 0.0) -> SchedulePlan:
    return SchedulePlan(
        kind=kind,
        warmup_steps=warmup_steps,
        warmup_from=begin,
        total_steps=0 if kind is Schedule.CONSTANT else TOTAL_STEPS,
        end=end,
    )


SCHEDULES = [
    a_schedule(kind, warmup_steps, begin, end)
    for kind in Schedule
    for warmup_steps in (0, 1, 2, 6, TOTAL_STEPS, TOTAL_STEPS + 3)
    for begin in (0.0, 1e-5)
    for end in ((0.0, 2e-5) if kind is Schedule.COSINE else (0.0,))
    if kind is not Schedule.CONSTANT or warmup_steps
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_update_has_deepspeeds_rate(
    schedule: SchedulePlan, deepspeed_schedulers: Callable[[str], Any]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    config = deepspeed_config(a_plan(optimizer={"lr": PEAK}, schedule=schedule))["scheduler"]
    scheduler = deepspeed_schedulers(config["type"])(optimizer, **config["params"])
    for updates in range(TOTAL_STEPS + 5):
        assert rate(PEAK, schedule, updates) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        scheduler.step()


def test_without_a_schedule_the_rate_is_constant_from_the_first_update() -> None:
    assert {rate(PEAK, SchedulePlan(), updates) for updates in range(5)} == {PEAK}


def test_a_warmup_from_nothing_makes_two_updates_without_effect() -> None:
    schedule = a_schedule(Schedule.CONSTANT, warmup_steps=4)
    assert [rate(1.0, schedule, updates) for updates in range(7)] == [0, 0, 0.25, 0.5, 0.75, 1, 1]


def test_linear_ends_where_the_warmup_began() -> None:
    schedule = a_schedule(Schedule.LINEAR, warmup_steps=2, begin=1e-5)
    assert rate(PEAK, schedule, TOTAL_STEPS + 1) == pytest.approx(1e-5)


def test_cosine_begins_at_nothing_though_its_warmup_does_not() -> None:
    schedule = a_schedule(Schedule.COSINE, warmup_steps=2, begin=1e-5, end=2e-5)
    rates = [rate(PEAK, schedule, updates) for updates in (0, 1, TOTAL_STEPS + 9)]
    assert rates == pytest.approx([0.0, 1e-5, 2e-5])
