"""The engine of a plan, imported when it is known which one."""

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
    """Import what the plan needs: DeepSpeed takes seconds, which ddp need not pay."""
    if plan.engine is Engine.DDP:
        from train_entry.engines import ddp

        return ddp
    if plan.pipeline > 1:
        from train_entry.engines import pipeline

        return pipeline
    from train_entry.engines import deepspeed

    return deepspeed


def sharding_for(plan: Plan, ds_config: Mapping[str, Any], device: torch.device, rank: int) -> Sharding:
    """Where and how the plan's engine wants the parameters of a rank."""
    if plan.engine is Engine.DDP:
        return Replicated(device)  # they are the fp32 masters
    dtype = DTYPES[plan.precision]  # DeepSpeed would cast them anyway
    if plan.pipeline > 1:
        from train_entry.model import stages

        return stages.Staged(plan, plan.coordinates(rank), dtype, device)
    if plan.tensor > 1:
        # DeepSpeed splits a whole model: not on the device, which may have room for a part only.
        return Replicated(torch.device("cpu"), dtype)
    if plan.zero.stage < 3:
        return Replicated(device, dtype)
    from train_entry.engines import zero_init

    return zero_init.ZeroInit(ds_config, dtype, device)


def collectives_for(device: torch.device) -> str:
    """The library that moves tensors of this device between ranks."""
    return "nccl" if device.type == "cuda" else "gloo"
