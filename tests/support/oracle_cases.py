"""The plans that the oracle trains, by name, grouped by the plan whose training they must reproduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.train_entry.conftest import tiny_plan, zero_plan
from train_entry.contract import (
    DdpPlan,
    LossScalePlan,
    Offload,
    OffloadPlan,
    OptimizerPlan,
    Plan,
    Precision,
    Schedule,
    SchedulePlan,
)

Plans = Mapping[str, Plan]

SGD = OptimizerPlan(name="sgd", lr=0.1, weight_decay=0.1, momentum=0.9)
LINEAR = SchedulePlan(kind=Schedule.LINEAR, warmup_steps=2, warmup_from=1e-4, total_steps=8)
COSINE = SchedulePlan(kind=Schedule.COSINE, warmup_steps=2, warmup_from=1e-4, total_steps=8, end=5e-5)
ALL_ON_CPU = OffloadPlan(optimizer=Offload.CPU, param=Offload.CPU, pin_memory=False)
FP16: dict[str, Any] = {
    "precision": Precision.FP16,
    # Low enough that nothing overflows: after a skipped step a case would lag behind the others.
    "loss_scale": LossScalePlan(initial_power=8),
}


def zero(stage: int, settings: Mapping[str, Any] | None = None, **changes: Any) -> Plan:
    """Return a plan of a ZeRO stage. `settings` change its ZeRO section, `changes` the plan."""
    plan = zero_plan(stage, **changes)
    return dataclasses.replace(plan, zero=dataclasses.replace(plan.zero, **(settings or {})))


def optimizer_on_cpu(**changes: Any) -> OffloadPlan:
    return OffloadPlan(**{"optimizer": Offload.CPU, "pin_memory": False, **changes})


STRATEGIES: Plans = {"ddp": tiny_plan(), **{f"zero{stage}": zero(stage) for stage in range(4)}}

ONE_PROCESS: Plans = {
    "one process": tiny_plan(ranks=1),
    "one process, zero3": zero(3, ranks=1),
}

OFFLOADED: Plans = {
    "zero1, optimizer on cpu": zero(1, offload=optimizer_on_cpu()),
    "zero2, optimizer on cpu": zero(2, offload=optimizer_on_cpu()),
    "zero3, optimizer on cpu": zero(3, offload=optimizer_on_cpu()),
    "zero3, half of the optimizer on cpu": zero(3, offload=optimizer_on_cpu(ratio=0.5)),
    "zero3, parameters on cpu": zero(3, offload=optimizer_on_cpu(optimizer=Offload.NONE, param=Offload.CPU)),
    "zero3, all on cpu": zero(3, offload=ALL_ON_CPU),
    "zero3, all on cpu, pinned": zero(3, offload=dataclasses.replace(ALL_ON_CPU, pin_memory=True)),
}

RECOMPUTED: Plans = {
    f"{name}, every {every} blocks recomputed": dataclasses.replace(STRATEGIES[name], checkpoint_every=every)
    for name in ("ddp", "zero2", "zero3")
    for every in (1, 2)
}

ACCUMULATED: Plans = {
    f"{name}, micro-batch {size}": dataclasses.replace(STRATEGIES[name], micro_batch=size)
    for name in ("ddp", "zero2", "zero3")
    for size in (1, 4)
}

SETTINGS: Plans = {
    "ddp, small buckets": tiny_plan(ddp=DdpPlan(bucket_cap_mib=1)),
    "ddp, gradients are views": tiny_plan(ddp=DdpPlan(gradient_as_bucket_view=True)),
    "zero1, tiny buckets": zero(1, {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}),
    "zero1, overlapped": zero(1, {"overlap_comm": True}),
    "zero1, scattered gradients": zero(1, {"contiguous_gradients": False}),
    "zero1, round robin": zero(1, {"round_robin_gradients": True}),
    "zero2, tiny buckets": zero(2, {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}),
    "zero2, huge buckets": zero(2, {"reduce_bucket_size": 5 * 10**8, "allgather_bucket_size": 5 * 10**8}),
    "zero2, overlapped": zero(2, {"overlap_comm": True, "reduce_bucket_size": 3000}),
    "zero2, scattered gradients": zero(2, {"contiguous_gradients": False}),
    "zero2, all-reduce": zero(2, {"reduce_scatter": False}),
    "zero2, round robin": zero(2, {"round_robin_gradients": True, "overlap_comm": True}),
    "zero2, one rank a bucket": zero(2, {"use_multi_rank_bucket_allreduce": False}),
    "zero3, tiny buckets": zero(3, {"reduce_bucket_size": 3000}),
    "zero3, overlapped": zero(3, {"overlap_comm": True}),
    "zero3, scattered gradients": zero(3, {"contiguous_gradients": False}),
    "zero3, all-reduce": zero(3, {"reduce_scatter": False}),
    "zero3, no prefetch": zero(3, {"prefetch_bucket_size": 0}),
    "zero3, all persist": zero(3, {"param_persistence_threshold": 100_000, "prefetch_bucket_size": 1000}),
    "zero3, little alive": zero(3, {"max_live_parameters": 1000, "max_reuse_distance": 1000}),
    "zero3, small groups": zero(3, {"sub_group_size": 10_000}),
    "zero3, second copy": zero(3, {"hpz_partition_size": 2}),
}

COMPILED: Plans = {
    f"{name}, compiled": dataclasses.replace(STRATEGIES[name], compile=True) for name in ("ddp", "zero2")
}

WITH_SGD: Plans = {
    "ddp, sgd": tiny_plan(optimizer=SGD),
    **{f"zero{stage}, sgd": zero(stage, optimizer=SGD) for stage in (2, 3)},
}
WITH_LINEAR: Plans = {
    "ddp, linear": tiny_plan(schedule=LINEAR),
    "zero2, linear": zero(2, schedule=LINEAR),
}
WITH_COSINE: Plans = {
    "ddp, cosine": tiny_plan(schedule=COSINE),
    **{f"zero{stage}, cosine": zero(stage, schedule=COSINE) for stage in (2, 3)},
}
IN_BF16: Plans = {
    **{f"zero{stage}, bf16": zero(stage, precision=Precision.BF16) for stage in (1, 2, 3)},
    "zero2, bf16, fp32 gradients": zero(2, precision=Precision.BF16, grad_accum_dtype=Precision.FP32),
    "zero3, bf16, all on cpu": zero(3, precision=Precision.BF16, offload=ALL_ON_CPU),
}
IN_FP16: Plans = {f"zero{stage}, fp16": zero(stage, **FP16) for stage in (1, 2, 3)}
WITH_STATIC_SCALE: Plans = {
    "zero2, fp16, static scale": zero(2, precision=Precision.FP16, loss_scale=LossScalePlan(static=256.0)),
    "ddp, fp16, static scale": tiny_plan(precision=Precision.FP16, loss_scale=LossScalePlan(static=256.0)),
}
AUTOCAST: Plans = {
    "ddp, bf16": tiny_plan(precision=Precision.BF16),
    "ddp, fp16": tiny_plan(**FP16),
}


# A model with shards of more than 1 MiB: DeepSpeed leaves smaller ones in host memory (runtime/swap_tensor,
# MIN_AIO_BYTES).
WIDE: dict[str, Any] = {"layers": 2, "hidden": 256, "ffn": 2304}


def on_nvme(disk: Path) -> Plans:
    """Return plans with offload to NVMe. They must train as "ddp, wide" does."""
    everything = OffloadPlan(
        optimizer=Offload.NVME,
        param=Offload.NVME,
        pin_memory=False,
        max_in_cpu=0,
        buffer_size=1_000_000,
        nvme_path=str(disk),
    )
    optimizer = dataclasses.replace(everything, param=Offload.NONE)
    parameters = dataclasses.replace(everything, optimizer=Offload.CPU)
    # A parameter that stays gathered for its next use keeps its buffer, and there are only five.
    briefly = {"max_reuse_distance": 0}
    return {
        "zero3, all on nvme": zero(3, briefly, offload=everything),
        "zero3, optimizer on nvme": zero(3, offload=optimizer),
        "zero3, parameters on nvme, recomputed": zero(3, briefly, offload=parameters, checkpoint_every=1),
    }


# All these must train as ddp in fp32 does, however much memory and speed differ.
LIKE_DDP: Plans = {**STRATEGIES, **OFFLOADED, **RECOMPUTED, **ACCUMULATED, **SETTINGS}
TWO_RANKS: Plans = {
    **LIKE_DDP,
    **WITH_SGD,
    **WITH_LINEAR,
    **WITH_COSINE,
    **IN_BF16,
    **IN_FP16,
    **WITH_STATIC_SCALE,
    **AUTOCAST,
    **COMPILED,  # last: torch.compile builds C++ code, which takes long where it is not cached yet
}
