"""Buffers that reducing, gathering and updating take for a while. Pure. Bytes of one rank.

Read in DeepSpeed 0.19.8, files as named; torch's optimizers in torch/optim.
"""

from __future__ import annotations

import re

from sweeps.estimate.hardware import Hardware
from sweeps.estimate.memory.activations import FP32_BYTES
from sweeps.estimate.memory.share import Share
from sweeps.estimate.memory.states import States, Wrapper
from train_entry.contract import Offload, Plan, Precision

# torch, getChosenWorkspaceSize: cuBLAS gets 32 MiB a handle and stream on Hopper and later, 8 before; the
# forward pass and autograd's thread have a handle each. Recorded peaks of the optimizer's step are 64 MiB
# more than its tensors.
WORKSPACE_BYTES = {True: 2 * 32 * 2**20, False: 2 * 8 * 2**20}
HOPPER_AND_LATER = re.compile(r"\b(G?H(100|200|800|20)|G?B\d00|RTX 50)")
# DeepSpeed engine.py, MEMORY_OPT_ALLREDUCE_SIZE: without ZeRO, and in BF16_Optimizer, gradients are copied
# together up to this many elements.
ALLREDUCE_ELEMENTS = 500_000_000


def buckets(plan: Plan, kept: States, share: Share) -> float:
    """In which gradients are put together to be reduced.

    stage_1_and_2.py, setup_buckets: one, or with overlap_comm two, of the full size whatever the model's;
    without contiguous_gradients copies as large as they must be. stage3.py: one, for good.
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
    """One bucket more, of the full size, while a pipeline's gradients are reduced.

    stage_1_and_2.py, reduce_gradients: it "must create ipg buffer, since backward is handled outside zero",
    beside the one that setup_buckets made before the backward pass all the same.
    """
    if kept.wrapper is not Wrapper.ZERO12 or plan.pipeline == 1 or not plan.zero.contiguous_gradients:
        return 0.0
    return float(plan.zero.reduce_bucket_size) * kept.wide


def partition_copy(plan: Plan, kept: States) -> float:
    """Where reduced gradients of the rank's own part go, allocated when a bucket fills.

    stage_1_and_2.py, copy_grads_in_partition. ZeRO-2 that adds up in fp32 adds to what it keeps between
    micro-batches (_build_compact_grad_partition_buffer).
    """
    if kept.wrapper is not Wrapper.ZERO12 or plan.offload.optimizer is not Offload.NONE:
        return 0.0
    if plan.zero.stage == 2 and kept.summed != kept.wide:
        return 0.0 if plan.grad_accum > 1 else kept.summed * kept.part
    return kept.summed * kept.part if plan.zero.stage == 1 else kept.wide * kept.part


def reduction_copy(plan: Plan, kept: States, share: Share) -> float:
    """A bucket flattened once more for the collective.

    ZeRO-1 and -2 pass a bucket on as it is as long as it belongs to one rank (average_tensor joins
    neighbours, and flattening one tensor copies nothing); a smaller part, or round-robin order, makes it
    several.
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
    """Whole weights that stage 3 has at hand at most.

    partitioned_param_coordinator.py: every module fetched prefetches up to a bucket more, as long as
    max_live_parameters allow; released is what comes again no sooner than max_reuse_distance, which goes
    forward and back again. No limit splits a parameter, so the largest is a floor. One rank uses its shard.
    """
    if kept.wrapper is not Wrapper.ZERO3:
        return 0.0
    zero = plan.zero
    is_quantized = zero.quantized_weights
    if plan.data == 1 and plan.offload.param is Offload.NONE and not is_quantized:
        return 0.0
    reused = zero.max_reuse_distance / 2
    runs_ahead = zero.prefetch_bucket_size >= share.block_parameters / 7  # a block's matrices are about seven
    ahead = float(zero.max_live_parameters) if runs_ahead else reused + zero.prefetch_bucket_size
    live = max(share.largest_parameter, min(zero.max_live_parameters, ahead, share.parameters))
    arriving = min(zero.prefetch_bucket_size + share.largest_parameter, share.parameters) * is_quantized
    return live * kept.wide + arriving  # quantized weights arrive in bytes, beside what they become


def cast_weights(plan: Plan, kept: States, share: Share) -> float:
    """ddp in half precision: autocast keeps its copies of matrices until the pass has ended."""
    if kept.wrapper is not Wrapper.DDP or plan.precision is Precision.FP32:
        return 0.0
    head = share.head_parameters if share.has_head else 0.0
    return 2.0 * (share.blocks * share.block_parameters + head)


def workspace(hardware: Hardware) -> int:
    """cuBLAS's."""
    if hardware.is_cpu:
        return 0
    return WORKSPACE_BYTES[HOPPER_AND_LATER.search(hardware.name) is not None]


def offload_buffer(plan: Plan, kept: States, share: Share) -> float:
    """stage_1_and_2.py, temp_grad_buffer_for_gpu_offload: as large as the largest parameter, for good."""
    is_offloaded = kept.wrapper is Wrapper.ZERO12 and plan.offload.optimizer is not Offload.NONE
    return share.largest_parameter * kept.wide if is_offloaded else 0.0


def step_gradients(kept: States) -> float:
    """Gradients while the optimizer updates, beyond what is kept throughout."""
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
    """While those are made: the gradients they are made of, and copies on the way."""
    match kept.wrapper:
        case Wrapper.ZERO12 if kept.summed == kept.wide:
            flat = kept.wide if kept.wide != FP32_BYTES else 0
            return (kept.wide + flat) * kept.on_device  # reduced ones, and flattened
        case Wrapper.ZERO3 if kept.summed != FP32_BYTES:
            return kept.summed * kept.group  # flattened
        case _:
            return 0.0


def optimizer_temporaries(plan: Plan, kept: States, hardware: Hardware) -> float:
    """What torch's optimizer allocates during its update.

    torch/optim/adam.py, _multi_tensor_adam: the square roots of all second moments at once; fused: nothing;
    on a CPU one parameter at a time, of which ZeRO has made one: roots, and their quotient. sgd.py: gradients
    with weight decay added.
    """
    if plan.optimizer.fused:
        return 0.0
    if plan.optimizer.name != "adamw":
        return kept.temporary if plan.optimizer.weight_decay > 0 else 0.0
    return kept.temporary * (2 if hardware.is_cpu else 1)
