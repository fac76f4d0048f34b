"""How a model is run over its ranks: what the measurement needs of it, and nothing else."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from train_entry.contract import Engine, Plan, Precision
from train_entry.rank import RankInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


class Part(StrEnum):
    """What a step is made of."""

    FETCH = "fetch"  # the micro-batch, onto the device
    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"  # sending to the neighbouring stages of a pipeline, and waiting for them
    UPDATE = "update"


Lap = Callable[[Part], None]  # called when a part has ended; to wait for the device there costs time


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as the forward pass uses it, or the part of it that a rank has."""

    values: torch.Tensor  # a copy
    copies: int  # ranks that hold the same values


class TrainEngine(Protocol):
    """Optimizer steps, one after another."""

    def step(self, batches: Iterator[torch.Tensor], lap: Lap) -> torch.Tensor:
        """Take plan.grad_accum micro-batches of token ids (micro_batch, seq_len), and update the weights.

        The result is the mean next-token loss of these micro-batches, before the update and on the device.
        Gradients are averaged over the global batch, and the learning rate advances.
        """
        ...

    def lr(self) -> float:
        """Learning rate of the next update, read from the optimizer that will do it."""
        ...

    def grad_norm(self) -> float | None:
        """Norm of the last update's whole gradient, before clipping; None where not computed."""
        ...

    def held(self) -> list[Held]:
        """All parameters that this rank has, for a comparison. Collective: all ranks call it together."""
        ...


class MicroSteps(ABC):
    """A step taken micro-batch by micro-batch. See TrainEngine."""

    def __init__(self, grad_accum: int) -> None:
        self._grad_accum = grad_accum

    def step(self, batches: Iterator[torch.Tensor], lap: Lap) -> torch.Tensor:
        losses = [self._take(batches, lap) for _ in range(self._grad_accum)]
        return torch.stack(losses).float().mean()

    def _take(self, batches: Iterator[torch.Tensor], lap: Lap) -> torch.Tensor:
        batch = next(batches)
        lap(Part.FETCH)
        loss = self.forward(batch)
        lap(Part.FORWARD)
        self.backward(loss)
        lap(Part.BACKWARD)
        self.update()
        lap(Part.UPDATE)
        return loss.detach()

    @abstractmethod
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of one micro-batch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this micro-batch."""

    @abstractmethod
    def update(self) -> None:
        """Follows every `backward`; does next to nothing but at each plan.grad_accum-th micro-batch."""


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
    """What a rank has of a model, and where, from the moment it is made: nothing must be moved later."""

    dtype: torch.dtype  # parameters are made in

    def construct(self) -> AbstractContextManager[object]:
        """Modules are made inside. Collective."""
        ...

    def place(self, model: PreTrainedModel) -> None:
        """Afterwards the model has those parameters that this rank holds, in place, with no values yet."""
        ...

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Of the values of a whole parameter, those that this rank holds."""
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

    def place(self, model: PreTrainedModel) -> None:
        pass  # it is there

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        return values

    def whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[bool]:
        return contextlib.nullcontext(True)


def backend_for(plan: Plan) -> Backend:
    """Import what the plan needs: DeepSpeed takes seconds, which ddp need not pay."""
    if plan.engine is Engine.DDP:
        from train_entry import engine_ddp

        return engine_ddp
    if plan.pipeline > 1:
        from train_entry import engine_pipeline

        return engine_pipeline
    from train_entry import engine_deepspeed

    return engine_deepspeed


def sharding_for(plan: Plan, ds_config: Mapping[str, Any], device: torch.device, rank: int) -> Sharding:
    """Where and how the plan's engine wants the parameters of a rank."""
    if plan.engine is Engine.DDP:
        return Replicated(device)  # they are the fp32 masters
    dtype = DTYPES[plan.precision]  # DeepSpeed would cast them anyway
    if plan.pipeline > 1:
        from train_entry import stages

        return stages.Staged(plan, plan.place(rank), dtype, device)
    if plan.tensor > 1:
        # DeepSpeed splits a whole model: not on the device, which may have room for a part only.
        return Replicated(torch.device("cpu"), dtype)
    if plan.zero.stage < 3:
        return Replicated(device, dtype)
    from train_entry import zero_init

    return zero_init.ZeroInit(ds_config, dtype, device)


def copies_of(parameter: torch.nn.Parameter, plan: Plan) -> int:
    """Ranks that hold the same values of it, ZeRO's shards put together."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    stages = 2 if getattr(parameter, "is_at_both_ends", False) else 1
    return stages * plan.data * (1 if is_split else plan.tensor)


def collectives_for(device: torch.device) -> str:
    """The library that moves tensors of this device between ranks."""
    return "nccl" if device.type == "cuda" else "gloo"
