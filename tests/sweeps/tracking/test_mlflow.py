"""Real MLflow on a real SQLite database: the tests read back what was written. Loopback only."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import TrackingError
from sweeps.tracking.background import BackgroundTracker
from sweeps.tracking.content import LOG_TAIL_LINES, STATUS
from sweeps.tracking.mlflow import MlflowTracker, replay
from tests.support.tracking import (
    CREATED_AT,
    attempt_in,
    client,
    measured,
    out_of_memory,
    rejected,
    runs,
    study_record,
    write_attempt,
)
from train_entry.contract import State, StudyDir, StudyRecord, dump, write_atomic


@pytest.fixture
def study(request: pytest.FixtureRequest) -> StudyRecord:
    return study_record(request.node.name)


@pytest.fixture
def tracker(mlflow_uri: str, tmp_path: Path, study: StudyRecord) -> MlflowTracker:
    return MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study)


def contents(uri: str, experiment: str) -> list[tuple[Any, ...]]:
    return [
        (
            *(run.info.run_name, run.info.status, run.info.start_time, run.info.end_time),
            *(run.data.params, run.data.metrics, run.data.tags),
        )
        for run in runs(uri, experiment)
    ]


# The content of a run


def test_a_trial_is_one_run_with_its_times(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.record(measured(7), None)

    (run,) = runs(mlflow_uri, study.name)

    assert (run.info.run_name, run.info.status) == ("0007 zero2", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (CREATED_AT * 1000, (CREATED_AT + 60) * 1000)


def test_params_are_what_varies_and_the_whole_plan(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.record(measured(0), None)

    params = runs(mlflow_uri, study.name)[0].data.params

    assert params["micro_batch"] == "4"
    assert params["plan.zero.reduce_bucket_size"] == "500000000"
    assert params["plan.zero.overlap_comm"] == "false"
    assert params["plan.optimizer.lr"] == "0.0003"
    assert params["plan.precision"] == "bf16"
    assert params["plan.grad_accum"] == "2"


def test_metrics_carry_their_unit_and_an_unknown_mfu_is_left_out(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.record(measured(0), None)

    assert runs(mlflow_uri, study.name)[0].data.metrics == {
        "tokens_per_s": 24_690.0,
        "tokens_per_s_per_gpu": 12_345.0,
        "samples_per_s": 385.0,
        "step_s": 0.25,
        "peak_gib": 3.0,
        "reserved_gib": 4.0,
        "loss": 5.5,
        "startup_s": 7.0,
        "gpu_s": 42.0,
    }


def test_steps_are_series_longer_than_one_batch(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    tracker.record(measured(0), attempt_in(tmp_path, steps=400))

    (run,) = runs(mlflow_uri, study.name)
    losses = client(mlflow_uri).get_metric_history(run.info.run_id, "by_step/loss")
    rates = client(mlflow_uri).get_metric_history(run.info.run_id, "by_step/lr")

    assert [(point.step, point.value) for point in losses] == [(step, 5.0 / step) for step in range(1, 401)]
    assert rates[399].value == 1e-4 * 400
    assert losses[1].timestamp == CREATED_AT * 1000 + 1000
    assert run.data.metrics["loss"] == 5.5


def test_a_loss_that_is_not_a_number_is_recorded_as_such(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    attempt = attempt_in(tmp_path)
    attempt.metrics.write_text(attempt.metrics.read_text().replace("5.0", "NaN"))

    tracker.record(measured(0), attempt)

    (run,) = runs(mlflow_uri, study.name)
    history = client(mlflow_uri).get_metric_history(run.info.run_id, "by_step/loss")
    assert math.isnan(history[0].value)


def test_tags_say_how_to_run_the_trial_alone(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.record(measured(0), None)

    tags = runs(mlflow_uri, study.name)[0].data.tags

    assert tags["reproduce"] == "python sweep.py strategy=zero2 '+note=two words'"
    assert tags["overrides"] == "strategy=zero2 +note=two words"
    assert (tags["state"], tags["origin"], tags["strategy"]) == ("measured", "baseline", "zero2")
    assert tags["fingerprint"] == "f00d"
    assert "failure" not in tags


def test_a_failed_trial_says_why(tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord) -> None:
    tracker.record(out_of_memory(1), None)

    (run,) = runs(mlflow_uri, study.name)

    assert run.info.status == "FAILED"
    assert (run.data.tags["state"], run.data.tags["failure"]) == ("infeasible", "gpu_oom")
    assert run.data.tags["failure_message"] == "rank 1 wanted 9.0 GiB more"
    assert run.data.metrics == {"gpu_s": 42.0}


def test_a_rejected_trial_has_reasons_and_no_plan(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.record(rejected(2), None)

    (run,) = runs(mlflow_uri, study.name)

    assert run.info.run_name == "0002 rejected"
    assert run.data.params == {"tensor": "3"}
    assert run.data.tags["reasons"] == "tensor 3 does not divide 2 ranks"


def test_artifacts_are_the_inputs_and_the_ends_of_the_logs(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    tracker.record(measured(0), attempt_in(tmp_path))

    (run,) = runs(mlflow_uri, study.name)
    names = [artifact.path for artifact in client(mlflow_uri).list_artifacts(run.info.run_id)]
    (tail,) = (tmp_path / "mlartifacts").rglob("log_tail.rank1.txt")

    assert names == ["ds_config.json", "log_tail.rank0.txt", "log_tail.rank1.txt", "spec.json"]
    assert tail.read_text().splitlines()[0] == "rank 1 line 100"
    assert len(tail.read_text().splitlines()) == LOG_TAIL_LINES


def test_every_state_has_a_status() -> None:
    assert set(STATUS) == set(State)


# The study as a whole


def test_a_replay_equals_what_was_recorded_live(mlflow_uri: str, tmp_path: Path, study: StudyRecord) -> None:
    study_dir = StudyDir(tmp_path / "studies" / "again")
    write_atomic(study_dir.record, dump(dataclasses.replace(study, name="replayed")))
    live = MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study)
    queued = dataclasses.replace(measured(3), attempts=())
    for trial in (measured(0), out_of_memory(1), rejected(2), queued):
        write_atomic(study_dir.trial(trial.number).record, dump(trial))
    attempts = [write_attempt(study_dir.trial(number).attempt(1)) for number in (0, 1)]
    live.record(measured(0), attempts[0])
    live.record(out_of_memory(1), attempts[1])
    live.record(rejected(2), None)

    counts = [replay(study_dir, mlflow_uri), replay(study_dir, mlflow_uri)]

    assert counts == [3, 3]
    assert contents(mlflow_uri, "replayed") == contents(mlflow_uri, study.name)


def test_a_replay_of_something_else_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"is not a study directory: it has no study\.json"):
        replay(StudyDir(tmp_path), "sqlite:////nowhere/mlflow.db")


def test_another_study_of_the_same_name_has_its_own_experiment(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    other = MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study_record(study.name, created_at=1.0))
    tracker.record(measured(0), None)

    other.record(rejected(0), None)

    assert [run.info.run_name for run in runs(mlflow_uri, study.name)] == ["0000 zero2"]
    assert [run.info.run_name for run in runs(mlflow_uri, f"{study.name} (1)")] == ["0000 rejected"]


def test_an_experiment_deleted_meanwhile_is_restored(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.open()
    client(mlflow_uri).delete_experiment(client(mlflow_uri).get_experiment_by_name(study.name).experiment_id)

    tracker.open()

    assert client(mlflow_uri).get_experiment_by_name(study.name).lifecycle_stage == "active"


@pytest.mark.slow
def test_two_studies_may_create_the_database_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sweeps.tracking.mlflow import MlflowTracker\n"
        "from tests.support.tracking import study_record, measured\n"
        "MlflowTracker(sys.argv[1], Path(sys.argv[2]), study_record(sys.argv[3])).record(measured(0), None)"
    )
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    started = [
        subprocess.Popen([sys.executable, "-c", program, uri, str(tmp_path), name]) for name in ("a", "b")
    ]

    assert [process.wait(timeout=120) for process in started] == [0, 0]


def test_recording_in_the_background_reaches_mlflow(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    tracker.open()
    background = BackgroundTracker(tracker, tmp_path)

    background.record(measured(0), attempt_in(tmp_path))
    background.close()

    assert [run.info.run_name for run in runs(mlflow_uri, study.name)] == ["0000 zero2"]


def test_an_open_tracker_knows_its_link(tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord) -> None:
    tracker.open()

    experiment = client(mlflow_uri).get_experiment_by_name(study.name)

    assert tracker.runs_url(port=5001).startswith(
        f"http://127.0.0.1:5001/#/experiments/{experiment.experiment_id}/runs"
    )
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
