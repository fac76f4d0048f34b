"""Builds real study directories, with the files and the codec that a study uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train_entry.contract import (
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
    Scalar,
    State,
    StepMetrics,
    StudyDir,
    StudyRecord,
    Trial,
    ZeroPlan,
    append_line,
    dump,
    write_atomic,
)

MODEL = ModelShape(
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
    global_batch=8,
    seq_len=64,
    precision=Precision.BF16,
    activation_checkpointing=Checkpointing.NONE,
    gradient_clipping=1.0,
    optimizer=OptimizerPlan(name="adamw", lr=1e-3, weight_decay=0.1),
    warmup_steps=0,
    zero=ZeroPlan(
        stage=2,
        reduce_bucket_size=500_000_000,
        allgather_bucket_size=500_000_000,
        overlap_comm=True,
        contiguous_gradients=True,
    ),
    seed=0,
)
# Every number differs from every other, so that two swapped columns show.
MEASUREMENT = Measurement(
    tokens_per_s=24_690.0,
    tokens_per_s_per_gpu=12_345.0,
    samples_per_s=385.0,
    step_s=0.25,
    step_s_iqr=0.005,
    steps=10,
    peak_bytes=3 * 2**30,
    reserved_bytes=4 * 2**30,
    memory_kind=MemoryKind.DEVICE,
    mfu=None,
    loss=5.5,
    tokens=10_000,
    startup_s=7.0,
    ranks=(),
)


class StudyBuilder:
    def __init__(self, path: Path) -> None:
        self.directory = StudyDir(path)
        self.study()

    def study(self, objective: str = "tokens_per_s_per_gpu") -> None:
        record = StudyRecord(
            name="demo",
            created_at=0.0,
            objective=objective,
            asked={},
            dimensions={"strategy": "zero1,zero2", "micro_batch": "choice(1,2,4)"},
            limits={},
            versions={},
            model=MODEL,
        )
        write_atomic(self.directory.record, dump(record))

    def trial(self, number: int, state: State, **changes: Any) -> None:
        """`changes` replace fields of trial.json."""
        values: Mapping[str, Scalar] = {"strategy": "zero2", "micro_batch": 4}
        trial = Trial(
            number=number,
            state=state,
            origin=Origin.SAMPLER,
            overrides=("strategy=zero2", "micro_batch=4"),
            values=values,
            created_at=0.0,
            plan=PLAN,
        )
        write_atomic(self.directory.trial(number).record, dump(replace(trial, **changes)))

    def measured(
        self, number: int, *, state: State = State.MEASURED, gpu_s: float = 20.0, **changes: Any
    ) -> None:
        """`changes` replace fields of the measurement."""
        self.trial(number, state, outcome=replace(MEASUREMENT, **changes), attempts=1, gpu_s=gpu_s)

    def failed(self, number: int, kind: FailureKind, message: str, state: State = State.FAILED) -> None:
        self.trial(number, state, outcome=Failure(kind=kind, message=message), attempts=1)

    def losses(
        self, number: int, losses: Sequence[float], *, tokens_per_step: int = 1000, attempt: int = 1
    ) -> None:
        """The stream of an attempt, one step a loss."""
        path = self.directory.trial(number).attempt(attempt).metrics
        path.parent.mkdir(parents=True, exist_ok=True)
        for step, loss in enumerate(losses, 1):
            tokens = step * tokens_per_step
            append_line(
                path, StepMetrics(step=step, tokens=tokens, loss=loss, step_s=0.1, lr=0.1, timed=True)
            )


@pytest.fixture
def built(tmp_path: Path) -> StudyBuilder:
    """A study without trials, to be filled."""
    return StudyBuilder(tmp_path / "demo")
