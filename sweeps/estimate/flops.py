"""Count a model's floating-point operations and memory traffic. Pure.

`time/compute.py` turns these counts into seconds. A multiplication and an addition are two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract import Attention, ModelShape, Precision

ADDS = 2  # operations of a multiply-add


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTraffic:
    """Memory traffic and kernels of a transformer block besides its matrix products, in eager PyTorch.

    Traffic is in bytes read and written per token in 16-bit training, summed over single operations: an eager
    kernel leaves nothing in registers for the next one.
    """

    whole: float  # per unit of hidden width; every tensor rank has all of it
    split: float  # per unit of hidden width; tensor parallelism splits it
    ffn: float  # per unit of feed-forward width; tensor parallelism splits it
    operations: int  # kernels launched in the forward pass


# Counted in transformers 5's modeling_llama.py. An RMSNorm casts to fp32, squares, averages, scales, casts
# back and multiplies: 36 bytes, twice; two residual additions: 12. Rotating q and k: five operations each,
# 20 bytes; making attention's output contiguous: 4. SiLU and product: 10 bytes of feed-forward width.
LLAMA = BlockTraffic(whole=84, split=44, ffn=10, operations=56)
# modeling_gpt2.py: LayerNorm is one kernel, 4 bytes, twice; two residual additions: 12; splitting q, k and v
# and making them contiguous: 16. The tanh form of GELU is written out in eight operations: 40 bytes.
GPT2 = BlockTraffic(whole=20, split=16, ffn=40, operations=36)
TRAFFIC = {"gpt2": GPT2}  # other families count as LLAMA, since nearly all of them came after it

# Bytes per logit. Forward: transformers casts it to fp32 (2 read, 4 written), log-softmax reads it twice and
# writes it. Backward: softmax's derivative (8 read, 4 written), then the cast back (4 read, 2 written).
LOGIT_FORWARD_BYTES = 18
LOGIT_BACKWARD_BYTES = 18
# Bytes per score of eager attention: masked, cast to fp32, normalized, cast back; then the same backward.
SCORE_FORWARD_BYTES = 22
SCORE_BACKWARD_BYTES = 22


def flops_per_token(model: ModelShape, seq_len: int) -> float:
    """FLOPs of forward and backward pass: 6 P + 12 L h s (PaLM, appendix B: no causal discount).

    Recomputation is not included. P counts all parameters, embeddings included. Utilization (MFU) is defined
    by this number; the kernels execute a different one.
    """
    return 6.0 * model.parameters + 12.0 * model.layers * model.hidden * seq_len


def recomputed_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """The same count if every block's forward pass runs twice: 8 P + 16 L h s."""
    return flops_per_token(model, seq_len) * 4 / 3


def block_parameters(model: ModelShape) -> float:
    """Number of parameters of one transformer block."""
    return max(0.0, model.parameters - embedding_parameters(model)) / model.layers


def embedding_parameters(model: ModelShape) -> float:
    """Number of parameters of token embedding and head, and of learned positions if the family has them."""
    tables = 1 if model.tied_embeddings else 2
    positions = model.positions if model.family == "gpt2" else 0
    return (tables * model.vocab + positions) * model.hidden


def block_matmul_flops(model: ModelShape, tokens: int) -> float:
    """FLOPs of one block's linear layers, forward."""
    return ADDS * block_parameters(model) * tokens


def head_flops(model: ModelShape, tokens: int) -> float:
    """FLOPs of the product with the vocabulary matrix, forward."""
    return ADDS * model.vocab * model.hidden * tokens


def attention_flops(model: ModelShape, seq_len: int, tokens: int, attention: Attention) -> float:
    """FLOPs of one block's scores and their product with values, forward; fused kernels skip half."""
    whole = 2 * ADDS * model.hidden * seq_len * tokens
    return whole if attention is Attention.EAGER else whole / 2


def score_elements(model: ModelShape, seq_len: int, tokens: int, attention: Attention) -> float:
    """Number of attention scores that a block keeps; fused kernels keep none."""
    return float(model.heads * seq_len * tokens) if attention is Attention.EAGER else 0.0


def block_traffic_bytes(model: ModelShape, tokens: int, tensor: int, precision: Precision) -> float:
    """Bytes of a rank's memory traffic besides matrix products and attention, for one block, forward."""
    traffic = TRAFFIC.get(model.family, LLAMA)
    whole = traffic.whole * model.hidden
    split = (traffic.split * model.hidden + traffic.ffn * model.ffn) / tensor
    return (whole + split) * tokens * element_scale(precision)


def block_operations(model: ModelShape) -> int:
    """Number of kernels that one block launches, forward."""
    return TRAFFIC.get(model.family, LLAMA).operations


def element_scale(precision: Precision) -> float:
    """Size of an element relative to 16 bits."""
    return element_bytes(precision) / 2


def element_bytes(precision: Precision) -> int:
    return 4 if precision is Precision.FP32 else 2
