"""The engine for torch's DistributedDataParallel, the plain baseline of every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from train_entry.contract import OptimizerPlan, Plan, Precision
from train_entry.engines.base import Held, MicroSteps
from train_entry.engines.schedule import rate
from train_entry.rank import RankInfo

HALF_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def join_ranks(collectives: str, where: RankInfo) -> None:
    """Create the process group."""
    torch.distributed.init_process_group(
        collectives, init_method=where.init_method, rank=where.rank, world_size=where.ranks
    )


def open_engine(
    model: torch.nn.Module, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
) -> DdpEngine:
    """Wrap the model for its plan. ds_config is only for DeepSpeed and is ignored."""
    return DdpEngine(model, plan, device)


class DdpEngine(MicroSteps):
    """DDP over fp32 master weights; half precision uses torch.autocast. Implements base.TrainEngine."""

    def __init__(self, model: torch.nn.Module, plan: Plan, device: torch.device) -> None:
        super().__init__(plan.grad_accum)
        self._model = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=plan.ddp.bucket_cap_mib,  # torch's MB is 2**20 bytes
            gradient_as_bucket_view=plan.ddp.gradient_as_bucket_view,
        )
        if plan.compile:
            # Compile DDP, not the model inside it: torch then splits the graph at DDP's buckets and reduces
            # them during the backward pass. Compile in place, since `forward` below sets an attribute of DDP.
            self._model.compile()
        self._plan = plan
        self._device = device
        self._optimizer = make_optimizer(list(model.parameters()), plan.optimizer)
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=plan.loss_scale.static or 2.0**plan.loss_scale.initial_power,
            growth_interval=plan.loss_scale.window,
            enabled=plan.precision is Precision.FP16,
        )
        self._loss_scale = self._scaler.get_scale()
        self._micro_steps = 0
        self._updates = 0
        self._grad_norm: torch.Tensor | None = None
        self._set_lr()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        # The attribute that no_sync() sets; a context manager cannot span forward and backward here.
        self._model.require_backward_grad_sync = self._is_boundary
        dtype = HALF_DTYPES.get(self._plan.precision)
        with torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None):
            loss: torch.Tensor = self._model(input_ids=batch, labels=batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(self._scaler.scale(loss / self._plan.grad_accum))

    def update(self) -> None:
        if self._is_boundary:
            self._apply()
        self._micro_steps += 1

    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def grad_norm(self) -> float | None:
        return None if self._grad_norm is None else float(self._grad_norm)

    def held(self) -> list[Held]:
        return [Held(parameter.detach().clone(), self._plan.ranks) for parameter in self._model.parameters()]

    @property
    def _is_boundary(self) -> bool:
        return (self._micro_steps + 1) % self._plan.grad_accum == 0

    def _apply(self) -> None:
        if self._plan.gradient_clipping > 0:
            self._scaler.unscale_(self._optimizer)
            self._grad_norm = torch.nn.utils.clip_grad_norm_(
                self._model.parameters(), self._plan.gradient_clipping
            )
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        # A smaller scale means that gradients overflowed and the update was skipped. As in DeepSpeed, the
        # learning rate then does not advance.
        loss_scale = self._scaler.get_scale()
        if loss_scale >= self._loss_scale:
            self._updates += 1
            self._set_lr()
        if self._plan.loss_scale.static:
            self._scaler.update(self._plan.loss_scale.static)  # restore the fixed scale
        else:
            self._loss_scale = loss_scale

    def _set_lr(self) -> None:
        lr = rate(self._plan.optimizer.lr, self._plan.schedule, self._updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr


def make_optimizer(parameters: list[torch.nn.Parameter], plan: OptimizerPlan) -> torch.optim.Optimizer:
    """Create the optimizer with one group: weight decay applies to all parameters, as with DeepSpeed."""
    if plan.name == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=plan.lr,
            betas=(plan.beta1, plan.beta2),
            eps=plan.eps,
            weight_decay=plan.weight_decay,
            fused=plan.fused,
        )
    if plan.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=plan.lr,
            momentum=plan.momentum,
            weight_decay=plan.weight_decay,
            fused=plan.fused,
        )
    raise ValueError(f"optimizer.name is {plan.name}; it must be adamw or sgd")
