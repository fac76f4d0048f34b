"""Studies in held allocations of a real Slurm wait in the queue once, and survive what happens to nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from sweeps.cluster.slurm.holder import Hold, HoldDir
from tests.slurm.conftest import TINY, Slurm, SlurmLine
from train_entry.contract import (
    AttemptDir,
    FailureKind,
    JobRecord,
    SchedulerWord,
    State,
    StudyDir,
    read_document,
)

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.slurm]

Wait = Callable[[Callable[[], bool], float], None]
HELD = ("-m", *TINY, "cluster.hold=true", "study=x")
TWO_BY_TWO = (
    *HELD,
    "ranks=4",
    "cluster.nodes=4",
    "cluster.holds=2",
    "cluster.parallel=2",
    "cluster.gpus_per_node=2",
    "strategy=zero1,zero2",
)
ONE_BY_ONE = (*HELD, "ranks=1", "cluster.gpus_per_node=1", "strategy=ddp")


def attempt(line: SlurmLine, trial: int = 1, number: int = 1) -> AttemptDir:
    return StudyDir(line.studies / "x").trial(trial).attempt(number)


def holds(line: SlurmLine) -> list[Hold]:
    """All allocations that the study requested."""
    places = sorted((line.studies / "x" / "holds").glob("[0-9]*"))
    return [hold for place in places if (hold := read_document(HoldDir(place).record, Hold)) is not None]


def has_begun(place: AttemptDir) -> bool:
    return place.heartbeat(0).exists()


def test_two_allocations_hold_a_trial_each_and_the_end_of_one_is_survived(
    line: SlurmLine, slurm: Slurm, wait_for: Wait
) -> None:
    """Two trials of two nodes x two ranks run at once on four nodes; one's allocation is cancelled."""
    process = line.start(*TWO_BY_TWO)
    wait_for(lambda: has_begun(attempt(line, 1)) and has_begun(attempt(line, 2)), 200)
    first, second = holds(line)
    mine = sorted(slurm.ask("squeue", "-h", "-o", "%i|%j|%D").splitlines())
    assert mine == [f"{first.job_id}|x/hold-0|2", f"{second.job_id}|x/hold-1|2"]
    steps = slurm.ask("squeue", "-h", "-s", "-o", "%i|%j").splitlines()
    assert {f"{first.job_id}.0|x/0001/1", f"{second.job_id}.0|x/0002/1"} <= set(steps)
    slurm.ask("scancel", second.job_id)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    found = line.trials()
    assert [(trial.state, len(trial.attempts), trial.used_retries, trial.is_shared) for trial in found] == [
        (State.MEASURED, 1, 0, False),
        (State.MEASURED, 2, 0, False),
    ], "no retry is used up, and each has nodes of its own"
    word = read_document(attempt(line, 2).scheduler, SchedulerWord)
    assert word is not None
    assert (word.kind, word.state, word.job_id) == (FailureKind.PREEMPTED, "CANCELLED", second.job_id)
    wait_for(lambda: slurm.ask("squeue", "--noheader") == "", 20)  # given back
    state = slurm.ask("sacct", "-X", "-n", "-P", "-j", first.job_id, "-o", "State")
    assert state.strip() == "COMPLETED"


def test_a_study_is_one_job_and_a_killed_orchestrator_finds_it_and_the_trials_in_it_again(
    line: SlurmLine, wait_for: Wait
) -> None:
    """Two trials run side by side on one node, which slows them down: their timings are marked shared."""
    keys = (*HELD, "ranks=1", "cluster.gpus_per_node=2", "cluster.parallel=2", "strategy=zero1,zero2,ddp")
    process = line.start(*keys)
    wait_for(lambda: has_begun(attempt(line, 1)) and has_begun(attempt(line, 2)), 120)
    os.killpg(process.pid, signal.SIGKILL)
    done = line.run(*keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(trial.state, len(trial.attempts)) for trial in line.trials()] == [(State.MEASURED, 1)] * 3
    assert [trial.is_shared for trial in line.trials()][:2] == [True, True]
    jobs = [read_document(attempt(line, number).job, JobRecord) for number in (1, 2, 3)]
    (only,) = holds(line)
    assert [record.job_id for record in jobs if record] == [only.job_id] * 3


def test_an_idle_allocation_ends_by_itself(line: SlurmLine, slurm: Slurm, wait_for: Wait) -> None:
    keys = (*ONE_BY_ONE, "cluster.hold_idle_s=2")
    process = line.start(*keys)
    wait_for(lambda: has_begun(attempt(line)), 90)
    os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: slurm.ask("squeue", "--noheader") == "", 60)
    assert attempt(line).exit(0).exists(), "not before its trial has ended"
    done = line.run(*keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(trial.state, len(trial.attempts)) for trial in line.trials()] == [(State.MEASURED, 1)]
    assert len(holds(line)) == 1


def test_a_trial_without_an_orchestrator_is_cancelled_and_its_allocation_goes_on(
    line: SlurmLine, slurm: Slurm, wait_for: Wait
) -> None:
    process = line.start(*ONE_BY_ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    os.killpg(process.pid, signal.SIGKILL)
    assert line.sweeps("cancel", str(line.studies / "x")).startswith("cancelled 1 running trial;")
    (only,) = holds(line)
    assert [row.split()[0] for row in slurm.ask("squeue", "-h", "-s").splitlines()] == [
        f"{only.job_id}.batch"
    ]
    slurm.ask("scancel", only.job_id)


def test_ctrl_c_ends_the_trial_and_gives_the_allocation_back(
    line: SlurmLine, slurm: Slurm, wait_for: Wait
) -> None:
    process = line.start(*ONE_BY_ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert [trial.state for trial in line.trials()] == [State.CANCELLED]
    wait_for(lambda: slurm.ask("squeue", "--noheader") == "", 20)
