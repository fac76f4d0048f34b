"""Studies on a real Slurm, through `python sweep.py`: many nodes, many trials, and many faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sweeps.cluster.slurm.queries import JobWatch
from sweeps.cluster.slurm.submit import cancel_jobs, scancel
from tests.slurm.conftest import TINY, Slurm, SlurmLine
from train_entry.contract import (
    AttemptDir,
    FailureKind,
    JobRecord,
    Measurement,
    SchedulerWord,
    State,
    StudyDir,
    Submission,
    read_document,
)

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.slurm]

Wait = Callable[[Callable[[], bool], float], None]
FREE_WITHIN_S = 15.0
ONE_BY_ONE = ("-m", *TINY, "ranks=1", "cluster.gpus_per_node=1", "strategy=ddp", "study=x")
TWO_BY_TWO = (
    "-m",
    *TINY,
    "ranks=4",
    "cluster.nodes=4",
    "cluster.gpus_per_node=2",
    "cluster.parallel=2",
    "strategy=zero1,zero2",
)


def attempt(line: SlurmLine, trial: int = 1, number: int = 1) -> AttemptDir:
    return StudyDir(line.studies / "x").trial(trial).attempt(number)


def job_of(place: AttemptDir) -> str:
    found = read_document(place.submission, Submission)
    assert found is not None
    return found.job_id


def has_begun(place: AttemptDir) -> bool:
    return place.heartbeat(0).exists()


def span(place: AttemptDir) -> tuple[float, float]:
    """The times of the job's first act and of the last rank's end."""
    job = read_document(place.job, JobRecord)
    assert job is not None
    return job.started_at, max(path.stat().st_mtime for path in place.path.glob("exit.rank*.json"))


def word(place: AttemptDir) -> SchedulerWord:
    """The scheduler's word on how the job ended."""
    found = read_document(place.scheduler, SchedulerWord)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def study(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SlurmLine, str]]:
    """A study of two trials of two nodes x two ranks each, at once, and what it printed."""
    line = slurm.line(tmp_path_factory.mktemp("study"))
    done = line.run(*TWO_BY_TWO, "study=x")
    assert done.returncode == 0, done.stdout + done.stderr
    yield line, done.stdout
    line.end()


def test_trials_of_two_nodes_are_measured_side_by_side(study: tuple[SlurmLine, str]) -> None:
    line, _ = study
    found = line.trials()
    assert [(trial.state, len(trial.attempts)) for trial in found] == [(State.MEASURED, 1)] * 2
    assert all(isinstance(trial.outcome, Measurement) and len(trial.outcome.ranks) == 4 for trial in found)
    (begun, ended), (other_begun, other_ended) = (span(attempt(line, trial.number)) for trial in found)
    assert begun < other_ended
    assert other_begun < ended
    assert not any(trial.is_shared for trial in found), "each has nodes of its own"


def test_a_trial_is_one_job_of_two_nodes_named_after_it(study: tuple[SlurmLine, str], slurm: Slurm) -> None:
    line, _ = study
    job_id = job_of(attempt(line))
    row = slurm.ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "JobName%30,NNodes,State")
    assert row.strip() == "x/0001/1|2|COMPLETED"
    ranks = slurm.ask("sacct", "-n", "-P", "-j", f"{job_id}.0", "-o", "NTasks,NNodes")
    assert ranks.strip() == "4|2"


def test_waiting_starting_and_running_are_recorded_apart(study: tuple[SlurmLine, str]) -> None:
    line, _ = study
    for trial in line.trials():
        elapsed = trial.attempts[0].elapsed
        assert elapsed is not None
        seconds = (elapsed.queue_s, elapsed.startup_s, elapsed.run_s)
        print(f"\ntrial {trial.number}: waited, started, ran: {seconds} s")
        assert all(part is not None and part >= 0 for part in seconds)


def test_a_slot_is_free_soon_after_its_trial_has_ended(study: tuple[SlurmLine, str]) -> None:
    line, _ = study
    for trial in line.trials():
        assert trial.closed_at is not None
        late_s = trial.closed_at - span(attempt(line, trial.number))[1]
        print(f"\ntrial {trial.number}: free {late_s:.1f} s after its last rank's end")
        assert late_s < FREE_WITHIN_S


def test_nothing_is_left_in_the_queue(study: tuple[SlurmLine, str], slurm: Slurm, wait_for: Wait) -> None:
    wait_for(lambda: slurm.ask("squeue", "--noheader") == "", 20)


def test_ending_what_is_over_is_no_problem(
    study: tuple[SlurmLine, str], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    over = job_of(attempt(study[0]))
    assert scancel([over, "999999"])[1] == ""
    assert cancel_jobs([over, "999999"], JobWatch()) == []


def test_a_dry_run_uses_what_the_probe_found(study: tuple[SlurmLine, str]) -> None:
    line, out = study
    assert "probing a node of main" in out
    done = line.run(*TWO_BY_TWO, "study=y", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "probing" not in done.stdout
    assert "zero2" in done.stdout


def test_what_contradicts_the_cluster_is_said_and_launches_nothing(line: SlurmLine) -> None:
    done = line.run(*ONE_BY_ONE, "cluster.partition=nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cluster.partition=nowhere: no such partition; the cluster has high, main\n"
    done = line.run(*ONE_BY_ONE, "cluster.nodes=9", "cluster.memory_gib=500")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "cluster.nodes=9: partition main has 4 nodes that are up and have 1 cores or more",
        "cluster.memory_gib=500: nodes of partition main have 15.6 GiB",
    ]
    done = line.run(*ONE_BY_ONE, 'cluster.sbatch_args=["--licenses=none"]')
    assert done.returncode == 2
    assert done.stderr.startswith("cluster=slurm: sbatch refuses such jobs: ")
    assert not line.studies.exists()


def test_a_killed_orchestrator_finds_its_job_again_by_name(line: SlurmLine, wait_for: Wait) -> None:
    process = line.start(*ONE_BY_ONE)
    wait_for(lambda: attempt(line).submission.exists(), 60)
    job_id = job_of(attempt(line))
    os.killpg(process.pid, signal.SIGKILL)
    attempt(line).submission.unlink()  # as if the orchestrator had died before it wrote the id
    done = line.run(*ONE_BY_ONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(trial.state, len(trial.attempts)) for trial in line.trials()] == [(State.MEASURED, 1)]
    record = read_document(attempt(line).job, JobRecord)
    assert record is not None
    assert record.job_id == job_id


def test_a_preempted_trial_is_launched_again(line: SlurmLine, slurm: Slurm, wait_for: Wait) -> None:
    process = line.start(*ONE_BY_ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    slurm.ask("sbatch", "-p", "high", "-N4", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 1")
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    assert word(attempt(line)).kind is FailureKind.PREEMPTED
    (trial,) = line.trials()
    assert (trial.state, len(trial.attempts), trial.used_retries) == (State.MEASURED, 2, 0)


def test_from_inside_a_job_with_gpus_and_ctrl_c(line: SlurmLine, slurm: Slurm, wait_for: Wait) -> None:
    """The trials must not inherit what the surrounding job has."""
    line.within = ("srun", "-n1", "--gpus-per-node=2", "--mem=2G", "-t10")
    process = line.start(*ONE_BY_ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    job_id = job_of(attempt(line))
    surrounding = set(slurm.ask("squeue", "--noheader", "-o", "%i").split()) - {job_id}
    assert len(surrounding) == 1
    slurm.ask("scancel", "--signal=INT", surrounding.pop())
    process.communicate(timeout=60)
    wait_for(lambda: slurm.ask("squeue", "--noheader") == "", 60)
    assert slurm.ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State").startswith("CANCELLED")
    assert [trial.state for trial in line.trials()] == [State.CANCELLED]


def test_without_accounting_a_job_that_is_ended_by_hand_is_seen(
    slurm_without_accounting: Slurm, tmp_path: Path, wait_for: Wait
) -> None:
    line = slurm_without_accounting.line(tmp_path)
    process = line.start(*ONE_BY_ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    slurm_without_accounting.ask("scancel", job_of(attempt(line)))
    out, err = process.communicate(timeout=120)
    line.end()
    assert process.returncode == 0, out + err
    assert word(attempt(line)).kind is FailureKind.CANCELLED
    assert [(trial.state, len(trial.attempts)) for trial in line.trials()] == [(State.MEASURED, 2)]
