"""What the forward pass leaves for the backward pass, counted tensor by tensor. Pure.

Bytes are given per token and, where a tensor is as wide as the model, per unit of width. `wide` is the bytes
of an element in the forward pass: 4 in fp32, else 2. Sources: transformers' modeling_llama.py,
modeling_gpt2.py and activations.py for the operations; torch's derivatives.yaml for what each saves. A test
counts the same on real models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sweeps.estimate.memory.share import census
from train_entry.contract import Attention, Engine, ModelShape, Plan, Precision

FP32_BYTES = 4
# transformers' loss_utils.py, ForCausalLMLoss: logits.float(), then cross-entropy. In its backward pass three
# fp32 tensors of the logits' size exist at once: log-softmax's result, its gradient, and that of its input.
# The forward pass has less: the logits as computed, in fp32, and log-softmax's result.
LOGITS_BYTES = 12
# Compiled, log-softmax is computed again from the logits, in kernels that fuse it with what follows: logits
# and their gradient as computed, and one fp32 tensor. Together with compiled blocks (_llama) an assumption,
# which makes of 15.3 GiB the 10.1 that two H200s measured (llama_160m, bf16, micro-batch 16, ZeRO-2).
COMPILED_LOGITS_BYTES = 8
# Graphs that end within the model keep more: ddp's end at its buckets, stage 3's at its hooks. The same
# measurement: ddp 18.6 -> 13.2 GiB, ZeRO-3 16.4 -> 11.7.
COMPILED_IN_PIECES = 1.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Bytes of one micro-batch on one rank."""

    block: float  # kept by a transformer block that is not recomputed
    block_input: float  # kept by one that is
    backward: float  # a block's gradients while it is gone through backward, beyond what it kept
    outside: float  # the last norm, and the head's input
    logits: float  # while the loss is gone through backward
    hidden: float  # one tensor as wide as the model: a gradient, or what a stage sends to the next


def element_bytes(plan: Plan) -> int:
    """Of a number in the forward and backward pass's matrix products."""
    return 4 if plan.precision is Precision.FP32 else 2


def is_autocast(plan: Plan) -> bool:
    """ddp keeps weights and the residual stream in fp32 and casts for matrix products only."""
    return plan.engine is Engine.DDP and plan.precision is not Precision.FP32


def saved(plan: Plan, model: ModelShape) -> Saved:
    """What a forward pass of one micro-batch keeps."""
    wide, autocast = element_bytes(plan), is_autocast(plan)
    tokens = plan.micro_batch * plan.seq_len
    residual = FP32_BYTES if autocast else wide
    width = _block_width(model, wide, autocast, plan.tensor, plan.attention, plan.compile)
    if plan.compile and (plan.engine is Engine.DDP or plan.zero.stage == 3):
        width *= COMPILED_IN_PIECES
    scores = _scores(plan, model, wide)
    has_gate = census(model).is_gated
    # A tied head is split by vocabulary, and so is its loss; logits of another are gathered: see share.py.
    parts = plan.tensor if model.tied_embeddings and plan.pipeline == 1 else 1
    return Saved(
        block=tokens * width + scores,
        block_input=tokens * model.hidden * residual,
        # While the feed-forward part is gone through: the product's gradient and those of its two factors,
        # less the product, which is gone by then. A norm's, in fp32 beside the residual stream's, come later.
        backward=tokens * max(2 * wide * model.ffn / plan.tensor, (residual + FP32_BYTES) * model.hidden)
        + 1.5 * scores,
        outside=tokens * model.hidden * _outside(wide, autocast, has_gate),
        logits=tokens * model.vocab / parts * (COMPILED_LOGITS_BYTES if plan.compile else LOGITS_BYTES),
        hidden=tokens * model.hidden * residual,
    )


@lru_cache(maxsize=256)
def _block_width(
    model: ModelShape, wide: int, autocast: bool, tensor: int, attention: Attention, compiled: bool
) -> float:
    """Bytes a token that a block keeps, but for a matrix of scores."""
    if census(model).is_gated:
        norms, mlp = _llama(wide, autocast, compiled)
    else:
        norms, mlp = _gpt2(wide, autocast, compiled)
    # Queries and the result; keys and values, which written-out attention repeats for every head. The
    # kernels also keep the logarithm of each row's sum, in fp32.
    is_eager = attention is Attention.EAGER
    grouped = 1.0 if is_eager else model.kv_heads / model.heads
    attended = wide * (2 + 2 * grouped) * model.hidden + (0 if is_eager else FP32_BYTES * model.heads)
    return norms * model.hidden + (attended + mlp * model.ffn) / tensor


def _llama(wide: int, autocast: bool, compiled: bool) -> tuple[float, float]:
    """Bytes per unit of model width of two norms, and per unit of feed-forward width."""
    if compiled:  # both norms' inputs and results; gate and up, of which the rest is computed again
        return (2 * (FP32_BYTES + wide) if autocast else 4.0 * wide), 2.0 * wide
    # Gate, its SiLU, up, and their product.
    if autocast:
        # A norm's input and what it was scaled to, in fp32; its result, cast anew for q, k, v, gate and up.
        return 4.0 * FP32_BYTES + 5 * wide, 4.0 * wide
    if wide == FP32_BYTES:
        return 6.0 * FP32_BYTES, 4.0 * wide
    return 2.0 * (FP32_BYTES + 2 * wide), 4.0 * wide  # upcast input, what it was scaled to, result


def _gpt2(wide: int, autocast: bool, compiled: bool) -> tuple[float, float]:
    """As _llama, for LayerNorm and GELU written out (NewGELUActivation)."""
    norms = 2.0 * (FP32_BYTES + wide) if autocast else 4.0 * wide  # input and result
    if compiled:
        return norms, 2.0 * wide
    # Input, half of it, tanh, one more than that, product. Under autocast the power is fp32, and what
    # follows.
    return norms, (3.0 * FP32_BYTES + 2 * wide if autocast else 5.0 * wide)


def _scores(plan: Plan, model: ModelShape, wide: int) -> float:
    """Attention written out keeps its probabilities: llama's softmax is fp32, gpt2's as computed."""
    if plan.attention is not Attention.EAGER:
        return 0.0
    is_fp32 = wide == FP32_BYTES
    has_fp32_softmax = census(model).is_gated or is_autocast(plan)
    each = FP32_BYTES if is_fp32 else wide + (FP32_BYTES if has_fp32_softmax else 0)
    return each * plan.micro_batch * model.heads * plan.seq_len**2 / plan.tensor


def _outside(wide: int, autocast: bool, has_gate: bool) -> float:
    """Per unit of width: the last norm and its result."""
    if not has_gate:
        return FP32_BYTES + wide if autocast else 2.0 * wide
    if autocast:
        return 2.0 * FP32_BYTES + wide
    return 3.0 * FP32_BYTES if wide == FP32_BYTES else FP32_BYTES + 2.0 * wide
