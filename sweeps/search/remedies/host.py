"""Remedies for host memory that is full beside GPUs that are not: offload less, or to a disk."""

from __future__ import annotations

from collections.abc import Iterator

from sweeps.search.remedies.base import Changes, Step, parameters, remedy, rounded_up
from train_entry.contract import ModelShape, Offload, Plan, Scalar

BACK, ON_TO_DISK = "back to the GPU", "on to the disk"


@remedy(cost="copies between host and GPU are slower, and no longer overlap with computation")
def unpinned(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """Host buffers are not page-locked: page-locked ones cannot be swapped, and are rounded up in size."""
    if plan.offload.devices and plan.offload.pin_memory:
        # pytorch/pytorch issues 95823 and 150517: CachingHostAllocator rounds to the next power of two.
        how = "torch rounds page-locked buffers up to powers of two, up to twice their size"
        yield Step(changes={"offload.pin_memory": False}, how=how)


@remedy(cost="the GPUs must hold their share of the weights again")
def weights_back(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The weights return to the GPU."""
    if plan.offload.param is Offload.CPU:
        yield Step(changes={"zero.offload_param": "none"}, how=f"the weights go {BACK}")


@remedy(cost="the GPUs must hold the other half, and update it")
def half_the_optimizer(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """Half of the optimizer's states return to the GPU: DeepSpeed's Twin-Flow, for stage 3 only."""
    is_whole = plan.offload.optimizer is Offload.CPU and plan.offload.ratio == 1
    if plan.zero.stage < 3 or not is_whole:
        return
    # stage3.py splits by whole sub-groups: it keeps int((1 - ratio) x sub-groups) of them on the device.
    two_groups = rounded_up(parameters(plan, model) / plan.data / 2)
    changes: dict[str, Scalar] = {"offload.ratio": 0.5}
    if two_groups < plan.zero.sub_group_size:
        changes["zero.sub_group_size"] = two_groups
    yield Step(changes=changes, how=f"half of the optimizer's states go {BACK}")


@remedy(cost="every micro-batch reads the weights from the disk twice")
def weights_on_to_nvme(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The weights move from host memory on to a local disk."""
    if plan.offload.param is Offload.CPU:
        yield Step(changes={"zero.offload_param": "nvme"}, how=f"the weights go {ON_TO_DISK}")


@remedy(cost="every update reads and writes the states on the disk, and is as fast as the disk")
def optimizer_on_to_nvme(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The optimizer's states move from host memory on to a local disk."""
    if plan.offload.optimizer is Offload.CPU and plan.zero.stage == 3:
        yield Step(changes=_all_to(plan, "nvme"), how=f"the optimizer's states go {ON_TO_DISK}")


@remedy(cost="the GPUs must hold all of the optimizer again")
def optimizer_back(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The optimizer's states return to the GPU."""
    if plan.offload.optimizer is Offload.CPU:
        yield Step(changes=_all_to(plan, "none"), how=f"the optimizer's states go {BACK}")


def _all_to(plan: Plan, place: str) -> Changes:
    """Return the changes that move all of the optimizer, so a ratio below 1 goes back to 1."""
    whole: Changes = {"offload.ratio": 1.0} if plan.offload.ratio < 1 else {}
    return {"zero.offload_optimizer": place, **whole}
