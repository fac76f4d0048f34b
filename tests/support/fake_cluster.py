"""A fake cluster: its jobs are scripts that write the same files as real jobs.

    FakeCluster(machine, {"zero1 x2": [oom], "ddp": [lost, measured(100.0)], "*": [measured(50.0)]})

The key is a strategy and micro-batch, a strategy, or `*`. The nth script of the list runs the nth attempt,
and the last one runs all further attempts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sweeps.cluster.base import JobHandle, JobState
from sweeps.machine import Machine
from sweeps.study.journal import Clock
from tests.support.examples import a_rank_measurement
from train_entry.contract import (
    AttemptDir,
    AttemptKind,
    ExitReason,
    Failure,
    FailureKind,
    MemoryPeak,
    Phase,
    RankExit,
    RankOutcome,
    StepMetrics,
    TimingEnd,
    TrialDir,
    TrialSpec,
    append_line,
    dump,
    read_document,
    read_trial,
    write_atomic,
)

POLLS = 3  # until a job ends
SECONDS = 10.0  # the lifetime of each rank that supervisors record

Script = Callable[[AttemptDir, TrialSpec], None]  # writes the files of the job
Found = TypeVar("Found")


def measured(tokens_per_s: float, peak_bytes: int = 100, watched: bool = False) -> Script:
    """Let every rank measure this total of tokens per second. If `watched`, timing may end early."""
    return measured_as(lambda attempt, spec: tokens_per_s, peak_bytes, watched)


def as_estimated(factor: float = 1.0) -> Script:
    """Let every rank measure the estimated speed times a factor."""

    def estimated(attempt: AttemptDir, spec: TrialSpec) -> float:
        trial = read_trial(TrialDir(attempt.path.parent))
        assert trial is not None and trial.estimate is not None
        return trial.estimate.tokens_per_s * factor

    return measured_as(estimated)


def measured_as(
    speed: Callable[[AttemptDir, TrialSpec], float], peak_bytes: int = 100, watched: bool = False
) -> Script:
    peak = MemoryPeak(allocated_bytes=peak_bytes, reserved_bytes=peak_bytes)

    def write(attempt: AttemptDir, spec: TrialSpec) -> None:
        step_s = spec.plan.tokens_per_step / speed(attempt, spec)
        assert math.isfinite(step_s)
        ended = _end_of_timing(attempt, spec, step_s) if watched else TimingEnd.CAP
        for step in range(1, spec.measure.steps + 1):
            tokens = step * spec.plan.tokens_per_step
            append_line(
                attempt.metrics,
                StepMetrics(step=step, tokens=tokens, loss=5.0 / step, step_s=step_s, lr=1e-3, timed=True),
            )
        for rank in range(spec.plan.ranks):
            seen = a_rank_measurement(rank=rank, step_s=(step_s, step_s), steady=peak, ended=ended)
            _end(attempt, rank, seen)

    return write


def _end_of_timing(attempt: AttemptDir, spec: TrialSpec, step_s: float) -> TimingEnd:
    if attempt.stop.exists():
        return TimingEnd.ASKED
    beat_s = spec.measure.beat_step_s
    return TimingEnd.FUTILE if beat_s is not None and step_s > beat_s else TimingEnd.CAP


def failing(kind: FailureKind) -> Script:
    """Let the last rank fail with this kind, and all others because that peer is gone."""

    def write(attempt: AttemptDir, spec: TrialSpec) -> None:
        for rank in range(spec.plan.ranks):
            own = kind if rank == spec.plan.ranks - 1 else FailureKind.PEER_LOST
            _end(attempt, rank, Failure(kind=own, message="as scripted", rank=rank))

    return write


def lost(attempt: AttemptDir, spec: TrialSpec) -> None:
    """Write nothing: the node is gone."""


oom = failing(FailureKind.GPU_OOM)
crash = failing(FailureKind.CRASHED)


@dataclass
class _Job:
    spec: TrialSpec
    script: Script
    slots: tuple[str, ...]
    polls_left: float


@dataclass
class FakeCluster:
    """A cluster with one slot per core of the machine. `parallel` bounds the number of trials at once."""

    machine: Machine
    scripts: Mapping[str, Sequence[Script]]
    parallel: int = 1
    polls: Mapping[str, float] = field(default_factory=dict)  # by the same keys; inf: never ends by itself
    jobs: dict[AttemptDir, _Job] = field(default_factory=dict)  # all running jobs, also of earlier starts
    taken: set[str] = field(default_factory=set)  # slots that other studies hold
    launched: list[TrialSpec] = field(default_factory=list)
    most_at_once: int = 0
    silent_when_cancelled: bool = False  # its supervisors end before they can record it
    _ours: set[AttemptDir] = field(default_factory=set)

    def restarted(self) -> FakeCluster:
        """Return the cluster as the next orchestrator finds it: jobs still run, but none is attached."""
        return dataclasses.replace(self, _ours=set())

    def free_ranks(self) -> int:
        return 0 if len(self._ours) >= self.parallel else len(self._free())

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        free = self._free()
        if len(self._ours) >= self.parallel or len(free) < ranks:
            return None
        return tuple(free[:ranks])

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        return bool(self.taken - set(slots))

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        told = read_document(attempt.spec, TrialSpec)
        assert told == spec, "the job is told what its directory holds"
        script = _named(self.scripts, spec)[min(spec.attempt, len(_named(self.scripts, spec))) - 1]
        polls = _named({"*": POLLS, **self.polls}, spec)
        self.jobs[attempt] = _Job(spec=spec, script=script, slots=slots, polls_left=polls)
        self.launched.append(spec)
        attempt.submitit.mkdir()
        self.most_at_once = max(self.most_at_once, len(self.jobs))
        return self.attach(attempt, spec.plan.ranks, slots)

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        self._ours.add(attempt)
        return JobHandle(attempt=attempt, ranks=ranks, slots=slots, submitted_at=0.0)

    def poll(self, handle: JobHandle) -> JobState:
        job = self.jobs.get(handle.attempt)
        if job is not None:
            job.polls_left -= 1
            if job.polls_left > 0:
                return JobState.RUNNING
            self.finish(handle.attempt)
        self._ours.discard(handle.attempt)
        wrote = all(handle.attempt.exit(rank).exists() for rank in range(handle.ranks))
        return JobState.ENDED if wrote else JobState.LOST

    def cancel(self, *handles: JobHandle) -> list[str]:
        for handle in handles:
            job = self.jobs.pop(handle.attempt, None)
            self._ours.discard(handle.attempt)
            for rank in range(handle.ranks if job and not self.silent_when_cancelled else 0):
                _write_exit(handle.attempt, rank, returncode=-9, reason=ExitReason.CANCELLED)
        return []

    def finish(self, attempt: AttemptDir) -> None:
        """End a job now, with the results of its script."""
        job = self.jobs.pop(attempt)
        job.script(attempt, job.spec)

    def _free(self) -> list[str]:
        taken = self.taken | {slot for job in self.jobs.values() for slot in job.slots}
        cores = [f"core-{index}" for index in range(self.machine.capacity)]
        return [core for core in cores if core not in taken]


@dataclass
class FakeClock:
    """A clock that moves only while the loop sleeps. `at` holds actions by the number of the sleep."""

    time_s: float = 1000.0
    sleeps: int = 0
    at: dict[int, Callable[[], None]] = field(default_factory=dict)

    def clock(self) -> Clock:
        return Clock(now=lambda: self.time_s, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.time_s += seconds
        assert self.sleeps < 5000, "the loop does not end"
        self.at.get(self.sleeps, lambda: None)()


def _named(table: Mapping[str, Found], spec: TrialSpec) -> Found:
    plan = spec.plan
    check = f"check {plan.strategy}" if spec.kind is AttemptKind.CHECK else ""
    names = (check, f"{plan.strategy} x{plan.micro_batch}", plan.strategy, "*")
    return next(table[name] for name in names if name in table)


def _end(attempt: AttemptDir, rank: int, outcome: RankOutcome) -> None:
    write_atomic(attempt.outcome(rank), dump(outcome))
    _write_exit(attempt, rank, returncode=int(isinstance(outcome, Failure)), reason=ExitReason.EXITED)


def _write_exit(attempt: AttemptDir, rank: int, returncode: int, reason: ExitReason) -> None:
    ended = RankExit(
        rank=rank, returncode=returncode, reason=reason, phase=Phase.STEPS, silent_s=0.1, seconds=SECONDS
    )
    write_atomic(attempt.exit(rank), dump(ended))
