"""Studies, trials and attempts for tests of tracking, and access to their MLflow runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.examples import a_measured_trial, a_measurement, a_plan, a_study_record, a_trial
from train_entry.contract import (
    AttemptDir,
    Failure,
    FailureKind,
    Origin,
    Outcome,
    Reason,
    State,
    StepMetrics,
    StudyRecord,
    Trial,
    append_line,
)

CREATED_AT = 1_700_000_000.0
OOM = Failure(kind=FailureKind.GPU_OOM, message="rank 1 wanted 9.0 GiB more", rank=1)


def study_record(name: str, created_at: float = CREATED_AT) -> StudyRecord:
    return a_study_record(name=name, created_at=created_at)


def measured(number: int, **changes: Any) -> Trial:
    """`changes` replace fields of the measurement."""
    return ended(number, a_measurement(**changes))


def out_of_memory(number: int) -> Trial:
    return ended(number, OOM)


def ended(number: int, outcome: Outcome) -> Trial:
    return a_measured_trial(
        number=number,
        origin=Origin.BASELINE,
        overrides=("strategy=zero2", "+note=two words"),
        created_at=CREATED_AT,
        plan=a_plan(global_batch=16),
        outcome=outcome,
        gpu_s=42.0,
        closed_at=CREATED_AT + 60,
    )


def rejected(number: int) -> Trial:
    return a_trial(
        number=number,
        state=State.REJECTED,
        overrides=("tensor=3",),
        values={"tensor": 3},
        created_at=CREATED_AT,
        plan=None,
        reasons=(Reason(rule="degrees_divide_ranks", text="tensor 3 does not divide 2 ranks"),),
        closed_at=CREATED_AT,
    )


def write_attempt(attempt: AttemptDir, steps: int = 3) -> AttemptDir:
    """Write the files that a job of two ranks leaves."""
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
