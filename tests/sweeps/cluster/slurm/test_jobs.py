"""Slots, states and outcomes of jobs: a true SlurmCluster over a scheduler that the tests play."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.base import JobHandle, JobState, share_a_node
from sweeps.cluster.slurm import jobs, states, submit
from sweeps.cluster.slurm.jobs import SlurmCluster
from sweeps.cluster.slurm.queries import JobWatch, SlurmError
from sweeps.cluster.slurm.request import Site
from sweeps.config.schema import ClusterConfig
from sweeps.errors import SweepError
from sweeps.machine import Machine
from sweeps.study.collect import collect
from tests.support.examples import a_plan, a_trial_spec, an_attempt
from tests.sweeps.cluster.conftest import Commands
from train_entry.contract import (
    AttemptDir,
    ExitReason,
    Failure,
    FailureKind,
    Phase,
    RankExit,
    Submission,
    dump,
    write_atomic,
)

FOUR_NODES = Machine(device="cpu", nodes=4, ranks_per_node=2, cores=8)
SPEC = a_trial_spec(plan=a_plan(ranks=2))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    found = AttemptDir(tmp_path / "attempt-1")
    write_atomic(found.spec, dump(SPEC))
    return found


def cluster(state: str = "RUNNING", parallel: int = 4, **keys: Any) -> SlurmCluster:
    """A cluster whose squeue always lists job 7 in this state."""
    text = f"7|{state}|None|1:00|30:00|study/0001/1|\n" if state else ""
    watch = JobWatch(ask=lambda *command: text if command[0] == "squeue" else "")
    return SlurmCluster(
        Site(cluster=ClusterConfig(kind="slurm", **keys), machine=FOUR_NODES), parallel, watch
    )


def attached(on: SlurmCluster, attempt: AttemptDir) -> JobHandle:
    write_atomic(attempt.submission, dump(Submission(cluster="slurm", job_id="7", submitted_at=0.0)))
    return on.attach(attempt, 2, ("node-0/0", "node-0/1"))


def end(attempt: AttemptDir, *ranks: int, reason: ExitReason = ExitReason.EXITED) -> None:
    for rank in ranks:
        ended = RankExit(
            rank=rank, returncode=-9, reason=reason, phase=Phase.STEPS, silent_s=0.1, seconds=10.0
        )
        write_atomic(attempt.exit(rank), dump(ended))


# ---------------------------------------------------------------- slots


def test_a_large_trial_takes_whole_nodes_and_a_small_one_fits_beside(tmp_path: Path) -> None:
    on = cluster()
    assert on.free_ranks() == 8
    first = on.reserve(4)
    assert first == ("node-0/0", "node-0/1", "node-1/0", "node-1/1")
    on.attach(AttemptDir(tmp_path / "a"), 4, first)
    second = on.reserve(1)
    assert second == ("node-2/0",)
    on.attach(AttemptDir(tmp_path / "b"), 1, second)
    assert on.reserve(4) is None
    assert on.free_ranks() == 2


def test_no_more_than_parallel_run_at_once(tmp_path: Path) -> None:
    on = cluster(parallel=1)
    on.attach(AttemptDir(tmp_path / "a"), 1, ("node-0/0",))
    assert (on.free_ranks(), on.reserve(1)) == (0, None)


def test_trials_disturb_each_other_on_one_node_only() -> None:
    assert share_a_node(("node-0/0",), ("node-0/1", "node-1/0"))
    assert not share_a_node(("node-0/0",), ("node-1/0",))
    assert share_a_node(("core-0",), ("core-1",)), "all slots of one host"


def test_a_node_of_ones_own_has_no_neighbours() -> None:
    assert not cluster().has_neighbours(("node-0/0",))
    assert cluster(exclusive=False).has_neighbours(("node-0/0",))
    assert not cluster(exclusive=False).has_neighbours(("node-0/0", "node-0/1"))


def test_a_part_of_a_nodes_gpus_is_no_node_of_ones_own() -> None:
    on = cluster(exclusive=False)
    on.site = dataclasses.replace(on.site, gpus_on_node=8)
    assert on.has_neighbours(("node-0/0", "node-0/1"))


# ---------------------------------------------------------------- submitting


def sending(*answers: SweepError | str) -> Any:
    """An executor to which Slurm gives these answers, one after another."""
    left = list(answers)

    class Scripted:
        def __init__(self, folder: Path) -> None: ...

        def update_parameters(self, **parameters: object) -> None: ...

        def send(self, *_: object) -> str:
            if isinstance(answer := left.pop(0), SweepError):
                raise answer
            return answer

    return Scripted


def test_what_sbatch_refuses_for_a_while_is_sent_again(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "RESEND_S", 0.0)
    monkeypatch.setattr(jobs, "LOOK_S", 0.0)
    on = cluster("PENDING")
    on.executor = sending(SweepError("sbatch refused: QOSMaxSubmitJobPerUserLimit"), "7")
    handle = on.submit(attempt, SPEC, ("node-0/0", "node-0/1"))
    assert not attempt.submission.exists()
    assert on.poll(handle) is JobState.QUEUED
    assert jobs.known_job(attempt) == "7"


def test_a_job_whose_answer_was_lost_is_taken_for_what_it_is(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "RESEND_S", 0.0)
    on = cluster()
    on.watch = JobWatch(ask=lambda *_: f"7|PENDING|None|0:00|30:00|study/0001/1|{attempt.path.resolve()}\n")
    on.executor = sending(SweepError("sbatch refused: Socket timed out on send/recv operation"))
    assert on.poll(on.submit(attempt, SPEC, ("node-0/0",))) is JobState.QUEUED
    assert jobs.known_job(attempt) == "7", "and none is sent beside it"


def test_a_lost_job_is_cancelled_too(attempt: AttemptDir, commands: Commands) -> None:
    row = f"7|RUNNING|None|0:00|30:00|study/0001/1|{attempt.path.resolve()}\n"
    rows = [row, row.replace("RUNNING", "CANCELLED")]
    on = cluster()
    on.watch = JobWatch(ask=lambda *_: rows.pop(0) if len(rows) > 1 else rows[0], squeue_every_s=0.0)
    on.executor = sending(SweepError("sbatch refused: Socket timed out on send/recv operation"))
    assert on.cancel(on.submit(attempt, SPEC, ("node-0/0",))) == []
    assert commands.calls("scancel") == ["7"]


# ---------------------------------------------------------------- states


def test_a_job_waits_then_starts_then_runs(attempt: AttemptDir) -> None:
    waiting = cluster("PENDING")
    assert waiting.poll(attached(waiting, attempt)) is JobState.QUEUED
    starting = cluster("RUNNING")
    assert starting.poll(attached(starting, attempt)) is JobState.STARTING
    write_atomic(attempt.job, "{}")
    running = cluster("RUNNING")
    assert running.poll(attached(running, attempt)) is JobState.RUNNING


def test_ranks_that_have_ended_end_the_trial_whatever_slurm_says(attempt: AttemptDir) -> None:
    on = cluster("RUNNING")
    handle = attached(on, attempt)
    end(attempt, 0, 1)
    assert on.poll(handle) is JobState.ENDED
    assert on.free_ranks() == 8
    assert not attempt.scheduler.exists()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("PREEMPTED", FailureKind.PREEMPTED),
        ("NODE_FAIL", FailureKind.NODE_LOST),
        ("TIMEOUT", FailureKind.TIMED_OUT),
        ("OUT_OF_MEMORY", FailureKind.HOST_OOM),
        ("CANCELLED", FailureKind.CANCELLED),
    ],
)
def test_where_ranks_left_no_word_slurms_counts(
    attempt: AttemptDir, state: str, kind: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FILES_S", -1.0)
    on = cluster(state)
    end(attempt, 0, reason=ExitReason.PEER_LOST)
    assert on.poll(attached(on, attempt)) is JobState.LOST
    outcome = collect(attempt, SPEC, an_attempt()).outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is kind
    assert outcome.message.startswith(f"Slurm ended job 7: {state}")


def test_files_of_another_node_may_come_late(attempt: AttemptDir) -> None:
    on = cluster("COMPLETED")
    assert on.poll(attached(on, attempt)) is JobState.RUNNING


def test_a_ranks_own_failure_explains_more_than_the_scheduler(attempt: AttemptDir) -> None:
    on = cluster("PREEMPTED")
    end(attempt, 0, 1, reason=ExitReason.CANCELLED)
    write_atomic(attempt.outcome(1), dump(Failure(kind=FailureKind.GPU_OOM, message="full", rank=1)))
    assert on.poll(attached(on, attempt)) is JobState.ENDED
    outcome = collect(attempt, SPEC, an_attempt()).outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.GPU_OOM


def test_a_job_without_id_is_found_by_its_name(attempt: AttemptDir) -> None:
    text = f"7|PENDING|Priority|0:00|30:00|study/0001/1|{attempt.path.resolve()}\n"
    on = cluster()
    on.watch = JobWatch(ask=lambda *_: text)
    assert on.poll(on.attach(attempt, 2, ("node-0/0",))) is JobState.QUEUED


def test_a_job_is_not_lost_while_squeue_is_silent(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: str) -> str:
        raise SlurmError("Unable to contact slurm controller")

    monkeypatch.setattr(jobs, "UNKNOWN_S", -1.0)
    on = cluster()
    on.watch = JobWatch(ask=silent)
    assert on.poll(on.attach(attempt, 2, ("node-0/0",))) is JobState.STARTING
    on.watch = JobWatch(ask=lambda *_: "")
    assert on.poll(on.attach(attempt, 2, ("node-0/0",))) is JobState.LOST


def test_a_controller_that_restarts_ends_no_study(
    attempt: AttemptDir, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job stays in the queue after its ranks have ended, and Slurm does not hear the first scancel."""
    monkeypatch.setattr(jobs, "LEAVING_S", 0.0)
    monkeypatch.setattr(jobs, "LOOK_S", 0.0)
    commands.answer("scancel", err="scancel: error: Unable to contact slurm controller\n", status=1)
    on = cluster("RUNNING")
    first = attached(on, attempt)
    end(attempt, 0, 1)
    assert on.poll(first) is JobState.ENDED
    other = AttemptDir(attempt.path.parent / "attempt-2")
    second = attached(on, other)
    assert on.poll(second) is JobState.STARTING
    commands.answer("scancel")
    on.poll(second)
    on.poll(second)
    assert commands.calls("scancel") == ["7", "7"], "until it is heard"


def test_no_job_is_ended_on_what_a_silent_controller_said_before(
    attempt: AttemptDir, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LEAVING_S", 0.0)
    monkeypatch.setattr(jobs, "LOOK_S", 0.0)
    on = cluster("RUNNING")
    handle = attached(on, attempt)
    end(attempt, 0, 1)
    assert on.poll(handle) is JobState.ENDED
    other = attached(on, AttemptDir(attempt.path.parent / "attempt-2"))

    def silent(*_: str) -> str:
        raise SlurmError("Unable to contact slurm controller")

    on.watch.ask, on.watch.squeue_every_s = silent, 0.0
    on.poll(other)
    assert commands.calls("scancel") == []


def test_a_trial_that_waits_for_long_says_why(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "TOLD_S", 0.0)
    told: list[str] = []
    on = SlurmCluster(
        Site(cluster=ClusterConfig(kind="slurm"), machine=FOUR_NODES),
        4,
        JobWatch(ask=lambda *_: "7|PENDING|PartitionTimeLimit|0:00|30:00|study/0001/1|\n"),
        say=told.append,
    )
    on.poll(attached(on, attempt))
    (text,) = told
    assert text.startswith(f"trial {attempt.path.parent.name} (job 7) waits: PartitionTimeLimit; lower")
