"""Illegal configurations, each with the names of all rules that it breaks, and no others."""

from __future__ import annotations

import dataclasses

import pytest

from sweeps.config.keys import with_value
from sweeps.config.schema import SweepConfig
from sweeps.machine import Machine, Nvme
from sweeps.plan.resolve import Rejection, resolve
from sweeps.plan.rules import RULES
from tests.support.divided_plans import (
    CPU,
    DDP,
    DIVIDED,
    H200,
    H200_FLASH,
    LEGALLY_DIVIDED,
    NVME,
    OFFLOAD_3,
    TWO_NODES,
    Changes,
    cards,
)
from tests.support.examples import a_model
from train_entry.contract import ModelShape, Plan

MODEL = a_model(parameters=1_000_000, layers=4, hidden=64, ffn=256, vocab=1024)
OLD_CPU = dataclasses.replace(CPU, has_fp16=False)
NO_LIBAIO = dataclasses.replace(CPU, has_libaio=False, nvme=Nvme(path="/scratch", free_bytes=10**12))
FULL_DISK = dataclasses.replace(CPU, nvme=Nvme(path="/scratch", free_bytes=1_000_000))
READ_ONLY = dataclasses.replace(CPU, nvme=Nvme(path="/ro", free_bytes=0, problem="cannot be written"))


V100, T4 = cards("V100", (7, 0), flash=True), cards("T4", (7, 5))
RATIO: Changes = {**OFFLOAD_3, "offload.ratio": 0.5}
NVME_PARAM: Changes = {"zero.stage": 3, "zero.offload_param": "nvme"}

ILLEGAL: list[tuple[Machine, Changes, set[str]]] = [
    # Ranks, degrees, batches, sequences.
    (CPU, {"ranks": 8}, {"ranks_fit_the_cluster"}),
    (CPU, {"tensor": 3}, {"degrees_divide_ranks", "tensor_ranks_share_evenly"}),
    (CPU, {"micro_batch": 3}, {"batches_divide"}),
    (CPU, {"global_batch": 30, "micro_batch": 2}, {"batches_divide"}),
    (CPU, {"seq_len": 4096}, {"sequence_fits_the_model"}),
    (CPU, {"micro_batch": 64, "seq_len": 4096}, {"batches_divide", "sequence_fits_the_model"}),
    # ddp has no ZeRO.
    (CPU, {**DDP, "zero.stage": 1}, {"ddp_shards_nothing"}),
    (CPU, {**DDP, "zero.stage": 3}, {"ddp_shards_nothing"}),
    (CPU, {**DDP, "zero.offload_optimizer": "cpu"}, {"ddp_offloads_nothing"}),
    (CPU, {**DDP, **OFFLOAD_3}, {"ddp_shards_nothing", "ddp_offloads_nothing"}),
    (CPU, {**DDP, "zero.hpz_partition_size": 2}, {"a_second_shard_needs_stage_3"}),
    # Offload, stage by stage.
    (CPU, {"zero.stage": 0, "zero.offload_optimizer": "cpu"}, {"optimizer_offload_needs_a_zero_stage"}),
    (CPU, {"zero.stage": 1, "zero.offload_param": "cpu"}, {"param_offload_needs_stage_3"}),
    (CPU, {"zero.stage": 2, "zero.offload_param": "cpu"}, {"param_offload_needs_stage_3"}),
    (
        CPU,
        {"zero.stage": 0, "zero.offload_param": "cpu", "zero.offload_optimizer": "cpu"},
        {"optimizer_offload_needs_a_zero_stage", "param_offload_needs_stage_3"},
    ),
    (CPU, {"zero.stage": 2, "zero.offload_optimizer": "nvme"}, {"nvme_needs_stage_3", "nvme_needs_a_path"}),
    (
        CPU,
        {"zero.stage": 2, "zero.offload_optimizer": "cpu", "offload.ratio": 0.5},
        {"a_ratio_needs_stage_3"},
    ),
    (
        CPU,
        {"zero.stage": 1, "zero.offload_optimizer": "cpu", "offload.ratio": 0.9},
        {"a_ratio_needs_stage_3"},
    ),
    (H200, {**RATIO, "optimizer.name": "sgd", "zero.sub_group_size": 1e5}, {"a_ratio_needs_adamw"}),
    (H200, {**RATIO, "lr.base_warmup": 10, "zero.sub_group_size": 1e5}, {"a_ratio_needs_a_constant_rate"}),
    (
        H200,
        {**RATIO, "lr.schedule": "linear", "lr.total_steps": 9, "zero.sub_group_size": 1e5},
        {"a_ratio_needs_a_constant_rate"},
    ),
    (H200, RATIO, {"a_ratio_leaves_a_sub_group"}),
    (
        H200,
        {**RATIO, "lr.base_warmup": 10},
        {"a_ratio_leaves_a_sub_group", "a_ratio_needs_a_constant_rate"},
    ),
    # NVMe: path, library, space, buffers.
    (CPU, NVME, {"nvme_needs_a_path"}),
    (CPU, NVME_PARAM, {"nvme_needs_a_path"}),
    (NO_LIBAIO, NVME, {"nvme_needs_libaio"}),
    (FULL_DISK, NVME, {"the_nvme_has_space"}),
    (READ_ONLY, NVME, {"the_nvme_path_can_be_written"}),
    (
        dataclasses.replace(NO_LIBAIO, nvme=None),
        {**NVME, "zero.stage": 1},
        {"nvme_needs_stage_3", "nvme_needs_a_path", "nvme_needs_libaio"},
    ),
    (
        dataclasses.replace(FULL_DISK, nvme=Nvme(path="/scratch", free_bytes=10**12)),
        {**NVME_PARAM, "offload.buffer_size": 1000},
        {"a_buffer_holds_the_largest_parameter"},
    ),
    (
        dataclasses.replace(NO_LIBAIO, has_libaio=True),
        {**NVME_PARAM, "offload.max_in_cpu": 0.0},
        {"weights_on_nvme_are_not_kept"},
    ),
    # ZeRO++.
    (CPU, {"zero.stage": 2, "zero.hpz_partition_size": 2}, {"a_second_shard_needs_stage_3"}),
    (H200, {"zero.stage": 3, "zero.hpz_partition_size": 3}, {"second_shards_divide_the_ranks"}),
    (CPU, {"zero.stage": 3, "zero.quantized_weights": True}, {"quantizing_needs_gpus"}),
    (H200, {"zero.stage": 2, "zero.quantized_weights": True}, {"quantized_weights_need_stage_3"}),
    (H200, {"zero.stage": 3, "zero.quantized_gradients": True}, {"quantized_gradients_need_several_nodes"}),
    (
        TWO_NODES,
        {"ranks": 8, "zero.stage": 1, "zero.quantized_gradients": True},
        {"quantized_gradients_need_stage_3"},
    ),
    (
        CPU,
        {"zero.stage": 1, "zero.quantized_weights": True, "zero.quantized_gradients": True},
        {
            "quantizing_needs_gpus",
            "quantized_weights_need_stage_3",
            "quantized_gradients_need_stage_3",
            "quantized_gradients_need_several_nodes",
        },
    ),
    (CPU, {"zero.stage": 2, "zero.allgather_bucket_size": 101}, {"the_allgather_bucket_is_even"}),
    # Number formats.
    (CPU, {"precision": "fp16", "zero.stage": 0}, {"fp16_needs_a_zero_stage"}),
    (
        CPU,
        {"precision": "bf16", "zero.stage": 0, "optimizer.name": "sgd", "optimizer.weight_decay": 0.1},
        {"decay_by_sgd_needs_a_zero_stage_in_bf16"},
    ),
    (OLD_CPU, {"precision": "fp16", "zero.stage": 2}, {"fp16_needs_a_cpu_that_has_it"}),
    (OLD_CPU, {"precision": "fp16"}, {"fp16_needs_a_zero_stage", "fp16_needs_a_cpu_that_has_it"}),
    (V100, {"precision": "bf16", "zero.stage": 2}, {"bf16_needs_a_card_that_has_it"}),
    (T4, {**DDP, "precision": "bf16"}, {"bf16_needs_a_card_that_has_it"}),
    (
        CPU,
        {"precision": "bf16", "grad_accum_dtype": "fp32"},
        {"accumulation_in_another_format_needs_a_zero_stage"},
    ),
    (
        H200,
        {"precision": "fp16", "grad_accum_dtype": "fp32"},
        {"accumulation_in_another_format_needs_a_zero_stage", "fp16_needs_a_zero_stage"},
    ),
    (CPU, {"grad_accum_dtype": "bf16", "zero.stage": 2}, {"accumulation_is_in_a_wider_format"}),
    (
        H200,
        {"precision": "bf16", "grad_accum_dtype": "fp16", "zero.stage": 3},
        {"accumulation_is_in_a_wider_format"},
    ),
    (
        H200,
        {"precision": "fp16", "zero.stage": 1, "fp16.initial_scale_power": 4, "fp16.min_loss_scale": 16.0},
        {"the_loss_scale_begins_above_its_minimum"},
    ),
    # Blocks, attention, learning rate.
    (CPU, {"activation_checkpointing": "5"}, {"a_block_is_checkpointed"}),
    (H200, {"attention": "flash_attention_2"}, {"flash_attention_is_installed"}),
    (
        H200_FLASH,
        {"attention": "flash_attention_2", "precision": "fp32"},
        {"flash_attention_needs_half_precision_on_gpus"},
    ),
    (
        V100,
        {**DDP, "attention": "flash_attention_2", "precision": "fp16"},
        {"flash_attention_needs_a_card_that_has_it"},
    ),
    (
        CPU,
        {"attention": "flash_attention_2"},
        {"flash_attention_is_installed", "flash_attention_needs_half_precision_on_gpus"},
    ),
    (
        CPU,
        {"lr.schedule": "cosine", "lr.base_warmup": 10, "lr.total_steps": 10},
        {"the_warmup_ends_before_the_decay"},
    ),
    (CPU, {"lr.base_warmup": 10, "lr.warmup_from": 1.0}, {"the_ends_of_the_rate_are_below_its_peak"}),
]


def asked(changes: Changes) -> SweepConfig:
    """Apply changes to a legal plan of four ranks: 32 = micro-batch 2 x accumulation 4 x data degree 4."""
    config = SweepConfig(ranks=4, micro_batch=2, global_batch=32, seq_len=64)
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config


def label(value: object) -> str:
    return "+".join(sorted(value)) if isinstance(value, set) else ""


@pytest.mark.parametrize(("machine", "changes", "rules"), ILLEGAL, ids=label)
def test_an_illegal_plan_breaks_exactly_its_rules(
    machine: Machine, changes: Changes, rules: set[str]
) -> None:
    resolved = resolve(asked(changes), MODEL, machine)
    assert isinstance(resolved, Rejection)
    assert {reason.rule for reason in resolved.reasons} == rules


@pytest.mark.parametrize(("machine", "model", "changes", "rules"), DIVIDED, ids=label)
def test_an_illegal_division_breaks_exactly_its_rules(
    machine: Machine, model: ModelShape, changes: Changes, rules: set[str]
) -> None:
    resolved = resolve(asked(changes), model, machine)
    assert isinstance(resolved, Rejection)
    assert {reason.rule for reason in resolved.reasons} == rules


def test_the_tables_have_sixty_five_rows_and_every_rule() -> None:
    rows = [rules for _, _, rules in ILLEGAL] + [rules for _, _, _, rules in DIVIDED]
    covered = set().union(*rows)
    assert len(ILLEGAL) >= 40
    assert len(DIVIDED) >= 25
    assert {rule.name for rule in RULES} - covered == {
        "bytes_fit_the_vocabulary"
    }  # depends on the data: test_rules.py


LEGAL: list[tuple[Machine, Changes]] = [
    (CPU, {}),
    (CPU, {"zero.stage": 1, "zero.offload_optimizer": "cpu"}),
    (CPU, {**OFFLOAD_3, "zero.offload_param": "cpu"}),
    (CPU, {"zero.stage": 3, "zero.offload_param": "cpu"}),
    (H200, {**RATIO, "zero.sub_group_size": 1e5}),
    (dataclasses.replace(CPU, nvme=Nvme(path="/scratch", free_bytes=10**12)), {**NVME, **NVME_PARAM}),
    (
        dataclasses.replace(NO_LIBAIO, has_libaio=True),
        {**NVME_PARAM, "offload.max_in_cpu": 0.0, "zero.max_reuse_distance": 0.0},
    ),
    (H200, {"zero.stage": 3, "zero.hpz_partition_size": 2}),
    (H200, {"zero.stage": 3, "zero.quantized_weights": True}),
    (TWO_NODES, {"ranks": 8, "zero.stage": 3, "zero.quantized_gradients": True}),
    (T4, {"precision": "auto", "zero.stage": 1}),
    (CPU, {"zero.stage": 3, "zero.allgather_bucket_size": 101}),
    (CPU, {"precision": "bf16", "zero.stage": 1, "grad_accum_dtype": "fp32"}),
    (H200_FLASH, {"attention": "flash_attention_2", "precision": "bf16"}),
    (CPU, {"activation_checkpointing": "4"}),
    (CPU, {"lr.schedule": "linear", "lr.base_warmup": 10, "lr.total_steps": 11}),
]


@pytest.mark.parametrize(("machine", "changes"), LEGAL, ids=lambda value: str(value)[:60])
def test_its_legal_neighbours_make_plans(machine: Machine, changes: Changes) -> None:
    assert isinstance(resolve(asked(changes), MODEL, machine), Plan)


@pytest.mark.parametrize(("machine", "model", "changes"), LEGALLY_DIVIDED, ids=lambda value: str(value)[:60])
def test_legal_divisions_make_plans(machine: Machine, model: ModelShape, changes: Changes) -> None:
    assert isinstance(resolve(asked(changes), model, machine), Plan)
