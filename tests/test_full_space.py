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


DEGREES = (
    "-m",
    "space=model_parallel",
    "study=degrees",
    "search=grid",
    "ranks=4",
    "cluster.gpus_per_node=4",
    "strategy=zero1",
    "tensor=1,2",
    "pipeline=2",
    "micro_batch=1",
    "measure.warmup_steps=1",
    "measure.steps=3",
    "measure.split_steps=1",
    "tracking=none",
)


@pytest.mark.timeout(900)
def test_a_study_over_degrees_on_four_ranks_launches_no_trial_that_fails(command_line: CommandLine) -> None:
    done = command_line.run(*DEGREES, limit_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(command_line, "degrees")
    strategies = {trial.plan.strategy for trial in found if trial.plan}
    assert strategies == {"pp2_zero1", "tp2_pp2_zero1"}
    losses = set()
    for trial in found:
        assert trial.plan is not None
        assert isinstance(trial.outcome, Measurement)
        assert trial.outcome.bubble is not None
        assert 0 < trial.outcome.bubble < 1
        assert all(rank.split and rank.split.exchange_s > 0 for rank in trial.outcome.ranks)
        assert (trial.outcome.tensor_volume_bytes > 0) == (trial.plan.tensor > 1)
        losses.add(round(trial.outcome.loss, 4))
    assert len(losses) == 1


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
