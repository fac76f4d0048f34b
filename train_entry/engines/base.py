"""The interface of an engine: the calls that a measurement needs, and nothing else."""

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
    """A part of a step."""

    FETCH = "fetch"  # bringing the micro-batch onto the device
    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"  # in a pipeline: sending to the neighbouring stages and waiting for them
    UPDATE = "update"


Lap = Callable[[Part], None]  # called after each part; it may wait for the device, which costs time


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as the forward pass uses it, or the part of it that a rank holds."""

    values: torch.Tensor  # a copy
    copies: int  # ranks that hold the same values


class TrainEngine(Protocol):
    """An engine that takes optimizer steps."""

    def step(self, batches: Iterator[torch.Tensor], lap: Lap) -> torch.Tensor:
        """Train on plan.grad_accum micro-batches of token ids (micro_batch, seq_len), and update the weights.

        Return the mean next-token loss of these micro-batches, from before the update, on the device.
        Gradients are averaged over the global batch, and the learning rate advances.
        """
        ...

    def lr(self) -> float:
        """The learning rate of the next update, read from the optimizer itself."""
        ...

    def grad_norm(self) -> float | None:
        """The norm of the last update's whole gradient, before clipping; None if it is not computed."""
        ...

    def held(self) -> list[Held]:
        """Copies of all parameters that this rank holds. Collective: all ranks call it together."""
        ...


class MicroSteps(ABC):
    """The base of engines whose step runs one micro-batch after another. Implements TrainEngine.step."""

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
        """Return the mean next-token loss of one micro-batch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this micro-batch."""

    @abstractmethod
    def update(self) -> None:
        """Update the weights at every plan.grad_accum-th call. It is called after each `backward`."""


class Backend(Protocol):
    """The interface of a module that implements an engine."""

    def join_ranks(self, collectives: str, where: RankInfo) -> None:
        """Create the process group with the other ranks; `collectives` is nccl or gloo."""
        ...

    def open_engine(
        self, model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
    ) -> TrainEngine:
        """Wrap the model for its plan. Raise ValueError or AssertionError if the plan cannot run."""
        ...
