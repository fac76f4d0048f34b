"""A rank that builds ZeRO-3 models in shards, and writes its observations for engines/test_zero_init.py."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sweeps.plan.ds_config import deepspeed_config
from tests.train_entry.conftest import tiny_spec, zero_plan
from train_entry.contract import ModelShape, Offload, OffloadPlan, Plan, Precision
from train_entry.engines import choose
from train_entry.model.build import build_model, parameters_of
from train_entry.model.sharding import Replicated
from train_entry.rank import RankInfo, prepare_process

M_MMAP_THRESHOLD = -3  # malloc.h
CPU = torch.device("cpu")
MIB = 2**20
BIG = ModelShape(
    name="big",
    family="llama",
    parameters=0,
    layers=12,
    hidden=512,
    heads=8,
    kv_heads=8,
    ffn=1024,
    vocab=1024,
    positions=64,
    tied_embeddings=True,
)
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama untied": {"tied_embeddings": False},
    "gpt2": {"family": "gpt2"},
    "gpt2 untied": {"family": "gpt2", "tied_embeddings": False},
    "llama in bf16": {"precision": Precision.BF16},
    "llama offloaded": {"offload": OffloadPlan(param=Offload.CPU)},
    "gpt2 from a directory": {"family": "gpt2", "path": "gpt2"},
}
PLAN_FIELDS = ("precision", "offload")


def case(name: str, directory: Path) -> tuple[Plan, ModelShape]:
    changes = dict(CASES[name])
    plan = zero_plan(3, **{field: changes.pop(field) for field in PLAN_FIELDS if field in changes})
    if "path" in changes:
        changes["path"] = str(directory / changes["path"])
    return plan, dataclasses.replace(tiny_spec(plan).model, **changes)


def main(directory: Path) -> None:
    """Write this rank's observations of each case to a file."""
    # Let glibc return the memory of large tensors to the system at once: what remains can then be measured.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 4)
    where = RankInfo.from_env(os.environ, 2)
    prepare_process(where, "cpu")
    torch.set_num_threads(1)
    choose.backend_for(zero_plan(3)).join_ranks("gloo", where)
    seen = {"big": growth_of_big_model(), **{name: seen_of(name, directory) for name in CASES}}
    (directory / f"seen.rank{where.rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
    os._exit(0)


def seen_of(name: str, directory: Path) -> dict[str, Any]:
    plan, shape = case(name, directory)
    config = deepspeed_config(plan)
    sharding = choose.sharding_for(plan, config, CPU, rank=0)
    sharded = build_model(shape, plan, CPU, sharding)
    whole = build_model(shape, plan, CPU, Replicated(CPU, sharding.dtype))
    seen = {
        "parameters": [parameters_of(sharded), parameters_of(whole)],
        "held": sum(parameter.numel() for parameter in sharded.parameters()),
        "shards": sum(parameter.ds_tensor.numel() for parameter in sharded.parameters()),
        "buffers": all(map(torch.equal, sharded.buffers(), whole.buffers())),
    }
    opened = choose.backend_for(plan).open_engine(sharded, plan, config, CPU)
    seen["equal"] = all(map(torch.equal, (held.values for held in opened.held()), whole.parameters()))
    batch = torch.arange(64).reshape(2, 32)
    seen["losses"] = [
        float(opened.step(itertools.repeat(batch), lambda part: None)),
        float(whole(input_ids=batch, labels=batch).loss.detach()),
    ]
    return seen


def growth_of_big_model() -> dict[str, int]:
    plan = zero_plan(3)
    sharding = choose.sharding_for(plan, deepspeed_config(plan), CPU, rank=0)
    import_module("transformers.models.llama.modeling_llama")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = build_model(BIG, plan, CPU, sharding)
    peak = resident("VmHWM") - before
    return {"bytes": 4 * parameters_of(model), "peak": peak, "left": resident("VmRSS") - before}


def resident(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
