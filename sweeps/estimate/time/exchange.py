"""Estimate the exchange between data-parallel ranks, by strategy, as DeepSpeed 0.19 and torch do it. Pure.

Sources: DeepSpeed's runtime/engine.py (allreduce_gradients), zero/stage_1_and_2.py (average_tensor,
process_gradients) and zero/stage3.py. Sizes are those of one rank's part of the model, before sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.estimate import flops
from sweeps.estimate.hardware import Hardware
from sweeps.estimate.time.collectives import Group, data_group, nodes_of, secondary_group
from train_entry.contract import MIB, Engine, ModelShape, Offload, Plan, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Seconds of communication, and which of them may overlap with computing."""

    reductions: int  # of gradients, per step: one at its end, or one after every micro-batch
    reduce_s: float  # for one reduction
    tail_s: float  # the part of reduce_s for the last bucket, which no computing is left to hide
    reduce_overlaps: bool
    gather_s: float  # for gathering weights, per micro-batch: stage 3
    gather_overlaps: bool
    update_s: float  # for gathering updated weights, per step: stages 1 and 2. Nothing hides it


ALONE = Exchange(
    reductions=0,
    reduce_s=0.0,
    tail_s=0.0,
    reduce_overlaps=True,
    gather_s=0.0,
    gather_overlaps=True,
    update_s=0.0,
)


def exchange_of(plan: Plan, model: ModelShape, hardware: Hardware) -> Exchange:
    if plan.data == 1:
        return ALONE
    group = data_group(plan, hardware)
    held = held_parameters(plan, model)
    stage = plan.zero.stage
    reduce_s = _reduce_s(plan, group, held, hardware)
    bucket = min(1.0, _bucket_elements(plan) / held)
    return Exchange(
        reductions=plan.grad_accum if stage >= 2 else 1,
        reduce_s=reduce_s,
        tail_s=reduce_s * bucket,
        reduce_overlaps=_reduce_overlaps(plan),
        gather_s=_gather_s(plan, model, hardware) if stage == 3 else 0.0,
        gather_overlaps=plan.zero.prefetch_bucket_size > 0,
        update_s=group.all_gather_s(held * flops.element_bytes(plan.precision)) if stage in (1, 2) else 0.0,
    )


def held_parameters(plan: Plan, model: ModelShape) -> float:
    """Number of parameters in one rank's part of the model; AutoTP splits only the blocks."""
    blocks = flops.block_parameters(model) * model.layers / plan.tensor
    return (blocks + flops.embedding_parameters(model)) / plan.pipeline


def gathers(plan: Plan, model: ModelShape) -> float:
    """Return how often stage 3 gathers a parameter per micro-batch: forward, backward, and for recomputation.

    It keeps parameters that are needed again within `max_reuse_distance` parameters: those at the end of the
    forward pass, and a recomputed block's until its own backward pass (partitioned_param_coordinator.py,
    __params_to_release).
    """
    reuse = plan.zero.max_reuse_distance
    kept = min(1.0, reuse / (2 * model.parameters))
    again = 0.0
    if plan.checkpoint_every and reuse < flops.block_parameters(model):
        again = 1.0 / plan.checkpoint_every
    return 2.0 - kept + again


def _reduce_s(plan: Plan, group: Group, held: float, hardware: Hardware) -> float:
    size = held * _gradient_bytes(plan)
    zero = plan.zero
    if zero.stage == 0:
        return group.all_reduce_s(size)
    if zero.stage == 3:
        is_quantized = zero.quantized_gradients and nodes_of(plan, hardware) > 1
        return group.reduce_scatter_s(size / 4 if is_quantized else size)
    # use_multi_rank_bucket_allreduce: the whole bucket is all-reduced and each rank copies its part, whatever
    # reduce_scatter says. Without it each part is reduced to its owner.
    by_owner = zero.reduce_scatter and not zero.use_multi_rank_bucket_allreduce
    return group.reduce_scatter_s(size) if by_owner else group.all_reduce_s(size)


def _gather_s(plan: Plan, model: ModelShape, hardware: Hardware) -> float:
    size = _gathered_parameters(plan, model) * flops.element_bytes(plan.precision)
    if plan.zero.quantized_weights:
        size /= 2  # int8
    group = data_group(plan, hardware)
    if plan.zero.hpz_partition_size == 1:
        return gathers(plan, model) * group.all_gather_s(size)
    # ZeRO++: the forward pass gathers from all ranks, later gathers from those that share a second copy.
    again = (gathers(plan, model) - 1) * secondary_group(plan, hardware).all_gather_s(size)
    return group.all_gather_s(size) + again


def _gathered_parameters(plan: Plan, model: ModelShape) -> float:
    """Number of parameters to gather: none if all are small enough to stay whole on every rank."""
    if model.largest_parameter <= plan.zero.param_persistence_threshold:
        return 0.0
    return held_parameters(plan, model)


def _reduce_overlaps(plan: Plan) -> bool:
    """True for DDP, and for ZeRO with overlap_comm. Stage 0 reduces after the last backward pass."""
    return plan.engine is Engine.DDP or (plan.zero.stage > 0 and plan.zero.overlap_comm)


def _bucket_elements(plan: Plan) -> float:
    if plan.engine is Engine.DDP:
        return plan.ddp.bucket_cap_mib * MIB / _gradient_bytes(plan)
    return plan.zero.reduce_bucket_size


def _gradient_bytes(plan: Plan) -> int:
    """Bytes of a gradient element in communication.

    DDP's weights are fp32, and so are their gradients. Stage 1 that accumulates bf16 gradients in fp32 uses
    BF16_Optimizer, which reduces the fp32 sums.
    """
    if plan.engine is Engine.DDP:
        return 4
    is_wide = plan.grad_accum_dtype is Precision.FP32 and plan.precision is Precision.BF16
    if plan.zero.stage == 1 and is_wide and plan.offload.optimizer is Offload.NONE:
        return 4
    return flops.element_bytes(plan.precision)
