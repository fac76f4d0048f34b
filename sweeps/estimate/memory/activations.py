"""Count what the forward pass keeps for the backward pass, tensor by tensor. Pure.

Bytes are per token and, if a tensor is as wide as the model, per unit of width. `wide` is the bytes of an
element in the forward pass: 4 in fp32, else 2. Sources: transformers' modeling_llama.py,
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
# The forward pass holds less: the logits as computed, in fp32, and log-softmax's result.
LOGITS_BYTES = 12
# torch.compile computes log-softmax again from the logits, in kernels that fuse it with what follows. What
# stays is the logits and their gradient, as computed, and one fp32 tensor. This and the compiled blocks
# (_llama) are assumptions: they lower 15.3 GiB to the 10.1 measured on two H200s (llama_160m, bf16,
# micro-batch 16, ZeRO-2).
COMPILED_LOGITS_BYTES = 8
# Graphs that end within the model keep more: ddp's graphs end at its buckets, stage 3's at its hooks. By the
# same measurement: ddp 18.6 -> 13.2 GiB, ZeRO-3 16.4 -> 11.7.
COMPILED_IN_PIECES = 1.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Bytes that one micro-batch keeps on one rank."""

    block: float  # kept by a transformer block that is not recomputed
    block_input: float  # kept by a transformer block that is recomputed
    backward: float  # a block's gradients during its backward pass, beyond what it kept
    outside: float  # kept by the last norm, and the head's input
    logits: float  # during the backward pass of the loss
    hidden: float  # one tensor as wide as the model: a gradient, or what a stage sends to the next


def element_bytes(plan: Plan) -> int:
    """Bytes of an element in the matrix products of the forward and backward pass."""
    return 4 if plan.precision is Precision.FP32 else 2


def is_autocast(plan: Plan) -> bool:
    """True for ddp in half precision: weights and residual stream are fp32, cast for matrix products only."""
    return plan.engine is Engine.DDP and plan.precision is not Precision.FP32


def saved(plan: Plan, model: ModelShape) -> Saved:
    """Return the bytes that the forward pass of one micro-batch keeps."""
    wide, autocast = element_bytes(plan), is_autocast(plan)
    tokens = plan.micro_batch * plan.seq_len
    residual = FP32_BYTES if autocast else wide
    width = _block_width(model, wide, autocast, plan.tensor, plan.attention, plan.compile)
    if plan.compile and (plan.engine is Engine.DDP or plan.zero.stage == 3):
        width *= COMPILED_IN_PIECES
    scores = _scores(plan, model, wide)
    has_gate = census(model).is_gated
    # A tied head is split by vocabulary, and so is its loss; another head's logits are gathered (share.py).
    parts = plan.tensor if model.tied_embeddings and plan.pipeline == 1 else 1
    return Saved(
        block=tokens * width + scores,
        block_input=tokens * model.hidden * residual,
        # In the feed-forward part: the product's gradient and those of its two factors, less the product,
        # which is freed by then. The gradients of a norm, in fp32 beside the residual stream's, come later.
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
    """Bytes per token that a block keeps, without attention scores."""
    if census(model).is_gated:
        norms, mlp = _llama(wide, autocast, compiled)
    else:
        norms, mlp = _gpt2(wide, autocast, compiled)
    # Queries and the result; keys and values, which eager attention repeats for every head. Fused kernels
    # also keep the logarithm of each row's sum, in fp32.
    is_eager = attention is Attention.EAGER
    grouped = 1.0 if is_eager else model.kv_heads / model.heads
    attended = wide * (2 + 2 * grouped) * model.hidden + (0 if is_eager else FP32_BYTES * model.heads)
    return norms * model.hidden + (attended + mlp * model.ffn) / tensor


def _llama(wide: int, autocast: bool, compiled: bool) -> tuple[float, float]:
    """Return bytes of two norms per unit of model width, and of the MLP per unit of feed-forward width."""
    if compiled:  # both norms' inputs and results; gate and up, from which the rest is computed again
        return (2 * (FP32_BYTES + wide) if autocast else 4.0 * wide), 2.0 * wide
    # Gate, its SiLU, up, and their product.
    if autocast:
        # Each norm's input and normalized input, in fp32; the results, cast separately for q, k, v, gate, up.
        return 4.0 * FP32_BYTES + 5 * wide, 4.0 * wide
    if wide == FP32_BYTES:
        return 6.0 * FP32_BYTES, 4.0 * wide
    return 2.0 * (FP32_BYTES + 2 * wide), 4.0 * wide  # upcast input, normalized input, result


def _gpt2(wide: int, autocast: bool, compiled: bool) -> tuple[float, float]:
    """Return the same as _llama, for LayerNorm and GELU written out (NewGELUActivation)."""
    norms = 2.0 * (FP32_BYTES + wide) if autocast else 4.0 * wide  # input and result
    if compiled:
        return norms, 2.0 * wide
    # Input, half of it, tanh, one plus tanh, product. Under autocast the power and what follows are fp32.
    return norms, (3.0 * FP32_BYTES + 2 * wide if autocast else 5.0 * wide)


def _scores(plan: Plan, model: ModelShape, wide: int) -> float:
    """Bytes of the probabilities that eager attention keeps: llama's softmax is fp32, gpt2's as computed."""
    if plan.attention is not Attention.EAGER:
        return 0.0
    is_fp32 = wide == FP32_BYTES
    has_fp32_softmax = census(model).is_gated or is_autocast(plan)
    each = FP32_BYTES if is_fp32 else wide + (FP32_BYTES if has_fp32_softmax else 0)
    return each * plan.micro_batch * model.heads * plan.seq_len**2 / plan.tensor


def _outside(wide: int, autocast: bool, has_gate: bool) -> float:
    """Bytes of the last norm and its result, per unit of width."""
    if not has_gate:
        return FP32_BYTES + wide if autocast else 2.0 * wide
    if autocast:
        return 2.0 * FP32_BYTES + wide
    return 3.0 * FP32_BYTES if wide == FP32_BYTES else FP32_BYTES + 2.0 * wide
