"""Split the matrices of a pipeline's blocks over tensor ranks: first by columns, then by rows.

The method is that of Shoeybi et al. 2019, arXiv 1909.08053, section 3. DeepSpeed's own splitting is used only
without a pipeline: it replaces a pipeline's topology, and the pipeline then fails.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

COLUMNS, ROWS = 0, 1  # the dimension of a weight that is split: outputs, inputs
SPLIT = {
    "llama": {
        "self_attn": {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS},
        "mlp": {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
    }
}


def shrink(model: PreTrainedModel, degree: int) -> None:
    """Reduce every split matrix to one of `degree` equal parts. The model is on the meta device.

    Attention derives its number of heads from the matrices. Raise ValueError for an unknown family, for a
    bias, and for a matrix that cannot be divided equally.
    """
    family = model.config.model_type
    if family not in SPLIT:
        raise ValueError(f"matrices of a model of type {family} cannot be split: only {', '.join(SPLIT)} can")
    for name, linear, dim in _split_matrices(model):
        whole = linear.weight.shape[dim]
        if linear.bias is not None:
            raise ValueError(f"{name} has a bias: in a pipeline only matrices without one can be split")
        if whole % degree:
            raise ValueError(f"{name} {tuple(linear.weight.shape)} cannot be split into {degree} equal parts")
        linear.weight = torch.nn.Parameter(linear.weight.narrow(dim, 0, whole // degree))
        linear.out_features, linear.in_features = linear.weight.shape


def mark(model: PreTrainedModel) -> None:
    """Mark the split parameters for DeepSpeed and `part_of`. Call this once they have their storage."""
    for _, linear, dim in _split_matrices(model):
        linear.weight.tensor_model_parallel = True
        linear.weight.split_dim = dim


def part_of(parameter: torch.nn.Parameter, values: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor rank's part of a whole parameter's values."""
    dim = getattr(parameter, "split_dim", None)
    if dim is None:
        return values
    size = parameter.shape[dim]
    return values.narrow(dim, rank * size, size)


def join(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Add the all-reduces that make a group's ranks compute the result of the whole matrices."""

    def enter(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if inputs:
            return (sum_of_gradients(inputs[0], group), *inputs[1:]), named
        return inputs, {**named, "hidden_states": sum_of_gradients(named["hidden_states"], group)}

    def leave(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        return sum_of_parts(output, group)

    parts = SPLIT[model.config.model_type]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in parts:
            module.register_forward_pre_hook(enter, with_kwargs=True)
    for _, linear, dim in _split_matrices(model):
        if dim == ROWS:
            linear.register_forward_hook(leave)


class SumOfGradients(torch.autograd.Function):
    """Pass the input on, and sum its gradient over ranks: each rank computes a part of the gradient."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total, None


class SumOfParts(torch.autograd.Function):
    """Sum the output over ranks, and pass its gradient on: the gradient is the same on all ranks."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = output.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


sum_of_gradients: Any = SumOfGradients.apply
sum_of_parts: Any = SumOfParts.apply


def _split_matrices(model: PreTrainedModel) -> list[tuple[str, Any, int]]:
    """Name, module and split dimension of every matrix that is split."""
    parts = SPLIT[model.config.model_type]
    found = []
    for name, module in model.named_modules():
        dims = parts.get(name.rpartition(".")[2], {})
        found += [(f"{name}.{own}", module.get_submodule(own), dim) for own, dim in dims.items()]
    return found
