"""The winner as files that run without shardsweep."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from sweeps.study.export import reproduce_command, write_best
from tests.support.examples import a_measured_trial, a_plan, a_repeat
from train_entry.contract import Engine, Plan, StudyDir, load


@pytest.fixture
def directory(tmp_path: Path) -> StudyDir:
    return StudyDir(tmp_path / "a study")


def test_the_winner_leaves_as_four_files(directory: StudyDir) -> None:
    trial = a_measured_trial()
    best = write_best(directory, trial)
    names = {"plan.json", "overrides.txt", "command.sh", "ds_config.json"}
    assert {path.name for path in best.iterdir()} == names
    assert load(Plan, (best / "plan.json").read_text()) == trial.plan
    assert (best / "overrides.txt").read_text() == "strategy=zero2\nmicro_batch=4\n"
    assert json.loads((best / "ds_config.json").read_text())["zero_optimization"]["stage"] == 2


def test_a_winner_of_ddp_leaves_no_document_of_an_earlier_winner(directory: StudyDir) -> None:
    write_best(directory, a_measured_trial())
    best = write_best(directory, a_measured_trial(number=2, plan=a_plan(engine=Engine.DDP)))
    assert not (best / "ds_config.json").exists()


def test_the_script_is_valid_and_names_the_attempt_that_was_measured(directory: StudyDir) -> None:
    trial = a_measured_trial(number=7, lost=1, repeats=(a_repeat(),))
    script = write_best(directory, trial) / "command.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert "python sweep.py strategy=zero2 micro_batch=4" in lines
    again = shlex.split(lines[-1].removeprefix("# "))
    assert again[:4] == ["torchrun", "--nproc-per-node=2", "-m", "train_entry"]
    assert again[4] == str(directory.path / "trials" / "0007" / "attempt-2")


def test_a_command_can_be_pasted_whatever_the_values_hold() -> None:
    overrides = ["optimizer.betas=[0.9, 0.95]", "data.path='my books'", "micro_batch=4"]
    assert shlex.split(reproduce_command(overrides)) == ["python", "sweep.py", *overrides]


def test_a_trial_without_a_plan_cannot_win(directory: StudyDir) -> None:
    with pytest.raises(ValueError, match="trial 4 has no plan"):
        write_best(directory, a_measured_trial(number=4, plan=None))
