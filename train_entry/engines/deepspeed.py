"""The engine for DeepSpeed with ZeRO stages 0 to 3. zero_init.py builds models for stage 3."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch

from train_entry.contract import Plan
from train_entry.engines.base import Held, MicroSteps
from train_entry.model.sharding import copies_of
from train_entry.rank import RankInfo


def join_ranks(collectives: str, where: RankInfo) -> None:
    """Create the process group through DeepSpeed, which keeps its own handle to it."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if where.rank == 0 else logging.ERROR)
    # torch 2.13 renamed collectives and warns of the old names in every step; printing that costs time.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed.init_distributed(
        dist_backend=collectives,
        auto_mpi_discovery=False,  # otherwise it needs mpi4py if MASTER_ADDR is not set, as with file://
        init_method=where.init_method,
        rank=where.rank,
        world_size=where.ranks,
    )


def open_engine(
    model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
) -> DeepSpeedEngine:
    """Wrap the model. ds_config was written for the plan; DeepSpeed determines the device itself."""
    return DeepSpeedEngine(model, plan, ds_config)


class DeepSpeedEngine(MicroSteps):
    """DeepSpeed's engine, with all settings from ds_config. Implements base.TrainEngine."""

    def __init__(self, model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any]) -> None:
        super().__init__(plan.grad_accum)
        self._plan = plan
        self._engine = deepspeed.initialize(model=model, config=dict(ds_config))[0]
        if plan.compile:
            self._engine.compile()  # torch.compile in place, DeepSpeed's hooks included; not DeepCompile

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(input_ids=batch, labels=batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)  # divides by the accumulation steps

    def update(self) -> None:
        self._engine.step()

    def lr(self) -> float:
        return rate_of(self._engine)

    def grad_norm(self) -> float | None:
        return norm_of(self._engine)

    def held(self) -> list[Held]:
        parameters = self._engine.module.parameters()
        return [Held(self._whole(parameter), copies_of(parameter, self._plan)) for parameter in parameters]

    def _whole(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        # In stage 3 a parameter is empty except while its layer runs. They are gathered one at a time: with
        # NVMe there are buffers for only a few.
        is_sharded = self._engine.zero_optimization_partition_weights()
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_sharded):
            return parameter.detach().clone()


def rate_of(engine: Any) -> float:
    """The learning rate of the next update."""
    return float(engine.optimizer.param_groups[0]["lr"])


def norm_of(engine: Any) -> float | None:
    """The norm of the last update's gradient; None if DeepSpeed has none, as at stage 0 in fp32."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)
