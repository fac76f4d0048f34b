"""Rules on settings of ZeRO that an engine, a stage or a device does not support."""

from __future__ import annotations

from sweeps.plan.rules.base import Draft, choices, divisors, rule


@rule(source="torch DistributedDataParallel keeps whole replicas")
def ddp_shards_nothing(draft: Draft) -> str | None:
    """ddp keeps all states on every rank: it is the baseline without sharding."""
    asked = draft.config.zero.stage
    if draft.is_deepspeed or asked == 0:
        return None
    return f"engine=ddp cannot shard, but zero.stage={asked}; engine=deepspeed can"


@rule(source="deepspeed/runtime/zero/stage_1_and_2.py, __init__: multiple of nccl_start_alignment_factor")
def the_allgather_bucket_is_even(draft: Draft) -> str | None:
    """The size no longer has an effect, but DeepSpeed still checks it."""
    size = int(draft.config.zero.allgather_bucket_size)
    if draft.stage not in (1, 2) or size % 2 == 0:
        return None
    return (
        f"zero.allgather_bucket_size={size} is odd, but DeepSpeed requires an even number, such as {size + 1}"
    )


@rule(source="deepspeed/runtime/engine.py passes zero_hpz_partition_size to stage 3 only")
def a_second_shard_needs_stage_3(draft: Draft) -> str | None:
    """hpZ keeps a second copy of sharded weights, and only stage 3 shards weights."""
    size = draft.config.zero.hpz_partition_size
    if size == 1 or draft.stage == 3:
        return None
    return f"zero.hpz_partition_size={size} without sharded weights would be ignored; zero.stage may be 3"


@rule(source="deepspeed/utils/groups.py, _create_zero_param_parallel_group")
def second_shards_divide_the_ranks(draft: Draft) -> str | None:
    """Each group of hpz_partition_size ranks within a node holds all weights among its ranks."""
    size = draft.config.zero.hpz_partition_size
    within = min(draft.ranks, draft.machine.ranks_per_node)
    if size == 1 or draft.stage != 3:
        return None
    if within % size == 0:
        return None
    return (
        f"zero.hpz_partition_size={size} does not divide the {within} ranks of a node; "
        f"it may be {choices(divisors(within))}"
    )


@rule(source="deepspeed/runtime/engine.py passes zero_quantized_weights to stage 3 only")
def quantized_weights_need_stage_3(draft: Draft) -> str | None:
    """Only stage 3 gathers weights in the forward and backward pass."""
    if not draft.config.zero.quantized_weights or draft.stage == 3:
        return None
    return "zero.quantized_weights=true without sharded weights would be ignored; zero.stage may be 3"


@rule(source="deepspeed/runtime/zero/stage3.py, which alone reduces by quantized all-to-all")
def quantized_gradients_need_stage_3(draft: Draft) -> str | None:
    """ZeRO++ is an extension of stage 3."""
    if not draft.config.zero.quantized_gradients or draft.stage == 3:
        return None
    return "zero.quantized_gradients=true would be ignored without ZeRO-3; zero.stage may be 3"


@rule(source="seen: ValueError: This op had not been implemented on CPU backend (QuantizerBuilder)")
def quantizing_needs_gpus(draft: Draft) -> str | None:
    """The quantization kernels exist only in CUDA."""
    zero = draft.config.zero
    asked = [name for name in ("quantized_weights", "quantized_gradients") if getattr(zero, name)]
    if not asked or draft.machine.device != "cpu":
        return None
    return f"{' and '.join(f'zero.{name}=true' for name in asked)}: DeepSpeed quantizes on GPUs only"


@rule(source="deepspeed/runtime/zero/stage3.py: all-to-all reduction where there are several nodes")
def quantized_gradients_need_several_nodes(draft: Draft) -> str | None:
    """Within a node DeepSpeed reduces gradients as usual, whatever this setting says."""
    within = draft.machine.ranks_per_node
    if not draft.config.zero.quantized_gradients or draft.ranks > within:
        return None
    return (
        f"zero.quantized_gradients=true with {draft.ranks} ranks on one node would be ignored; "
        f"it needs more than {within} ranks"
    )


RULES = (
    ddp_shards_nothing,
    the_allgather_bucket_is_even,
    a_second_shard_needs_stage_3,
    second_shards_divide_the_ranks,
    quantized_weights_need_stage_3,
    quantized_gradients_need_stage_3,
    quantizing_needs_gpus,
    quantized_gradients_need_several_nodes,
)
