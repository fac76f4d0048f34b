"""How a model is run over its ranks: what the measurement needs of it, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from train_entry.contract import Engine, Plan, Precision
from train_entry.rank import RankInfo

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


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
        """Norm of the last update's whole gradient, before clipping; None where not computed."""
        ...

    def parameters(self) -> list[torch.Tensor]:
        """A copy of all parameters as the forward pass uses them. Collective: all ranks call it together."""
        ...


class Backend(Protocol):
    """A module that runs models in one way."""

    def join_ranks(self, collectives: str, where: RankInfo) -> None:
        """Meet the other ranks over nccl or gloo: the process group exists when this returns."""
        ...

    def open_engine(
        self, model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
    ) -> TrainEngine:
        """Wrap the model for its plan. Raises ValueError or AssertionError where the plan cannot run."""
        ...


class Sharding(Protocol):
    """Where the parameters of a model lie from the moment they are made, so that none must be moved later."""

    dtype: torch.dtype  # they are made in

    def construct(self) -> AbstractContextManager[object]:
        """Modules made inside have their parameters in place, with no values yet. Collective."""
        ...

    def whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[bool]:
        """Inside, the parameter is complete; true on the ranks whose writes to it count. Collective."""
        ...


class Replicated:
    """Every rank has all parameters on its device. See Sharding."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._device = device

    def construct(self) -> AbstractContextManager[object]:
        return self._device  # a context in which tensors are made there

    def whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[bool]:
        return contextlib.nullcontext(True)


def backend_for(plan: Plan) -> Backend:
    """Import what the plan needs: DeepSpeed takes seconds, which ddp need not pay."""
    if plan.engine is Engine.DEEPSPEED:
        from train_entry import engine_deepspeed

        return engine_deepspeed
    from train_entry import engine_ddp

    return engine_ddp


def sharding_for(plan: Plan, ds_config: Mapping[str, Any], device: torch.device) -> Sharding:
    """Where and how the plan's engine wants parameters."""
    if plan.engine is Engine.DDP:
        return Replicated(device)  # they are the fp32 masters
    if plan.zero.stage < 3:
        return Replicated(device, DTYPES[plan.precision])  # DeepSpeed would cast them anyway
    from train_entry import zero_init

    return zero_init.ZeroInit(ds_config, DTYPES[plan.precision], device)


def collectives_for(device: torch.device) -> str:
    """The library that moves tensors of this device between ranks."""
    return "nccl" if device.type == "cuda" else "gloo"


def refuse_model_parallel(plan: Plan) -> None:
    """Raises ValueError where ranks would have to share a sample: both engines here give each its own."""
    if plan.tensor * plan.pipeline != 1:
        raise ValueError(f"tensor {plan.tensor} x pipeline {plan.pipeline}: only 1 x 1 can be run so far")
