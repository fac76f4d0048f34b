"""Bytes that a plan holds on the device of one rank, by published formulas. Pure.

They explain advice, where a factor matters and a few percent do not: they refuse no plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from train_entry.contract import Attention, Engine, ModelShape, Offload, Plan, Precision

# ZeRO paper (Rajbhandari et al. 2020), section 3.1: 2 weights + 2 gradients + 12 optimizer, of which the
# master weights take 4 and Adam's two moments 8. In fp32 ZeRO keeps a master copy too
# (deepspeed/runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups); ddp does not.
MASTER_BYTES = 4
MOMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Model states of one rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def stage(plan: Plan) -> int:
    """The ZeRO stage in effect: 0 for ddp."""
    return plan.zero.stage if plan.engine is Engine.DEEPSPEED else 0


def element_bytes(plan: Plan) -> int:
    """Of a weight, gradient or activation in the forward and backward pass."""
    return 4 if plan.precision is Precision.FP32 else 2


def moments(plan: Plan) -> int:
    """Numbers that the optimizer keeps beside each weight."""
    return 2 if plan.optimizer.name == "adamw" else int(plan.optimizer.momentum > 0)


def parameters(plan: Plan, model: ModelShape) -> int:
    """Of a rank's stage, its part of the matrices: what a copy of the model comes to on it."""
    return math.ceil(model.parameters / (plan.tensor * plan.pipeline))


def sharded_states(plan: Plan, model: ModelShape) -> States:
    """What a rank is responsible for, on whatever device it lies."""
    count = parameters(plan, model)
    if plan.engine is Engine.DDP:  # fp32 throughout: half precision is torch.autocast
        return States(weights=4 * count, gradients=4 * count, optimizer=MOMENT_BYTES * moments(plan) * count)
    over = [plan.data if stage(plan) >= first else 1 for first in (3, 2, 1)]
    accumulated = 4 if plan.grad_accum_dtype is Precision.FP32 else element_bytes(plan)
    return States(
        weights=element_bytes(plan) * count / over[0],
        gradients=accumulated * count / over[1],
        optimizer=(MASTER_BYTES + MOMENT_BYTES * moments(plan)) * count / over[2],
    )


def states(plan: Plan, model: ModelShape) -> States:
    """What of it lies on the device: offloading from stage 2 on takes the rank's gradients along."""
    held = sharded_states(plan, model)
    optimizer_stays = plan.offload.optimizer is Offload.NONE
    share = 1.0 if optimizer_stays else 1 - plan.offload.ratio
    return States(
        weights=held.weights if plan.offload.param is Offload.NONE else 0.0,
        gradients=held.gradients if optimizer_stays or stage(plan) < 2 else 0.0,
        optimizer=held.optimizer * share,
    )


def buckets(plan: Plan) -> float:
    """Buffers in which gradients are reduced: allocated whole, whatever the model's size.

    deepspeed/runtime/zero/stage_1_and_2.py, setup_buckets, and stage3.py, where overlap_comm adds none.
    """
    if stage(plan) == 0 or not plan.zero.contiguous_gradients:
        return 0.0
    doubled = plan.zero.overlap_comm and stage(plan) < 3
    return (1 + doubled) * plan.zero.reduce_bucket_size * element_bytes(plan)


def gathered_weights(plan: Plan, model: ModelShape) -> float:
    """Whole weights that stage 3 has at hand at most: those in use, kept for reuse, or prefetched.

    No limit splits a parameter, so the largest is a floor.
    """
    if stage(plan) < 3:
        return 0.0
    kept = plan.zero.max_live_parameters + plan.zero.prefetch_bucket_size
    return element_bytes(plan) * max(model.largest_parameter, min(kept, model.parameters))


def activations(plan: Plan, model: ModelShape) -> float:
    """What the forward pass leaves for the backward pass, logits included.

    The first stage of a pipeline is ahead by a micro-batch for each stage: it keeps as much as without one.
    """
    block, checkpoint = block_activations(plan, model), block_input(plan, model)
    every = plan.checkpoint_every
    layers = model.layers * min(plan.pipeline, plan.grad_accum) // plan.pipeline
    recomputed = math.ceil(layers / every) if every else 0
    kept = recomputed * checkpoint + (layers - recomputed) * block
    at_work = block if recomputed else 0  # one block at a time is computed again
    return kept + at_work + logits(plan, model)


def block_input(plan: Plan, model: ModelShape) -> float:
    return plan.micro_batch * plan.seq_len * model.hidden * element_bytes(plan)


def block_activations(plan: Plan, model: ModelShape) -> float:
    """Of one transformer block without recomputation.

    gpt2: 34 s b h in half precision (Korthikanti et al. 2022, arXiv 2205.05198, table 2, without the matrix
    of scores, 5 a s s b, which only eager attention keeps). llama: its tensors counted one by one, 12 + 4 g +
    8 f/h, and 16 for two norms in fp32; g is kv_heads/heads, f the feed-forward width. Tensor ranks share
    what lies between the first and the last matrix of attention, and of the feed-forward layer.
    """
    wide = element_bytes(plan) / 2
    places = plan.micro_batch * plan.seq_len * model.hidden
    if model.family == "gpt2":
        a_place = (10 + 24 / plan.tensor) * wide
    else:
        shared = 4 + 4 * model.kv_heads / model.heads + 8 * model.ffn / model.hidden
        a_place = (8 + shared / plan.tensor) * wide + 16
    scores = 0.0
    if plan.attention is Attention.EAGER:
        scores = 5 * wide * model.heads / plan.tensor * plan.seq_len**2 * plan.micro_batch
    return a_place * places + scores


def logits(plan: Plan, model: ModelShape) -> float:
    """Once as computed, once in fp32 for the loss."""
    return plan.micro_batch * plan.seq_len * model.vocab * (element_bytes(plan) + 4)


def total(plan: Plan, model: ModelShape) -> float:
    """All of the above; context, collectives' buffers and fragmentation come on top."""
    gathered = gathered_weights(plan, model)
    return states(plan, model).total + buckets(plan) + gathered + activations(plan, model)
