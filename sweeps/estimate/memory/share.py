"""The part of a model that one rank holds, split by pipeline and tensor degree. Pure. Counts are elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sweeps.estimate.memory.allocator import Tensors
from train_entry.contract import ModelShape, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """A model's parameters by kind."""

    embedding: int  # one row per token; includes learned positions
    head: int  # 0: the embedding also serves as the head
    final_norm: int
    block: float  # of one transformer block
    block_norms: int  # those of `block` in norms, which no degree splits
    matrices: Tensors  # of one block
    is_gated: bool  # three feed-forward matrices (SwiGLU) and RMS norms written out; else two and LayerNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of a model that a rank of one pipeline stage holds, before ZeRO shards it."""

    stage: int
    blocks: int
    parameters: float
    block_parameters: float
    head_parameters: float  # of the output matrix; 0: not on this stage
    largest_parameter: float
    tensors: Tensors  # all tensors; what no matrix explains counts as one
    has_embedding: bool
    has_head: bool
    in_flight: int  # micro-batches whose activations it keeps at once


@lru_cache(maxsize=64)
def census(model: ModelShape) -> Census:
    """Count embeddings from the shape, and divide the remaining parameters among the blocks."""
    matrix = model.vocab * model.hidden
    positions = model.positions * model.hidden if model.family == "gpt2" else 0
    norm = model.hidden * (2 if model.family == "gpt2" else 1)
    head = 0 if model.tied_embeddings else matrix
    block = max(0, model.parameters - matrix - head - positions - norm) / max(1, model.layers)
    kv_width = model.hidden * model.kv_heads // model.heads
    feed_forward = block - 2 * model.hidden * (model.hidden + kv_width)
    is_gated = feed_forward > 2.5 * model.hidden * model.ffn
    return Census(
        embedding=matrix + positions,
        head=head,
        final_norm=norm,
        block=block,
        block_norms=2 * norm,
        matrices=_matrices(model, kv_width, is_gated),
        is_gated=is_gated,
    )


def _matrices(model: ModelShape, kv_width: int, is_gated: bool) -> Tensors:
    hidden = model.hidden
    if is_gated:
        return (2, hidden * hidden), (2, hidden * kv_width), (3, hidden * model.ffn)
    return (1, 3 * hidden * hidden), (1, hidden * hidden), (2, hidden * model.ffn)


def shares(plan: Plan, model: ModelShape) -> tuple[Share, ...]:
    """Return one share per pipeline stage."""
    return _shares(model, plan.tensor, plan.pipeline, min(plan.grad_accum, plan.pipeline))


@lru_cache(maxsize=256)
def _shares(model: ModelShape, tensor: int, pipeline: int, in_flight: int) -> tuple[Share, ...]:
    return tuple([_share(model, tensor, pipeline, stage, in_flight) for stage in range(pipeline)])


def _share(model: ModelShape, tensor: int, pipeline: int, stage: int, in_flight: int) -> Share:
    counted, last = census(model), pipeline - 1
    blocks = _blocks(model.layers, pipeline, stage)
    # DeepSpeed's AutoTP (module_inject/auto_tp.py) splits linear layers, the head among them, and leaves
    # embeddings and norms whole: 705.7M parameters per rank of a 1,345.4M model at tensor=2, as recorded. It
    # splits an embedding that is also the head by vocabulary (runtime/engine.py, vocab_parallel_lm_head). In
    # a pipeline only blocks are split (train_entry/model/split.py).
    block = counted.block_norms + (counted.block - counted.block_norms) / tensor
    has_embedding = stage == 0
    has_head = stage == last
    by_vocabulary = tensor if pipeline == 1 else 1
    embedding = counted.embedding / (by_vocabulary if model.tied_embeddings else 1)
    head = counted.head / by_vocabulary if has_head else 0.0
    copies = int(has_embedding) or int(has_head and model.tied_embeddings)  # the last stage has a copy
    whole = copies * embedding + has_head * counted.final_norm
    largest = max(
        model.hidden * model.ffn / tensor,
        embedding if copies else 0.0,
        head,
    )
    parameters = blocks * block + whole + head
    matrices = tuple([(blocks * each, size / tensor) for each, size in counted.matrices])
    known = (*matrices, (copies, float(embedding)), (int(head > 0), head))
    left = max(0.0, parameters - sum([each * size for each, size in known]))
    return Share(
        stage=stage,
        blocks=blocks,
        parameters=parameters,
        block_parameters=block,
        head_parameters=(head or embedding) if has_head else 0.0,
        largest_parameter=largest,
        tensors=(*known, (1, left)),
        has_embedding=has_embedding,
        has_head=has_head,
        # 1F1B (Narayanan et al. 2021, section 2.2): one for the stage itself and one for each that follows.
        in_flight=min(in_flight, pipeline - stage),
    )


def _blocks(layers: int, stages: int, stage: int) -> int:
    """Number of blocks of a stage: balanced; the first stages take one more if they do not divide."""
    each, left = divmod(layers, stages)
    return each + (stage < left)
