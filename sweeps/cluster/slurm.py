"""Slurm, through submitit: a trial is a job, a rank a task. Who asks what of Slurm is in `slurm_queries`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.slurm_queries import JobFacts, JobWatch, SlurmError, ask, is_foreign, said
from sweeps.cluster.slurm_request import Layout, Site, job_name, trial_parameters
from sweeps.cluster.supervisor import supervise
from sweeps.errors import SweepError
from sweeps.machine import Machine
from train_entry.contract import (
    AttemptDir,
    ContractError,
    ExitReason,
    FailureKind,
    JobRecord,
    RankExit,
    SchedulerWord,
    Submission,
    TrialSpec,
    dump,
    read_document,
    write_atomic,
)

NAME = "slurm"
LOOK_S = 1.0  # between two looks at a running job's files, which lie on a file system that many share
FILES_S = 10.0  # for files of another node to be seen here after their job has ended
UNKNOWN_S = 90.0  # for a job whose submitter died before it had an id to write
RESEND_S = 15.0  # after sbatch has refused: too many jobs of this user, a controller that restarts
REFUSED_S = 600.0  # and for so long
CANCEL_S = 120.0  # for a cancelled job to be gone; Slurm itself waits KillWait, 30 s, before it kills
WARNED_S = 120.0  # before the end of its time, at most, a job hears that it is near
LEAVING_S = 30.0  # for a job whose ranks have all ended
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


@dataclass
class _Job:
    """What is known here of an attempt's job."""

    handle: JobHandle
    job_id: str | None
    state: JobState = JobState.QUEUED
    looked_at: float = float("-inf")
    over_since: float | None = None
    unsent: TrialSpec | None = None  # Slurm has not taken it yet
    refused_since: float | None = None
    sent_at: float = float("-inf")


@dataclass
class SlurmCluster:
    """Runs each trial as a job of its own, at most `parallel` at once."""

    site: Site
    parallel: int
    watch: JobWatch = field(default_factory=JobWatch)
    executor: Callable[[Path], Executor] = field(default_factory=lambda: Executor)
    _jobs: dict[Path, _Job] = field(default_factory=dict)
    _leaving: dict[str, float] = field(default_factory=dict)  # jobs whose ranks have ended, since when

    @property
    def machine(self) -> Machine:
        return self.site.machine

    def free_ranks(self) -> int:
        if len(self._jobs) >= self.parallel:
            return 0
        free = self._free()
        whole = sum(len(slots) for slots in free.values() if len(slots) == self.machine.ranks_per_node)
        return max([whole, *(len(slots) for slots in free.values())])

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        if len(self._jobs) >= self.parallel:
            return None
        layout = Layout.of(ranks, self.machine.ranks_per_node)
        free = self._free()
        wanted = self.machine.ranks_per_node if layout.nodes > 1 else ranks
        nodes = [slots[:wanted] for slots in free.values() if len(slots) >= wanted][: layout.nodes]
        return tuple(slot for slots in nodes for slot in slots) if len(nodes) == layout.nodes else None

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """Unless a node is all ours, Slurm may put anybody's job beside."""
        per_node = len(slots) / max(1, len({slot.partition("/")[0] for slot in slots}))
        return not self.site.cluster.exclusive and per_node < self.machine.ranks_per_node

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        handle = self._take(attempt, spec.plan.ranks, slots, None)
        self._jobs[attempt.path].unsent = spec
        self._send(self._jobs[attempt.path])
        return handle

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        return self._take(attempt, ranks, slots, known_job(attempt))

    def poll(self, handle: JobHandle) -> JobState:
        job = self._jobs.get(handle.attempt.path)
        if job is None:
            return JobState.ENDED
        if time.monotonic() - job.looked_at >= LOOK_S:
            job.looked_at = time.monotonic()
            job.state = self._state(job)
            self._end_stragglers()
        if job.state in (JobState.ENDED, JobState.LOST):
            self._drop(job)
        return job.state

    def cancel(self, handle: JobHandle) -> None:
        job = self._jobs.get(handle.attempt.path)
        if job is None:
            return
        if job.job_id is None and job.unsent is None:
            job.job_id = self._find(job)
        if job.job_id is not None:
            cancel_job(job.job_id, self.watch)
        self._drop(job)

    def _send(self, job: _Job) -> None:
        """Submit it; what a full queue or a controller that restarts refuses is tried again for a while."""
        if job.unsent is None or time.monotonic() - job.sent_at < RESEND_S:
            return
        attempt, job.sent_at = job.handle.attempt, time.monotonic()
        where = str(attempt.path.resolve())
        executor = self.executor(attempt.submitit)
        executor.update_parameters(**trial_parameters(self.site, job.unsent, where))
        try:
            job.job_id = executor.send(supervise, where)
        except SweepError:
            job.refused_since = job.refused_since or job.sent_at
            if job.sent_at - job.refused_since > REFUSED_S:
                raise
            return
        job.unsent = None
        record = Submission(cluster=NAME, job_id=job.job_id, submitted_at=time.time())
        write_atomic(attempt.submission, dump(record))

    # ------------------------------------------------------------------ slots

    def _free(self) -> dict[str, list[str]]:
        """By node. Which of the cluster's nodes they are is Slurm's choice; we only count."""
        taken = {slot for job in self._jobs.values() for slot in job.handle.slots}
        slots = range(self.machine.ranks_per_node)
        return {
            f"node-{node}": [name for slot in slots if (name := f"node-{node}/{slot}") not in taken]
            for node in range(self.machine.nodes)
        }

    def _take(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...], job_id: str | None) -> JobHandle:
        handle = JobHandle(attempt=attempt, ranks=ranks, slots=slots, submitted_at=time.monotonic())
        self._jobs[attempt.path] = _Job(handle=handle, job_id=job_id)
        return handle

    def _drop(self, job: _Job) -> None:
        self._jobs.pop(job.handle.attempt.path, None)
        if job.job_id is not None and job.state is JobState.ENDED:
            self._leaving[job.job_id] = time.monotonic()
        elif job.job_id is not None:
            self.watch.forget(job.job_id)

    # ------------------------------------------------------------------ states

    def _state(self, job: _Job) -> JobState:
        self._send(job)
        if job.unsent is not None:
            return JobState.QUEUED
        if job.job_id is None:
            job.job_id = known_job(job.handle.attempt) or self._find(job)
        if job.job_id is None:
            waited_s = time.monotonic() - job.handle.submitted_at
            return JobState.STARTING if waited_s < UNKNOWN_S else JobState.LOST
        facts = self.watch.facts(job.job_id)
        if facts is not None and facts.is_waiting:
            return JobState.QUEUED
        exits = rank_exits(job.handle.attempt, job.handle.ranks)
        if len(exits) == job.handle.ranks and not any(_was_ended(found) for found in exits):
            return JobState.ENDED
        if facts is None or not facts.is_over:
            job.over_since = None
            return JobState.RUNNING if job.handle.attempt.job.exists() else JobState.STARTING
        return self._ended_otherwise(job, exits)

    def _ended_otherwise(self, job: _Job, exits: list[RankExit]) -> JobState:
        """A job that is over, and whose ranks do not say why: its scheduler may."""
        job.over_since = job.over_since or time.monotonic()
        is_complete = len(exits) == job.handle.ranks
        if not is_complete and time.monotonic() - job.over_since < FILES_S:
            return JobState.RUNNING
        assert job.job_id is not None, "a job without id has no state"
        final = self.watch.final(job.job_id)
        if final is None and time.monotonic() - job.over_since < UNKNOWN_S:
            return JobState.RUNNING
        if final is not None and (word := scheduler_word(final, was_told=is_complete)):
            write_atomic(job.handle.attempt.scheduler, dump(word))
        return JobState.ENDED if is_complete else JobState.LOST

    def _find(self, job: _Job) -> str | None:
        """By its name, where an orchestrator died between sbatch and writing down the job's id."""
        spec = read_document(job.handle.attempt.spec, TrialSpec)
        if spec is None:
            return None
        found = self.watch.named(job_name(spec), str(job.handle.attempt.path.resolve()))
        return found.job_id if found else None

    def _end_stragglers(self) -> None:
        """A job that does not end after its ranks have would keep its nodes from the next one."""
        for job_id, since in list(self._leaving.items()):
            facts = self.watch.facts(job_id)
            if facts is None or not facts.is_over:
                if time.monotonic() - since < LEAVING_S:
                    continue
                ask("scancel", job_id)
            del self._leaving[job_id]
            self.watch.forget(job_id)


def known_job(attempt: AttemptDir) -> str | None:
    """The id of an attempt's job, as its submitter wrote it down, or else the job itself."""
    if submission := read_document(attempt.submission, Submission):
        return submission.job_id
    record = read_document(attempt.job, JobRecord)
    return record.job_id if record else None


def rank_exits(attempt: AttemptDir, ranks: int) -> list[RankExit]:
    """Of the ranks that have ended."""
    try:
        there = set(os.listdir(attempt.path))  # one question; NFS answers it afresh
    except FileNotFoundError:
        return []
    found = []
    for rank in range(ranks):
        if attempt.exit(rank).name in there:
            found.append(_exit(attempt, rank))
    return [ended for ended in found if ended is not None]


def _exit(attempt: AttemptDir, rank: int) -> RankExit | None:
    try:
        return read_document(attempt.exit(rank), RankExit)
    except ContractError:  # not all of it is here yet
        return None


def _was_ended(ended: RankExit) -> bool:
    return ended.reason is ExitReason.CANCELLED


def scheduler_word(final: JobFacts, was_told: bool) -> SchedulerWord | None:
    """What a job's end means to us; None: nothing that its files would not say better.

    `was_told`: its ranks ended in order, since a signal told them to. Slurm then calls the job COMPLETED,
    where it had given it some grace before it would take its nodes.
    """
    if final.state != "COMPLETED":
        kind = KINDS.get(final.state)
    elif was_told:
        kind = FailureKind.TIMED_OUT if _is_out_of_time(final) else FailureKind.PREEMPTED
    else:
        kind = FailureKind.NODE_LOST
    if kind is None:
        return None
    return SchedulerWord(
        scheduler="Slurm",
        job_id=final.job_id,
        state=final.state,
        kind=kind,
        detail=_detail(final, kind),
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
    if final.state == "FAILED":
        code = f" (exit code {final.exit_code})" if final.exit_code else ""
        return f"the end of submitit's log may say why{code}"
    return ""


def cancel_job(job_id: str, watch: JobWatch) -> None:
    """End a job, and wait until it is gone. Raises SlurmError where Slurm does not end it."""
    try:
        ask("scancel", job_id)
    except SlurmError as error:
        if "Invalid job id" not in str(error):  # it has been over for long
            raise
    watch.expire()
    deadline = time.monotonic() + CANCEL_S
    while time.monotonic() < deadline:
        facts = watch.facts(job_id)
        if facts is not None and facts.is_over:
            return
        time.sleep(0.2)
    raise SlurmError(f"job {job_id} is still there {CANCEL_S:.0f} s after scancel")


def cancel_attempt(attempt: AttemptDir) -> None:
    """End an attempt's job, whoever submitted it."""
    if job_id := known_job(attempt):
        cancel_job(job_id, JobWatch())


class Executor(SlurmExecutor):  # type: ignore[misc]  # submitit is not followed by mypy
    """submitit's, asked by us alone for the pace of submissions and the environment of sbatch.

    -P keeps a directory called `sweeps` in the user's working directory from being imported instead of ours.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, python=f"{shlex.quote(sys.executable)} -P")

    def send(self, function: Callable[..., None], *arguments: str) -> str:
        """Submit a job; returns its id. Raises SweepError with Slurm's words."""
        try:
            return str(self.submit(function, *arguments).job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            name = self.parameters.get("job_name", "")
            raise SweepError(f"sbatch refused {name}: {_refusal(str(error))}") from error

    def script(self) -> str:
        """What sbatch would be given."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def _throttle(self) -> None:
        """submitit lets 5 jobs a second through; a controller takes some hundred, and the loop sends few."""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [word for name in os.environ if is_foreign(name) for word in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]


def _refusal(text: str) -> str:
    """Slurm's words within submitit's."""
    lines = [line for line in text.splitlines() if "error:" in line or "failure:" in line]
    return said("\n".join(lines)) or text.strip()
