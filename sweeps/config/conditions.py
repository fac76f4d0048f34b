"""Conditions for a knob to have an effect, named by its declaration, and the values that decide them. Pure.

DeepSpeed ignores many settings in many plans. A knob without effect in a plan is no dimension there, and the
plan holds its default, so that two configurations that run the same job have the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def decides(key: str) -> Any:
    """Declare a field of Setting that holds the value of this key."""
    return dataclasses.field(metadata={"key": key})


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The values that decide whether a knob is active; a field may decide whether a later one is."""

    engine: str = decides("engine")
    tensor: int = decides("tensor")
    pipeline: int = decides("pipeline")
    zero_stage: int = decides("zero.stage")
    offload_optimizer: str = decides("zero.offload_optimizer")
    offload_param: str = decides("zero.offload_param")
    ranks: int | None = decides("ranks")
    precision: str = decides("precision")  # never auto
    grad_accum_dtype: str = decides("grad_accum_dtype")
    reduce_scatter: bool = decides("zero.reduce_scatter")
    loss_scale: float = decides("fp16.loss_scale")
    optimizer: str = decides("optimizer.name")
    warmup: str = decides("lr.warmup")
    base_warmup: int = decides("lr.base_warmup")
    schedule: str = decides("lr.schedule")
    device: str  # cuda or cpu
    ranks_per_node: int

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 for ddp, which has no ZeRO."""
        return self.zero_stage if self.engine == "deepspeed" else 0

    @property
    def is_sharded(self) -> bool:
        return self.stage > 0

    @property
    def nodes(self) -> int:
        """The number of nodes that the ranks fill."""
        return -(-(self.ranks or 1) // self.ranks_per_node)

    @property
    def warms_up(self) -> bool:
        """True if there is a warm-up. DeepSpeed's decaying schedules have one of at least two steps."""
        asked = int(self.warmup) if self.warmup.isdigit() else self.base_warmup
        return asked > 0 or self.schedule != "constant"

    @property
    def has_bf16_optimizer(self) -> bool:
        """True if DeepSpeed uses BF16_Optimizer for ZeRO-1; that optimizer reads no bucket settings."""
        is_wide = self.grad_accum_dtype == "fp32" and self.precision == "bf16"
        return self.stage == 1 and is_wide and self.offload_optimizer == "none"

    @property
    def offloads(self) -> frozenset[str]:
        """The kinds of device, besides the GPU, that hold states."""
        param = self.offload_param if self.stage == 3 else "none"
        return frozenset((self.offload_optimizer, param)) - {"none"}

    @property
    def offloads_from_gpus(self) -> bool:
        """True if states move off a GPU. A CPU run has them in host memory anyway: no pinning, no ratio."""
        return self.is_sharded and bool(self.offloads) and self.device == "cuda"


# Fields of a setting and their keys, in the order in which a space decides them.
DECIDING: dict[str, str] = {
    field.name: field.metadata["key"] for field in dataclasses.fields(Setting) if "key" in field.metadata
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition for a knob to be active; `text` completes "has an effect only with ..."."""

    text: str
    holds: Callable[[Setting], bool]


DDP = Condition(text="engine=ddp", holds=lambda at: at.engine == "ddp")
DEEPSPEED = Condition(text="engine=deepspeed", holds=lambda at: at.engine == "deepspeed")
TENSOR = Condition(
    text="engine=deepspeed and tensor=2 or more",
    holds=lambda at: at.engine == "deepspeed" and at.tensor > 1,
)
ZERO = Condition(text="zero.stage=1, 2 or 3", holds=lambda at: at.is_sharded)
BUCKETS = Condition(
    text="zero.stage=1, 2 or 3, except stage 1 with bf16 gradients accumulated in fp32",
    holds=lambda at: at.is_sharded and not at.has_bf16_optimizer,
)
BUCKETS_OF_STAGES_1_2 = Condition(
    text="zero.stage=1 or 2, except stage 1 with bf16 gradients accumulated in fp32",
    holds=lambda at: at.stage in (1, 2) and not at.has_bf16_optimizer,
)
# With a pipeline DeepSpeed turns it off, with a warning: runtime/engine.py, _configure_zero_optimizer.
OVERLAP = Condition(
    text="pipeline=1 and zero.stage=1, 2 or 3, except stage 1 with bf16 gradients accumulated in fp32",
    holds=lambda at: BUCKETS.holds(at) and at.pipeline == 1,
)
CONTIGUOUS = Condition(
    text="zero.stage=3, or stage 1 or 2 without optimizer offload, which always copies",
    holds=lambda at: BUCKETS.holds(at) and (at.stage == 3 or at.offload_optimizer == "none"),
)
MULTI_RANK = Condition(
    text="zero.stage=1 or 2 and zero.reduce_scatter=true",
    holds=lambda at: BUCKETS_OF_STAGES_1_2.holds(at) and at.reduce_scatter,
)
ZERO3 = Condition(text="zero.stage=3", holds=lambda at: at.stage == 3)
QUANTIZED_WEIGHTS = Condition(
    text="zero.stage=3 on GPUs", holds=lambda at: at.stage == 3 and at.device == "cuda"
)
# Within a node DeepSpeed ignores the setting: runtime/zero/stage3.py, where it asks for the number of nodes.
QUANTIZED_GRADIENTS = Condition(
    text="zero.stage=3 on GPUs of several nodes",
    holds=lambda at: QUANTIZED_WEIGHTS.holds(at) and at.nodes > 1,
)
PINNED = Condition(text="states offloaded from GPUs", holds=lambda at: at.offloads_from_gpus)
RATIO = Condition(
    text="zero.stage=3 and zero.offload_optimizer=cpu, on GPUs",
    holds=lambda at: at.stage == 3 and at.offload_optimizer == "cpu" and at.device == "cuda",
)
NVME = Condition(text="states offloaded to nvme", holds=lambda at: at.is_sharded and "nvme" in at.offloads)
NVME_PARAM = Condition(
    text="zero.offload_param=nvme", holds=lambda at: at.stage == 3 and at.offload_param == "nvme"
)
# When the optimizer is offloaded, AdamW is DeepSpeed's own; SGD stays torch's, on the CPU.
TORCH_OPTIMIZER = Condition(
    text="zero.offload_optimizer=none, or optimizer=sgd",
    holds=lambda at: not at.is_sharded or at.offload_optimizer == "none" or at.optimizer == "sgd",
)
FP16 = Condition(text="precision=fp16", holds=lambda at: at.precision == "fp16")
DYNAMIC_SCALE = Condition(
    text="precision=fp16 and fp16.loss_scale=0",
    holds=lambda at: at.precision == "fp16" and at.loss_scale == 0,
)
DEEPSPEED_DYNAMIC_SCALE = Condition(
    text="engine=deepspeed, precision=fp16 and fp16.loss_scale=0",
    holds=lambda at: DYNAMIC_SCALE.holds(at) and at.engine == "deepspeed",
)
ADAMW = Condition(text="optimizer=adamw", holds=lambda at: at.optimizer == "adamw")
SGD = Condition(text="optimizer=sgd", holds=lambda at: at.optimizer == "sgd")
SCALED_WARMUP = Condition(
    text="lr.warmup=steps or samples", holds=lambda at: at.warmup in ("steps", "samples")
)
WARMUP = Condition(text="a warm-up, which a decaying schedule always has", holds=lambda at: at.warms_up)
DECAY = Condition(text="lr.schedule=linear or cosine", holds=lambda at: at.schedule != "constant")
COSINE = Condition(text="lr.schedule=cosine", holds=lambda at: at.schedule == "cosine")
GPU = Condition(text="GPUs", holds=lambda at: at.device == "cuda")
# DeepSpeed gathers a stage's weights in one torch call, and passes it no bucket size: runtime/utils.py,
# all_gather_into_tensor_dp_groups. The key is still exported, because DeepSpeed's file has it.
NEVER = Condition(text="a torch without all_gather_into_tensor", holds=lambda at: False)
