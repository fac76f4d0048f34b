"""DeepSpeed, ZeRO stages 0 to 3. The only module that imports it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError

from train_entry.rank import RankInfo


def join_ranks(backend: str, where: RankInfo) -> None:
    """Create the process group through DeepSpeed, which keeps a handle of its own on it."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if where.rank == 0 else logging.ERROR)
    if not where.init_method:
        # DeepSpeed has no argument for a store; it adopts a group that exists.
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=where.rank, world_size=where.ranks
        )
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,  # else it wants mpi4py where MASTER_ADDR is not set, as with file://
        init_method=where.init_method or None,
        rank=where.rank,
        world_size=where.ranks,
    )


class DeepSpeedEngine:
    """Optimizer, schedule and sharding come from ds_config.json alone. See engine.TrainEngine."""

    def __init__(self, model: torch.nn.Module, ds_config: Mapping[str, Any]) -> None:
        config = copy.deepcopy(dict(ds_config))
        # Its throughput timer synchronizes the device at every micro-batch; ddp has none.
        config["timers"] = {"throughput": {"enabled": False}}
        try:
            self._engine = deepspeed.initialize(model=model, config=config)[0]
        except DeepSpeedConfigError as error:
            raise ValueError(str(error)) from error

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(input_ids=batch, labels=batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)  # divides by the accumulation steps

    def step(self) -> None:
        self._engine.step()

    def lr(self) -> float:
        return float(self._engine.optimizer.param_groups[0]["lr"])

    def grad_norm(self) -> float | None:
        # A tensor, a float, or None at stage 0 in fp32.
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def parameters(self) -> list[torch.Tensor]:
        parameters = list(self._engine.module.parameters())
        # Stage 3 leaves nothing in a parameter outside of its layer's turn. At other stages this does nothing.
        with deepspeed.zero.GatheredParameters(
            parameters, enabled=self._engine.zero_optimization_partition_weights()
        ):
            return [parameter.detach().clone() for parameter in parameters]
