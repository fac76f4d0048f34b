"""The keys of `zero`, `offload`, `aio` and `ddp`: how states are sharded, stored and exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config import conditions as when
from sweeps.config.knob import DeepSpeedKey, Mark, knob


def _zero(name: str, stages: tuple[int, ...] = (0, 1, 2, 3), is_optional: bool = False) -> DeepSpeedKey:
    return DeepSpeedKey(path=f"zero_optimization.{name}", stages=stages, is_optional=is_optional)


def _zero3(name: str, is_optional: bool = False) -> DeepSpeedKey:
    return _zero(name, stages=(3,), is_optional=is_optional)


def _aio(name: str, field: str) -> DeepSpeedKey:
    return DeepSpeedKey(path=f"aio.{name}", plan=f"offload.aio.{field}")


@dataclass
class ZeroConfig:
    stage: int = knob(
        0,
        "what ZeRO shards: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights",
        low=0,
        high=3,
        marks=Mark.BY_HAND,
        deepspeed=_zero("stage"),
    )
    offload_optimizer: str = knob(
        "none",
        "keep the optimizer's states off the device, and update there",
        choices=("none", "cpu", "nvme"),
        marks=Mark.BY_HAND,
        active_when=when.ZERO,
    )
    offload_param: str = knob(
        "none",
        "stage 3: keep the weights off the device",
        choices=("none", "cpu", "nvme"),
        marks=Mark.BY_HAND,
        active_when=when.ZERO3,
    )
    reduce_bucket_size: float = knob(
        5e8,
        "gradients that one collective reduces",
        unit="elements",
        low=1,
        integral=True,
        grid="digits",
        active_when=when.BUCKETS,
        deepspeed=_zero("reduce_bucket_size"),
    )
    allgather_bucket_size: float = knob(
        5e8,
        "weights that one collective gathers; no effect on current torch",
        unit="elements",
        low=1,
        integral=True,
        active_when=when.NEVER,
        deepspeed=_zero("allgather_bucket_size"),
    )
    overlap_comm: bool = knob(
        False,
        "reduce gradients during the backward pass; needs a second bucket",
        active_when=when.OVERLAP,
        deepspeed=_zero("overlap_comm"),
    )
    contiguous_gradients: bool = knob(
        True,
        "copy gradients into one buffer as they are computed",
        active_when=when.CONTIGUOUS,
        deepspeed=_zero("contiguous_gradients"),
    )
    reduce_scatter: bool = knob(
        True,
        "each rank receives only its own share of the gradients",
        active_when=when.BUCKETS,
        deepspeed=_zero("reduce_scatter"),
    )
    use_multi_rank_bucket_allreduce: bool = knob(
        True,
        "stages 1 and 2: reduce the shares of all ranks in a bucket by one collective",
        active_when=when.MULTI_RANK,
        deepspeed=_zero("use_multi_rank_bucket_allreduce", stages=(1, 2)),
    )
    round_robin_gradients: bool = knob(
        False,
        "stages 1 and 2: assign gradients to ranks round-robin, not in contiguous runs",
        active_when=when.BUCKETS_OF_STAGES_1_2,
        deepspeed=_zero("round_robin_gradients", stages=(1, 2)),
    )
    prefetch_bucket_size: float = knob(
        5e7,
        "stage 3: most weights gathered ahead of their use",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
        active_when=when.ZERO3,
        deepspeed=_zero3("stage3_prefetch_bucket_size"),
    )
    param_persistence_threshold: float = knob(
        1e5,
        "stage 3: parameters smaller than this are never sharded",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
        active_when=when.ZERO3,
        deepspeed=_zero3("stage3_param_persistence_threshold"),
    )
    max_live_parameters: float = knob(
        1e9,
        "stage 3: most weights that stay gathered",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
        active_when=when.ZERO3,
        deepspeed=_zero3("stage3_max_live_parameters"),
    )
    max_reuse_distance: float = knob(
        1e9,
        "stage 3: weights needed again within this many elements stay gathered",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
        active_when=when.ZERO3,
        deepspeed=_zero3("stage3_max_reuse_distance"),
    )
    sub_group_size: float = knob(
        1e9,
        "stage 3: parameters that the optimizer updates at once",
        unit="elements",
        low=1,
        integral=True,
        grid="digits",
        active_when=when.ZERO3,
        deepspeed=_zero3("sub_group_size"),
    )
    hpz_partition_size: int = knob(
        1,
        "ZeRO++: number of ranks that shard a second copy of the weights among themselves; 1: no copy",
        unit="ranks",
        low=1,
        active_when=when.ZERO3,
        deepspeed=_zero3("zero_hpz_partition_size", is_optional=True),
    )
    quantized_weights: bool = knob(
        False,
        "ZeRO++: gather weights as 8-bit numbers",
        active_when=when.QUANTIZED_WEIGHTS,
        deepspeed=_zero3("zero_quantized_weights", is_optional=True),
    )
    quantized_gradients: bool = knob(
        False,
        "ZeRO++: reduce gradients as 4-bit numbers",
        active_when=when.QUANTIZED_GRADIENTS,
        deepspeed=_zero3("zero_quantized_gradients", is_optional=True),
    )


@dataclass
class OffloadConfig:
    ratio: float = knob(
        1.0,
        "stage 3: share of the optimizer's states that the CPU keeps and updates",
        above=0,
        high=1,
        grid="digits",
        active_when=when.RATIO,
    )
    pin_memory: bool = knob(True, "use page-locked host buffers", active_when=when.PINNED)
    max_in_cpu: float = knob(
        1e9,
        "weights on NVMe: how many of a rank's weights still stay in host memory",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
        active_when=when.NVME_PARAM,
    )
    buffer_count: int = knob(
        5, "weights on NVMe: number of buffers in host memory", low=1, active_when=when.NVME_PARAM
    )
    buffer_size: float = knob(
        1e8,
        "weights on NVMe: size of a buffer; a rank's share of the largest parameter must fit",
        unit="elements",
        low=1,
        integral=True,
        active_when=when.NVME_PARAM,
    )


@dataclass
class AioConfig:
    block_size: float = knob(
        1048576,
        "size of one read or write",
        unit="bytes",
        low=512,
        integral=True,
        grid="pow2",
        active_when=when.NVME,
        deepspeed=_aio("block_size", "block_size_bytes"),
    )
    queue_depth: int = knob(
        8,
        "most reads and writes under way at once",
        low=1,
        grid="pow2",
        active_when=when.NVME,
        deepspeed=_aio("queue_depth", "queue_depth"),
    )
    threads: int = knob(
        1,
        "threads that share a transfer",
        low=1,
        grid="pow2",
        active_when=when.NVME,
        deepspeed=_aio("intra_op_parallelism", "threads"),
    )
    single_submit: bool = knob(
        False,
        "hand requests over one by one",
        active_when=when.NVME,
        deepspeed=_aio("single_submit", "single_submit"),
    )
    overlap_events: bool = knob(
        True,
        "hand over the next requests while others are under way",
        active_when=when.NVME,
        deepspeed=_aio("overlap_events", "overlap_events"),
    )


@dataclass
class DdpConfig:
    bucket_cap_mb: int = knob(
        25, "gradients that one collective reduces", unit="MiB", low=1, grid="pow2", active_when=when.DDP
    )
    gradient_as_bucket_view: bool = knob(
        False, "keep gradients in the buckets: no copy, no second buffer", active_when=when.DDP
    )
