"""DeepSpeed's configuration file: golden texts, and properties of each."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.machine import Machine, Nvme
from sweeps.plan.ds_config import PIPELINE, deepspeed_config, ds_config_text
from sweeps.plan.resolve import resolve
from tests.support.examples import a_plan
from tests.support.paths import ROOT
from train_entry.contract import Engine, Plan, Precision

GOLDEN = ROOT / "tests" / "data" / "ds_config"
CASES: dict[str, dict[str, Any]] = {
    "zero0": {"zero": {"stage": 0}, "precision": Precision.FP32},
    "zero1": {"zero": {"stage": 1, "reduce_bucket_size": 50_000_000}, "warmup_steps": 10},
    "zero2": {"zero": {"stage": 2, "overlap_comm": True}, "micro_batch": 2, "optimizer": {"fused": True}},
    "zero3": {"zero": {"stage": 3, "overlap_comm": True}, "warmup_steps": 100, "gradient_clipping": 0.0},
    "zero2_sgd": {
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9},
        "precision": Precision.FP32,
        "warmup_steps": 5,
    },
    "zero3_fp16": {"zero": {"stage": 3, "contiguous_gradients": False}, "precision": Precision.FP16},
}
# Plans that split the model: they name its degrees, or leave that to the pipeline's topology.
DIVIDED: dict[str, dict[str, Any]] = {
    "tp2_zero1": {"tensor": 2, "zero": {"stage": 1}, "ranks": 8},
    "tp4_zero3": {"tensor": 4, "zero": {"stage": 3}, "ranks": 8, "warmup_steps": 10},
    "pp2": {"pipeline": 2, "zero": {"stage": 0}, "precision": Precision.FP32, "ranks": 4},
    "pp4_zero1": {"pipeline": 4, "zero": {"stage": 1}, "grad_accum_dtype": Precision.FP32, "ranks": 8},
    "tp2_pp2_zero1": {"tensor": 2, "pipeline": 2, "zero": {"stage": 1}, "ranks": 8},
}
GOLDENS = {**CASES, **DIVIDED}
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml") if path.stem != "ddp")
NEEDED = {"hybrid_3d": ("ranks=4",), "tp2": ("ranks=2", "precision=fp32")}
# Eight GPUs for the experiment, as its name says; presets use two ranks or four.
MACHINE = Machine(
    device="cuda",
    nodes=1,
    ranks_per_node=8,
    nvme=Nvme(path="/scratch", free_bytes=10**13),
    has_libaio=True,
)
# DeepSpeed checks the batches against the number of ranks, which is one in this process.
READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
from deepspeed.runtime.config import DeepSpeedConfig
for path in sys.argv[1:]:
    document = json.load(open(path))
    document["train_batch_size"] = (
        document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"]
    )
    config = DeepSpeedConfig(document)
    zero = config.zero_config
    offload = [part and part.model_dump(mode="json")["device"]
               for part in (zero.offload_optimizer, zero.offload_param)]
    print("read", config.zero_optimization_stage, config.gradient_accumulation_steps,
          config.float16_config.enabled, config.bfloat16_config.enabled, config.optimizer_name.lower(),
          config.scheduler_name, config.gradient_clipping, zero.reduce_bucket_size, zero.overlap_comm,
          *offload, config.tensor_parallel_config.autotp_size)
"""


@pytest.mark.parametrize("name", GOLDENS)
def test_a_plan_gives_the_document_that_was_reviewed(name: str) -> None:
    expected = (GOLDEN / f"{name}.json").read_text()
    assert ds_config_text(a_plan(**GOLDENS[name])) == expected


@pytest.mark.parametrize("name", DIVIDED)
def test_a_divided_plan_is_called_by_its_degrees(name: str) -> None:
    assert a_plan(**DIVIDED[name]).strategy == name


def composed(composer: Composer, *overrides: str) -> Plan:
    config = composer.with_fixed(overrides).compose()
    plan = resolve(config, model_shape(config.model), MACHINE)
    assert isinstance(plan, Plan), plan.texts
    return plan


@pytest.mark.parametrize("name", PRESETS)
def test_a_strategy_gives_the_document_that_was_reviewed(composer: Composer, name: str) -> None:
    needed = NEEDED.get(name, ("ranks=2",))
    plan = composed(composer, f"strategy={name}", "model=llama_160m", "cluster.nvme_path=/scratch", *needed)
    assert ds_config_text(plan) == (GOLDEN / "strategy" / f"{name}.json").read_text()


def test_the_article_template_for_eight_gpus_comes_out_field_by_field(composer: Composer) -> None:
    plan = composed(composer, "experiment=article_7b_8gpu")
    assert ds_config_text(plan) == (GOLDEN / "experiment" / "article_7b_8gpu.json").read_text()
    document = deepspeed_config(plan)
    assert document["train_batch_size"] == 512 == 4 * 16 * 8
    assert (document["train_micro_batch_size_per_gpu"], document["gradient_accumulation_steps"]) == (4, 16)
    assert (document["optimizer"]["type"], document["optimizer"]["params"]["lr"]) == ("AdamW", 3e-4)
    assert document["scheduler"] == {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 1e-5,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 1000,
            "warmup_type": "linear",
        },
    }
    assert (document["fp16"]["enabled"], document["fp16"]["loss_scale"]) == (True, 0)
    zero = document["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (2, "cpu")
    assert (zero["overlap_comm"], zero["contiguous_gradients"]) == (True, True)
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 5e8
    assert document["gradient_clipping"] == 1.0


def test_every_reviewed_document_has_its_plan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(GOLDENS)
    assert [path.stem for path in sorted((GOLDEN / "strategy").glob("*.json"))] == PRESETS


@pytest.mark.parametrize("name", CASES)
def test_the_batch_triad_agrees_with_two_ranks(name: str) -> None:
    document = json.loads((GOLDEN / f"{name}.json").read_text())
    micro, accumulation = (
        document["train_micro_batch_size_per_gpu"],
        document["gradient_accumulation_steps"],
    )
    assert document["train_batch_size"] == 2 * micro * accumulation


@pytest.mark.parametrize("name", DIVIDED)
def test_the_batch_triad_leaves_tensor_and_pipeline_out(name: str) -> None:
    plan = a_plan(**DIVIDED[name])
    document = deepspeed_config(plan)
    micro, accumulation = (
        document["train_micro_batch_size_per_gpu"],
        document["gradient_accumulation_steps"],
    )
    assert micro * accumulation * plan.ranks == 32 * plan.tensor * plan.pipeline


@pytest.mark.parametrize(
    ("degrees", "section"),
    [
        ({"tensor": 2}, {"tensor_parallel": {"autotp_size": 2}}),
        ({"pipeline": 2}, {"pipeline": PIPELINE}),
        ({"tensor": 2, "pipeline": 2}, {"pipeline": PIPELINE}),  # the topology has the tensor degree
    ],
)
def test_each_degree_has_a_section_of_its_own(degrees: dict[str, Any], section: dict[str, Any]) -> None:
    document = deepspeed_config(a_plan(ranks=8, zero={"stage": 1}, **degrees))
    names = ("tensor_parallel", "pipeline")
    assert {name: document[name] for name in names if name in document} == section


def test_autotp_is_not_told_a_batch_that_it_would_check_wrongly() -> None:
    assert "train_batch_size" not in deepspeed_config(a_plan(ranks=8, tensor=2, zero={"stage": 1}))
    assert deepspeed_config(a_plan(ranks=8, pipeline=2, zero={"stage": 1}))["train_batch_size"] == 32


def test_the_peak_rate_stands_in_the_optimizer_and_in_the_scheduler() -> None:
    document = deepspeed_config(a_plan(warmup_steps=10, optimizer={"lr": 6e-4}))
    warmup = document["scheduler"]["params"]
    assert document["optimizer"]["params"]["lr"] == warmup["warmup_max_lr"] == 6e-4
    assert (warmup["warmup_type"], warmup["warmup_num_steps"]) == ("linear", 10)


def test_without_warmup_there_is_no_scheduler() -> None:
    assert "scheduler" not in deepspeed_config(a_plan(warmup_steps=0))


@pytest.mark.parametrize("precision", Precision)
def test_one_precision_at_most_is_on(precision: Precision) -> None:
    document = deepspeed_config(a_plan(precision=precision))
    on = [name for name in ("bf16", "fp16") if document[name]["enabled"]]
    assert on == ([] if precision is Precision.FP32 else [precision.value])


def test_ddp_has_no_document() -> None:
    assert ds_config_text(a_plan(engine=Engine.DDP)) is None


@pytest.mark.slow
def test_deepspeed_reads_the_documents_as_they_are_meant() -> None:
    paths = [*(GOLDEN / f"{name}.json" for name in GOLDENS), *sorted(GOLDEN.glob("*/*.json"))]
    command = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("read ")]
    assert lines == [
        "read 0 4 False False adamw None 1.0 500000000 False None None 0",
        "read 1 4 False True adamw WarmupLR 1.0 50000000 False None None 0",
        "read 2 8 False True adamw None 1.0 500000000 True None None 0",
        "read 3 4 False True adamw WarmupLR 0.0 500000000 True None None 0",
        "read 2 4 False False sgd WarmupLR 1.0 500000000 False None None 0",
        "read 3 4 True False adamw None 1.0 500000000 False None None 0",
        "read 1 2 False True adamw None 1.0 500000000 False None None 2",  # tensor degrees stand last
        "read 3 4 False True adamw WarmupLR 1.0 500000000 False None None 4",
        "read 0 4 False False adamw None 1.0 500000000 False None None 0",
        "read 1 4 False True adamw None 1.0 500000000 False None None 0",
        "read 1 4 False True adamw None 1.0 500000000 False None None 0",
        "read 2 16 True False adamw WarmupLR 1.0 500000000 True cpu None 0",  # the article's
        "read 1 64 False True adamw None 1.0 500000000 False None None 0",  # hybrid_3d
        "read 0 64 False True adamw None 1.0 500000000 False None None 0",
        "read 1 64 False True adamw None 1.0 500000000 False None None 0",
        "read 0 64 False False adamw None 1.0 500000000 False None None 2",
        "read 1 64 False True adamw None 1.0 500000000 False None None 2",  # tp_zero1
        "read 0 32 False True adamw None 1.0 500000000 False None None 0",
        "read 1 32 False True adamw None 1.0 500000000 False None None 0",
        "read 2 32 False True adamw None 1.0 500000000 False None None 0",
        "read 2 32 False True adamw None 1.0 500000000 False cpu None 0",
        "read 3 32 False True adamw None 1.0 500000000 True None None 0",
        "read 3 32 False True adamw None 1.0 500000000 True nvme nvme 0",
        "read 3 32 False True adamw None 1.0 500000000 True cpu cpu 0",
    ], done.stderr
