"""Load recorded measurements of real trials, with which estimates are compared.

A table has one JSON object per line. Every line has `gpus, seq, global_batch, cap_gib, stage, micro_batch,
outcome` (ok or oom) and `model`: a name of conf/model, or of another model whose shape the line gives itself
(`family, layers, hidden, heads, kv_heads, ffn, vocab, positions, tied_embeddings`, or these below `shape`).

These keys change the plan and are optional: `engine` (ddp, deepspeed), `tp`, `pp`, `overlap`, `offload` (of
the optimizer: none, cpu, nvme), `offload_param`, `ratio`, `bucket` (for reducing and gathering, in elements),
`ckpt` (true, or k for every k-th block), `precision`, `grad_accum_dtype`, `attention`, `compile`, `clip`,
`expandable_segments`, `optimizer`, `momentum`, `fused`, `prefetch`, `persistence`, `max_live`, `max_reuse`,
`sub_group`, `hpz`, `quantized_weights`, `multi_rank`. `gpu` names the GPU, `card_gib` is its size, `hardware`
changes its figures.

Measured values, as far as the trial came: `static` (bytes allocated after deepspeed.initialize), `peak`,
`reserved` and `nvml` (bytes: torch's allocated, torch's reserved, in use on the GPU), `steps_ms`, `split_ms`
(forward, backward, step), `startup_s`, `wall_s`; after an out-of-memory failure `peak`, `error` and `where`.
For each rank, in order: `peaks` (highest allocated bytes before the first step, in it, and in later steps;
`peak` is the largest of them) and `host_peak` (highest resident bytes). `name` is for people.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sweeps.config.models import model_shape
from sweeps.config.schema import ModelConfig
from sweeps.estimate import hardware
from sweeps.estimate.hardware import Hardware
from tests.support.paths import ROOT
from train_entry.contract import (
    Attention,
    DdpPlan,
    Engine,
    ModelShape,
    Offload,
    OffloadPlan,
    OptimizerPlan,
    Plan,
    Precision,
    ZeroPlan,
)

RECORDED = ROOT / "tests" / "data" / "recorded"
MORE_TABLES = "SHARDSWEEP_TABLES"  # environment variable: paths of further tables, separated as in PATH
GIB = 2**30
SHAPE_FIELDS = (
    *("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "positions"),
    "tied_embeddings",
)

# From NVIDIA's data sheets; the link in one direction, as measured between two H200s (ml-engineering, network
# section).
H200 = Hardware(
    name="NVIDIA H200",
    device="cuda",
    ranks_per_node=8,
    memory_bytes=150_110_000_000,  # 139.8 GiB, as CUDA reports it
    host_memory_bytes=2048 * GIB,
    half_flops_per_s=989.4e12,
    fp32_flops_per_s=67e12,
    memory_bytes_per_s=4.8e12,
    link_bytes_per_s=396e9,
    network_bytes_per_s=50e9,
    host_link_bytes_per_s=55e9,
    host_memory_bytes_per_s=300e9,
    nvme_bytes_per_s=6e9,
    context_bytes=int(0.55 * GIB),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trial of a table. None: the trial did not get that far, or the table has no value."""

    table: str
    plan: Plan
    model: ModelShape
    hardware: Hardware
    cap_bytes: (
        int  # that the process could allocate: includes torch's reserved memory, without the CUDA context
    )
    is_oom: bool
    static_bytes: int | None  # allocated after the engine is created
    peak_bytes: int | None  # torch's allocated bytes; after an out-of-memory failure, the peak until then
    asked_bytes: int | None  # out-of-memory failures: the size of the allocation that failed
    reserved_bytes: int | None
    card_bytes: int | None  # in use on the GPU, CUDA context included
    where: str | None  # out-of-memory failures: engine (also the first step), first (later), ...
    steps_s: tuple[float, ...]  # each optimizer step; the first one is warm-up
    split_s: tuple[tuple[float, float, float], ...]  # forward, backward, step
    startup_s: Mapping[str, float]
    wall_s: float | None
    rank_peak_bytes: tuple[int, ...] = ()  # for each rank, over all phases
    host_peak_bytes: int | None = None  # sum over all ranks

    @property
    def label(self) -> str:
        plan = self.plan
        return (
            f"{self.model.name} {plan.strategy} ranks={plan.ranks} tensor={plan.tensor} "
            f"pipeline={plan.pipeline} micro_batch={plan.micro_batch} "
            f"checkpoint_every={plan.checkpoint_every} "
            f"bucket={plan.zero.reduce_bucket_size:.0e} overlap={plan.zero.overlap_comm}"
        )


def tables() -> dict[str, list[Row]]:
    """Return all recorded tables by name, and those that SHARDSWEEP_TABLES adds."""
    added = [Path(path) for path in os.environ.get(MORE_TABLES, "").split(os.pathsep) if path]
    return {path.stem: load_table(path) for path in [*sorted(RECORDED.glob("*.jsonl")), *added]}


def load_table(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [row_of(json.loads(line), path.stem) for line in lines if line.strip()]


def row_of(raw: Mapping[str, Any], table: str = "") -> Row:
    return Row(
        table=table,
        plan=plan_of(raw),
        model=model_of(raw),
        hardware=hardware_of(raw),
        cap_bytes=round(raw["cap_gib"] * GIB) if raw.get("cap_gib") else hardware_of(raw).memory_bytes,
        is_oom=raw["outcome"] == "oom",
        static_bytes=raw.get("static"),
        peak_bytes=raw.get("peak"),
        asked_bytes=_asked(raw.get("error", "")),
        reserved_bytes=raw.get("reserved"),
        card_bytes=raw.get("nvml"),
        where=raw.get("where"),
        steps_s=tuple(step / 1e3 for step in raw.get("steps_ms", ())),
        split_s=tuple((f / 1e3, b / 1e3, s / 1e3) for f, b, s in raw.get("split_ms", ())),
        startup_s=raw.get("startup_s", {}),
        wall_s=raw.get("wall_s"),
        rank_peak_bytes=tuple(max(phases) for phases in raw.get("peaks", ())),
        host_peak_bytes=sum(raw["host_peak"]) if "host_peak" in raw else None,
    )


def model_of(raw: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a line gives, or else that of the model in conf/model with its name."""
    given = {**raw, **raw.get("shape", {})}
    known = ROOT / "conf" / "model" / f"{raw['model']}.yaml"
    config: dict[str, Any] = {"name": raw["model"]}
    if known.is_file():
        config |= yaml.safe_load(known.read_text(encoding="utf-8"))["model"]
    config |= {key: given[key] for key in SHAPE_FIELDS if key in given}
    if "kv_heads" not in config:
        config["kv_heads"] = config["heads"]
    return model_shape(ModelConfig(**config))


def hardware_of(raw: Mapping[str, Any]) -> Hardware:
    """Return the GPU's figures from data sheets, with the changes that `hardware` gives."""
    card = H200
    if raw.get("gpu", H200.name) != H200.name:
        memory_bytes = round(raw.get("card_gib", 80) * GIB)
        card = hardware.hardware_of(raw["gpu"], "cuda", 8, memory_bytes, H200.host_memory_bytes)
    return dataclasses.replace(card, **raw.get("hardware", {}))


def plan_of(raw: Mapping[str, Any]) -> Plan:
    precision = Precision(raw.get("precision", "bf16"))
    accumulate = raw.get("grad_accum_dtype")
    return Plan(
        engine=Engine(raw.get("engine", "deepspeed")),
        ranks=raw["gpus"],
        tensor=raw.get("tp", 1),
        pipeline=raw.get("pp", 1),
        micro_batch=raw["micro_batch"],
        global_batch=raw["global_batch"],
        seq_len=raw["seq"],
        precision=precision,
        gradient_clipping=raw.get("clip", 1.0),
        optimizer=_optimizer(raw),
        zero=_zero(raw),
        seed=0,
        grad_accum_dtype=Precision(accumulate) if accumulate else None,
        offload=OffloadPlan(
            optimizer=Offload(raw.get("offload", "none")),
            param=Offload(raw.get("offload_param", "none")),
            ratio=raw.get("ratio", 1.0),
        ),
        ddp=DdpPlan(gradient_as_bucket_view=raw.get("gradient_as_bucket_view", False)),
        checkpoint_every=int(raw.get("ckpt", 0)),
        attention=Attention(raw.get("attention", "sdpa")),
        compile=raw.get("compile", False),
        expandable_segments=raw.get("expandable_segments", False),
    )


def _optimizer(raw: Mapping[str, Any]) -> OptimizerPlan:
    name = raw.get("optimizer", "adamw")
    return OptimizerPlan(
        name=name,
        lr=raw.get("lr", 3e-4),
        weight_decay=0.1,
        beta1=0.9 if name == "adamw" else 0.0,
        beta2=0.95 if name == "adamw" else 0.0,
        eps=1e-8 if name == "adamw" else 0.0,
        momentum=raw.get("momentum", 0.0),
        fused=raw.get("fused", False),
    )


def _zero(raw: Mapping[str, Any]) -> ZeroPlan:
    names = {
        "bucket": "reduce_bucket_size",
        "overlap": "overlap_comm",
        "contiguous": "contiguous_gradients",
        "multi_rank": "use_multi_rank_bucket_allreduce",
        "prefetch": "prefetch_bucket_size",
        "persistence": "param_persistence_threshold",
        "max_live": "max_live_parameters",
        "max_reuse": "max_reuse_distance",
        "sub_group": "sub_group_size",
        "hpz": "hpz_partition_size",
        "quantized_weights": "quantized_weights",
        "quantized_gradients": "quantized_gradients",
    }
    sizes = {field: raw[name] for name, field in names.items() if name in raw}
    sizes |= {name: int(size) for name, size in sizes.items() if isinstance(size, float)}
    if "reduce_bucket_size" in sizes:
        sizes["allgather_bucket_size"] = sizes["reduce_bucket_size"]
    return ZeroPlan(stage=raw["stage"], **sizes)


def _asked(error: str) -> int | None:
    """Return the bytes in torch's message "Tried to allocate 1.95 GiB"; None for any other message."""
    found = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", error)
    if not found:
        return None
    return round(float(found[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}[found[2]])
