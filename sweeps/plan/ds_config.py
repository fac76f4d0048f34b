"""Make a plan's DeepSpeed configuration file: complete, so it also runs outside of this project. Pure."""

from __future__ import annotations

import json
import operator
from typing import Any

from sweeps.config.keys import KEYS
from train_entry.contract import Engine, Offload, OffloadPlan, Plan, Precision, Schedule

NEVER = 2**31 - 1  # steps_per_print: turns off DeepSpeed's progress lines; metrics.rank0.jsonl has ours
# Blocks recompute their own activations, and stages send whole activations.
PIPELINE = {"activation_checkpoint_interval": 0, "pipe_partitioned": False, "grad_partitioned": False}


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the JSON document for `deepspeed.initialize(config=...)`."""
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "gradient_clipping": plan.gradient_clipping,
        "optimizer": _optimizer(plan),
        "bf16": {"enabled": plan.precision is Precision.BF16},
        "fp16": _fp16(plan),
        "zero_optimization": _zero(plan),
        # DeepSpeed calls torch's own optimizers "untested"; our tests show that they agree with ddp.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
        # This timer synchronizes the device at every micro-batch, which ddp does not do.
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
    }
    if plan.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": plan.grad_accum_dtype.value}
    if plan.pipeline > 1:
        config["pipeline"] = PIPELINE
    elif plan.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tensor}
        # DeepSpeed 0.19 checks it against all ranks at stages 0 to 2, but against model copies at stage 3.
        del config["train_batch_size"]
    if Offload.NVME in plan.offload.devices:
        config["aio"] = _declared("aio", plan)
    if scheduler := _scheduler(plan):
        config["scheduler"] = scheduler
    return config


def ds_config_text(plan: Plan) -> str | None:
    """Return the file's text, or None for plans that do not use DeepSpeed."""
    if plan.engine is not Engine.DEEPSPEED:
        return None
    return json.dumps(deepspeed_config(plan), indent=2) + "\n"


def _optimizer(plan: Plan) -> dict[str, Any]:
    optimizer = plan.optimizer
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.fused:
        params["fused"] = True
    if optimizer.name == "sgd":
        return {"type": "SGD", "params": params | {"momentum": optimizer.momentum}}
    adam: dict[str, Any] = {"betas": [optimizer.beta1, optimizer.beta2], "eps": optimizer.eps}
    if plan.offload.optimizer is Offload.NONE:
        # ddp uses the same AdamW. DeepSpeed's FusedAdam would be another implementation to compare.
        adam["torch_adam"] = True
    return {"type": "AdamW", "params": params | adam}  # with offload, DeepSpeed uses its own CPU Adam


def _fp16(plan: Plan) -> dict[str, Any]:
    if plan.precision is not Precision.FP16:
        return {"enabled": False}
    return {"enabled": True} | _declared("fp16", plan)


def _scheduler(plan: Plan) -> dict[str, Any] | None:
    """Return the scheduler section. It overrides the optimizer's rate from step 1, so both have the peak."""
    schedule, peak = plan.schedule, plan.optimizer.lr
    if schedule.kind is Schedule.CONSTANT and not schedule.warmup_steps:
        return None
    # Without a warm-up DeepSpeed still does one of at least two steps; so does ddp (schedule.py).
    warmup = {
        "warmup_num_steps": max(1, schedule.warmup_steps),
        "warmup_type": "linear",  # DeepSpeed's default is logarithmic
    }
    if schedule.kind is Schedule.COSINE:
        ratios = {"warmup_min_ratio": schedule.warmup_from / peak, "cos_min_ratio": schedule.end / peak}
        return {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": schedule.total_steps, **ratios, **warmup},
        }
    rates = {"warmup_min_lr": schedule.warmup_from, "warmup_max_lr": peak}
    if schedule.kind is Schedule.LINEAR:
        total = {"total_num_steps": schedule.total_steps}
        return {"type": "WarmupDecayLR", "params": {**total, **rates, **warmup}}
    return {"type": "WarmupLR", "params": {**rates, **warmup}}


def _zero(plan: Plan) -> dict[str, Any]:
    section = _declared("zero_optimization", plan)
    if plan.offload.optimizer is not Offload.NONE:
        section["offload_optimizer"] = _offload_optimizer(plan.offload)
    if plan.offload.param is not Offload.NONE:
        section["offload_param"] = _offload_param(plan.offload)
    return section


def _declared(section: str, plan: Plan) -> dict[str, Any]:
    """Return the keys of the section that knobs declare for a plan of this ZeRO stage."""
    found: dict[str, Any] = {}
    for key in KEYS.values():
        at = key.deepspeed
        if at is None or plan.zero.stage not in at.stages:
            continue
        within, _, name = at.path.rpartition(".")
        value = operator.attrgetter(at.plan or key.name)(plan)
        if within == section and not (at.is_optional and value == key.default):
            found[name] = value
    return found


def _offload_optimizer(offload: OffloadPlan) -> dict[str, Any]:
    section: dict[str, Any] = {"device": offload.optimizer.value, "pin_memory": offload.pin_memory}
    if offload.ratio < 1:
        section["ratio"] = offload.ratio
    if offload.optimizer is Offload.NVME:
        section["nvme_path"] = offload.nvme_path
    return section


def _offload_param(offload: OffloadPlan) -> dict[str, Any]:
    section: dict[str, Any] = {"device": offload.param.value, "pin_memory": offload.pin_memory}
    if offload.param is Offload.NVME:
        section |= {
            "nvme_path": offload.nvme_path,
            "max_in_cpu": offload.max_in_cpu,
            "buffer_count": offload.buffer_count,
            "buffer_size": offload.buffer_size,
        }
    return section
