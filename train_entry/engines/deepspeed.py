"""DeepSpeed, ZeRO stages 0 to 3. The engine; zero_init.py builds models for stage 3."""

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
    """Create the process group through DeepSpeed, which keeps a handle of its own on it."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if where.rank == 0 else logging.ERROR)
    # Of collectives whose names torch 2.13 changed, once each in every step: written out, that costs time.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed.init_distributed(
        dist_backend=collectives,
        auto_mpi_discovery=False,  # else it wants mpi4py where MASTER_ADDR is not set, as with file://
        init_method=where.init_method,
        rank=where.rank,
        world_size=where.ranks,
    )


def open_engine(
    model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
) -> DeepSpeedEngine:
    """Almost all it needs is in ds_config, which was written for the plan; DeepSpeed knows its device."""
    return DeepSpeedEngine(model, plan, ds_config)


class DeepSpeedEngine(MicroSteps):
    """Optimizer, schedule and sharding come from ds_config.json alone. See engine.TrainEngine."""

    def __init__(self, model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any]) -> None:
        super().__init__(plan.grad_accum)
        self._plan = plan
        self._engine = deepspeed.initialize(model=model, config=dict(ds_config))[0]
        if plan.compile:
            self._engine.compile()  # torch.compile in place, its own hooks included; not DeepCompile

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
        # Stage 3 leaves a parameter empty outside of its layer's turn. One at a time: on NVMe only few have a
        # buffer to be read into.
        is_sharded = self._engine.zero_optimization_partition_weights()
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_sharded):
            return parameter.detach().clone()


def rate_of(engine: Any) -> float:
    """Of the next update."""
    return float(engine.optimizer.param_groups[0]["lr"])


def norm_of(engine: Any) -> float | None:
    """Of the last update's gradient. DeepSpeed gives a tensor, a float, or None at stage 0 in fp32."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)
