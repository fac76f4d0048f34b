"""From a configuration to a plan, or to the reasons why there is none. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from sweeps.config.schema import LrConfig, OptimizerConfig, SweepConfig
from sweeps.machine import Machine
from sweeps.rules import RULES, Draft
from train_entry.contract import (
    Checkpointing,
    DataSpec,
    Engine,
    ModelShape,
    OptimizerPlan,
    Plan,
    Precision,
    ZeroPlan,
    dump,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """No legal plan; costs 0 GPU-seconds."""

    reasons: tuple[str, ...]


def resolve(config: SweepConfig, model: ModelShape, machine: Machine) -> Plan | Rejection:
    """The plan of a configuration on a machine, or all reasons why it has none."""
    ranks = config.ranks or default_ranks(machine)
    precision = resolve_precision(config.precision, machine)
    draft = Draft(config=config, model=model, machine=machine, ranks=ranks, precision=precision)
    reasons = tuple(reason for rule in RULES if (reason := rule(draft)))
    return Rejection(reasons=reasons) if reasons else _plan(draft)


def default_ranks(machine: Machine) -> int:
    """All GPUs of a node. On CPU two, where it has them: each costs memory, and all share its bandwidth."""
    return machine.ranks_per_node if machine.device == "cuda" else min(2, machine.ranks_per_node)


def resolve_precision(asked: str, machine: Machine) -> str:
    """`auto` is bf16 on GPUs and fp32 on CPU, where half precision is only emulated."""
    if asked != "auto":
        return asked
    return "bf16" if machine.device == "cuda" else "fp32"


def scaled_lr(lr: LrConfig, global_batch: int) -> float:
    """The peak learning rate at a global batch.

    sqrt: k times the batch, sqrt(k) times the rate, for Adam (Malladi et al. 2022, arXiv 2205.10287).
    linear: k times the rate, for SGD (Goyal et al. 2017, arXiv 1706.02677).
    """
    ratio = global_batch / lr.base_batch
    factors = {"sqrt": math.sqrt(ratio), "linear": ratio, "none": 1.0}
    return lr.base * factors[lr.rule]


def warmup_steps(lr: LrConfig, global_batch: int) -> int:
    """Warm-up steps at a global batch: the steps, or the samples, of base_batch; or a number of their own."""
    if lr.warmup == "steps":
        return lr.base_warmup
    if lr.warmup == "samples":
        return math.ceil(lr.base_warmup * lr.base_batch / global_batch)
    return int(lr.warmup)


def fingerprint(plan: Plan, model: ModelShape, data: DataSpec) -> str:
    """A hash of exactly what changes the run: two plans that would run the same job have the same one."""
    zero = dataclasses.replace(plan.zero, allgather_bucket_size=0)  # no effect: gathered in one call
    if plan.engine is Engine.DDP or zero.stage == 0:  # no ZeRO optimizer, nothing reads its knobs
        zero = ZeroPlan(
            stage=0,
            reduce_bucket_size=0,
            allgather_bucket_size=0,
            overlap_comm=False,
            contiguous_gradients=False,
        )
    text = dump((dataclasses.replace(plan, zero=zero), model, data), indent=None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_spec(config: SweepConfig) -> DataSpec:
    """Where a job finds its tokens; paths absolute, since it runs in a directory of its own."""
    data = config.data
    return DataSpec(
        kind=data.kind,
        path=str(Path(data.path).resolve()) if data.path else None,
        tokenizer=str(Path(data.tokenizer).resolve()) if data.tokenizer else None,
        max_bytes=int(data.max_bytes),
    )


def _plan(draft: Draft) -> Plan:
    config = draft.config
    return Plan(
        engine=Engine(config.engine),
        ranks=draft.ranks,
        tensor=config.tensor,
        pipeline=config.pipeline,
        micro_batch=config.micro_batch,
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        precision=Precision(draft.precision),
        activation_checkpointing=Checkpointing(config.activation_checkpointing),
        gradient_clipping=config.gradient_clipping,
        optimizer=_optimizer(config.optimizer, scaled_lr(config.lr, config.global_batch)),
        warmup_steps=warmup_steps(config.lr, config.global_batch),
        zero=ZeroPlan(
            stage=config.zero.stage,
            reduce_bucket_size=int(config.zero.reduce_bucket_size),
            allgather_bucket_size=int(config.zero.allgather_bucket_size),
            overlap_comm=config.zero.overlap_comm,
            contiguous_gradients=config.zero.contiguous_gradients,
        ),
        seed=config.seed,
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
