"""Interpret Slurm's words: how a job ended, and why one waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from sweeps.cluster.slurm.queries import JobFacts
from train_entry.contract import FailureKind, SchedulerWord

WARNED_S = 120.0  # Slurm warns a job at most this long before its time limit
TOLD_S = 60.0  # a job waits this long before we tell a person why
KINDS = {
    "BOOT_FAIL": FailureKind.NODE_LOST,
    "NODE_FAIL": FailureKind.NODE_LOST,
    "PREEMPTED": FailureKind.PREEMPTED,
    "REVOKED": FailureKind.PREEMPTED,
    "TIMEOUT": FailureKind.TIMED_OUT,
    "DEADLINE": FailureKind.TIMED_OUT,
    "OUT_OF_MEMORY": FailureKind.HOST_OOM,
    "CANCELLED": FailureKind.CANCELLED,
    "FAILED": FailureKind.CRASHED,
}
# squeue's reasons for a wait that does not end when other jobs end, and what would end it.
ENDLESS = (
    (r"Wall\w*PerJob|PartitionTimeLimit", "lower cluster.time_min (for a held allocation: cluster.hold_min)"),
    (r"Nodes?PerJob|PartitionNodeLimit", "use fewer ranks, or lower cluster.nodes"),
    (r"PerJob|PerNode", "it asks for more than a job may have: use fewer ranks, or lower cluster.*"),
    (r"Minutes", "the account's budget is used up; choose another by cluster.account or cluster.qos"),
    (r"JobHeld|requeued held|user env", "`scontrol release JOB` lets it go on; `scancel JOB` ends it"),
    (r"BadConstraints", "no node has all it asks for: see cluster.constraint and cluster.gpu_type"),
    (r"Invalid(Account|QOS)|NotAllowed|AssocNot", "see cluster.account, cluster.qos, cluster.partition"),
    (r"NotAvail|DOWN|NodeDown|PartitionDown|Inactive", "nodes are down or reserved; `sinfo -R` says why"),
)


def scheduler_word(final: JobFacts, was_told: bool) -> SchedulerWord | None:
    """Return what a job's end means to us; None if the job's files say it better.

    `was_told`: its ranks ended in order because a signal told them to. Slurm calls such a job COMPLETED if it
    gave the job a grace period before taking its nodes.
    """
    state = "OUT_OF_MEMORY" if final.ran_out_of_memory else final.state
    if state != "COMPLETED":
        kind = KINDS.get(state)
    elif was_told:
        kind = FailureKind.TIMED_OUT if _is_out_of_time(final) else FailureKind.PREEMPTED
    else:
        kind = FailureKind.NODE_LOST
    if kind is None:
        return None
    return SchedulerWord(
        scheduler="Slurm", job_id=final.job_id, state=state, kind=kind, detail=_detail(final, kind)
    )


def _is_out_of_time(final: JobFacts) -> bool:
    return final.limit_s is not None and final.used_s >= final.limit_s - WARNED_S


def _detail(final: JobFacts, kind: FailureKind) -> str:
    if kind is FailureKind.NODE_LOST and final.state == "COMPLETED":
        return "its ranks left no files here; studies_dir must be on a file system that all nodes share"
    if kind is FailureKind.TIMED_OUT and final.limit_s is not None:
        return f"its limit was {final.limit_s // 60} minutes (cluster.time_min)"
    if kind is FailureKind.PREEMPTED:
        return "Slurm took its nodes for other jobs"
    if kind is FailureKind.CRASHED:
        code = f" (exit code {final.exit_code})" if final.exit_code else ""
        return f"the end of submitit's log may say why{code}"
    return ""


def remedy(reason: str) -> str:
    """Advice on a wait that does not end when other jobs end; empty if waiting helps."""
    return next((words for pattern, words in ENDLESS if re.search(pattern, reason)), "")


@dataclass
class Waits:
    """Messages on why jobs wait: a passing reason once for all jobs, a lasting one once for each job."""

    say: Callable[[str], None]
    _told: set[tuple[str, str]] = field(default_factory=set)

    def look(self, who: str, facts: JobFacts, waited_s: float) -> None:
        if waited_s < TOLD_S or facts.reason in ("", "None"):
            return
        helps = remedy(facts.reason)
        key = (who if helps else "", facts.reason)
        if key not in self._told:
            self._told.add(key)
            self.say(f"{who} (job {facts.job_id}) waits: {facts.reason}{f'; {helps}' if helps else ''}")
