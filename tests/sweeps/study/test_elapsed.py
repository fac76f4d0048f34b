"""The parts of an attempt's time, by its files, and the time limits of its phases."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from sweeps.cluster.node.supervisor import _Watch
from sweeps.study.collect import collect
from tests.support.examples import a_plan, a_trial_spec, an_attempt
from train_entry.contract import (
    AttemptDir,
    Elapsed,
    ExitReason,
    Heartbeat,
    JobRecord,
    Phase,
    RankExit,
    Submission,
    dump,
    write_atomic,
)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return AttemptDir(tmp_path)


def end(attempt: AttemptDir, rank: int, seconds: float, startup_s: float | None) -> None:
    ended = RankExit(
        rank=rank,
        returncode=0,
        reason=ExitReason.EXITED,
        phase=Phase.REPORT,
        silent_s=0.1,
        seconds=seconds,
        startup_s=startup_s,
    )
    write_atomic(attempt.exit(rank), dump(ended))


def elapsed(attempt: AttemptDir, ranks: int) -> Elapsed | None:
    return collect(attempt, a_trial_spec(plan=a_plan(ranks=ranks)), an_attempt()).elapsed


def test_waiting_starting_and_running_are_apart(attempt: AttemptDir) -> None:
    write_atomic(attempt.submission, dump(Submission(cluster="slurm", job_id="7", submitted_at=100.0)))
    job = JobRecord(job_id="7", host="n1", leader_pid=1, leader_start_ticks=1, started_at=160.0)
    write_atomic(attempt.job, dump(job))
    end(attempt, 0, seconds=50.0, startup_s=30.0)
    end(attempt, 1, seconds=49.0, startup_s=32.0)
    assert elapsed(attempt, 2) == Elapsed(queue_s=60.0, startup_s=32.0, run_s=18.0)


def test_what_never_started_up_ran_no_time(attempt: AttemptDir) -> None:
    end(attempt, 0, seconds=20.0, startup_s=None)
    assert elapsed(attempt, 1) == Elapsed(queue_s=None, startup_s=20.0, run_s=0.0)


def test_what_left_nothing_is_not_known(attempt: AttemptDir) -> None:
    assert elapsed(attempt, 2) == Elapsed(queue_s=None, startup_s=None, run_s=None)


@pytest.mark.parametrize(
    ("phase", "age_s", "reason"),
    [
        (Phase.ENGINE, 100.0, None),  # twice the trial's limit, but start-up may take longer: it compiles
        (Phase.ENGINE, 301.0, ExitReason.TIMED_OUT),
        (Phase.STEPS, 0.0, None),
    ],
)
def test_start_up_has_a_limit_of_its_own(
    attempt: AttemptDir, phase: Phase, age_s: float, reason: ExitReason | None
) -> None:
    watch = a_watch(attempt, phase)
    watch.started -= age_s
    assert watch._reason_to_end() == reason


def test_the_trials_limit_counts_from_the_end_of_start_up(attempt: AttemptDir) -> None:
    watch = a_watch(attempt, Phase.STEPS)
    watch.started -= 200.0  # start-up took long
    assert watch._reason_to_end() is None
    watch.ready_at = time.monotonic() - 51.0
    assert watch._reason_to_end() is ExitReason.TIMED_OUT


def a_watch(attempt: AttemptDir, phase: Phase) -> _Watch:
    spec = a_trial_spec(plan=a_plan(ranks=1))
    limits = dataclasses.replace(
        spec.limits, attempt_s=50.0, startup_s=300.0, startup_silence_s=1e6, step_silence_s=1e6
    )
    write_atomic(attempt.heartbeat(0), dump(Heartbeat(rank=0, pid=1, counter=1, phase=phase, step=0)))
    watch = _Watch(attempt, dataclasses.replace(spec, limits=limits), 0)
    watch._read_heartbeat()
    return watch
