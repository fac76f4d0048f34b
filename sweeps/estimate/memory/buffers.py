"""Temporary buffers for reducing, gathering and updating, in bytes of one rank. Pure.

Sources: DeepSpeed 0.19.8, files as named; torch's optimizers in torch/optim.
"""

from __future__ import annotations

import re

from sweeps.estimate.hardware import Hardware
from sweeps.estimate.memory.activations import FP32_BYTES
from sweeps.estimate.memory.share import Share
from sweeps.estimate.memory.states import States, Wrapper
from train_entry.contract import Offload, Plan, Precision

# torch, getChosenWorkspaceSize: cuBLAS gets 32 MiB per handle and stream on Hopper and later, 8 MiB before.
# The forward pass and autograd's thread have one handle each. Recorded peaks of the optimizer's step are 64
# MiB more than its tensors.
WORKSPACE_BYTES = {True: 2 * 32 * 2**20, False: 2 * 8 * 2**20}
HOPPER_AND_LATER = re.compile(r"\b(G?H(100|200|800|20)|G?B\d00|RTX 50)")
# DeepSpeed engine.py, MEMORY_OPT_ALLREDUCE_SIZE: without ZeRO, and in BF16_Optimizer, gradients are copied
# into buffers of up to this many elements.
ALLREDUCE_ELEMENTS = 500_000_000


def buckets(plan: Plan, kept: States, share: Share) -> float:
    """Bytes of the buckets in which gradients are collected for reduction.

    stage_1_and_2.py, setup_buckets: one bucket, or two with overlap_comm, of the full size even if the model
    is smaller; without contiguous_gradients, copies only as large as needed. stage3.py: one bucket, never
    freed.
    """
    size = float(plan.zero.reduce_bucket_size)
    match kept.wrapper:
        case Wrapper.ZERO3:
            return size * kept.wide if plan.zero.contiguous_gradients else 0.0
        case Wrapper.ZERO12:
            is_summed_apart = plan.zero.stage == 1 and kept.summed != kept.wide
            is_copied = not plan.zero.contiguous_gradients and plan.offload.optimizer is Offload.NONE
            count = (1 + plan.zero.overlap_comm) * (min(size, share.parameters) if is_copied else size)
            return count * (kept.summed if is_summed_apart else kept.wide)
        case _:
            return 0.0


def pipeline_bucket(plan: Plan, kept: States) -> float:
    """Bytes of one more bucket of the full size, while a pipeline's gradients are reduced.

    stage_1_and_2.py, reduce_gradients: it "must create ipg buffer, since backward is handled outside zero",
    although setup_buckets made one before the backward pass.
    """
    if kept.wrapper is not Wrapper.ZERO12 or plan.pipeline == 1 or not plan.zero.contiguous_gradients:
        return 0.0
    return float(plan.zero.reduce_bucket_size) * kept.wide


def partition_copy(plan: Plan, kept: States) -> float:
    """Bytes for the reduced gradients of the rank's own part, allocated when a bucket fills.

    stage_1_and_2.py, copy_grads_in_partition. ZeRO-2 with accumulation in fp32 adds to the buffer that it
    keeps between micro-batches (_build_compact_grad_partition_buffer).
    """
    if kept.wrapper is not Wrapper.ZERO12 or plan.offload.optimizer is not Offload.NONE:
        return 0.0
    if plan.zero.stage == 2 and kept.summed != kept.wide:
        return 0.0 if plan.grad_accum > 1 else kept.summed * kept.part
    return kept.summed * kept.part if plan.zero.stage == 1 else kept.wide * kept.part


def reduction_copy(plan: Plan, kept: States, share: Share) -> float:
    """Bytes of a bucket's copy, flattened for the collective.

    ZeRO-1 and ZeRO-2 need no copy if the whole bucket belongs to one rank: average_tensor joins neighbours,
    and flattening a single tensor copies nothing. With a smaller part per rank, or in round-robin order, the
    bucket belongs to several.
    """
    size = min(float(plan.zero.reduce_bucket_size), share.parameters)
    if plan.data == 1:
        return 0.0
    match kept.wrapper:
        case Wrapper.ZERO3:
            # reduce_scatter_coalesced: an input as large as the bucket, and the rank's part of it.
            return size * kept.wide * (1 + 1 / plan.data) if plan.zero.reduce_scatter else 0.0
        case Wrapper.ZERO12:
            is_mixed = plan.zero.round_robin_gradients or size > kept.part or kept.summed != kept.wide
            return size * kept.wide if is_mixed and plan.zero.reduce_scatter else 0.0
        case Wrapper.PLAIN | Wrapper.UNFUSED:
            return min(ALLREDUCE_ELEMENTS, share.parameters) * kept.wide
        case Wrapper.BF16:
            return min(ALLREDUCE_ELEMENTS, share.parameters) * kept.summed
        case _:
            return 0.0


def gathered_weights(plan: Plan, kept: States, share: Share) -> float:
    """Bytes of whole weights that stage 3 holds at most.

    partitioned_param_coordinator.py: every fetched module prefetches up to one more bucket, as long as
    max_live_parameters allows. A parameter is released if it is not used again within max_reuse_distance,
    which covers the way forward and back. No limit splits a parameter, so the largest is the minimum. A
    single rank uses its shard.
    """
    if kept.wrapper is not Wrapper.ZERO3:
        return 0.0
    zero = plan.zero
    is_quantized = zero.quantized_weights
    if plan.data == 1 and plan.offload.param is Offload.NONE and not is_quantized:
        return 0.0
    reused = zero.max_reuse_distance / 2
    runs_ahead = zero.prefetch_bucket_size >= share.block_parameters / 7  # a block has about seven matrices
    ahead = float(zero.max_live_parameters) if runs_ahead else reused + zero.prefetch_bucket_size
    live = max(share.largest_parameter, min(zero.max_live_parameters, ahead, share.parameters))
    arriving = min(zero.prefetch_bucket_size + share.largest_parameter, share.parameters) * is_quantized
    return live * kept.wide + arriving  # quantized weights arrive as int8, beside what they become


def cast_weights(plan: Plan, kept: States, share: Share) -> float:
    """Bytes of autocast's copies of matrices (ddp in half precision), which stay until the pass has ended."""
    if kept.wrapper is not Wrapper.DDP or plan.precision is Precision.FP32:
        return 0.0
    head = share.head_parameters if share.has_head else 0.0
    return 2.0 * (share.blocks * share.block_parameters + head)


def workspace(hardware: Hardware) -> int:
    """Bytes of cuBLAS's workspace."""
    if hardware.is_cpu:
        return 0
    return WORKSPACE_BYTES[HOPPER_AND_LATER.search(hardware.name) is not None]


def offload_buffer(plan: Plan, kept: States, share: Share) -> float:
    """Bytes of temp_grad_buffer_for_gpu_offload (stage_1_and_2.py): the largest parameter's, never freed."""
    is_offloaded = kept.wrapper is Wrapper.ZERO12 and plan.offload.optimizer is not Offload.NONE
    return share.largest_parameter * kept.wide if is_offloaded else 0.0


def step_gradients(kept: States) -> float:
    """Bytes of gradients during the optimizer's update, beyond those kept all the time."""
    match kept.wrapper:
        case Wrapper.DDP | Wrapper.PLAIN:
            return kept.between
        case Wrapper.UNFUSED:
            return kept.between + kept.temporary  # as they came, and in fp32
        case Wrapper.BF16:
            return 0.0 if kept.summed == FP32_BYTES else kept.temporary
        case _:
            return kept.temporary


def conversion(kept: States) -> float:
    """Bytes while these gradients are made: the gradients they are made from, and intermediate copies."""
    match kept.wrapper:
        case Wrapper.ZERO12 if kept.summed == kept.wide:
            flat = kept.wide if kept.wide != FP32_BYTES else 0
            return (kept.wide + flat) * kept.on_device  # reduced gradients, and flattened ones
        case Wrapper.ZERO3 if kept.summed != FP32_BYTES:
            return kept.summed * kept.group  # flattened
        case _:
            return 0.0


def optimizer_temporaries(plan: Plan, kept: States, hardware: Hardware) -> float:
    """Bytes that torch's optimizer allocates during its update.

    torch/optim/adam.py, _multi_tensor_adam: the square roots of all second moments at once. Fused: nothing.
    On a CPU: roots and their quotient of one parameter at a time, but ZeRO has flattened all into one.
    sgd.py: gradients with weight decay added.
    """
    if plan.optimizer.fused:
        return 0.0
    if plan.optimizer.name != "adamw":
        return kept.temporary if plan.optimizer.weight_decay > 0 else 0.0
    return kept.temporary * (2 if hardware.is_cpu else 1)
