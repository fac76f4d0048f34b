"""Describe plans as points: the closer two plans, the more alike the errors of their step times. Pure.

A plan has counts, on logarithmic scales, and kinds. The distance of two plans is the sum over what they
differ in: a doubling of a batch or a degree counts 1, and so does any difference of kind; a doubling of a
buffer's size, which matters less, counts an eighth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweeps.estimate.time.fitting import DOUBT, HOST_NOISE, NOISE
from train_entry.contract import Estimate, Plan

# The distance of a buffer's doubling, where a batch's is 1: tenfold buffers change step times by 1 to 5%.
BUFFER = 0.125

# The parts of a step whose time one fitted factor scales, by that factor.
PARTS = {
    "compute": ("forward", "backward", "recompute"),
    "launch": ("waiting", "fixed"),
    "communication": ("tensor", "reduce", "gather", "send", "bubble"),
    "offload": ("offload",),
    "update": ("update",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The position of one plan. The entries have the same order in all plans."""

    counts: tuple[float, ...]
    kinds: tuple[object, ...]
    parts: tuple[float, ...] = ()  # standard deviation of log(step time) that each factor causes
    width: float = 1.0  # spread of the noise, relative to a plan whose device never waits for its host


def features_of(plan: Plan, estimate: Estimate) -> Features:
    """Return the plan's position. Knobs that never change the step time (rates, seeds) are left out."""
    zero, offload = plan.zero, plan.offload
    batches = (plan.ranks, plan.tensor, plan.pipeline, plan.micro_batch, plan.global_batch, plan.seq_len)
    buffers = (
        *(zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold),
        *(zero.max_live_parameters, zero.max_reuse_distance, zero.sub_group_size, plan.ddp.bucket_cap_mib),
        *(offload.max_in_cpu, offload.buffer_count, offload.buffer_size),
        *(offload.aio.block_size_bytes, offload.aio.queue_depth, offload.aio.threads),
    )
    return Features(
        counts=(
            *(math.log2(count) for count in batches),
            *(BUFFER * math.log2(1 + size) for size in buffers),
            1 / plan.checkpoint_every if plan.checkpoint_every else 0.0,  # share of checkpointed blocks
            offload.ratio,
        ),
        kinds=(
            *(plan.engine, zero.stage, offload.optimizer, offload.param, zero.overlap_comm),
            *(zero.contiguous_gradients, zero.reduce_scatter, zero.use_multi_rank_bucket_allreduce),
            *(zero.round_robin_gradients, zero.hpz_partition_size, zero.quantized_weights),
            *(zero.quantized_gradients, offload.pin_memory, offload.aio.single_submit),
            *(offload.aio.overlap_events, plan.ddp.gradient_as_bucket_view, plan.precision),
            *(plan.grad_accum_dtype, plan.attention, plan.compile, plan.expandable_segments),
            *(plan.optimizer.name, plan.optimizer.fused, plan.gradient_clipping > 0),
        ),
        parts=tuple(DOUBT[factor] * _share(estimate, *names) for factor, names in PARTS.items()),
        width=math.hypot(NOISE, HOST_NOISE * _share(estimate, "waiting")) / NOISE,
    )


def _share(estimate: Estimate, *parts: str) -> float:
    """Return the share of the step that these parts take."""
    return sum(estimate.parts.get(part, 0.0) for part in parts) / estimate.step_s
