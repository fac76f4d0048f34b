"""DeepSpeed's configuration file: golden texts, and what must hold for each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.ds_config import deepspeed_config, ds_config_text
from tests.examples import a_plan
from train_entry.contract import Engine, Precision

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "ds_config"
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
# DeepSpeed checks the batches against the number of ranks, of which this process is the only one.
READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
from deepspeed.runtime.config import DeepSpeedConfig
for path in sys.argv[1:]:
    document = json.load(open(path))
    document["train_batch_size"] //= 2
    config = DeepSpeedConfig(document)
    print("read", config.zero_optimization_stage, config.gradient_accumulation_steps,
          config.float16_config.enabled, config.bfloat16_config.enabled, config.optimizer_name.lower(),
          config.scheduler_name, config.gradient_clipping, config.zero_config.reduce_bucket_size,
          config.zero_config.overlap_comm)
"""


@pytest.mark.parametrize("name", CASES)
def test_a_plan_gives_the_document_that_was_reviewed(name: str) -> None:
    expected = (GOLDEN / f"{name}.json").read_text()
    assert ds_config_text(a_plan(**CASES[name])) == expected


def test_every_reviewed_document_has_its_plan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_batch_triad_agrees_with_two_ranks(name: str) -> None:
    document = json.loads((GOLDEN / f"{name}.json").read_text())
    micro, accumulation = (
        document["train_micro_batch_size_per_gpu"],
        document["gradient_accumulation_steps"],
    )
    assert document["train_batch_size"] == 2 * micro * accumulation


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
    paths = [str(GOLDEN / f"{name}.json") for name in CASES]
    done = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("read ")]
    assert lines == [
        "read 0 4 False False adamw None 1.0 500000000 False",
        "read 1 4 False True adamw WarmupLR 1.0 50000000 False",
        "read 2 8 False True adamw None 1.0 500000000 True",
        "read 3 4 False True adamw WarmupLR 0.0 500000000 True",
        "read 2 4 False False sgd WarmupLR 1.0 500000000 False",
        "read 3 4 True False adamw None 1.0 500000000 False",
    ], done.stderr
