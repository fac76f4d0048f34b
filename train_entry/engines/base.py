"""How a model is run over its ranks: what the measurement needs of it, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from train_entry.contract import Plan
from train_entry.rank import RankInfo


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
