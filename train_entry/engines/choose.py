"""Choose a plan's engine. Only the chosen one is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from train_entry.contract import Engine, Plan, Precision
from train_entry.engines.base import Backend
from train_entry.model.sharding import Replicated, Sharding

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def backend_for(plan: Plan) -> Backend:
    """Import and return the plan's backend. DeepSpeed's import takes seconds, which ddp does not spend."""
    if plan.engine is Engine.DDP:
        from train_entry.engines import ddp

        return ddp
    if plan.pipeline > 1:
        from train_entry.engines import pipeline

        return pipeline
    from train_entry.engines import deepspeed

    return deepspeed


def sharding_for(plan: Plan, ds_config: Mapping[str, Any], device: torch.device, rank: int) -> Sharding:
    """Return where and how the plan's engine keeps the parameters of a rank."""
    if plan.engine is Engine.DDP:
        return Replicated(device)  # the parameters are the fp32 master weights
    dtype = DTYPES[plan.precision]  # DeepSpeed would cast them to it anyway
    if plan.pipeline > 1:
        from train_entry.model import stages

        return stages.Staged(plan, plan.coordinates(rank), dtype, device)
    if plan.tensor > 1:
        # DeepSpeed splits a whole model, so that is built on the CPU: the device may hold only a part of it.
        return Replicated(torch.device("cpu"), dtype)
    if plan.zero.stage < 3:
        return Replicated(device, dtype)
    from train_entry.engines import zero_init

    return zero_init.ZeroInit(ds_config, dtype, device)


def collectives_for(device: torch.device) -> str:
    """The backend of collectives for this device: nccl or gloo."""
    return "nccl" if device.type == "cuda" else "gloo"
