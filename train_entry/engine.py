"""How a model is run over its ranks: what the measurement needs of it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from train_entry.contract import Engine, Plan
from train_entry.rank import RankInfo


class TrainEngine(Protocol):
    """Forward, backward and update of micro-batches.

    `step` follows every `backward`; it updates the weights, and advances the learning rate, at each
    plan.grad_accum-th micro-batch and does next to nothing at the others.
    """

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of token ids of shape (micro_batch, seq_len)."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this micro-batch; they are averaged over the global batch."""
        ...

    def step(self) -> None:
        """End a micro-batch."""
        ...

    def lr(self) -> float:
        """Learning rate of the next update, read from the optimizer that will do it."""
        ...

    def grad_norm(self) -> float | None:
        """Norm of the last update's gradient over all parameters, before clipping; None where not computed."""
        ...

    def parameters(self) -> list[torch.Tensor]:
        """A copy of all parameters as the forward pass uses them. Collective: all ranks call it together."""
        ...


def join_ranks(plan: Plan, where: RankInfo, device: torch.device) -> None:
    """Meet the other ranks: the process group exists when this returns."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if plan.engine is Engine.DEEPSPEED:
        from train_entry import engine_deepspeed  # a second of imports that ddp need not pay

        engine_deepspeed.join_ranks(backend, where)
    elif where.init_method:
        torch.distributed.init_process_group(
            backend, init_method=where.init_method, rank=where.rank, world_size=where.ranks
        )
    else:
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=where.rank, world_size=where.ranks
        )


def open_engine(
    model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
) -> TrainEngine:
    """Wrap the model for its plan. Raises ValueError or AssertionError where the plan cannot run."""
    if plan.tensor * plan.pipeline != 1:
        raise ValueError(
            f"tensor {plan.tensor} x pipeline {plan.pipeline}: the {plan.engine} engine runs data parallel only"
        )
    if plan.engine is Engine.DEEPSPEED:
        from train_entry import engine_deepspeed

        return engine_deepspeed.DeepSpeedEngine(model, ds_config)
    from train_entry import engine_ddp

    return engine_ddp.DdpEngine(model, plan, device)
