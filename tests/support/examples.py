"""One example of each record. A test names what matters to it, and takes the rest as it is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from train_entry.contract import (
    AttemptKind,
    DataSpec,
    Engine,
    Measurement,
    MeasureSpec,
    MemoryKind,
    MemoryPeak,
    ModelShape,
    OptimizerPlan,
    Origin,
    Plan,
    Precision,
    RankMeasurement,
    SchedulePlan,
    State,
    StudyRecord,
    TimeLimits,
    Trial,
    TrialSpec,
    ZeroPlan,
)


def a_model(**changes: Any) -> ModelShape:
    model = ModelShape(
        name="tiny",
        family="llama",
        parameters=1000,
        layers=2,
        hidden=8,
        heads=2,
        kv_heads=2,
        ffn=32,
        vocab=256,
        positions=128,
        tied_embeddings=False,
    )
    return dataclasses.replace(model, **changes)


def a_plan(
    zero: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    warmup_steps: int = 0,
    **changes: Any,
) -> Plan:
    """ZeRO-2 on two ranks; `zero`, `optimizer` and `warmup_steps` change those parts, all else the plan."""
    plan = Plan(
        engine=Engine.DEEPSPEED,
        ranks=2,
        tensor=1,
        pipeline=1,
        micro_batch=4,
        global_batch=32,
        seq_len=128,
        precision=Precision.BF16,
        gradient_clipping=1.0,
        optimizer=dataclasses.replace(_ADAMW, **(optimizer or {})),
        schedule=SchedulePlan(warmup_steps=warmup_steps),
        zero=dataclasses.replace(_ZERO, **(zero or {})),
        seed=0,
    )
    return dataclasses.replace(plan, **changes)


_ADAMW = OptimizerPlan(name="adamw", lr=3e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
_ZERO = ZeroPlan(
    stage=2,
    reduce_bucket_size=500_000_000,
    allgather_bucket_size=500_000_000,
    overlap_comm=False,
    contiguous_gradients=True,
)


def a_trial_spec(**changes: Any) -> TrialSpec:
    """The first attempt of trial 1."""
    spec = TrialSpec(
        study="study",
        trial=1,
        attempt=1,
        kind=AttemptKind.FIRST,
        device="cpu",
        plan=a_plan(),
        model=a_model(),
        data=DataSpec(kind="synthetic"),
        measure=MeasureSpec(warmup_steps=3, steps=12, split_steps=0),
        limits=TimeLimits(attempt_s=600, startup_silence_s=60, step_silence_s=30),
    )
    return dataclasses.replace(spec, **changes)


def a_rank_measurement(**changes: Any) -> RankMeasurement:
    """As rank 0 of a CPU run measures."""
    peak = MemoryPeak(allocated_bytes=100, reserved_bytes=200)
    measurement = RankMeasurement(
        rank=0,
        host="here",
        device_name="CPU",
        parameters=1000,
        memory_kind=MemoryKind.HOST_RSS,
        startup=peak,
        first_step=peak,
        steady=peak,
        device_in_use_bytes=None,
        device_total_bytes=None,
        peak_flops_per_s=None,
        step_s=(0.5, 0.5),
        split=None,
        startup_s=3.0,
        host_peak_bytes=300,
    )
    return dataclasses.replace(measurement, **changes)


def a_measurement(**changes: Any) -> Measurement:
    """Every number differs from every other, so that two swapped columns show."""
    measurement = Measurement(
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
        host_peak_bytes=6 * 2**30,
    )
    return dataclasses.replace(measurement, **changes)


def a_trial(**changes: Any) -> Trial:
    """Trial 1, not yet launched."""
    trial = Trial(
        number=1,
        state=State.QUEUED,
        origin=Origin.SAMPLER,
        overrides=("strategy=zero2", "micro_batch=4"),
        values={"strategy": "zero2", "micro_batch": 4},
        created_at=0.0,
        plan=a_plan(),
    )
    return dataclasses.replace(trial, **changes)


def a_measured_trial(**changes: Any) -> Trial:
    """Trial 1, after one attempt of a minute."""
    trial = a_trial(
        state=State.MEASURED,
        fingerprint="f00d",
        outcome=a_measurement(),
        attempts=1,
        measured_attempt=1,
        closed_at=60.0,
    )
    return dataclasses.replace(trial, **changes)


def a_study_record(**changes: Any) -> StudyRecord:
    record = StudyRecord(
        name="demo",
        created_at=0.0,
        objective="tokens_per_s_per_gpu",
        asked={},
        dimensions={"strategy": "zero1,zero2", "micro_batch": "choice(1,2,4)"},
        limits={},
        versions={},
        model=a_model(),
    )
    return dataclasses.replace(record, **changes)
