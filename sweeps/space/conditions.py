"""Which knobs have an effect on a configuration, and which it does not read. Pure.

A knob without effect is no dimension there, and stands at its default in the plan: so two configurations
that would run the same job have the same plan, whatever they say of knobs that nothing reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sweeps.config.fields import FIELDS, default_of, value_at, with_value
from sweeps.config.schema import SweepConfig
from sweeps.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What decides whether a knob matters."""

    config: SweepConfig
    machine: Machine
    precision: str  # resolved: never auto

    @property
    def shards(self) -> bool:
        return self.config.engine == "deepspeed" and self.config.zero.stage > 0

    @property
    def stage(self) -> int:
        return self.config.zero.stage if self.config.engine == "deepspeed" else 0

    @property
    def nodes(self) -> int:
        """How many the ranks spread over."""
        return -(-(self.config.ranks or 1) // self.machine.ranks_per_node)

    @property
    def warms_up(self) -> bool:
        """DeepSpeed's schedules that decay take two steps at least."""
        lr = self.config.lr
        asked = int(lr.warmup) if lr.warmup.isdigit() else lr.base_warmup
        return asked > 0 or lr.schedule != "constant"

    @property
    def has_bf16_optimizer(self) -> bool:
        """DeepSpeed then leaves its ZeRO-1 optimizer for BF16_Optimizer, which reads no bucket settings."""
        wide = self.config.grad_accum_dtype == "fp32" and self.precision == "bf16"
        return self.stage == 1 and wide and self.config.zero.offload_optimizer == "none"

    @property
    def offloads(self) -> frozenset[str]:
        zero = self.config.zero
        param = zero.offload_param if self.stage == 3 else "none"
        return frozenset((zero.offload_optimizer, param)) - {"none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """When a knob matters; `text` completes "matters only with ..."."""

    text: str
    holds: Callable[[Setting], bool]


_DDP = Condition(text="engine=ddp", holds=lambda at: at.config.engine == "ddp")
_DEEPSPEED = Condition(text="engine=deepspeed", holds=lambda at: at.config.engine == "deepspeed")
_TENSOR = Condition(
    text="engine=deepspeed and tensor=2 or more",
    holds=lambda at: _DEEPSPEED.holds(at) and at.config.tensor > 1,
)
_ZERO = Condition(text="zero.stage=1, 2 or 3", holds=lambda at: at.shards)
_BUCKETS = Condition(
    text="zero.stage=1, 2 or 3, and not stage 1 that adds bf16 gradients up in fp32",
    holds=lambda at: at.shards and not at.has_bf16_optimizer,
)
_BUCKETS12 = Condition(
    text="zero.stage=1 or 2, and not stage 1 that adds bf16 gradients up in fp32",
    holds=lambda at: at.stage in (1, 2) and not at.has_bf16_optimizer,
)
# A pipeline has it off, with a warning: deepspeed/runtime/engine.py, _configure_zero_optimizer.
_OVERLAP = Condition(
    text="pipeline=1 and zero.stage=1, 2 or 3, and not stage 1 that adds bf16 gradients up in fp32",
    holds=lambda at: _BUCKETS.holds(at) and at.config.pipeline == 1,
)
_CONTIGUOUS = Condition(
    text="zero.stage=3, or 1 or 2 without optimizer offload, which always copies",
    holds=lambda at: _BUCKETS.holds(at) and (at.stage == 3 or at.config.zero.offload_optimizer == "none"),
)
_MULTI_RANK = Condition(
    text="zero.stage=1 or 2 and zero.reduce_scatter=true",
    holds=lambda at: _BUCKETS12.holds(at) and at.config.zero.reduce_scatter,
)
_ZERO3 = Condition(text="zero.stage=3", holds=lambda at: at.stage == 3)
_QUANTIZED_WEIGHTS = Condition(
    text="zero.stage=3 on GPUs", holds=lambda at: at.stage == 3 and at.machine.device == "cuda"
)
# Within a node DeepSpeed reduces as always: runtime/zero/stage3.py, where it asks for the number of nodes.
_QUANTIZED_GRADIENTS = Condition(
    text="zero.stage=3 on GPUs of several nodes",
    holds=lambda at: _QUANTIZED_WEIGHTS.holds(at) and at.nodes > 1,
)
# A CPU run has its device where offload would put things: no copy, nothing to pin, no share to split off.
_PINNED = Condition(
    text="something offloaded from GPUs",
    holds=lambda at: at.shards and bool(at.offloads) and at.machine.device == "cuda",
)
_RATIO = Condition(
    text="zero.stage=3 and zero.offload_optimizer=cpu, on GPUs",
    holds=lambda at: (
        at.stage == 3 and at.config.zero.offload_optimizer == "cpu" and at.machine.device == "cuda"
    ),
)
_NVME = Condition(text="something offloaded to nvme", holds=lambda at: at.shards and "nvme" in at.offloads)
_NVME_PARAM = Condition(
    text="zero.offload_param=nvme",
    holds=lambda at: at.stage == 3 and at.config.zero.offload_param == "nvme",
)
# Offloaded, AdamW is DeepSpeed's own; SGD stays torch's, on the CPU.
_TORCHS = Condition(
    text="the optimizer on the device, or optimizer=sgd",
    holds=lambda at: (
        not at.shards or at.config.zero.offload_optimizer == "none" or at.config.optimizer.name == "sgd"
    ),
)
_FP16 = Condition(text="precision=fp16", holds=lambda at: at.precision == "fp16")
_DYNAMIC = Condition(
    text="precision=fp16 and fp16.loss_scale=0",
    holds=lambda at: at.precision == "fp16" and at.config.fp16.loss_scale == 0,
)
_DYNAMIC_DEEPSPEED = Condition(
    text="engine=deepspeed, precision=fp16 and fp16.loss_scale=0",
    holds=lambda at: _DYNAMIC.holds(at) and at.config.engine == "deepspeed",
)
_ADAMW = Condition(text="optimizer=adamw", holds=lambda at: at.config.optimizer.name == "adamw")
_SGD = Condition(text="optimizer=sgd", holds=lambda at: at.config.optimizer.name == "sgd")
_SCALED_WARMUP = Condition(
    text="lr.warmup=steps or samples", holds=lambda at: at.config.lr.warmup in ("steps", "samples")
)
_WARMUP = Condition(text="a warm-up, or a schedule that decays, which has one", holds=lambda at: at.warms_up)
_DECAY = Condition(text="lr.schedule=linear or cosine", holds=lambda at: at.config.lr.schedule != "constant")
_COSINE = Condition(text="lr.schedule=cosine", holds=lambda at: at.config.lr.schedule == "cosine")
_GPU = Condition(text="GPUs", holds=lambda at: at.machine.device == "cuda")
# torch gathers a stage's weights in one call, and DeepSpeed passes it no size: runtime/utils.py,
# all_gather_into_tensor_dp_groups. The key is exported all the same, since DeepSpeed's file has it.
_NEVER = Condition(text="a torch without all_gather_into_tensor", holds=lambda at: False)

CONDITIONS: dict[str, Condition] = {
    "tensor": _DEEPSPEED,
    "pipeline": _DEEPSPEED,
    "tensor_across_nodes": _TENSOR,
    "zero.offload_optimizer": _ZERO,
    "zero.offload_param": _ZERO3,
    "zero.reduce_bucket_size": _BUCKETS,
    "zero.allgather_bucket_size": _NEVER,
    "zero.overlap_comm": _OVERLAP,
    "zero.contiguous_gradients": _CONTIGUOUS,
    "zero.reduce_scatter": _BUCKETS,
    "zero.use_multi_rank_bucket_allreduce": _MULTI_RANK,
    "zero.round_robin_gradients": _BUCKETS12,
    "zero.prefetch_bucket_size": _ZERO3,
    "zero.param_persistence_threshold": _ZERO3,
    "zero.max_live_parameters": _ZERO3,
    "zero.max_reuse_distance": _ZERO3,
    "zero.sub_group_size": _ZERO3,
    "zero.hpz_partition_size": _ZERO3,
    "zero.quantized_weights": _QUANTIZED_WEIGHTS,
    "zero.quantized_gradients": _QUANTIZED_GRADIENTS,
    "offload.ratio": _RATIO,
    "offload.pin_memory": _PINNED,
    "offload.max_in_cpu": _NVME_PARAM,
    "offload.buffer_count": _NVME_PARAM,
    "offload.buffer_size": _NVME_PARAM,
    "aio.block_size": _NVME,
    "aio.queue_depth": _NVME,
    "aio.threads": _NVME,
    "aio.single_submit": _NVME,
    "aio.overlap_events": _NVME,
    "ddp.bucket_cap_mb": _DDP,
    "ddp.gradient_as_bucket_view": _DDP,
    "fp16.loss_scale": _FP16,
    "fp16.initial_scale_power": _DYNAMIC,
    "fp16.loss_scale_window": _DYNAMIC,
    "fp16.hysteresis": _DYNAMIC_DEEPSPEED,
    "fp16.min_loss_scale": _DYNAMIC_DEEPSPEED,
    "grad_accum_dtype": _ZERO,
    "optimizer.betas": _ADAMW,
    "optimizer.eps": _ADAMW,
    "optimizer.momentum": _SGD,
    "optimizer.implementation": _TORCHS,
    "lr.base_warmup": _SCALED_WARMUP,
    "lr.warmup_from": _WARMUP,
    "lr.total_steps": _DECAY,
    "lr.end": _COSINE,
    "allocator.expandable_segments": _GPU,
}
# What the conditions read. A space settles these first, in this order: one may decide over a later one.
DECIDING = (
    "engine",
    "tensor",
    "pipeline",
    "zero.stage",
    "zero.offload_optimizer",
    "zero.offload_param",
    "ranks",
    "precision",
    "grad_accum_dtype",
    "zero.reduce_scatter",
    "fp16.loss_scale",
    "optimizer.name",
    "lr.warmup",
    "lr.base_warmup",
    "lr.schedule",
)
EXPORTED_ALL_THE_SAME = ("zero.allgather_bucket_size",)


def decision_rank(key: str) -> float:
    """When a space settles a knob: groups of conf/, then DECIDING in order; infinite: it decides nothing."""
    if key not in FIELDS:
        return 0
    return 1 + DECIDING.index(key) if key in DECIDING else math.inf


def matters(key: str, at: Setting) -> bool:
    """Whether a knob has an effect there."""
    condition = CONDITIONS.get(key)
    return condition is None or condition.holds(at)


def without_idle_knobs(at: Setting) -> SweepConfig:
    """The configuration with every knob that has no effect at its default."""
    config = at.config
    for key in CONDITIONS:
        is_kept = key in EXPORTED_ALL_THE_SAME or matters(key, at)
        if not is_kept and value_at(config, key) != default_of(key):  # a copy takes longer than a look
            config = with_value(config, key, default_of(key))
    return config
