"""A plan as DeepSpeed's configuration file: complete, so that it also runs outside of this project. Pure."""

from __future__ import annotations

import json
from typing import Any

from train_entry.contract import Engine, OptimizerPlan, Plan, Precision

NEVER = 2**31 - 1  # steps_per_print: DeepSpeed's progress lines are off, ours are in metrics.rank0.jsonl


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """The JSON document for `deepspeed.initialize(config=...)`."""
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "gradient_clipping": plan.gradient_clipping,
        "optimizer": _optimizer(plan.optimizer),
        "bf16": {"enabled": plan.precision is Precision.BF16},
        "fp16": {"enabled": plan.precision is Precision.FP16},
        "zero_optimization": _zero(plan),
        # torch's own optimizers are "untested" to DeepSpeed; that they agree with ddp is what our tests show.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
        # It synchronizes the device at every micro-batch, which ddp does not.
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
    }
    if plan.warmup_steps:
        config["scheduler"] = _warmup(plan)
    return config


def ds_config_text(plan: Plan) -> str | None:
    """The file's text; None for plans that do not use DeepSpeed."""
    if plan.engine is not Engine.DEEPSPEED:
        return None
    return json.dumps(deepspeed_config(plan), indent=2) + "\n"


def _optimizer(optimizer: OptimizerPlan) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.fused:
        params["fused"] = True
    if optimizer.name == "sgd":
        return {"type": "SGD", "params": params | {"momentum": optimizer.momentum}}
    # torch_adam: the same AdamW as ddp's. DeepSpeed's FusedAdam would be another implementation to compare.
    adam = {"betas": [optimizer.beta1, optimizer.beta2], "eps": optimizer.eps, "torch_adam": True}
    return {"type": "AdamW", "params": params | adam}


def _warmup(plan: Plan) -> dict[str, Any]:
    """The scheduler overrides the optimizer's rate from the first step on, so the peak stands in both."""
    params = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": plan.optimizer.lr,
        "warmup_num_steps": plan.warmup_steps,
        "warmup_type": "linear",  # DeepSpeed's default is logarithmic
    }
    return {"type": "WarmupLR", "params": params}


def _zero(plan: Plan) -> dict[str, Any]:
    zero = plan.zero
    return {
        "stage": zero.stage,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "overlap_comm": zero.overlap_comm,
        "contiguous_gradients": zero.contiguous_gradients,
    }
