"""How much there is to compute: floating-point operations of a model, and bytes that pass its memory. Pure.

Counts only; what they take is in `passes`. A multiplication and an addition are two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract import Attention, ModelShape, Precision

ADDS = 2  # operations of a multiply-add


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTraffic:
    """What a transformers block does beside its matrix products, in eager PyTorch.

    Bytes that are read and written a token in 16-bit training, each operation's own: eager kernels leave
    nothing in registers for the next.
    """

    whole: float  # a unit of hidden width; under tensor parallelism every rank does all of it
    split: float  # a unit of hidden width; tensor parallelism splits it
    ffn: float  # a unit of feed-forward width; split too
    operations: int  # kernels launched, forward


# Counted in transformers 5's modeling_llama.py. An RMSNorm casts to fp32, squares, averages, scales, casts
# back and multiplies: 36 bytes, twice; two residual additions, 12. Rotating q and k: five operations each,
# 20 bytes; attention's output is made contiguous, 4. SiLU and product, 10 bytes of feed-forward width.
LLAMA = BlockTraffic(whole=84, split=44, ffn=10, operations=56)
# modeling_gpt2.py: LayerNorm is one kernel, 4 bytes, twice; two residual additions, 12; q, k and v are split
# and made contiguous, 16. The tanh form of GELU is written out in eight operations, 40 bytes.
GPT2 = BlockTraffic(whole=20, split=16, ffn=40, operations=36)
TRAFFIC = {"gpt2": GPT2}  # all others: LLAMA, since nearly all came after it

# A logit, forward: transformers casts it to fp32 (2 read, 4 written), log-softmax reads it twice and writes
# it. Backward: softmax's derivative (8 read, 4 written), cast back (4 and 2).
LOGIT_FORWARD_BYTES = 18
LOGIT_BACKWARD_BYTES = 18
# Attention written out: the score is masked, cast to fp32, normalized and cast back, then as much in reverse.
SCORE_FORWARD_BYTES = 22
SCORE_BACKWARD_BYTES = 22


def flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Forward and backward, without recomputation: 6 P + 12 L h s (PaLM, appendix B: no causal discount).

    P is all parameters, embeddings included. What utilization (MFU) is made of, not what a kernel does.
    """
    return 6.0 * model.parameters + 12.0 * model.layers * model.hidden * seq_len


def recomputed_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """The same where every block's forward pass runs twice: 8 P + 16 L h s."""
    return flops_per_token(model, seq_len) * 4 / 3


def block_parameters(model: ModelShape) -> float:
    """Parameters of one transformer block."""
    return max(0.0, model.parameters - embedding_parameters(model)) / model.layers


def embedding_parameters(model: ModelShape) -> float:
    """Token embedding and head, and learned positions where the family has them."""
    tables = 1 if model.tied_embeddings else 2
    positions = model.positions if model.family == "gpt2" else 0
    return (tables * model.vocab + positions) * model.hidden


def block_matmul_flops(model: ModelShape, tokens: int) -> float:
    """Of one block's linear layers, forward."""
    return ADDS * block_parameters(model) * tokens


def head_flops(model: ModelShape, tokens: int) -> float:
    """Of the product with the vocabulary, forward."""
    return ADDS * model.vocab * model.hidden * tokens


def attention_flops(model: ModelShape, seq_len: int, tokens: int, attention: Attention) -> float:
    """Of scores and their product with values, one block, forward. Fused kernels skip the causal half."""
    whole = 2 * ADDS * model.hidden * seq_len * tokens
    return whole if attention is Attention.EAGER else whole / 2


def score_elements(model: ModelShape, seq_len: int, tokens: int, attention: Attention) -> float:
    """Elements of the matrix of scores that a block keeps; fused kernels have none."""
    return float(model.heads * seq_len * tokens) if attention is Attention.EAGER else 0.0


def block_traffic_bytes(model: ModelShape, tokens: int, tensor: int, precision: Precision) -> float:
    """Bytes that pass a rank's memory beside matrix products and attention, one block, forward."""
    traffic = TRAFFIC.get(model.family, LLAMA)
    whole = traffic.whole * model.hidden
    split = (traffic.split * model.hidden + traffic.ffn * model.ffn) / tensor
    return (whole + split) * tokens * element_scale(precision)


def block_operations(model: ModelShape) -> int:
    """Kernels that one block launches, forward."""
    return TRAFFIC.get(model.family, LLAMA).operations


def element_scale(precision: Precision) -> float:
    """Bytes of an element over those of 16 bits."""
    return element_bytes(precision) / 2


def element_bytes(precision: Precision) -> int:
    return 4 if precision is Precision.FP32 else 2
