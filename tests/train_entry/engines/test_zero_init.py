"""ZeRO-3 models built in shards, on two real ranks: what they hold, what they cost, what they compute."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from sweeps.plan.ds_config import deepspeed_config
from tests.train_entry.conftest import tiny_spec, zero_plan
from train_entry.contract import ModelShape, Offload, OffloadPlan, Plan, Precision
from train_entry.engines import choose
from train_entry.model.build import build_model, parameters_of
from train_entry.model.sharding import Replicated
from train_entry.rank import RankInfo, prepare_process

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

CPU = torch.device("cpu")
RANKS = 2
MIB = 2**20
SLACK = 40 * MIB  # seen: 14 to 17 MiB
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


# ---------------------------------------------------------------- on a rank


def on_rank(rank: int, directory: Path) -> None:
    """What one rank sees of each case, left in a file: a process costs more than all cases together."""
    where = RankInfo(rank=rank, ranks=RANKS, local_rank=rank, init_method=(directory / "rendezvous").as_uri())
    prepare_process(where, "cpu")
    torch.set_num_threads(1)
    choose.backend_for(zero_plan(3)).join_ranks("gloo", where)
    seen = {"big": growth_of_big_model(), **{name: seen_of(name, directory) for name in CASES}}
    (directory / f"seen.rank{rank}.json").write_text(json.dumps(seen))
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


# ---------------------------------------------------------------- what they saw


@pytest.fixture(scope="module")
def seen(cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    directory = tmp_path_factory.mktemp("zero_init")
    plan, shape = case("gpt2", directory)
    build_model(shape, dataclasses.replace(plan, seed=99), CPU).save_pretrained(directory / "gpt2")
    # glibc fills the holes that large tensors leave behind; given back at once, what is left can be told.
    with environment(MALLOC_MMAP_THRESHOLD_=str(MIB // 4), OMP_NUM_THREADS="1"):
        spawn(on_rank, (directory,), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return [json.loads((directory / f"seen.rank{rank}.json").read_text()) for rank in range(RANKS)]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize("name", CASES)
def test_the_shards_together_are_bit_for_bit_the_whole_model(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        assert rank[name]["equal"]
        assert rank[name]["buffers"]


@pytest.mark.parametrize("name", CASES)
def test_the_first_loss_is_that_of_the_whole_model(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        sharded, whole = rank[name]["losses"]
        assert sharded == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_counted_whole_and_held_in_shards(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        sharded, whole = rank[name]["parameters"]
        assert sharded == whole
        assert rank[name]["held"] == 0
        assert rank[name]["shards"] == pytest.approx(whole / RANKS, rel=0.01)


def test_a_rank_never_holds_more_than_its_shard_and_a_parameter(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        big = rank["big"]
        assert big["left"] <= big["peak"] < big["bytes"] / RANKS + SLACK < big["bytes"]
