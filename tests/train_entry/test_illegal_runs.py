"""Check the rules against DeepSpeed: it refuses what they refuse too, ignores it, or trains wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps.plan.rules import RULES
from tests.train_entry.conftest import StartRanks
from train_entry.contract import AttemptDir

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(600)]

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-2}}
CPU_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
ON_CPU = {"device": "cpu"}
MAY_TAKE_S = 500  # ten times what a quiet machine needs


def document(stage: int, zero: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAMW,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, **(zero or {})},
        **others,
    }


def offload_optimizer(**settings: Any) -> dict[str, Any]:
    return {"offload_optimizer": {**ON_CPU, **settings}}


def cases(nvme: str) -> dict[str, dict[str, Any]]:
    on_nvme = {"device": "nvme", "nvme_path": nvme}
    accumulate: dict[str, Any] = {"data_types": {"grad_accum_dtype": "bf16"}}
    wide: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    return {
        # Legal ones, for comparison.
        "zero1": document(1),
        "zero2": document(2),
        "zero3": document(3),
        "zero2 bf16": document(2, **BF16),
        # Refused.
        "batch triad": document(2, train_batch_size=17),
        "odd allgather bucket": document(1, {"allgather_bucket_size": 101}),
        "ratio at stage 2": document(2, offload_optimizer(ratio=0.5), optimizer=CPU_ADAMW),
        "ratio with sgd": document(3, offload_optimizer(ratio=0.5), optimizer=SGD),
        "quantized weights": document(3, {"zero_quantized_weights": True}),
        "nvme without a path": document(3, {"offload_optimizer": {"device": "nvme"}}, optimizer=CPU_ADAMW),
        "stage 0, bf16, fp32 accumulation": document(0, **wide),
        "stage 0, fp32, bf16 accumulation": document(0, **accumulate),
        "scale at its minimum": document(
            2, fp16={"enabled": True, "initial_scale_power": 30, "min_loss_scale": 2.0**30, "hysteresis": 1}
        ),
        # Ignored.
        "nvme at stage 2": document(
            2, {"offload_optimizer": {"device": "nvme", "nvme_path": nvme}}, optimizer=CPU_ADAMW
        ),
        "param offload at stage 2": document(2, {"offload_param": on_nvme}),
        "hpz at stage 2": document(2, {"zero_hpz_partition_size": 2}),
        "quantized weights at stage 1": document(1, {"zero_quantized_weights": True}),
        "quantized gradients at stage 1": document(1, {"zero_quantized_gradients": True}),
        "bf16 accumulation at stage 2": document(2, **accumulate),
        "bf16 accumulation at stage 3": document(3, **accumulate),
        "stage 0 offload": document(0, offload_optimizer(), optimizer=CPU_ADAMW),
        # Trained wrongly. With SGD, since Adam would hide the scale of the first update.
        "fp16 at stage 0": document(0, **FP16, optimizer=SGD),
        "fp16 at stage 2": document(2, **FP16, optimizer=SGD),
        "bf16 at stage 0": document(0, **BF16),
        # Legal, but DeepSpeed switches to another optimizer, which does not read some settings.
        "bf16, fp32 accumulation at stage 1": document(1, **wide),
    }


@pytest.fixture(scope="module")
def nvme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvme")


@pytest.fixture(scope="module")
def seen(
    start_ranks: StartRanks, nvme: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Run every case on two ranks, in one pair of processes, and return the answers by case."""
    folder = AttemptDir(tmp_path_factory.mktemp("illegal"))
    questions, answers = folder.path / "cases.json", folder.path / "answers.json"
    questions.write_text(json.dumps(cases(str(nvme))))
    ranks = start_ranks(folder, 2, "tests.support.illegal_runs", str(questions), str(answers))
    ranks.wait(MAY_TAKE_S)
    assert answers.exists(), ranks.logs
    found: dict[str, dict[str, Any]] = json.loads(answers.read_text())
    return found


# A rule, a case that it refuses, and DeepSpeed's error.
REFUSED = [
    ("batches_divide", "batch triad", "AssertionError: Check batch related parameters"),
    ("the_allgather_bucket_is_even", "odd allgather bucket", "must be a multiple of nccl_start_alignment"),
    ("a_ratio_needs_stage_3", "ratio at stage 2", "Partial offloading only supported for ZeRO Stage 3"),
    ("a_ratio_needs_adamw", "ratio with sgd", "Hybrid Optimizer Only Supports DeepSpeedCPUAdam"),
    ("quantizing_needs_gpus", "quantized weights", "This op had not been implemented on CPU backend"),
    ("nvme_needs_a_path", "nvme without a path", "TypeError: expected str, bytes or os.PathLike object"),
    (
        "accumulation_in_another_format_needs_a_zero_stage",
        "stage 0, bf16, fp32 accumulation",
        "NotImplementedError: unsupported mix",
    ),
    (
        "accumulation_in_another_format_needs_a_zero_stage",
        "stage 0, fp32, bf16 accumulation",
        "NotImplementedError: unsupported mix",
    ),
    (
        "the_loss_scale_begins_above_its_minimum",
        "scale at its minimum",
        "Current loss scale already at minimum",
    ),
]


@pytest.mark.parametrize(("rule", "case", "answer"), REFUSED, ids=[case for _, case, _ in REFUSED])
def test_deepspeed_refuses_what_the_rule_refuses(
    seen: dict[str, dict[str, Any]], rule: str, case: str, answer: str
) -> None:
    assert rule in {known.name for known in RULES}
    assert answer in seen[case].get("error", "it ran")


# A rule, a case that it refuses, and a legal case that gives exactly the same numbers.
IGNORED = [
    ("param_offload_needs_stage_3", "param offload at stage 2", "zero2"),
    ("a_second_shard_needs_stage_3", "hpz at stage 2", "zero2"),
    ("quantized_weights_need_stage_3", "quantized weights at stage 1", "zero1"),
    ("quantized_gradients_need_stage_3", "quantized gradients at stage 1", "zero1"),
    ("accumulation_is_in_a_wider_format", "bf16 accumulation at stage 2", "zero2"),
]


@pytest.mark.parametrize(("rule", "case", "same_as"), IGNORED, ids=[case for _, case, _ in IGNORED])
def test_deepspeed_ignores_what_the_rule_refuses(
    seen: dict[str, dict[str, Any]], rule: str, case: str, same_as: str
) -> None:
    assert rule in {known.name for known in RULES}
    assert seen[case]["losses"] == seen[same_as]["losses"]


def test_whether_narrow_accumulation_is_ignored_depends_on_the_stage(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["zero3"]["losses"] == pytest.approx(seen["zero2"]["losses"], rel=1e-6)
    assert seen["bf16 accumulation at stage 3"]["losses"] != seen["zero3"]["losses"]


def test_stages_1_and_2_write_nothing_to_nvme(seen: dict[str, dict[str, Any]], nvme: Path) -> None:
    assert "losses" in seen["nvme at stage 2"]
    assert [path for path in nvme.rglob("*") if "optimizer" in path.name] == []


def test_fp16_without_zero_divides_by_a_scale_that_it_never_applied(seen: dict[str, dict[str, Any]]) -> None:
    right, wrong = seen["fp16 at stage 2"], seen["fp16 at stage 0"]
    assert right["norms"][0] == pytest.approx(seen["zero2"]["norms"][0], rel=1e-2)
    assert wrong["update"] < right["update"] / 10  # 1 / 2**8, apart from rounding in fp16


def test_the_first_update_of_bf16_without_zero_is_too_small(seen: dict[str, dict[str, Any]]) -> None:
    # (0.1 / 0.19) / sqrt(0.001 / 0.001999): Adam's moments have already seen one step without gradients.
    assert seen["bf16 at stage 0"]["update"] == pytest.approx(0.744 * seen["zero2 bf16"]["update"], rel=0.05)


def test_wide_accumulation_at_stage_1_is_another_optimizer(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["bf16, fp32 accumulation at stage 1"]["optimizer"] == "BF16_Optimizer"
    assert seen["zero1"]["optimizer"] == "DeepSpeedZeroOptimizer"


def test_offload_at_stage_0_only_changes_the_optimizer(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["stage 0 offload"]["optimizer"] == "DeepSpeedCPUAdam"


def test_the_names_of_the_cases_are_those_that_ran(seen: dict[str, dict[str, Any]], nvme: Path) -> None:
    assert set(seen) == set(cases(str(nvme)))
