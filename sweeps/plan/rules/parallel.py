"""Rules on degrees that a model, an engine, a ZeRO stage or the nodes do not allow."""

from __future__ import annotations

import math

from sweeps.plan.rules.base import Draft, choices, divisors, rule
from sweeps.plan.rules.batch import degrees_divide_ranks, ranks_fit_the_cluster

SPLIT_FAMILIES = ("llama",)  # families whose matrices can be split among tensor ranks
CUT_FAMILIES = ("llama", "gpt2")  # families whose blocks can be split into pipeline stages


@rule(source="torch DistributedDataParallel copies the whole model to every rank")
def ddp_divides_no_model(draft: Draft) -> str | None:
    """Only DeepSpeed has these degrees: ddp is the baseline without them."""
    if draft.is_deepspeed or draft.config.tensor * draft.config.pipeline == 1:
        return None
    asked = f"tensor={draft.config.tensor} and pipeline={draft.config.pipeline}"
    return f"engine=ddp cannot split a model, but {asked}; engine=deepspeed can"


# ---------------------------------------------------------------- tensor


@rule(source="seen: AssertionError: AutoTP not supported for model (deepspeed/module_inject/auto_tp.py)")
def tensor_parallel_knows_the_family(draft: Draft) -> str | None:
    """DeepSpeed refuses GPT-2, whose query, key and value are one matrix; other families are untested."""
    if draft.tensor == 1 or draft.model.family in SPLIT_FAMILIES:
        return None
    return (
        f"tensor={draft.tensor}: matrices of {draft.model.name}, a {draft.model.family} model, cannot be "
        f"split, only those of {choices([*SPLIT_FAMILIES])} models; tensor may be 1"
    )


@rule(source="seen: 1 key and value head on 2 ranks hangs; any width: deepspeed/module_inject/tp_shard.py")
def tensor_ranks_share_evenly(draft: Draft) -> str | None:
    """DeepSpeed silently splits widths unevenly if they do not divide; the ranks then disagree on shapes."""
    model = draft.model
    widths = {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "vocab": model.vocab,
    }
    odd = [f"{name}={width}" for name, width in widths.items() if width % draft.tensor]
    if not odd or model.family not in SPLIT_FAMILIES:  # another rule reports other families
        return None
    legal = divisors(math.gcd(draft.ranks, *widths.values()))
    return (
        f"tensor={draft.tensor} does not divide {', '.join(odd)} of {model.name}; tensor may be "
        f"{choices(legal)}"
    )


@rule(source="seen: norm 1.63 instead of 2.13; deepspeed/runtime/fp16/unfused_optimizer.py adds no parts up")
def tensor_parallel_clips_in_half_precision_with_zero(draft: Draft) -> str | None:
    """At stage 0 the norm lacks the parts of all tensor ranks but the first, so it clips too little."""
    config = draft.config
    if draft.tensor == 1 or draft.pipeline > 1 or draft.stage > 0:
        return None
    if draft.precision == "fp32" or config.gradient_clipping == 0:
        return None
    return (
        f"tensor={draft.tensor} with zero.stage=0, precision={draft.precision} and gradient_clipping="
        f"{config.gradient_clipping:g} clips by only a part of the norm; zero.stage may be 1, 2 or 3, or "
        "precision fp32, or gradient_clipping 0"
    )


@rule(source="never tried together: DeepSpeed's AutoTP was checked with plain ZeRO-3 only")
def tensor_parallel_at_stage_3_is_plain(draft: Draft) -> str | None:
    """Offload and ZeRO++ move shards of matrices that AutoTP has already split."""
    zero = draft.config.zero
    if draft.tensor == 1 or draft.stage < 3:
        return None
    extras = {
        "zero.hpz_partition_size": zero.hpz_partition_size if zero.hpz_partition_size > 1 else None,
        "zero.quantized_weights": "true" if zero.quantized_weights else None,
        "zero.quantized_gradients": "true" if zero.quantized_gradients else None,
        "zero.offload_optimizer": zero.offload_optimizer if zero.offload_optimizer != "none" else None,
        "zero.offload_param": zero.offload_param if zero.offload_param != "none" else None,
    }
    asked = [f"{key}={value}" for key, value in extras.items() if value is not None]
    if not asked:
        return None
    return (
        f"tensor={draft.tensor} with zero.stage=3 and {', '.join(asked)} is untested; leave "
        f"{'it' if len(asked) == 1 else 'them'} out, or tensor may be 1"
    )


@rule(source="four all-reduces per block and micro-batch (Shoeybi et al. 2019, arXiv 1909.08053, section 3)")
def a_tensor_group_stays_within_a_node(draft: Draft) -> str | None:
    """A group waits for every all-reduce, and links between nodes are many times slower than within one."""
    within = draft.machine.ranks_per_node
    if not _has_places(draft) or draft.tensor <= within or draft.config.tensor_across_nodes:
        return None
    return (
        f"tensor={draft.tensor} is more than the {within} ranks of a node; tensor may be at most {within}, "
        "with pipeline for the rest, or set tensor_across_nodes=true"
    )


@rule(source="neighbours share matrices: ranks are counted node by node, tensor ranks first")
def tensor_groups_fill_nodes(draft: Draft) -> str | None:
    """If some groups lie within a node and others across two, the slowest ones set the pace."""
    within, tensor = draft.machine.ranks_per_node, draft.tensor
    if not _has_places(draft) or draft.ranks <= within:
        return None
    if max(tensor, within) % min(tensor, within) == 0:
        return None
    return (
        f"tensor={tensor} does not divide the {within} ranks of a node: some groups would span two nodes; "
        f"tensor may be {choices(divisors(math.gcd(draft.ranks, within)))}"
    )


# ---------------------------------------------------------------- pipeline


@rule(source="train_entry/model/stages.py knows the parts of these families")
def a_pipeline_knows_the_family(draft: Draft) -> str | None:
    """A stage is a model without the parts of the other stages, so all parts must be known by name."""
    if draft.pipeline == 1 or draft.model.family in CUT_FAMILIES:
        return None
    return (
        f"pipeline={draft.pipeline}: {draft.model.name}, a {draft.model.family} model, cannot be cut into "
        f"stages, only {choices([*CUT_FAMILIES])} models can; pipeline may be 1"
    )


@rule(source="the slowest stage sets the pace of all; Plan.blocks gives each as many blocks")
def stages_have_equally_many_blocks(draft: Draft) -> str | None:
    """At every micro-batch, shorter stages would wait for the longest."""
    layers = draft.model.layers
    if layers % draft.pipeline == 0:
        return None
    return (
        f"pipeline={draft.pipeline} does not divide the {layers} blocks of {draft.model.name}; "
        f"pipeline may be {choices(divisors(math.gcd(layers, draft.ranks)))}"
    )


@rule(source="deepspeed/runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism")
def a_pipeline_shards_the_optimizer_at_most(draft: Draft) -> str | None:
    """ZeRO-2 and ZeRO-3 reduce gradients at every micro-batch, and a pipeline has several in flight."""
    if draft.pipeline == 1 or draft.stage < 2:
        return None
    return (
        f"pipeline={draft.pipeline} with zero.stage={draft.stage}: DeepSpeed refuses it; zero.stage may be 0 "
        "or 1, or use tensor instead of pipeline"
    )


@rule(source="never checked on GPUs; deepspeed/runtime/pipe/engine.py, _exec_reduce_grads, goes past offload")
def a_pipeline_offloads_nothing(draft: Draft) -> str | None:
    """A pipeline reduces gradients itself, bypassing the code of ZeRO-Offload."""
    zero = draft.config.zero
    asked = [
        f"zero.{name}={getattr(zero, name)}"
        for name in ("offload_optimizer", "offload_param")
        if getattr(zero, name) != "none"
    ]
    if draft.pipeline == 1 or not asked:
        return None
    return (
        f"pipeline={draft.pipeline} with {' and '.join(asked)}: a pipeline cannot offload; "
        "pipeline may be 1, or offload none"
    )


@rule(source="seen: norm 1.92 instead of 2.03; deepspeed/runtime/pipe/engine.py adds up an empty weight.grad")
def tied_embeddings_add_up_across_stages(draft: Draft) -> str | None:
    """If ZeRO-1 accumulates in fp32, the two copies of the embedding never add up their gradients."""
    config, precision = draft.config, draft.precision
    if draft.pipeline == 1 or not draft.model.tied_embeddings or draft.stage != 1:
        return None
    is_wide = config.grad_accum_dtype == "fp32" and precision != "fp32"
    is_bf16_optimizer = precision == "bf16" and config.zero.offload_optimizer == "none"
    if not is_wide or is_bf16_optimizer:
        return None
    return (
        f"pipeline={draft.pipeline} with tied embeddings, precision={precision} and grad_accum_dtype=fp32: "
        "DeepSpeed never adds up the gradients of the two copies; grad_accum_dtype may be auto, or "
        "model.tied_embeddings false"
    )


# ---------------------------------------------------------------- both


@rule(source="never tried: all-reduces within compiled stages")
def a_hybrid_is_not_compiled(draft: Draft) -> str | None:
    """Each degree alone compiles; both together are untested."""
    if draft.tensor == 1 or draft.pipeline == 1 or not draft.config.compile:
        return None
    return (
        f"compile=true with tensor={draft.tensor} and pipeline={draft.pipeline} is untested; "
        "compile may be false, or one of the degrees 1"
    )


def _has_places(draft: Draft) -> bool:
    """True if every rank has a place on a node and in a group."""
    return not ranks_fit_the_cluster(draft) and not degrees_divide_ranks(draft)


RULES = (
    ddp_divides_no_model,
    tensor_parallel_knows_the_family,
    tensor_ranks_share_evenly,
    tensor_parallel_clips_in_half_precision_with_zero,
    tensor_parallel_at_stage_3_is_plain,
    a_tensor_group_stays_within_a_node,
    tensor_groups_fill_nodes,
    a_pipeline_knows_the_family,
    stages_have_equally_many_blocks,
    a_pipeline_shards_the_optimizer_at_most,
    a_pipeline_offloads_nothing,
    tied_embeddings_add_up_across_stages,
    a_hybrid_is_not_compiled,
)
