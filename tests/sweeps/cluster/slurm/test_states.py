"""Slurm's words tell how a job ended, and why one waits."""

from __future__ import annotations

import pytest

from sweeps.cluster.slurm.queries import JobFacts
from sweeps.cluster.slurm.states import Waits, remedy, scheduler_word
from train_entry.contract import FailureKind


def waiting(reason: str, job_id: str = "7") -> JobFacts:
    return JobFacts(job_id=job_id, state="PENDING", reason=reason)


def test_ranks_that_ended_in_order_within_the_grace_were_preempted_or_out_of_time() -> None:
    early = JobFacts(job_id="7", state="COMPLETED", used_s=60, limit_s=1800)
    late = JobFacts(job_id="7", state="COMPLETED", used_s=1760, limit_s=1800)
    words = [scheduler_word(facts, was_told=True) for facts in (early, late)]
    assert [word.kind for word in words if word] == [FailureKind.PREEMPTED, FailureKind.TIMED_OUT]
    lost = scheduler_word(early, was_told=False)
    assert lost is not None
    assert lost.kind is FailureKind.NODE_LOST
    assert "a file system that all nodes share" in lost.detail


def test_a_trials_step_out_of_memory_says_more_than_its_job() -> None:
    word = scheduler_word(JobFacts(job_id="7", state="FAILED", ran_out_of_memory=True), was_told=False)
    assert word is not None
    assert (word.kind, word.state) == (FailureKind.HOST_OOM, "OUT_OF_MEMORY")


def test_a_wait_is_explained_once_and_not_at_once() -> None:
    told: list[str] = []
    waits = Waits(told.append)
    waits.look("trial 0001", waiting("Priority"), 59.0)
    assert told == []
    for who, job_id in (("trial 0001", "7"), ("trial 0001", "7"), ("trial 0002", "8")):
        waits.look(who, waiting("Priority", job_id), 61.0)
    assert told == ["trial 0001 (job 7) waits: Priority"]


def test_a_wait_that_never_ends_is_explained_for_each_job_with_what_would_help() -> None:
    told: list[str] = []
    waits = Waits(told.append)
    for who in ("trial 0001", "trial 0001", "trial 0002"):
        waits.look(who, waiting("QOSMaxWallDurationPerJobLimit"), 61.0)
    assert [text.partition(" (")[0] for text in told] == ["trial 0001", "trial 0002"]
    assert "waits: QOSMaxWallDurationPerJobLimit; lower cluster.time_min" in told[0]


@pytest.mark.parametrize(
    ("reason", "helps"),
    [
        ("PartitionTimeLimit", "cluster.time_min"),
        ("QOSMaxNodePerJobLimit", "fewer ranks"),
        ("JobHeldAdmin", "scontrol release"),
        ("BadConstraints", "cluster.constraint"),
        ("AssocGrpGRESMinutes", "used up"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "sinfo -R"),
    ],
)
def test_reasons_that_no_other_jobs_end_removes(reason: str, helps: str) -> None:
    assert helps in remedy(reason)


@pytest.mark.parametrize("reason", ["Priority", "Resources", "QOSMaxJobsPerUserLimit", "Licenses"])
def test_reasons_that_waiting_removes(reason: str) -> None:
    assert remedy(reason) == ""
