"""Remedies for a host that ran out of memory beside GPUs that did not: less of it offloaded, or further."""

from __future__ import annotations

from sweeps.remedies import footprint
from sweeps.remedies.base import Changes, Step, remedy, rounded_up, size
from train_entry.contract import ModelShape, Offload, Plan, Scalar


@remedy(cost="copies between host and GPU are slower, and no longer run beside computation")
def unpinned(plan: Plan, model: ModelShape) -> Step | None:
    """Ordinary host buffers instead of page-locked ones, which cannot be swapped and are rounded up."""
    if not plan.offload.devices or not plan.offload.pin_memory:
        return None
    # pytorch/pytorch issues 95823 and 150517: CachingHostAllocator rounds to the next power of two.
    why = "torch rounds page-locked buffers up to powers of two, up to twice their size"
    return Step(changes={"offload.pin_memory": False}, why=why)


@remedy(cost="the GPUs must hold their share of the weights again")
def weights_back(plan: Plan, model: ModelShape) -> Step | None:
    """The weights return to the GPU."""
    if plan.offload.param is not Offload.CPU:
        return None
    share = size(footprint.sharded_states(plan, model).weights)
    why = f"{share} a rank leaves the host, and comes back to the GPU"
    return Step(changes={"zero.offload_param": "none"}, why=why)


@remedy(cost="the GPUs must hold the other half, and update it")
def half_the_optimizer(plan: Plan, model: ModelShape) -> Step | None:
    """Half of the optimizer's states return to the GPU: DeepSpeed's Twin-Flow, of stage 3 only."""
    is_whole = plan.offload.optimizer is Offload.CPU and plan.offload.ratio == 1
    if footprint.stage(plan) < 3 or not is_whole:
        return None
    # stage3.py splits by whole sub-groups: int((1 - ratio) x sub-groups) of them stay on the device.
    two_groups = rounded_up(footprint.parameters(plan, model) / plan.data / 2)
    changes: dict[str, Scalar] = {"offload.ratio": 0.5}
    if two_groups < plan.zero.sub_group_size:
        changes["zero.sub_group_size"] = two_groups
    share = size(footprint.sharded_states(plan, model).optimizer / 2)
    return Step(changes=changes, why=f"{share} a rank leaves the host, and comes back to the GPU")


@remedy(cost="every micro-batch reads the weights from the disk twice")
def weights_on_to_nvme(plan: Plan, model: ModelShape) -> Step | None:
    """The weights go on from host memory to a local disk."""
    if plan.offload.param is not Offload.CPU:
        return None
    share = size(footprint.sharded_states(plan, model).weights)
    return Step(changes={"zero.offload_param": "nvme"}, why=f"{share} a rank leaves the host for the disk")


@remedy(cost="every update reads and writes the states on the disk, and is as fast as the disk")
def optimizer_on_to_nvme(plan: Plan, model: ModelShape) -> Step | None:
    """The optimizer's states go on from host memory to a local disk."""
    if plan.offload.optimizer is not Offload.CPU or footprint.stage(plan) < 3:
        return None
    share = size(_optimizer_on_host(plan, model))
    return Step(changes=_all_to(plan, "nvme"), why=f"{share} a rank leaves the host for the disk")


@remedy(cost="the GPUs must hold all of the optimizer again")
def optimizer_back(plan: Plan, model: ModelShape) -> Step | None:
    """The optimizer's states return to the GPU."""
    if plan.offload.optimizer is not Offload.CPU:
        return None
    share = size(_optimizer_on_host(plan, model))
    why = f"{share} a rank leaves the host, and comes back to the GPU"
    return Step(changes=_all_to(plan, "none"), why=why)


def _optimizer_on_host(plan: Plan, model: ModelShape) -> float:
    return plan.offload.ratio * footprint.sharded_states(plan, model).optimizer


def _all_to(plan: Plan, place: str) -> Changes:
    """A share on the host, where there was one, ends with it."""
    whole: Changes = {"offload.ratio": 1.0} if plan.offload.ratio < 1 else {}
    return {"zero.offload_optimizer": place, **whole}
