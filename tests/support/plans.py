"""Plans and models for tests of estimates: some by name, and any number of random ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from sweeps.estimate.hardware import Hardware, hardware_of
from tests.support.examples import a_model, a_plan
from train_entry.contract import GIB, Engine, ModelShape, Offload, OffloadPlan, Plan, Precision

H200 = hardware_of("NVIDIA H200", "cuda", 8, round(139.8 * GIB), 2048 * GIB)
H100 = hardware_of("NVIDIA H100 80GB HBM3", "cuda", 8, 80 * GIB, 2048 * GIB)
A100 = hardware_of("NVIDIA A100-SXM4-80GB", "cuda", 8, 80 * GIB, 1024 * GIB)
CPU = hardware_of("CPU", "cpu", 8, 0, 64 * GIB)
HARDWARE = (H200, H100, A100, CPU)

LLAMA_160M = a_model(
    parameters=162_417_408, layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=32000
)
LLAMA_1B3 = a_model(
    parameters=1_345_423_360, layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5504, vocab=32000
)
LLAMA_8B = a_model(
    parameters=8_030_261_248, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256
)
GPT2_124M = a_model(
    family="gpt2",
    parameters=124_439_808,
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=3072,
    vocab=50257,
    positions=1024,
    tied_embeddings=True,
)
MODELS = (LLAMA_160M, LLAMA_1B3, LLAMA_8B, GPT2_124M)

Case = tuple[Plan, ModelShape, Hardware]


def cases(count: int = 200, seed: int = 0) -> Iterator[Case]:
    """Yield random cases. The same seed gives the same cases."""
    chooser = random.Random(seed)
    for _ in range(count):
        yield a_random_plan(chooser), chooser.choice(MODELS), chooser.choice(HARDWARE)


def a_random_plan(chooser: random.Random) -> Plan:
    tensor, pipeline = chooser.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    data = chooser.choice([1, 2, 4, 16])
    micro_batch = chooser.choice([1, 2, 8])
    plan = a_plan(
        engine=chooser.choice([Engine.DDP, Engine.DEEPSPEED, Engine.DEEPSPEED, Engine.DEEPSPEED]),
        ranks=data * tensor * pipeline,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro_batch,
        global_batch=micro_batch * data * chooser.choice([1, 2, 8]),
        seq_len=chooser.choice([256, 1024, 4096]),
        precision=chooser.choice(list(Precision)),
        checkpoint_every=chooser.choice([0, 0, 1, 3]),
        compile=chooser.random() < 0.3,
        zero={
            "stage": chooser.randrange(4),
            "overlap_comm": chooser.random() < 0.5,
            "reduce_bucket_size": chooser.choice([10**6, 5 * 10**8]),
            "prefetch_bucket_size": chooser.choice([0, 5 * 10**7]),
            "max_reuse_distance": chooser.choice([0, 10**9]),
            "hpz_partition_size": chooser.choice([1, data]),
            "use_multi_rank_bucket_allreduce": chooser.random() < 0.5,
            "quantized_gradients": chooser.random() < 0.3,
        },
        optimizer={"fused": chooser.random() < 0.3},
    )
    return with_offload(plan, chooser)


def with_offload(plan: Plan, chooser: random.Random) -> Plan:
    if plan.engine is Engine.DDP or plan.zero.stage == 0:
        return plan
    offload = OffloadPlan(
        optimizer=chooser.choice([Offload.NONE, *Offload]),
        param=chooser.choice([Offload.NONE, *Offload]) if plan.zero.stage == 3 else Offload.NONE,
        ratio=chooser.choice([1.0, 0.5]),
        pin_memory=chooser.random() < 0.7,
        max_in_cpu=chooser.choice([0, 10**9]),
    )
    return dataclasses.replace(plan, offload=offload)
