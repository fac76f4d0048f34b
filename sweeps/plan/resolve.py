"""Resolve a configuration to a plan, or to the reasons why there is none. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.config.keys import KEYS, block_interval
from sweeps.config.schema import AioConfig, Fp16Config, LrConfig, OptimizerConfig, SweepConfig, ZeroConfig
from sweeps.machine import Machine
from sweeps.plan.rules import RULES, Draft
from sweeps.space.conditions import setting_of, without_inactive_knobs
from train_entry.contract import (
    AioPlan,
    Attention,
    DataSpec,
    DdpPlan,
    Engine,
    LossScalePlan,
    ModelShape,
    Offload,
    OffloadPlan,
    OptimizerPlan,
    Plan,
    Precision,
    Reason,
    Schedule,
    SchedulePlan,
    ZeroPlan,
    dump,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """The reasons why a configuration makes no legal plan; costs 0 GPU-seconds."""

    reasons: tuple[Reason, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(reason.text for reason in self.reasons)

    @property
    def lines(self) -> tuple[str, ...]:
        """The reasons for the command line, each with the name of its rule, which docs/rules.md explains."""
        return tuple(f"{reason.text} [{reason.rule}]" for reason in self.reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The result of planning a point."""

    plan: Plan | Rejection
    fingerprint: str | None
    overrides: tuple[str, ...]


def resolve(config: SweepConfig, model: ModelShape, machine: Machine) -> Plan | Rejection:
    """Return the plan of a configuration on a machine, or all reasons why it has none."""
    ranks = config.ranks or machine.default_ranks
    precision = machine.precision(config.precision)
    draft = Draft(
        config=config,
        model=model,
        machine=machine,
        ranks=ranks,
        precision=precision,
        warmup_steps=warmup_steps(config.lr, config.global_batch),
    )
    reasons = tuple(reason for rule in RULES if (reason := rule(draft)))
    return Rejection(reasons=reasons) if reasons else _plan(draft)


def lr_factor(lr: LrConfig, global_batch: int) -> float:
    """Return the factor that scales the learning rates of base_batch to a global batch k times as large.

    sqrt: sqrt(k), for Adam (Malladi et al. 2022, arXiv 2205.10287).
    linear: k, for SGD (Goyal et al. 2017, arXiv 1706.02677).
    none: 1.
    """
    ratio = global_batch / lr.base_batch
    return {"sqrt": math.sqrt(ratio), "linear": ratio, "none": 1.0}[lr.rule]


def warmup_steps(lr: LrConfig, global_batch: int) -> int:
    """Warm-up steps at a global batch: as many steps or samples as at base_batch, or a number by itself."""
    if lr.warmup == "steps":
        return lr.base_warmup
    if lr.warmup == "samples":
        return math.ceil(lr.base_warmup * lr.base_batch / global_batch)
    return int(lr.warmup)


def fingerprint(plan: Plan, model: ModelShape, data: DataSpec) -> str:
    """Return a hash of exactly what changes the run: plans that would run the same job have the same hash."""
    zero = dataclasses.replace(plan.zero, allgather_bucket_size=0)  # exported, but never read
    text = dump((dataclasses.replace(plan, zero=zero), model, data), indent=None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_spec(config: SweepConfig) -> DataSpec:
    """Return where a job finds its tokens. Paths are absolute, since it runs in a directory of its own."""
    data = config.data
    return DataSpec(
        kind=data.kind,
        path=str(Path(data.path).resolve()) if data.path else None,
        tokenizer=str(Path(data.tokenizer).resolve()) if data.tokenizer else None,
        max_bytes=int(data.max_bytes),
    )


def _plan(draft: Draft) -> Plan:
    config = without_inactive_knobs(draft.config, setting_of(draft.config, draft.machine))
    return Plan(
        engine=Engine(config.engine),
        ranks=draft.ranks,
        tensor=config.tensor,
        pipeline=config.pipeline,
        micro_batch=config.micro_batch,
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        precision=Precision(draft.precision),
        grad_accum_dtype=_grad_accum_dtype(config.grad_accum_dtype, draft.precision),
        gradient_clipping=config.gradient_clipping,
        optimizer=_optimizer(config.optimizer, config.lr.base * lr_factor(config.lr, config.global_batch)),
        schedule=_schedule(config.lr, config.global_batch),
        loss_scale=_loss_scale(config.fp16),
        zero=_zero(config.zero),
        offload=_offload(config),
        ddp=DdpPlan(
            bucket_cap_mib=config.ddp.bucket_cap_mb,
            gradient_as_bucket_view=config.ddp.gradient_as_bucket_view,
        ),
        checkpoint_every=block_interval(config.activation_checkpointing) or 0,
        attention=Attention(config.attention),
        compile=config.compile,
        expandable_segments=config.allocator.expandable_segments,
        seed=config.seed,
    )


def _grad_accum_dtype(asked: str, precision: str) -> Precision | None:
    """Return None if DeepSpeed uses this format by default."""
    return None if asked in ("auto", precision) else Precision(asked)


def _schedule(lr: LrConfig, global_batch: int) -> SchedulePlan:
    factor = lr_factor(lr, global_batch)
    return SchedulePlan(
        kind=Schedule(lr.schedule),
        warmup_steps=warmup_steps(lr, global_batch),
        warmup_from=lr.warmup_from * factor,
        total_steps=lr.total_steps or 0,
        end=lr.end * factor,
    )


def _loss_scale(fp16: Fp16Config) -> LossScalePlan:
    return LossScalePlan(
        static=fp16.loss_scale,
        initial_power=fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        minimum=int(fp16.min_loss_scale),
    )


def _zero(zero: ZeroConfig) -> ZeroPlan:
    """Copy field by field: a plan's field has the name of its knob."""
    values: dict[str, Any] = {field.name: getattr(zero, field.name) for field in dataclasses.fields(ZeroPlan)}
    whole = {name: int(value) for name, value in values.items() if KEYS[f"zero.{name}"].is_integral}
    return ZeroPlan(**(values | whole))


def _offload(config: SweepConfig) -> OffloadPlan:
    optimizer, param = Offload(config.zero.offload_optimizer), Offload(config.zero.offload_param)
    path = config.cluster.nvme_path
    return OffloadPlan(
        optimizer=optimizer,
        param=param,
        ratio=config.offload.ratio,
        pin_memory=config.offload.pin_memory,
        max_in_cpu=int(config.offload.max_in_cpu),
        buffer_count=config.offload.buffer_count,
        buffer_size=int(config.offload.buffer_size),
        nvme_path=str(Path(path).resolve()) if path and Offload.NVME in (optimizer, param) else None,
        aio=_aio(config.aio),
    )


def _aio(aio: AioConfig) -> AioPlan:
    return AioPlan(
        block_size_bytes=int(aio.block_size),
        queue_depth=aio.queue_depth,
        threads=aio.threads,
        single_submit=aio.single_submit,
        overlap_events=aio.overlap_events,
    )


def _optimizer(optimizer: OptimizerConfig, lr: float) -> OptimizerPlan:
    fused = optimizer.implementation == "torch_fused"
    if optimizer.name == "sgd":
        return OptimizerPlan(
            name="sgd", lr=lr, weight_decay=optimizer.weight_decay, momentum=optimizer.momentum, fused=fused
        )
    beta1, beta2 = optimizer.betas
    return OptimizerPlan(
        name="adamw",
        lr=lr,
        weight_decay=optimizer.weight_decay,
        beta1=beta1,
        beta2=beta2,
        eps=optimizer.eps,
        fused=fused,
    )
