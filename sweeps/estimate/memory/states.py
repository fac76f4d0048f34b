"""Weights, gradients and optimizer states of one rank, as each of DeepSpeed's optimizers keeps them. Pure.

Sources in DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py, fp16/unfused_optimizer.py,
bf16_optimizer.py, and engine.py, which chooses among them (_do_optimizer_sanity_check).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from sweeps.estimate.memory.activations import FP32_BYTES, element_bytes
from sweeps.estimate.memory.allocator import allocated
from sweeps.estimate.memory.share import Share
from train_entry.contract import Engine, Offload, Plan, Precision

# ZeRO paper (Rajbhandari et al. 2020), section 3.1: the optimizer's copy of a weight, and each moment.
MASTER_BYTES = 4
MOMENT_BYTES = 4


class Wrapper(StrEnum):
    """The class that keeps the optimizer's states."""

    DDP = "ddp"  # torch's DistributedDataParallel and optimizer, all in fp32
    PLAIN = "plain"  # DeepSpeed without ZeRO in fp32: torch's optimizer
    UNFUSED = "unfused"  # DeepSpeed without ZeRO in half precision: FP16_UnfusedOptimizer, tensor by tensor
    BF16 = "bf16"  # BF16_Optimizer: accumulates a full set of gradients, shards the rest
    ZERO12 = "zero12"  # DeepSpeedZeroOptimizer
    ZERO3 = "zero3"  # DeepSpeedZeroOptimizer_Stage3


# Wrappers with separate state tensors for each parameter.
APART = (Wrapper.DDP, Wrapper.PLAIN, Wrapper.UNFUSED)


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Bytes that stay allocated from step to step, and the counts from which others are computed."""

    wrapper: Wrapper
    wide: int  # bytes of a weight
    summed: int  # bytes of an accumulated gradient
    part: float  # elements whose optimizer states the rank keeps
    group: float  # elements updated at once
    on_device: float  # those of `part` that are updated on the device
    weights: float  # on the device
    second_weights: float  # ZeRO++'s second copy
    master: float
    moments: float
    temporary: float  # one fp32 number for each weight that is updated at once
    gradients: float  # allocated all the time
    between: float  # gradients kept from one micro-batch to the next, if a step has several


def wrapper_of(plan: Plan) -> Wrapper:
    """Return the class that DeepSpeed, or torch, uses for a plan."""
    if plan.engine is Engine.DDP:
        return Wrapper.DDP
    if plan.zero.stage == 3:
        return Wrapper.ZERO3
    is_bf16 = plan.precision is Precision.BF16
    if plan.zero.stage == 0:
        if plan.precision is Precision.FP32:
            return Wrapper.PLAIN
        return Wrapper.BF16 if is_bf16 and plan.pipeline > 1 else Wrapper.UNFUSED
    sums_in_fp32 = is_bf16 and plan.grad_accum_dtype is Precision.FP32
    if plan.zero.stage == 1 and sums_in_fp32 and plan.offload.optimizer is Offload.NONE:
        return Wrapper.BF16
    return Wrapper.ZERO12


def moments_of(plan: Plan) -> int:
    """Count of the numbers that the optimizer keeps for each weight."""
    return 2 if plan.optimizer.name == "adamw" else int(plan.optimizer.momentum > 0)


def summed_bytes(plan: Plan) -> int:
    """Bytes of an element of an accumulated gradient."""
    if plan.engine is Engine.DDP or plan.grad_accum_dtype is Precision.FP32:
        return FP32_BYTES
    return element_bytes(plan)


def states(plan: Plan, share: Share) -> States:
    """Return what a rank keeps of its share on the device."""
    wrapper = wrapper_of(plan)
    count = share.parameters
    wide = FP32_BYTES if wrapper is Wrapper.DDP else element_bytes(plan)
    part = count / plan.data if wrapper in (Wrapper.BF16, Wrapper.ZERO12, Wrapper.ZERO3) else count
    group = sub_group(plan, part) if wrapper is Wrapper.ZERO3 else part
    here = _updated_on_device(plan, part, group)
    is_apart = wrapper in APART
    each = allocated(share.tensors, FP32_BYTES) if is_apart else FP32_BYTES * here
    weights = allocated(share.tensors, wide) if is_apart else count * wide
    if wrapper is Wrapper.ZERO3:
        weights = part * wide if plan.offload.param is Offload.NONE else 0.0
    second = plan.zero.hpz_partition_size if wrapper is Wrapper.ZERO3 else 1
    throughout, between = _gradients(plan, wrapper, share, part)
    return States(
        wrapper=wrapper,
        wide=wide,
        summed=summed_bytes(plan),
        part=part,
        group=min(group, here),
        on_device=here,
        weights=weights,
        second_weights=count * wide / second if second > 1 else 0.0,
        master=0.0 if wrapper in (Wrapper.DDP, Wrapper.PLAIN) else each,
        moments=moments_of(plan) * each,
        temporary=each if is_apart else FP32_BYTES * min(group, here),
        gradients=throughout,
        between=between,
    )


def sub_group(plan: Plan, part: float) -> float:
    """Number of elements that stage 3 updates at once. A parameter that fills a sub-group closes it."""
    return min(float(plan.zero.sub_group_size), part)


def _updated_on_device(plan: Plan, part: float, group: float) -> float:
    """Number of elements: all, none, or with `ratio` the first sub-groups (stage3.py, subgroup_to_device)."""
    if plan.offload.optimizer is Offload.NONE:
        return part
    if plan.zero.stage < 3 or plan.offload.ratio >= 1 or not part:
        return 0.0
    return min(part, group * int((1 - plan.offload.ratio) * math.ceil(part / group)))


def _gradients(plan: Plan, wrapper: Wrapper, share: Share, part: float) -> tuple[float, float]:
    """Return the bytes allocated all the time, and the bytes kept between micro-batches."""
    count, summed = share.parameters, summed_bytes(plan)
    offloaded = plan.offload.optimizer is not Offload.NONE
    match wrapper:
        case Wrapper.DDP:
            # torch's Reducer copies gradients to buckets, or keeps them there from the start.
            in_buckets = plan.ddp.gradient_as_bucket_view
            return FP32_BYTES * count, 0.0 if in_buckets else allocated(share.tensors, FP32_BYTES)
        case Wrapper.PLAIN | Wrapper.UNFUSED:
            return 0.0, allocated(share.tensors, element_bytes(plan))
        case Wrapper.BF16:
            # fp32_groups_gradients_flat is whole on every rank. clear_lp_grads zeroes the weights' own
            # gradients for the next micro-batch, but keeps their memory.
            return summed * count, element_bytes(plan) * count
        case Wrapper.ZERO3:
            return 0.0 if offloaded else summed * part, 0.0  # grad_partitions_flat_buffer
        case Wrapper.ZERO12 if plan.zero.stage == 1:
            return 0.0, allocated(share.tensors, summed)  # whole: reduced only at the last micro-batch
        case _:
            return 0.0, 0.0 if offloaded else summed * part
