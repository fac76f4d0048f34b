"""The interface that makes and places a rank's part of a model's parameters, and the replicated case."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from train_entry.contract import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sharding(Protocol):
    """The part of a model that a rank holds, made in its final place so that nothing moves later."""

    dtype: torch.dtype  # the data type in which parameters are made

    def construct(self) -> AbstractContextManager[object]:
        """Return a context in which modules are made. Collective."""
        ...

    def place(self, model: PreTrainedModel) -> None:
        """Reduce the model to the parameters that this rank holds, in their final place, without values."""
        ...

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the values of a whole parameter."""
        ...

    def whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[bool]:
        """Return a context in which the parameter is whole. Collective.

        Its value is true on the ranks whose writes to the parameter count.
        """
        ...


class Replicated:
    """All parameters on every rank's device. Implements Sharding."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._device = device

    def construct(self) -> AbstractContextManager[object]:
        return self._device  # a device is a context in which new tensors are made on it

    def place(self, model: PreTrainedModel) -> None:
        pass  # it already is in its place

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        return values

    def whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[bool]:
        return contextlib.nullcontext(True)


def copies_of(parameter: torch.nn.Parameter, plan: Plan) -> int:
    """The number of ranks that hold the same values of a parameter, with ZeRO's shards gathered."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    stages = 2 if getattr(parameter, "is_at_both_ends", False) else 1
    return stages * plan.data * (1 if is_split else plan.tensor)
