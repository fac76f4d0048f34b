"""An orchestrator finds the jobs that an earlier one launched, perhaps on another host."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.cluster.base import JobState
from sweeps.cluster.local import SUBMITIT_MARGIN_S, LocalCluster, cancel_attempt
from sweeps.cluster.node.supervisor import job_record
from sweeps.errors import SweepError
from sweeps.machine import Machine
from tests.support.examples import a_trial_spec
from train_entry.contract import AttemptDir, ExitReason, JobRecord, Phase, RankExit, dump, write_atomic

SLOTS = ("core-0", "core-1")


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    machine = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
    return LocalCluster(machine, parallel=1, state_dir=tmp_path / "state")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    found = AttemptDir(tmp_path / "attempt-1")
    write_atomic(found.spec, dump(a_trial_spec()))
    return found


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def elsewhere(started_at: float) -> JobRecord:
    return dataclasses.replace(job_record("1", os.getpid()), host="another-host", started_at=started_at)


def end(attempt: AttemptDir) -> None:
    for rank in range(2):
        ended = RankExit(
            rank=rank,
            returncode=0,
            reason=ExitReason.EXITED,
            phase=Phase.REPORT,
            silent_s=0.1,
            seconds=9.0,
        )
        write_atomic(attempt.exit(rank), dump(ended))


def test_a_job_that_lives_is_running_and_holds_its_slots(
    cluster: LocalCluster, attempt: AttemptDir, job: subprocess.Popen[bytes]
) -> None:
    write_atomic(attempt.job, dump(job_record("1", job.pid)))
    handle = cluster.attach(attempt, 2, SLOTS)
    assert cluster.poll(handle) is JobState.RUNNING
    assert cluster.free_ranks() == 0
    assert cluster._leases.free() == 0  # for other studies too


def test_a_job_that_is_gone_without_a_word_is_lost_and_frees_its_slots(
    cluster: LocalCluster, attempt: AttemptDir
) -> None:
    gone = dataclasses.replace(job_record("1", os.getpid()), leader_start_ticks=1)
    write_atomic(attempt.job, dump(gone))
    handle = cluster.attach(attempt, 2, SLOTS)
    assert cluster.poll(handle) is JobState.LOST
    assert cluster.free_ranks() == 2


def test_a_job_that_has_not_said_who_it_is_gets_time(cluster: LocalCluster, attempt: AttemptDir) -> None:
    handle = cluster.attach(attempt, 2, SLOTS)
    assert cluster.poll(handle) is JobState.STARTING
    assert cluster.poll(dataclasses.replace(handle, submitted_at=time.monotonic() - 61)) is JobState.LOST


def test_a_job_on_another_host_runs_until_its_time_limit(cluster: LocalCluster, attempt: AttemptDir) -> None:
    limit_s = a_trial_spec().limits.attempt_s + SUBMITIT_MARGIN_S
    write_atomic(attempt.job, dump(elsewhere(time.time() - limit_s + 60)))
    handle = cluster.attach(attempt, 2, SLOTS)
    assert cluster.poll(handle) is JobState.RUNNING
    write_atomic(attempt.job, dump(elsewhere(time.time() - limit_s - 60)))
    assert cluster.poll(handle) is JobState.LOST


def test_a_job_that_ended_on_another_host_is_collected(cluster: LocalCluster, attempt: AttemptDir) -> None:
    write_atomic(attempt.job, dump(elsewhere(time.time())))
    end(attempt)
    assert cluster.poll(cluster.attach(attempt, 2, SLOTS)) is JobState.ENDED


def test_a_job_on_another_host_cannot_be_cancelled_from_here(attempt: AttemptDir) -> None:
    write_atomic(attempt.job, dump(elsewhere(time.time())))
    with pytest.raises(SweepError, match="runs on host another-host"):
        cancel_attempt(attempt)


def test_cancelling_ends_a_job_that_another_orchestrator_launched(
    cluster: LocalCluster, attempt: AttemptDir, job: subprocess.Popen[bytes]
) -> None:
    write_atomic(attempt.job, dump(job_record("1", job.pid)))
    cluster.cancel(cluster.attach(attempt, 2, SLOTS))
    assert not Path(f"/proc/{job.pid}").exists()
    assert cluster.free_ranks() == 2


def test_slots_reserved_for_a_trial_are_no_neighbours_of_it(cluster: LocalCluster) -> None:
    slots = cluster.reserve(1) or ()
    assert not cluster.has_neighbours(slots)
    assert cluster.has_neighbours(())
