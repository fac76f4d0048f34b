"""Real studies over the largest space, and real offload, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import QUICK, CommandLine
from train_entry.contract import Measurement, State, StudyDir, Trial, read_trial

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

FULL = ("-m", "space=full", "study=full", "search=random", "limits.trials=5", *QUICK)


def trials(line: CommandLine, study: str) -> list[Trial]:
    found = [read_trial(place) for place in StudyDir(line.studies / study).trials()]
    return [trial for trial in found if trial is not None]


def test_a_study_over_everything_launches_no_trial_that_fails(command_line: CommandLine) -> None:
    done = command_line.run(*FULL, "tracking=none")
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(command_line, "full")
    assert {trial.state for trial in found} <= {State.MEASURED, State.REJECTED, State.REUSED}
    assert sum(trial.is_launched for trial in found) == 5
    assert len({trial.plan.strategy for trial in found if trial.plan}) >= 3


@pytest.mark.libaio
def test_offload_to_nvme_trains_and_leaves_the_disk_as_it_was(
    command_line: CommandLine, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    asked = ("strategy=zero3_nvme", f"cluster.nvme_path={disk}", "study=nvme", "tracking=none", *QUICK)
    done = command_line.run(*asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = trials(command_line, "nvme")
    assert trial.plan is not None
    assert (trial.plan.strategy, trial.plan.offload.nvme_path) == ("zero3_nvme", str(disk))
    assert isinstance(trial.outcome, Measurement)
    assert list(disk.iterdir()) == []
