"""Classes of plans by their memory rules: an error in the rules of one need not affect the others. Pure."""

from __future__ import annotations

from enum import StrEnum

from train_entry.contract import Engine, Plan


class PlanClass(StrEnum):
    """A class of plans. In this order, a plan belongs to the first that matches."""

    PIPELINE = "pipeline"
    TENSOR = "tensor"
    OFFLOAD = "offload"
    DDP = "ddp"
    ZERO3 = "zero3"
    ZERO012 = "zero012"


def class_of(plan: Plan) -> PlanClass:
    """Return the class whose rules a plan's memory follows."""
    belongs = {
        PlanClass.PIPELINE: plan.pipeline > 1,
        PlanClass.TENSOR: plan.tensor > 1,
        PlanClass.OFFLOAD: bool(plan.offload.devices),
        PlanClass.DDP: plan.engine is Engine.DDP,
        PlanClass.ZERO3: plan.zero.stage == 3,
        PlanClass.ZERO012: True,
    }
    return next(each for each in PlanClass if belongs[each])
