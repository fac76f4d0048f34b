"""Kinds of plans whose memory follows rules of its own: where one is wrong, the others need not be. Pure."""

from __future__ import annotations

from enum import StrEnum

from train_entry.contract import Engine, Plan


class PlanClass(StrEnum):
    """The first that a plan belongs to, in this order."""

    PIPELINE = "pipeline"
    TENSOR = "tensor"
    OFFLOAD = "offload"
    DDP = "ddp"
    ZERO3 = "zero3"
    ZERO012 = "zero012"


def class_of(plan: Plan) -> PlanClass:
    """Which rules a plan's memory follows."""
    belongs = {
        PlanClass.PIPELINE: plan.pipeline > 1,
        PlanClass.TENSOR: plan.tensor > 1,
        PlanClass.OFFLOAD: bool(plan.offload.devices),
        PlanClass.DDP: plan.engine is Engine.DDP,
        PlanClass.ZERO3: plan.zero.stage == 3,
        PlanClass.ZERO012: True,
    }
    return next(each for each in PlanClass if belongs[each])
