"""Slurm as a cluster, through submitit: each trial is a job, each rank a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.node.exits import rank_exits
from sweeps.cluster.node.supervisor import supervise
from sweeps.cluster.slots import SlotTable
from sweeps.cluster.slurm.queries import JobWatch
from sweeps.cluster.slurm.request import Site, job_name, trial_parameters
from sweeps.cluster.slurm.states import Waits, scheduler_word
from sweeps.cluster.slurm.submit import Executor, Sending, cancel_jobs, scancel
from sweeps.machine import Machine
from train_entry.contract import (
    AttemptDir,
    ExitReason,
    JobRecord,
    RankExit,
    Submission,
    TrialSpec,
    dump,
    read_document,
    write_atomic,
)

NAME = "slurm"
LOOK_S = 1.0  # between two looks at a running job's files, which lie on a shared file system
FILES_S = 10.0  # for files of another node to become visible here after their job has ended
# For Slurm to list a job whose submitter died before it wrote the id, or to say how a job ended.
UNKNOWN_S = 90.0
LEAVING_S = 30.0  # for a job to end after all its ranks have


@dataclass
class _Job:
    """An attempt's job, as this orchestrator knows it."""

    handle: JobHandle
    job_id: str | None
    state: JobState = JobState.QUEUED
    looked_at: float = float("-inf")
    over_since: float | None = None
    sending: Sending | None = None  # set until Slurm accepts the job

    @property
    def may_be_there(self) -> bool:
        """True if the job may exist without an id here: its submitter died, or sbatch's answer was lost."""
        return self.job_id is None and (self.sending is None or self.sending.refused_since is not None)


@dataclass
class SlurmCluster:
    """A cluster that runs each trial as a Slurm job of its own, at most `parallel` at once."""

    site: Site
    parallel: int
    watch: JobWatch = field(default_factory=JobWatch)
    executor: Callable[[Path], Executor] = field(default_factory=lambda: Executor)
    say: Callable[[str], None] = print
    _jobs: dict[Path, _Job] = field(default_factory=dict)
    _leaving: dict[str, float] = field(default_factory=dict)  # jobs whose ranks have ended, and since when
    _waits: Waits = field(init=False)
    _slots: SlotTable = field(init=False)

    def __post_init__(self) -> None:
        self._waits = Waits(self.say)
        machine = self.machine
        self._slots = SlotTable(groups=("",), nodes=machine.nodes, per_node=machine.ranks_per_node)

    @property
    def machine(self) -> Machine:
        return self.site.machine

    @property
    def running(self) -> int:
        return len(self._jobs)

    def free_ranks(self) -> int:
        return 0 if self.running >= self.parallel else self._slots.free_ranks(self._taken())

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        """Only count: Slurm chooses which of the cluster's nodes the trial gets."""
        return None if self.running >= self.parallel else self._slots.reserve(ranks, self._taken())

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """True unless the trial has whole nodes: Slurm may put anybody's job beside it."""
        per_node = len(slots) / max(1, len({slot.partition("/")[0] for slot in slots}))
        return not self.site.cluster.exclusive and per_node < self.site.slots_on_node

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        handle = self._take(attempt, spec.plan.ranks, slots, None)
        job = self._jobs[attempt.path]
        job.sending = Sending(
            send=lambda: self._submit(attempt, spec),
            find=lambda: self._find(job),
            watch=self.watch,
            say=self.say,
        )
        self._send(job)
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

    def cancel(self, *handles: JobHandle) -> list[str]:
        jobs = [job for handle in handles if (job := self._jobs.get(handle.attempt.path))]
        self.watch.expire()
        problems = []
        for job in jobs:
            if job.may_be_there:
                job.job_id = known_job(job.handle.attempt) or self._find(job)
            if job.may_be_there and self.watch.is_silent:
                where = job.handle.attempt.path
                problems.append(f"{where}: its job may still run: Slurm does not answer; see `squeue --me`")
        problems += cancel_jobs([job.job_id for job in jobs if job.job_id is not None], self.watch)
        for job in jobs:
            self._drop(job)
        return problems

    # ------------------------------------------------------------------ submitting

    def _send(self, job: _Job) -> None:
        if job.sending is None:
            return
        job.job_id = job.sending.job_id()
        if job.job_id is not None:
            job.sending = None
            record = Submission(cluster=NAME, job_id=job.job_id, submitted_at=time.time())
            write_atomic(job.handle.attempt.submission, dump(record))

    def _submit(self, attempt: AttemptDir, spec: TrialSpec) -> str:
        where = str(attempt.path.resolve())
        executor = self.executor(attempt.submitit)
        executor.update_parameters(**trial_parameters(self.site, spec, where))
        return executor.send(supervise, where)

    def _taken(self) -> Collection[str]:
        return {slot for job in self._jobs.values() for slot in job.handle.slots}

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
        if job.sending is not None:
            return JobState.QUEUED
        if job.job_id is None:
            job.job_id = known_job(job.handle.attempt) or self._find(job)
        if job.job_id is None:  # counted to squeue's last answer: its silence proves nothing
            missed_s = self.watch.answered_at - job.handle.submitted_at
            return JobState.STARTING if missed_s < UNKNOWN_S else JobState.LOST
        facts = self.watch.facts(job.job_id)
        if facts is not None and facts.is_waiting:
            waited_s = time.monotonic() - job.handle.submitted_at
            self._waits.look(f"trial {job.handle.attempt.path.parent.name}", facts, waited_s)
            return JobState.QUEUED
        exits = rank_exits(job.handle.attempt, job.handle.ranks)
        if len(exits) == job.handle.ranks and not any(_was_ended(found) for found in exits):
            return JobState.ENDED
        if facts is None or not facts.is_over:
            job.over_since = None
            return JobState.RUNNING if job.handle.attempt.job.exists() else JobState.STARTING
        return self._ended_otherwise(job, exits)

    def _ended_otherwise(self, job: _Job, exits: list[RankExit]) -> JobState:
        """Return the state of a job that is over without its ranks saying why, and record what Slurm says."""
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
        """Find a job's id by its name, if an orchestrator died between sbatch and writing it."""
        spec = read_document(job.handle.attempt.spec, TrialSpec)
        if spec is None:
            return None
        found = self.watch.named(job_name(spec), str(job.handle.attempt.path.resolve()))
        return found.job_id if found else None

    def _end_stragglers(self) -> None:
        """Cancel jobs that do not end after their ranks have: they would keep nodes from the next job."""
        for job_id, since in list(self._leaving.items()):
            facts = self.watch.facts(job_id)
            is_over = facts is not None and facts.is_over
            if not is_over and not self.watch.is_silent and time.monotonic() - since >= LEAVING_S:
                over, refusal = scancel([job_id])
                is_over = not refusal or job_id in over
                self._leaving[job_id] = time.monotonic()  # repeated later if Slurm did not hear it
            if is_over:
                del self._leaving[job_id]
                self.watch.forget(job_id)


def known_job(attempt: AttemptDir) -> str | None:
    """The id of an attempt's job, as its submitter, or else the job itself, wrote it."""
    if submission := read_document(attempt.submission, Submission):
        return submission.job_id
    record = read_document(attempt.job, JobRecord)
    return record.job_id if record else None


def _was_ended(ended: RankExit) -> bool:
    return ended.reason is ExitReason.CANCELLED


def cancel_attempts(attempts: Sequence[AttemptDir]) -> list[str]:
    """End attempts' jobs, whoever submitted them. Return a line for each that may still run."""
    return cancel_jobs([job_id for attempt in attempts if (job_id := known_job(attempt))], JobWatch())
