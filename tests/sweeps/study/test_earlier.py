"""Estimates learn from studies of the same model on the same machine, and from no others."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.study import earlier
from sweeps.study.earlier import earlier_trials
from tests.support.examples import a_measured_trial, a_measurement, a_model, a_study_record
from train_entry.contract import (
    Estimate,
    Failure,
    FailureKind,
    Fit,
    Goal,
    State,
    StudyDir,
    StudyRecord,
    Trial,
    dump,
)

VERSIONS = {"torch": "2.13.0", "deepspeed": "0.19.0", "device": "NVIDIA H200"}
OURS = a_study_record(name="ours", versions=VERSIONS)
AN_ESTIMATE = Estimate(
    fit=Fit.FITS,
    why="",
    peak_bytes=3,
    needed_bytes=4,
    limit_bytes=5,
    reservable_bytes=5,
    host_bytes=6,
    host_limit_bytes=7,
    nvme_bytes=0,
    phase="loss",
    components={"weights": 3},
    step_s=0.5,
    parts={"forward": 0.5},
    tokens_per_s=10.0,
    tokens_per_s_per_gpu=5.0,
    observations=0,
)
RAN_OUT = Failure(kind=FailureKind.GPU_OOM, message="CUDA out of memory")
Write = Callable[..., StudyDir]


def measured(number: int, **changes: Any) -> Trial:
    return a_measured_trial(**{"number": number, "estimate": AN_ESTIMATE, **changes})


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write studies into the directory of studies, each newer than those before."""
    age_s = iter(range(1_000_000, 0, -1000))

    def put(name: str, *trials: Trial, **changes: Any) -> StudyDir:
        directory = StudyDir(tmp_path / name)
        directory.path.mkdir()
        directory.record.write_text(dump(dataclasses.replace(OURS, name=name, **changes)))
        for trial in trials:
            directory.trial(trial.number).path.mkdir(parents=True)
            directory.trial(trial.number).record.write_text(dump(trial))
        at_s = time.time() - next(age_s)
        os.utime(directory.record, (at_s, at_s))
        return directory

    return put


def numbers(studies_dir: Path, record: StudyRecord = OURS) -> list[int]:
    return [trial.number for trial in earlier_trials(studies_dir, record)]


def test_trials_come_with_all_that_they_say_the_newest_last(write: Write, tmp_path: Path) -> None:
    write("one", measured(1), measured(2))
    write("two", measured(3, state=State.INFEASIBLE, outcome=RAN_OUT))
    assert numbers(tmp_path) == [1, 2, 3]
    assert earlier_trials(tmp_path, OURS)[0] == measured(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": a_model(layers=3)},
        {"versions": {**VERSIONS, "torch": "2.12.0"}},
        {"versions": {**VERSIONS, "device": "NVIDIA A100-SXM4-80GB"}},
        {"versions": {}},
        {"asked": {"cluster.nodes": 2}},
        {"asked": {"measure.update_norms": True}},
    ],
)
def test_another_model_machine_or_version_says_nothing(
    write: Write, tmp_path: Path, changes: dict[str, Any]
) -> None:
    write("other", measured(1), **changes)
    assert numbers(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model": a_model(name="mine", path="/models/mine")},
        {"asked": {"cluster.nodes": 1, "measure.update_norms": False, "data.kind": "synthetic"}},
        {"goals": (Goal(name="tokens_per_s"),)},
        {"dimensions": {}},
    ],
)
def test_what_changes_neither_memory_nor_time_may_differ(
    write: Write, tmp_path: Path, changes: dict[str, Any]
) -> None:
    write("other", measured(1), **changes)
    assert numbers(tmp_path) == [1]


def test_a_study_does_not_learn_from_itself_nor_from_a_copy_of_it(write: Write, tmp_path: Path) -> None:
    write("ours", measured(1))
    copied = write("copied", measured(2))
    copied.record.write_text(dump(OURS))
    assert numbers(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"estimate": None},
        {"plan": None},
        {"state": State.QUEUED, "outcome": None},
        {"state": State.RUNNING, "outcome": None},
        {"state": State.CANCELLED, "outcome": None},
        {"state": State.REUSED},
        {"state": State.SUSPECT},
        {"state": State.INFEASIBLE, "outcome": Failure(kind=FailureKind.INFEASIBLE, message="too large")},
        {"state": State.FAILED, "outcome": Failure(kind=FailureKind.CRASHED, message="x")},
    ],
)
def test_a_trial_that_says_nothing_is_left_out(write: Write, tmp_path: Path, changes: dict[str, Any]) -> None:
    write("other", measured(1, **changes), measured(2))
    assert numbers(tmp_path) == [2]


def test_what_cannot_be_read_is_passed_over(write: Write, tmp_path: Path) -> None:
    torn = write("torn", measured(1), measured(2))
    torn.trial(1).record.write_text(dump(measured(1))[:200])
    write("no study", measured(3)).record.write_text("[]")
    write("binary", measured(4)).record.write_bytes(b"\xff\xfe\x00")
    later = write("later", measured(5), measured(6))
    later.trial(5).record.write_text(dump(measured(5)).replace('"sampler"', '"an origin of later"'))
    (tmp_path / "a directory" / "study.json").mkdir(parents=True)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "study.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mlflow.db").touch()
    assert numbers(tmp_path) == [2, 6]


def test_without_a_directory_there_is_nothing(tmp_path: Path) -> None:
    assert numbers(tmp_path / "nowhere") == []


def test_nothing_is_written(write: Write, tmp_path: Path) -> None:
    write("other", measured(1))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    earlier_trials(tmp_path, OURS)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_only_the_newest_are_read(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "MOST_TRIALS", 3)
    write("old", measured(1), measured(2))
    write("newer", *[measured(number) for number in (3, 4)])
    assert numbers(tmp_path) == [2, 3, 4]


def test_hundreds_of_studies_take_no_time(write: Write, tmp_path: Path) -> None:
    for number in range(200):
        write(f"study{number}", measured(number, outcome=a_measurement()))
    began = time.process_time()
    found = numbers(tmp_path)
    assert time.process_time() - began < 1.0
    assert found == list(range(100, 200))


def test_hundreds_of_other_models_studies_take_no_time(write: Write, tmp_path: Path) -> None:
    for number in range(200):
        write(f"study{number}", measured(1), measured(2), model=a_model(layers=number + 3))
    began = time.process_time()
    assert numbers(tmp_path) == []
    assert time.process_time() - began < 1.0
