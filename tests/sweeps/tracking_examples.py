"""Studies, trials and attempts for the tests of tracking, and what MLflow says of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from train_entry.contract import (
    AttemptDir,
    Checkpointing,
    Engine,
    Failure,
    FailureKind,
    Measurement,
    MemoryKind,
    ModelShape,
    OptimizerPlan,
    Origin,
    Plan,
    Precision,
    State,
    StepMetrics,
    StudyRecord,
    Trial,
    ZeroPlan,
    append_line,
)

CREATED_AT = 1_700_000_000.0
SHAPE = ModelShape(
    name="tiny",
    family="gpt2",
    parameters=1000,
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=2,
    ffn=32,
    vocab=256,
    positions=64,
    tied_embeddings=True,
)
PLAN = Plan(
    engine=Engine.DEEPSPEED,
    ranks=2,
    tensor=1,
    pipeline=1,
    micro_batch=4,
    global_batch=16,
    seq_len=64,
    precision=Precision.BF16,
    activation_checkpointing=Checkpointing.NONE,
    gradient_clipping=1.0,
    optimizer=OptimizerPlan(name="adamw", lr=3e-4, weight_decay=0.1),
    warmup_steps=0,
    zero=ZeroPlan(
        stage=2,
        reduce_bucket_size=50_000_000,
        allgather_bucket_size=50_000_000,
        overlap_comm=True,
        contiguous_gradients=True,
    ),
    seed=0,
)
MEASUREMENT = Measurement(
    tokens_per_s=2000.0,
    tokens_per_s_per_gpu=1000.0,
    samples_per_s=31.25,
    step_s=0.5,
    step_s_iqr=0.01,
    steps=10,
    peak_bytes=3 * 2**30,
    reserved_bytes=4 * 2**30,
    memory_kind=MemoryKind.DEVICE,
    mfu=None,
    loss=2.5,
    tokens=10_240,
    startup_s=7.0,
    ranks=(),
)
OOM = Failure(kind=FailureKind.GPU_OOM, message="rank 1 wanted 9.0 GiB more", rank=1)


def study_record(name: str, created_at: float = CREATED_AT) -> StudyRecord:
    return StudyRecord(
        name=name,
        created_at=created_at,
        objective="tokens_per_s_per_gpu",
        asked={},
        dimensions={"strategy": "ddp,zero2", "micro_batch": "choice(4,8)"},
        limits={},
        versions={},
        model=SHAPE,
    )


def measured(number: int, tokens_per_s_per_gpu: float = 1000.0) -> Trial:
    outcome = dataclasses.replace(MEASUREMENT, tokens_per_s_per_gpu=tokens_per_s_per_gpu)
    return Trial(
        number=number,
        state=State.MEASURED,
        origin=Origin.LADDER,
        overrides=("strategy=zero2", "+note=two words"),
        values={"strategy": "zero2", "micro_batch": 4},
        created_at=CREATED_AT,
        plan=PLAN,
        fingerprint="f00d",
        outcome=outcome,
        attempts=1,
        gpu_s=42.0,
        closed_at=CREATED_AT + 60,
    )


def out_of_memory(number: int) -> Trial:
    return dataclasses.replace(measured(number), state=State.INFEASIBLE, outcome=OOM)


def rejected(number: int) -> Trial:
    return Trial(
        number=number,
        state=State.REJECTED,
        origin=Origin.SAMPLER,
        overrides=("tensor=3",),
        values={"tensor": 3},
        created_at=CREATED_AT,
        reasons=("tensor 3 does not divide 2 ranks",),
        closed_at=CREATED_AT,
    )


def write_attempt(attempt: AttemptDir, steps: int = 3) -> AttemptDir:
    """The files a job of two ranks leaves."""
    attempt.path.mkdir(parents=True)
    attempt.spec.write_text('{"study": "tiny"}')
    attempt.ds_config.write_text('{"zero_optimization": {"stage": 2}}')
    for rank in range(2):
        attempt.log(rank).write_text("".join(f"rank {rank} line {line}\n" for line in range(300)))
    for step in range(1, steps + 1):
        line = StepMetrics(
            step=step, tokens=step * 1024, loss=5.0 / step, step_s=0.5, lr=1e-4 * step, timed=step > 1
        )
        append_line(attempt.metrics, line)
    return attempt


def attempt_in(folder: Path, steps: int = 3) -> AttemptDir:
    return write_attempt(AttemptDir(folder / "attempt-1"), steps)


def client(uri: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=uri)


def runs(uri: str, experiment: str) -> list[Any]:
    found = client(uri).get_experiment_by_name(experiment)
    return list(client(uri).search_runs([found.experiment_id], order_by=["attributes.run_name"]))
