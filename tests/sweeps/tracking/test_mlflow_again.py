"""Trials that are recorded more than once, in real MLflow: no run is written twice or stays half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import TrackingError
from sweeps.tracking.mlflow import MlflowTracker
from tests.support.tracking import attempt_in, client, measured, rejected, runs, study_record
from train_entry.contract import StudyRecord


@pytest.fixture
def study(request: pytest.FixtureRequest) -> StudyRecord:
    return study_record(request.node.name)


@pytest.fixture
def tracker(mlflow_uri: str, tmp_path: Path, study: StudyRecord) -> MlflowTracker:
    return MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study)


def test_recording_twice_leaves_one_run_untouched(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    attempt = attempt_in(tmp_path)
    tracker.record(measured(0), attempt)
    before = [run.info.run_id for run in runs(mlflow_uri, study.name)]

    tracker.record(measured(0), attempt)

    assert [run.info.run_id for run in runs(mlflow_uri, study.name)] == before


def test_a_trial_measured_again_replaces_its_run(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    tracker.record(measured(0, tokens_per_s_per_gpu=1000.0), None)
    tracker.record(measured(1), None)

    tracker.record(measured(0, tokens_per_s_per_gpu=900.0), None)

    speeds = [run.data.metrics["tokens_per_s_per_gpu"] for run in runs(mlflow_uri, study.name)]
    assert speeds == [900.0, 12_345.0]


def test_a_partly_written_run_is_replaced(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    tracker.open()
    experiment = client(mlflow_uri).get_experiment_by_name(study.name).experiment_id
    client(mlflow_uri).create_run(experiment, tags={"shardsweep.trial": "0"})

    tracker.record(measured(0), attempt_in(tmp_path))

    (run,) = runs(mlflow_uri, study.name)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["by_step/loss"] == 5.0 / 3


def test_a_write_that_broke_off_is_replaced(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.open()
    with monkeypatch.context() as patch:
        break_after(patch, "create_run")  # as if the answer came too late
        with pytest.raises(
            TrackingError, match=r"cannot record trial 0 at .*: the answer was lost; a replay"
        ):
            tracker.record(measured(0), None)
    (lost,) = runs(mlflow_uri, study.name)

    tracker.record(measured(0), None)

    (run,) = runs(mlflow_uri, study.name)
    assert run.info.run_id != lost.info.run_id
    assert run.data.metrics["tokens_per_s_per_gpu"] == 12_345.0


def test_a_replacement_that_broke_off_is_no_reason_to_believe_in_the_old_run(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.record(measured(0), None)
    with monkeypatch.context() as patch:
        break_after(patch, "delete_run")
        with pytest.raises(TrackingError, match="the answer was lost"):
            tracker.record(rejected(0), None)
    assert runs(mlflow_uri, study.name) == []

    tracker.record(measured(0), None)

    assert [run.info.run_name for run in runs(mlflow_uri, study.name)] == ["0000 zero2"]


def break_after(patch: pytest.MonkeyPatch, method: str) -> None:
    """Make a request succeed in MLflow and yet raise, as if its answer were lost."""
    import mlflow

    original = getattr(mlflow.MlflowClient, method)

    def broken(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        raise ConnectionError("the answer was lost")

    patch.setattr(mlflow.MlflowClient, method, broken)


def test_two_runs_of_one_trial_become_one(
    tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    trackers = [tracker, MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study)]
    for each in trackers:  # both have read that there is no trial 0
        each.record(rejected(1), None)
    for each in trackers:
        each.record(measured(0), None)
    twice = [run.info.run_name for run in runs(mlflow_uri, study.name)]

    MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study).record(measured(0), None)

    assert twice == ["0000 zero2", "0000 zero2", "0001 rejected"]
    assert [run.info.run_name for run in runs(mlflow_uri, study.name)] == ["0000 zero2", "0001 rejected"]


# Known runs are read once


TRIALS = [rejected(number) for number in range(12)]


@pytest.fixture
def resumed(tracker: MlflowTracker, mlflow_uri: str, study: StudyRecord, tmp_path: Path) -> MlflowTracker:
    """The second tracker of a study that has recorded TRIALS."""
    for trial in TRIALS:
        tracker.record(trial, None)
    return MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the requests about runs that MLflow receives from now on."""
    import mlflow

    made: list[str] = []
    for name in ("search_runs", "create_run", "delete_run"):
        original = getattr(mlflow.MlflowClient, name)

        def counted(*arguments: Any, _name: str = name, _original: Any = original, **named: Any) -> Any:
            made.append(_name)
            return _original(*arguments, **named)

        monkeypatch.setattr(mlflow.MlflowClient, name, counted)
    return made


@pytest.mark.parametrize(("page_runs", "pages"), [(1000, 1), (12, 1), (5, 3), (4, 3)])
def test_a_resumed_study_reads_its_runs_once_and_writes_nothing(
    resumed: MlflowTracker, calls: list[str], page_runs: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.tracking.mlflow.PAGE_RUNS", page_runs)

    for trial in TRIALS * 2:
        resumed.record(trial, None)

    assert calls == ["search_runs"] * pages


def test_a_resumed_study_writes_only_what_changed(
    resumed: MlflowTracker, calls: list[str], mlflow_uri: str, study: StudyRecord
) -> None:
    for trial in (measured(3), *TRIALS[4:], measured(12), measured(3)):
        resumed.record(trial, None)

    assert calls == ["search_runs", "delete_run", "create_run", "create_run"]
    names = [run.info.run_name for run in runs(mlflow_uri, study.name)]
    assert len(names) == 13
    assert [name for name in names if "zero2" in name] == ["0003 zero2", "0012 zero2"]


def test_a_deleted_run_counts_for_nothing_and_a_stranger_is_left_alone(
    resumed: MlflowTracker, mlflow_uri: str, study: StudyRecord
) -> None:
    mlflow, known = client(mlflow_uri), runs(mlflow_uri, study.name)
    mlflow.delete_run(known[0].info.run_id)
    stranger = mlflow.create_run(known[0].info.experiment_id, run_name="0000 a user's own").info.run_id

    for trial in TRIALS:
        resumed.record(trial, None)

    shown = [run.info.run_id for run in runs(mlflow_uri, study.name)]
    assert len(shown) == 13
    assert stranger in shown
    assert known[0].info.run_id not in shown


def test_what_was_unreachable_at_first_is_read_when_it_is_back(
    resumed: MlflowTracker, calls: list[str], mlflow_uri: str, study: StudyRecord, tmp_path: Path
) -> None:
    database = Path(mlflow_uri.removeprefix("sqlite:///"))
    late = MlflowTracker(f"sqlite:///{tmp_path}/later/{database.name}", tmp_path / "mlartifacts", study)
    with pytest.raises(TrackingError, match="there is no directory"):
        late.record(TRIALS[0], None)
    (tmp_path / "later").symlink_to(database.parent)

    for trial in TRIALS:
        late.record(trial, None)

    assert calls == ["search_runs"]
