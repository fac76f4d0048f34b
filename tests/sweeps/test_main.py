"""`python -m sweeps` on studies on disk."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sweeps.__main__ import main
from sweeps.cluster.node.processes import is_alive, start_ticks
from sweeps.cluster.node.supervisor import job_record
from sweeps.study.ledger import Ledger, exclusive
from tests.support.examples import a_measured_trial, a_measurement, a_repeat, a_study_record, a_trial
from train_entry.contract import (
    Goal,
    Standing,
    State,
    StudyDir,
    Winner,
    dump,
    write_atomic,
)


@pytest.fixture
def study(tmp_path: Path) -> StudyDir:
    directory = StudyDir(tmp_path / "studies" / "mine")
    record = a_study_record(name="mine", goals=(Goal(name="tokens_per_s"),))
    write_atomic(directory.record, dump(record))
    return directory


def test_list_counts_states_and_names_the_best(study: StudyDir, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(study)
    best = ledger.put(a_measured_trial(number=1))
    ledger.put(a_trial(number=2, state=State.FAILED))
    ledger.put(a_trial(number=3, state=State.FAILED))
    assert main(["list", str(study.path.parent)]) == 0
    line = capsys.readouterr().out
    assert "1 measured, 2 failed" in line
    assert "trial 0001" in line
    assert f"{best.outcome.tokens_per_s:,.0f} tokens/s, trial 0001" in line  # type: ignore[union-attr]


def test_list_names_the_best_of_a_goal_that_is_the_better_the_less_it_is(
    study: StudyDir, capsys: pytest.CaptureFixture[str]
) -> None:
    record = a_study_record(name="mine", goals=(Goal(name="peak_bytes"),))
    write_atomic(study.record, dump(record))
    ledger = Ledger(study)
    ledger.put(a_measured_trial(number=1, outcome=a_measurement(peak_bytes=3 * 2**30)))
    ledger.put(a_measured_trial(number=2, outcome=a_measurement(peak_bytes=2 * 2**30)))
    ledger.put(a_measured_trial(number=3, outcome=a_measurement(peak_bytes=2**30), is_single_gpu=True))
    assert main(["list", str(study.path.parent)]) == 0
    assert capsys.readouterr().out.endswith("; best 2.00 GiB, trial 0002\n")


def test_list_names_the_confirmed_winner(study: StudyDir, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(study)
    ledger.put(a_measured_trial(number=1, outcome=a_measurement(tokens_per_s=900.0)))
    ledger.put(a_measured_trial(number=2, outcome=a_measurement(tokens_per_s=800.0)))
    standing = Standing(trial=2, value=850.0, low=840.0, high=860.0, repeats=3)
    winner = Winner(goal="tokens_per_s", trial=2, confidence=0.95, standings=(standing,))
    write_atomic(study.winner, dump(winner))
    assert main(["list", str(study.path.parent)]) == 0
    assert capsys.readouterr().out.endswith("; best 850 tokens/s, trial 0002, confirmed\n")


def test_an_unreadable_study_does_not_hide_the_others(
    study: StudyDir, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = study.path.parent / "broken" / "study.json"
    write_atomic(broken, "{")
    assert main(["list", str(study.path.parent)]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["broken", "mine"]


@pytest.mark.parametrize("command", [["list"], ["cancel"], ["replay"], ["advise", "4"]])
def test_a_directory_without_a_study_is_one_line_and_status_2(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command[:1], str(tmp_path), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(tmp_path) in error


@pytest.mark.parametrize(
    "changes",
    [
        {"state": State.RUNNING},
        {"state": State.MEASURED, "repeats": (a_repeat(round=1),)},
    ],
    ids=["a first time", "again"],
)
def test_cancel_ends_the_processes_of_trials_that_are_measured(
    study: StudyDir, changes: dict[str, Any]
) -> None:
    job = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ticks = start_ticks(job.pid)
    trial = Ledger(study).put(a_trial(number=1, **changes))
    assert trial.running is not None
    write_atomic(study.trial(1).attempt(trial.running.number).job, dump(job_record("1", job.pid)))
    assert main(["cancel", str(study.path)]) == 0
    job.wait(timeout=5)
    assert ticks is not None
    assert not is_alive(job.pid, ticks)


def test_cancel_leaves_a_study_to_the_orchestrator_that_runs_it(
    study: StudyDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with exclusive(study):
        assert main(["cancel", str(study.path)]) == 1
    assert "is being run by pid" in capsys.readouterr().err
