"""Legal and illegal plans with degrees: rows for test_illegal_plans.py, and machines for all its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from sweeps.machine import Gpu, Machine
from tests.support.examples import a_model
from train_entry.contract import ModelShape

Changes = dict[str, Any]  # to a legal configuration

CPU = Machine(device="cpu", nodes=1, ranks_per_node=4, cores=4, has_libaio=True)


def cards(name: str, capability: tuple[int, int], flash: bool = False) -> Machine:
    gpus = tuple(
        Gpu(index=index, uuid=f"GPU-{index}", name=name, memory_bytes=2**34, capability=capability)
        for index in range(4)
    )
    return Machine(device="cuda", nodes=1, ranks_per_node=4, gpus=gpus, has_flash_attention=flash)


H200 = cards("H200", (9, 0))
H200_FLASH = cards("H200", (9, 0), flash=True)
TWO_NODES = dataclasses.replace(H200, nodes=2)
# Models whose sizes can be divided by 2, 4 and 8, except where a row changes them. Nodes have four GPUs.
WIDE = a_model(parameters=1_000_000, layers=8, hidden=64, heads=16, kv_heads=8, ffn=256, vocab=1024)
GPT2 = dataclasses.replace(WIDE, family="gpt2", kv_heads=16)
MISTRAL = dataclasses.replace(WIDE, family="mistral")
TIED = dataclasses.replace(WIDE, tied_embeddings=True)
THREE_NODES = dataclasses.replace(H200, nodes=3)
SIXES = dataclasses.replace(H200, nodes=2, ranks_per_node=6)

DDP: Changes = {"engine": "ddp"}
OFFLOAD_3: Changes = {"zero.stage": 3, "zero.offload_optimizer": "cpu"}
NVME: Changes = {"zero.stage": 3, "zero.offload_optimizer": "nvme"}
PIPE: Changes = {"pipeline": 2, "zero.stage": 1}
TENSOR: Changes = {"tensor": 2, "zero.stage": 1}
HYBRID: Changes = {"tensor": 2, "pipeline": 2, "zero.stage": 1}
DIVIDED: list[tuple[Machine, ModelShape, Changes, set[str]]] = [
    # Degrees and ranks.
    (CPU, WIDE, {**PIPE, "pipeline": 8}, {"degrees_divide_ranks"}),
    (CPU, WIDE, {**TENSOR, "tensor": 8}, {"degrees_divide_ranks"}),
    (CPU, WIDE, {**HYBRID, "tensor": 4}, {"degrees_divide_ranks"}),
    (CPU, WIDE, {**HYBRID, "ranks": 6}, {"ranks_fit_the_cluster", "degrees_divide_ranks"}),
    (CPU, WIDE, {**TENSOR, "micro_batch": 3}, {"batches_divide"}),
    (CPU, WIDE, {**PIPE, "pipeline": 4, "micro_batch": 64}, {"batches_divide"}),
    # ddp has no degrees.
    (CPU, WIDE, {**DDP, "tensor": 2}, {"ddp_divides_no_model"}),
    (CPU, WIDE, {**DDP, "pipeline": 2}, {"ddp_divides_no_model"}),
    (CPU, WIDE, {**DDP, **HYBRID}, {"ddp_divides_no_model", "ddp_shards_nothing"}),
    (CPU, GPT2, {**DDP, "tensor": 2}, {"ddp_divides_no_model"}),
    # Models.
    (CPU, GPT2, TENSOR, {"tensor_parallel_knows_the_family"}),
    (CPU, MISTRAL, TENSOR, {"tensor_parallel_knows_the_family"}),
    (CPU, MISTRAL, PIPE, {"a_pipeline_knows_the_family"}),
    (CPU, dataclasses.replace(GPT2, vocab=1023), TENSOR, {"tensor_parallel_knows_the_family"}),
    (CPU, GPT2, HYBRID, {"tensor_parallel_knows_the_family"}),
    (CPU, MISTRAL, HYBRID, {"tensor_parallel_knows_the_family", "a_pipeline_knows_the_family"}),
    (CPU, dataclasses.replace(WIDE, kv_heads=1), TENSOR, {"tensor_ranks_share_evenly"}),
    (CPU, dataclasses.replace(WIDE, heads=3, kv_heads=3, hidden=66), TENSOR, {"tensor_ranks_share_evenly"}),
    (CPU, dataclasses.replace(WIDE, ffn=255), TENSOR, {"tensor_ranks_share_evenly"}),
    (CPU, dataclasses.replace(WIDE, vocab=1023), TENSOR, {"tensor_ranks_share_evenly"}),
    (CPU, dataclasses.replace(WIDE, kv_heads=2), {**TENSOR, "tensor": 4}, {"tensor_ranks_share_evenly"}),
    (CPU, dataclasses.replace(WIDE, layers=7), PIPE, {"stages_have_equally_many_blocks"}),
    (CPU, dataclasses.replace(WIDE, layers=6), {**PIPE, "pipeline": 4}, {"stages_have_equally_many_blocks"}),
    (
        CPU,
        dataclasses.replace(WIDE, layers=7, vocab=1023),
        HYBRID,
        {"stages_have_equally_many_blocks", "tensor_ranks_share_evenly"},
    ),
    # ZeRO and offload.
    (CPU, WIDE, {**PIPE, "zero.stage": 2}, {"a_pipeline_shards_the_optimizer_at_most"}),
    (CPU, WIDE, {**PIPE, "zero.stage": 3}, {"a_pipeline_shards_the_optimizer_at_most"}),
    (CPU, WIDE, {**HYBRID, "zero.stage": 2}, {"a_pipeline_shards_the_optimizer_at_most"}),
    (CPU, WIDE, {**PIPE, "zero.offload_optimizer": "cpu"}, {"a_pipeline_offloads_nothing"}),
    (
        CPU,
        WIDE,
        {**PIPE, **OFFLOAD_3},
        {"a_pipeline_shards_the_optimizer_at_most", "a_pipeline_offloads_nothing"},
    ),
    (
        CPU,
        WIDE,
        {**PIPE, "zero.stage": 0, "zero.offload_optimizer": "cpu"},
        {"optimizer_offload_needs_a_zero_stage", "a_pipeline_offloads_nothing"},
    ),
    (CPU, WIDE, {**TENSOR, **OFFLOAD_3}, {"tensor_parallel_at_stage_3_is_plain"}),
    (
        CPU,
        WIDE,
        {**TENSOR, "zero.stage": 3, "zero.offload_param": "cpu"},
        {"tensor_parallel_at_stage_3_is_plain"},
    ),
    (
        H200,
        WIDE,
        {**TENSOR, **NVME},
        {"tensor_parallel_at_stage_3_is_plain", "nvme_needs_a_path", "nvme_needs_libaio"},
    ),
    (
        H200,
        WIDE,
        {**TENSOR, "zero.stage": 3, "zero.hpz_partition_size": 2},
        {"tensor_parallel_at_stage_3_is_plain"},
    ),
    (
        H200,
        WIDE,
        {**TENSOR, "zero.stage": 3, "zero.quantized_weights": True},
        {"tensor_parallel_at_stage_3_is_plain"},
    ),
    (
        H200,
        WIDE,
        {**HYBRID, **OFFLOAD_3},
        {
            "tensor_parallel_at_stage_3_is_plain",
            "a_pipeline_shards_the_optimizer_at_most",
            "a_pipeline_offloads_nothing",
        },
    ),
    # Number formats.
    (H200, WIDE, {"tensor": 2}, {"tensor_parallel_clips_in_half_precision_with_zero"}),
    (CPU, WIDE, {"tensor": 4, "precision": "bf16"}, {"tensor_parallel_clips_in_half_precision_with_zero"}),
    (
        H200,
        WIDE,
        {"tensor": 2, "precision": "fp16"},
        {"tensor_parallel_clips_in_half_precision_with_zero", "fp16_needs_a_zero_stage"},
    ),
    (H200, WIDE, {"pipeline": 2, "precision": "fp16"}, {"fp16_needs_a_zero_stage"}),
    (
        H200,
        WIDE,
        {"pipeline": 2, "precision": "bf16", "grad_accum_dtype": "fp32"},
        {"accumulation_in_another_format_needs_a_zero_stage"},
    ),
    (
        H200,
        TIED,
        {**PIPE, "precision": "fp16", "grad_accum_dtype": "fp32"},
        {"tied_embeddings_add_up_across_stages"},
    ),
    (
        H200,
        TIED,
        {**PIPE, "precision": "bf16", "grad_accum_dtype": "fp32", "zero.offload_optimizer": "cpu"},
        {"tied_embeddings_add_up_across_stages", "a_pipeline_offloads_nothing"},
    ),
    # Nodes.
    (TWO_NODES, WIDE, {**TENSOR, "ranks": 8, "tensor": 8}, {"a_tensor_group_stays_within_a_node"}),
    (
        THREE_NODES,
        dataclasses.replace(WIDE, heads=12, kv_heads=12, hidden=96, ffn=252, vocab=1020),
        {**TENSOR, "ranks": 12, "tensor": 12},
        {"a_tensor_group_stays_within_a_node"},
    ),
    (
        THREE_NODES,
        dataclasses.replace(WIDE, heads=6, kv_heads=6, hidden=96, ffn=252, vocab=1020),
        {**TENSOR, "ranks": 12, "tensor": 6, "tensor_across_nodes": True},
        {"tensor_groups_fill_nodes"},
    ),
    (
        SIXES,
        WIDE,
        {**TENSOR, "ranks": 12, "tensor": 4, "global_batch": 36},
        {"tensor_groups_fill_nodes"},
    ),
    (
        SIXES,
        WIDE,
        {**TENSOR, "ranks": 8, "tensor": 8},
        {"a_tensor_group_stays_within_a_node", "tensor_groups_fill_nodes"},
    ),
    # Both degrees.
    (H200, WIDE, {**HYBRID, "compile": True}, {"a_hybrid_is_not_compiled"}),
    (CPU, WIDE, {**HYBRID, "activation_checkpointing": "9"}, {"a_block_is_checkpointed"}),
    (CPU, WIDE, {**HYBRID, "activation_checkpointing": "5"}, {"a_block_is_checkpointed"}),  # 4 a stage
    (CPU, dataclasses.replace(WIDE, has_biases=True), HYBRID, {"a_hybrid_splits_no_biases"}),
]

LEGALLY_DIVIDED: list[tuple[Machine, ModelShape, Changes]] = [
    (CPU, WIDE, {"tensor": 2}),  # fp32: clipping is right without ZeRO
    (CPU, WIDE, {"tensor": 4, "zero.stage": 2}),
    (CPU, WIDE, {"tensor": 2, "zero.stage": 3, "activation_checkpointing": "full", "compile": True}),
    (H200, WIDE, {"tensor": 2, "gradient_clipping": 0.0}),
    (H200, WIDE, {**TENSOR, "precision": "fp16"}),
    (H200, WIDE, {**TENSOR, "zero.offload_optimizer": "cpu"}),
    (H200, WIDE, {**TENSOR, "zero.stage": 2, "zero.offload_optimizer": "cpu"}),
    (H200_FLASH, WIDE, {**TENSOR, "attention": "flash_attention_2"}),
    (CPU, TIED, TENSOR),
    (CPU, WIDE, {"pipeline": 2}),
    (CPU, GPT2, PIPE),
    (H200, WIDE, {"pipeline": 4, "precision": "bf16"}),
    (H200, WIDE, {**PIPE, "compile": True}),
    (H200, WIDE, {**PIPE, "precision": "bf16", "grad_accum_dtype": "fp32"}),
    (H200, TIED, {**PIPE, "precision": "bf16", "grad_accum_dtype": "fp32"}),
    (H200, TIED, {**PIPE, "precision": "fp16"}),
    (H200, TIED, {**PIPE, "precision": "fp32", "grad_accum_dtype": "fp32"}),
    (CPU, WIDE, {**PIPE, "micro_batch": 16}),  # one micro-batch: legal, with a warning
    (H200, WIDE, HYBRID),
    (H200, WIDE, {**HYBRID, "zero.stage": 0}),
    (TWO_NODES, WIDE, {**TENSOR, "ranks": 8, "tensor": 4}),
    (TWO_NODES, WIDE, {**TENSOR, "ranks": 8, "tensor": 8, "tensor_across_nodes": True}),
    (TWO_NODES, WIDE, {**PIPE, "ranks": 8, "pipeline": 8}),
    (SIXES, WIDE, {**TENSOR, "ranks": 12, "global_batch": 36}),
]
