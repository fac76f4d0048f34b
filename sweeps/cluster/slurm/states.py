"""What Slurm's words mean to us: how a job ended, and why one waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from sweeps.cluster.slurm.queries import JobFacts
from train_entry.contract import FailureKind, SchedulerWord

WARNED_S = 120.0  # before the end of its time, at most, a job hears that it is near
TOLD_S = 60.0  # a job waits before a person hears why
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
# Reasons that no other job's end removes, as squeue calls them, and what would.
ENDLESS = (
    (r"Wall\w*PerJob|PartitionTimeLimit", "lower cluster.time_min (of a held allocation: cluster.hold_min)"),
    (r"Nodes?PerJob|PartitionNodeLimit", "take fewer ranks, or cluster.nodes"),
    (r"PerJob|PerNode", "it asks for more than a job may have: take fewer ranks, or less of cluster.*"),
    (r"Minutes", "what the account was given is used up; cluster.account and cluster.qos choose another"),
    (r"JobHeld|requeued held|user env", "`scontrol release JOB` lets it go on, or `scancel JOB` end it"),
    (r"BadConstraints", "no node has all it asks for: see cluster.constraint and cluster.gpu_type"),
    (r"Invalid(Account|QOS)|NotAllowed|AssocNot", "see cluster.account, cluster.qos, cluster.partition"),
    (r"NotAvail|DOWN|NodeDown|PartitionDown|Inactive", "nodes are down or reserved; `sinfo -R` says why"),
)


def scheduler_word(final: JobFacts, was_told: bool) -> SchedulerWord | None:
    """What a job's end means to us; None: nothing that its files would not say better.

    `was_told`: its ranks ended in order, since a signal told them to. Slurm then calls the job COMPLETED,
    where it had given it some grace before it would take its nodes.
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
        return "its nodes were wanted by others"
    if kind is FailureKind.CRASHED:
        code = f" (exit code {final.exit_code})" if final.exit_code else ""
        return f"the end of submitit's log may say why{code}"
    return ""


def remedy(reason: str) -> str:
    """What ends a wait that no other job's end does; empty where waiting helps."""
    return next((words for pattern, words in ENDLESS if re.search(pattern, reason)), "")


@dataclass
class Waits:
    """Tells a person why jobs wait, once: of a common reason once at all, of one that never ends for each."""

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
