"""Plans with tensor and pipeline degrees for the oracle: all must train as one process does.

Most use SGD: AdamW divides a gradient by its own size and would hide one that is too large.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.oracle_cases import FP16, SGD, Plans, zero
from tests.train_entry.conftest import tiny_plan, tiny_spec
from train_entry.contract import ModelShape, Plan, Precision

TIED = tiny_spec(tiny_plan()).model
UNTIED = dataclasses.replace(TIED, tied_embeddings=False)
GPT2 = dataclasses.replace(TIED, family="gpt2", kv_heads=4)
MODELS: dict[str, ModelShape] = {"llama": TIED, "untied": UNTIED, "gpt2": GPT2}


def parallel(stage: int, **changes: Any) -> Plan:
    return zero(stage, **{"optimizer": SGD, **changes})


ALONE: Plans = {
    "one process": tiny_plan(ranks=1, optimizer=SGD),
    "one process, not clipped": tiny_plan(ranks=1, optimizer=SGD, gradient_clipping=0.0),
    "one process, bf16": parallel(1, ranks=1, precision=Precision.BF16),
    "one process, fp16": parallel(1, ranks=1, **FP16),
    "one process, adamw, bf16": zero(1, ranks=1, precision=Precision.BF16),
}
TWO_STAGES: Plans = {
    "pp2": parallel(0, pipeline=2),
    "pp2, not clipped": parallel(0, pipeline=2, gradient_clipping=0.0),
    "pp2, one micro-batch": parallel(0, pipeline=2, micro_batch=8),
    "pp2_zero1": parallel(1, pipeline=2),
    "pp2_zero1, eight micro-batches": parallel(1, pipeline=2, micro_batch=1),
    "pp2_zero1, recomputed": parallel(1, pipeline=2, checkpoint_every=1),
    "pp2, bf16": parallel(0, pipeline=2, precision=Precision.BF16),
    "pp2_zero1, bf16": parallel(1, pipeline=2, precision=Precision.BF16),
    "pp2_zero1, fp32 gradients, bf16": parallel(
        1, pipeline=2, precision=Precision.BF16, grad_accum_dtype=Precision.FP32
    ),
    "pp2_zero1, fp16": parallel(1, pipeline=2, **FP16),
    "pp2_zero1, adamw, bf16": zero(1, pipeline=2, precision=Precision.BF16),
}
TWO_PARTS: Plans = {
    "tp2": parallel(0, tensor=2),
    "tp2, not clipped": parallel(0, tensor=2, gradient_clipping=0.0),
    "tp2_zero1": parallel(1, tensor=2),
    "tp2_zero2": parallel(2, tensor=2),
    "tp2_zero3": parallel(3, tensor=2),
    "tp2_zero2, recomputed": parallel(2, tensor=2, checkpoint_every=1),
    "tp2_zero1, bf16": parallel(1, tensor=2, precision=Precision.BF16),
    "tp2_zero1, adamw, bf16": zero(1, tensor=2, precision=Precision.BF16),
}
FOUR_STAGED: Plans = {
    "pp2_zero1, 2 copies": parallel(1, pipeline=2, ranks=4),
    "tp2_pp2": parallel(0, pipeline=2, tensor=2, ranks=4),
    "tp2_pp2_zero1": parallel(1, pipeline=2, tensor=2, ranks=4),
    "tp2_pp2_zero1, recomputed": parallel(1, pipeline=2, tensor=2, ranks=4, checkpoint_every=1),
    "tp2_pp2, bf16": parallel(0, pipeline=2, tensor=2, ranks=4, precision=Precision.BF16),
    "tp2_pp2_zero1, adamw, bf16": zero(1, pipeline=2, tensor=2, ranks=4, precision=Precision.BF16),
    "tp2_pp2_zero1, bf16": parallel(1, pipeline=2, tensor=2, ranks=4, precision=Precision.BF16),
}
FOUR_SPLIT: Plans = {
    "tp2_zero1, 2 copies": parallel(1, tensor=2, ranks=4),
    "tp2_zero2, 2 copies": parallel(2, tensor=2, ranks=4),
    "tp2_zero3, 2 copies": parallel(3, tensor=2, ranks=4),
}
# Tensor and pipeline degrees leave state in DeepSpeed while a process lives: each set has its own processes.
RUNS: tuple[Plans, ...] = (TWO_STAGES, TWO_PARTS, FOUR_STAGED, FOUR_SPLIT)
# Other models, with the plans that train them too.
ALSO: dict[str, tuple[str, ...]] = {
    "untied": ("one process", "pp2", "pp2_zero1", "tp2_zero1", "tp2_pp2_zero1"),
    "gpt2": ("one process", "pp2", "pp2_zero1, recomputed"),
}
