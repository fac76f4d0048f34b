"""One example of each record. A test gives the fields that matter to it and takes the rest from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from train_entry.contract import (
    Attempt,
    AttemptKind,
    Closing,
    DataSpec,
    DeviceHealth,
    Engine,
    Failure,
    FailureKind,
    Goal,
    Measurement,
    MeasureSpec,
    MemoryKind,
    MemoryPeak,
    ModelShape,
    OptimizerPlan,
    Origin,
    Outcome,
    Plan,
    Precision,
    Purpose,
    RankMeasurement,
    SchedulePlan,
    State,
    StudyRecord,
    TimeLimits,
    TimingEnd,
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
    """ZeRO-2 on two ranks. `zero`, `optimizer` and `warmup_steps` change these parts, the rest the plan."""
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
    """Return the spec of trial 1's first attempt."""
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
    """Return the measurement of rank 0 in a run on CPUs."""
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
    """Return a measurement. All its numbers differ, so that swapped columns are noticed."""
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


def a_trial(
    state: State | None = None,
    outcome: Outcome | None = None,
    attempts: int | tuple[Attempt, ...] | None = None,
    closed_at: float | None = None,
    repeats: Sequence[Attempt] = (),
    check: Outcome | None = None,
    is_shared: bool = False,
    gpu_s: float = 0.0,
    lost: int = 0,
    **changes: Any,
) -> Trial:
    """Return trial 1: not yet launched, or with an outcome after `lost` lost attempts.

    `state` and `outcome` say how it ended; `repeats` and `check` follow. With `attempts=0` it closed without
    a launch.
    """
    trial = Trial(
        number=1,
        origin=Origin.SAMPLER,
        overrides=("strategy=zero2", "micro_batch=4"),
        values={"strategy": "zero2", "micro_batch": 4},
        created_at=0.0,
        plan=None if state is State.REJECTED else a_plan(),
    )
    trial = dataclasses.replace(trial, **changes)
    if isinstance(attempts, tuple):
        return dataclasses.replace(trial, attempts=attempts)
    if attempts is not None and attempts > 1 + lost + len(repeats) + (check is not None):
        raise ValueError("say which attempts these are")
    outcome = _fitting(state, outcome, is_launched=attempts != 0)
    known = [a_lost_attempt(number) for number in range(1, lost + 1)]
    is_open = state in (None, State.QUEUED, State.REJECTED) and outcome is None
    is_refused = isinstance(outcome, Failure) and outcome.kind is FailureKind.INFEASIBLE and attempts is None
    is_cancelled = state is State.CANCELLED and outcome is None
    if not is_open and (attempts == 0 or is_refused or is_cancelled or state is State.REUSED):
        trial = dataclasses.replace(trial, closing=Closing(at=closed_at or 0.0, outcome=outcome))
        if state is State.REUSED and trial.reused_from is None:
            trial = dataclasses.replace(trial, reused_from=max(1, trial.number - 1))
    elif not is_open:
        told = Attempt(
            number=1 + lost,
            kind=AttemptKind.RETRY if lost else AttemptKind.FIRST,
            started_at=trial.created_at,
            ended_at=closed_at,
            outcome=outcome,
            is_shared=is_shared,
            gpu_s=gpu_s,
        )
        known.append(told)
    known += [dataclasses.replace(one, number=len(known) + at) for at, one in enumerate(repeats, 1)]
    if check is not None:
        known.append(Attempt(number=1 + len(known), kind=AttemptKind.CHECK, outcome=check))
    trial = dataclasses.replace(trial, attempts=tuple(known))
    if state not in (None, trial.state):
        raise ValueError(f"such a trial is {trial.state}, not {state}")
    return trial


def _fitting(state: State | None, outcome: Outcome | None, is_launched: bool) -> Outcome | None:
    """Return an outcome that leads to `state`: the given one, changed or filled in if necessary."""
    match state, outcome:
        case State.STOPPED, Measurement(ended=TimingEnd.CAP):
            return dataclasses.replace(outcome, ended=TimingEnd.FUTILE)
        case State.SUSPECT, Measurement(is_suspect=False):
            hot = DeviceHealth(
                clock_mhz=1000,
                max_clock_mhz=2000,
                temperature_c=90,
                power_w=300.0,
                throttled=("hw_thermal_slowdown",),
            )
            ranks = outcome.ranks or (a_rank_measurement(),)
            return dataclasses.replace(
                outcome, ranks=tuple(dataclasses.replace(rank, health=hot) for rank in ranks)
            )
        case ((State.FAILED | State.INFEASIBLE), None):
            unfit = FailureKind.GPU_OOM if is_launched else FailureKind.INFEASIBLE
            kind = FailureKind.CRASHED if state is State.FAILED else unfit
            return Failure(kind=kind, message="as an example")
        case ((State.MEASURED | State.STOPPED | State.SUSPECT | State.REUSED), None):
            return _fitting(state, a_measurement(), is_launched)
    return outcome


def an_attempt(**changes: Any) -> Attempt:
    """Return a trial's first attempt, just begun."""
    return dataclasses.replace(Attempt(number=1, kind=AttemptKind.FIRST), **changes)


def a_lost_attempt(number: int, kind: FailureKind = FailureKind.NODE_LOST) -> Attempt:
    failure = Failure(kind=kind, message="as an example")
    which = AttemptKind.FIRST if number == 1 else AttemptKind.RETRY
    return Attempt(number=number, kind=which, outcome=failure, is_replaced=True)


def a_repeat(
    purpose: Purpose = Purpose.CONFIRM, round: int = 0, outcome: Outcome | None = None, **changes: Any
) -> Attempt:
    """Return a repeat. It gets its number when it is added to a trial."""
    repeat = Attempt(number=0, kind=AttemptKind.REPEAT, purpose=purpose, round=round, outcome=outcome)
    return dataclasses.replace(repeat, **changes)


def a_measured_trial(**changes: Any) -> Trial:
    """Return trial 1, measured by one attempt of a minute."""
    usual: dict[str, Any] = {"closed_at": 60.0, "fingerprint": "f00d"}
    if "state" not in changes:
        usual["outcome"] = a_measurement()
    return a_trial(**{**usual, **changes})


def a_study_record(**changes: Any) -> StudyRecord:
    record = StudyRecord(
        name="demo",
        created_at=0.0,
        goals=(Goal(name="tokens_per_s_per_gpu"),),
        asked={},
        dimensions={"strategy": "zero1,zero2", "micro_batch": "choice(1,2,4)"},
        limits={},
        versions={},
        model=a_model(),
    )
    return dataclasses.replace(record, **changes)
