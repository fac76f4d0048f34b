"""Where a rank keeps the parameters of a model, and which part of them, from the moment they are made."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from train_entry.contract import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def copies_of(parameter: torch.nn.Parameter, plan: Plan) -> int:
    """Ranks that hold the same values of it, ZeRO's shards put together."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    stages = 2 if getattr(parameter, "is_at_both_ends", False) else 1
    return stages * plan.data * (1 if is_split else plan.tensor)
