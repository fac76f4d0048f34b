"""What the forward and backward pass of one micro-batch take: on the device, and on the host. Pure.

On a GPU the host only queues kernels, and both go on side by side. For small micro-batches Python is the
slower of the two: what then counts is the number of operations, whatever their size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweeps.estimate import flops
from sweeps.estimate.hardware import Hardware
from train_entry.contract import Engine, ModelShape, Plan, Precision

# Of the data sheet's FLOP/s. The best matrix product reaches 80% on an H100 or H200 (794 of 989 TFLOP/s,
# "maximum achievable matmul FLOPS" of ml-engineering); in training shapes vary and the card is hot.
MATMUL_SHARE = 0.66
NARROW = 64  # a product this wide reaches half of that: a tile of tensor cores is 64 to 128 wide
# FlashAttention-2, which torch's SDPA is: 230 of 312 TFLOP/s on an A100, 350 of 989 on an H100
# (FlashAttention-3 paper, abstract); its backward pass has 2.5 times the operations at four fifths the speed.
ATTENTION_SHARE = 0.6
ATTENTION_FLOPS_PER_S = 350e12
ATTENTION_BACKWARD = 2.5 / 0.8
MEMORY_SHARE = 0.8  # of the data sheet, for element-wise kernels; a plain copy reaches about 0.9
KERNEL_S = 4e-6  # a kernel's ramp-up and tail on the device, however small it is
BACKWARD = 2  # kernels, and bytes of element-wise ones, of a backward pass over its forward one
# torch.compile fuses element-wise chains: read once, written once. Matrix products and attention stay.
FUSED_SHARE = 0.35
# Under autocast the residual stream is fp32, and every linear layer casts its input.
AUTOCAST = 1.3
# ... and its weights: read 4, write 2 bytes forward; gradients cast back and added up, 2 + 4 + 8 backward.
AUTOCAST_FORWARD_BYTES = 6
AUTOCAST_BACKWARD_BYTES = 14
ACCUMULATE_BYTES = 6  # .grad += gradient in 16 bits
# ZeRO-2 and 3 copy gradients into a bucket, average it, and add it to the rank's part.
BUCKET_BYTES = 14

# Python, the dispatcher and the driver, an operation: 31 to 41 ms for the 24 blocks of llama_1b3 (two H200s,
# micro-batch 1, where the device waits). Other hosts are half to twice as fast.
OPERATION_S = 25e-6
BACKWARD_HOST = 1.5  # over forward: autograd launches twice as many, from C++
COMPILED_HOST = 0.35  # what is left of it under torch.compile
# torch.utils.checkpoint saves and restores states of random number generators and autocast: 2.0 ms a block
# forward instead of 1.4, and as much again when it recomputes (measured as above).
CHECKPOINT_HOST_S = 0.6e-3
AUTOCAST_HOST = 1.15  # casts are operations too
OUTER_BLOCKS = 2  # embedding, last norm, head, loss, and the engine's own calls: as many as two blocks
# AutoTP: two all-reduces a block, each through DeepSpeed's wrapper and an autograd function of its own.
REDUCED_HOST_S = 0.7e-3
# ZeRO's Python, a block of seven linear layers and two norms, measured as above. Stages 2 and 3 handle each
# gradient in a hook; stage 1 does so in a step's last micro-batch only. Stage 3 also fetches and releases in
# hooks before and after each module.
BUCKET_HOST_S = 1.8e-3
GATHER_HOST_S = 6.0e-3  # forward, and as much backward
GATHER_AGAIN_HOST = 0.5  # of it, to recompute: what is gathered then is there for the backward pass
GATHER_PEERS_HOST = 1.25  # with real peers: collectives are queued too


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Seconds for one micro-batch on the rank that has most to do."""

    forward_s: float
    backward_s: float
    recompute_s: float
    launch_s: float  # the host's part: model and autograd
    hooks_s: float  # the host's part: stage 3's Python


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
    """Logits and loss; AutoTP leaves them whole on every rank."""
    tokens = plan.micro_batch * plan.seq_len
    logit_bytes = flops.LOGIT_FORWARD_BYTES if factor == 1 else flops.LOGIT_BACKWARD_BYTES
    traffic = tokens * model.vocab * logit_bytes * _fused(plan)
    return factor * flops.head_flops(model, tokens) / _matmul_rate(plan, model, hardware) + traffic / (
        hardware.memory_bytes_per_s * MEMORY_SHARE
    )


def _weight_traffic_s(plan: Plan, model: ModelShape, hardware: Hardware) -> tuple[float, float]:
    """Casting weights forward; adding gradients up backward."""
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
    """Of one block and micro-batch, on average over a step."""
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
    """Stage 3's hooks break the graph around every module: nothing is left to fuse (llama_160m on two H200s:
    65.5 thousand tokens/s as written, 63.3 compiled).
    """
    return plan.compile and plan.zero.stage != 3


def _fused(plan: Plan) -> float:
    return FUSED_SHARE if _compiles(plan) else 1.0


def _cast(plan: Plan) -> float:
    return AUTOCAST if plan.engine is Engine.DDP and plan.precision is not Precision.FP32 else 1.0
