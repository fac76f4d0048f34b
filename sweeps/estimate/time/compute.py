"""Estimate the forward and backward pass of one micro-batch: time on the device, time on the host. Pure.

On a GPU the host only queues kernels, and both work at the same time. With small micro-batches Python is the
slower of the two; then the number of operations decides, whatever their size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweeps.estimate import flops
from sweeps.estimate.hardware import Hardware
from train_entry.contract import Engine, ModelShape, Plan, Precision

# Share of the data sheet's FLOP/s that matrix products reach. The best one reaches 80% on an H100 or H200
# (794 of 989 TFLOP/s, "maximum achievable matmul FLOPS" of ml-engineering); in training shapes vary and the
# GPU is hot.
MATMUL_SHARE = 0.66
NARROW = 64  # a product of this width reaches half of that: a tile of tensor cores is 64 to 128 wide
# FlashAttention-2, which torch's SDPA uses: 230 of 312 TFLOP/s on an A100, 350 of 989 on an H100
# (FlashAttention-3 paper, abstract); its backward pass has 2.5 times the operations at four fifths the speed.
ATTENTION_SHARE = 0.6
ATTENTION_FLOPS_PER_S = 350e12
ATTENTION_BACKWARD = 2.5 / 0.8
MEMORY_SHARE = 0.8  # of the data sheet's rate, for element-wise kernels; a plain copy reaches about 0.9
KERNEL_S = 4e-6  # a kernel's ramp-up and tail on the device, however small it is
BACKWARD = 2  # backward over forward: matrix products, element-wise traffic, kernels
# torch.compile fuses element-wise chains: read once, written once. Matrix products and attention stay.
FUSED_SHARE = 0.35
# Under autocast the residual stream is fp32, and every linear layer casts its input.
AUTOCAST = 1.3
# It also casts weights: reads 4 bytes, writes 2. Backward, gradients are cast back and added up: 2 + 4 + 8.
AUTOCAST_FORWARD_BYTES = 6
AUTOCAST_BACKWARD_BYTES = 14
ACCUMULATE_BYTES = 6  # .grad += gradient in 16 bits
# ZeRO-2 and ZeRO-3 copy gradients into a bucket, average it, and add it to the rank's part.
BUCKET_BYTES = 14

# Host time per operation: Python, dispatcher and driver. The 24 blocks of llama_1b3 took 31 to 41 ms (two
# H200s, micro-batch 1, where the device waits for the host). Other hosts are half to twice as fast.
OPERATION_S = 25e-6
BACKWARD_HOST = 1.5  # backward over forward: autograd launches twice as many operations, but from C++
COMPILED_HOST = 0.35  # the share that is left under torch.compile
# torch.utils.checkpoint saves and restores the states of random number generators and autocast: a block's
# forward pass takes 2.0 ms instead of 1.4, and recomputation adds as much again (measured as above).
CHECKPOINT_HOST_S = 0.6e-3
AUTOCAST_HOST = 1.15  # autocast adds cast operations
OUTER_BLOCKS = 2  # embedding, last norm, head, loss and the engine's own calls cost as much as two blocks
# AutoTP: two all-reduces per block, each through DeepSpeed's wrapper and its own autograd function.
REDUCED_HOST_S = 0.7e-3
# ZeRO's Python per block (seven linear layers, two norms), measured as above. Stages 2 and 3 handle each
# gradient in a hook; stage 1 does so only in the last micro-batch of a step. Stage 3 also fetches and
# releases weights in hooks before and after each module.
BUCKET_HOST_S = 1.8e-3
GATHER_HOST_S = 6.0e-3  # forward, and as much again backward
GATHER_AGAIN_HOST = 0.5  # share of it for recomputation, whose weights are then there for the backward pass
GATHER_PEERS_HOST = 1.25  # factor with more than one data rank: collectives are queued too


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Seconds for one micro-batch on the rank that has the most to do."""

    forward_s: float
    backward_s: float
    recompute_s: float
    launch_s: float  # on the host: model and autograd
    hooks_s: float  # on the host: stage 3's Python


def micro_batch_of(plan: Plan, model: ModelShape, hardware: Hardware) -> MicroBatch:
    block = _block_forward_s(plan, model, hardware)
    blocks = math.ceil(model.layers / plan.pipeline)
    recomputed = math.ceil(blocks / plan.checkpoint_every) if plan.checkpoint_every else 0
    weights_forward_s, weights_backward_s = _weight_traffic_s(plan, model, hardware)
    return MicroBatch(
        forward_s=blocks * block.forward_s + _head_s(plan, model, hardware, 1) + weights_forward_s,
        backward_s=blocks * block.backward_s + _head_s(plan, model, hardware, BACKWARD) + weights_backward_s,
        recompute_s=recomputed * block.forward_s,
        launch_s=_launch_s(plan, model, blocks, recomputed),
        hooks_s=_hooks_s(plan, blocks, recomputed),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    forward_s: float
    backward_s: float


def _block_forward_s(plan: Plan, model: ModelShape, hardware: Hardware) -> _Block:
    tokens = plan.micro_batch * plan.seq_len
    peak = hardware.flops_per_s(plan.precision)
    matmul_s = flops.block_matmul_flops(model, tokens) / plan.tensor / _matmul_rate(plan, model, hardware)
    attention = flops.attention_flops(model, plan.seq_len, tokens, plan.attention) / plan.tensor
    attention_s = attention / min(ATTENTION_SHARE * peak, ATTENTION_FLOPS_PER_S)
    rate = hardware.memory_bytes_per_s * MEMORY_SHARE / _fused(plan)
    elements_s = flops.block_traffic_bytes(model, tokens, plan.tensor, plan.precision) * _cast(plan) / rate
    scores = flops.score_elements(model, plan.seq_len, tokens, plan.attention) / plan.tensor
    kernels_s = 0.0 if hardware.is_cpu else flops.block_operations(model) * KERNEL_S * _fused(plan)
    return _Block(
        forward_s=matmul_s + attention_s + elements_s + scores * flops.SCORE_FORWARD_BYTES / rate + kernels_s,
        backward_s=BACKWARD * (matmul_s + elements_s + kernels_s)
        + ATTENTION_BACKWARD * attention_s
        + scores * flops.SCORE_BACKWARD_BYTES / rate,
    )


def _head_s(plan: Plan, model: ModelShape, hardware: Hardware, factor: int) -> float:
    """Seconds for logits and loss; AutoTP leaves them whole on every rank."""
    tokens = plan.micro_batch * plan.seq_len
    logit_bytes = flops.LOGIT_FORWARD_BYTES if factor == 1 else flops.LOGIT_BACKWARD_BYTES
    traffic = tokens * model.vocab * logit_bytes * _fused(plan)
    return factor * flops.head_flops(model, tokens) / _matmul_rate(plan, model, hardware) + traffic / (
        hardware.memory_bytes_per_s * MEMORY_SHARE
    )


def _weight_traffic_s(plan: Plan, model: ModelShape, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds for casting weights forward, and for adding up gradients backward."""
    rate = hardware.memory_bytes_per_s * MEMORY_SHARE
    held = model.parameters / (plan.tensor * plan.pipeline)
    scale = flops.element_scale(plan.precision)
    if plan.engine is Engine.DDP and plan.precision is not Precision.FP32:
        return held * AUTOCAST_FORWARD_BYTES / rate, held * AUTOCAST_BACKWARD_BYTES / rate
    if plan.zero.stage >= 2:
        return 0.0, held * BUCKET_BYTES * scale / rate
    return 0.0, held * ACCUMULATE_BYTES * scale / rate if plan.grad_accum > 1 else 0.0


def _launch_s(plan: Plan, model: ModelShape, blocks: int, recomputed: int) -> float:
    operations = flops.block_operations(model) * OPERATION_S * (COMPILED_HOST if _compiles(plan) else 1)
    if plan.engine is Engine.DDP and plan.precision is not Precision.FP32:
        operations *= AUTOCAST_HOST
    reduced = 2 * REDUCED_HOST_S if plan.tensor > 1 else 0.0
    forward = operations + reduced
    total = (blocks + OUTER_BLOCKS) * (operations * (1 + BACKWARD_HOST) + 2 * reduced)
    total += recomputed * (forward + 2 * CHECKPOINT_HOST_S)
    return total + blocks * _bucket_host_s(plan)


def _bucket_host_s(plan: Plan) -> float:
    """Seconds of the host for one block and micro-batch, averaged over a step."""
    if plan.zero.stage == 0:
        return 0.0
    return BUCKET_HOST_S if plan.zero.stage >= 2 else BUCKET_HOST_S / plan.grad_accum


def _hooks_s(plan: Plan, blocks: int, recomputed: int) -> float:
    if plan.zero.stage < 3:
        return 0.0
    peers = GATHER_PEERS_HOST if plan.data > 1 else 1.0
    return (2 * blocks + recomputed * GATHER_AGAIN_HOST) * GATHER_HOST_S * peers


def _matmul_rate(plan: Plan, model: ModelShape, hardware: Hardware) -> float:
    width = model.hidden / plan.tensor
    return hardware.flops_per_s(plan.precision) * MATMUL_SHARE * width / (width + NARROW)


def _compiles(plan: Plan) -> bool:
    """True if compiling has an effect.

    Stage 3's hooks break the graph around every module, so nothing is left to fuse (llama_160m on two H200s:
    65.5 thousand tokens/s eager, 63.3 compiled).
    """
    return plan.compile and plan.zero.stage != 3


def _fused(plan: Plan) -> float:
    return FUSED_SHARE if _compiles(plan) else 1.0


def _cast(plan: Plan) -> float:
    return AUTOCAST if plan.engine is Engine.DDP and plan.precision is not Precision.FP32 else 1.0
