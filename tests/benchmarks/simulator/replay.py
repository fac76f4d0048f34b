"""A cluster that simulates jobs from a table, with a clock of its own, without GPUs and without Hydra.

    cluster = ReplayCluster(table, seed=7)
    loop = StudyLoop(planner=TablePlanner(table), cluster=cluster, clock=cluster.clock, ...)

A job takes the simulated time that a real job would take, ends timing by the same rules, and writes the same
files. Processes differ a little in speed, and so do the steps of a process.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sweeps.cluster.base import JobHandle, JobState
from sweeps.config.schema import LimitsConfig, MeasureConfig
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Planned, Rejection
from sweeps.study.journal import Clock
from tests.benchmarks.simulator.tables import DEFAULTS, IMPORTS_S, Table, TableRow
from train_entry.contract import (
    AttemptDir,
    AttemptKind,
    DataSpec,
    ExitReason,
    Failure,
    FailureKind,
    MeasureSpec,
    MemoryKind,
    MemoryPeak,
    Phase,
    RankExit,
    RankMeasurement,
    RankOutcome,
    Reason,
    Scalar,
    StepMetrics,
    TimeLimits,
    TimingEnd,
    Trial,
    TrialSpec,
    dump,
    write_atomic,
)
from train_entry.measure.stopping import decide, half_width_s, is_due


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The random deviations of a job from its row, as shares of the step time."""

    process: float = 0.004  # standard deviation from process to process
    hiccups: float = 0.01  # share of the steps that take longer at random
    hiccup: float = 0.15  # mean additional time of such a step

    def steps_s(self, row: TableRow, draws: random.Random) -> Iterator[float]:
        """Draw the step times of one process, in seconds, without end."""
        pace = row.step_s * math.exp(draws.gauss(0, self.process))
        while True:
            late = draws.expovariate(1 / self.hiccup) if draws.random() < self.hiccups else 0.0
            yield pace * math.exp(draws.gauss(0, row.spread)) * (1 + late)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The simulated run of a process, from its start."""

    row: TableRow
    seconds: float
    untimed_s: tuple[float, ...] = ()  # steps before the timed ones
    timed_s: tuple[float, ...] = ()
    ended: TimingEnd = TimingEnd.CAP

    @property
    def startup_s(self) -> float:
        """Seconds until the end of the first step."""
        return IMPORTS_S + self.row.startup_s + self.row.first_step_s

    @property
    def value(self) -> float | None:
        """The measured tokens/s; None if the job failed."""
        return self.row.plan.tokens_per_step / statistics.median(self.timed_s) if self.timed_s else None


def run_of(
    row: TableRow, measure: MeasureSpec, noise: Noise, draws: random.Random, stop_after_s: float = math.inf
) -> Run:
    """Simulate one job. After `stop_after_s` seconds it is asked to stop, and ends at its next look."""
    startup_s = IMPORTS_S + row.startup_s + row.first_step_s
    if row.failure is not None:
        return Run(row=row, seconds=startup_s)
    steps_s = noise.steps_s(row, draws)
    untimed_s = (row.first_step_s, *itertools.islice(steps_s, measure.warmup_steps - 1))
    begin_s = startup_s + sum(untimed_s[1:])
    timed_s: list[float] = []
    ended = TimingEnd.CAP
    for seconds in itertools.islice(steps_s, measure.steps):
        timed_s.append(seconds)
        if is_due(len(timed_s), measure) and begin_s + sum(timed_s) > stop_after_s:
            ended = TimingEnd.ASKED
            break
        if (end := decide(timed_s, measure)) is not None:
            ended = end
            break
    split_s = sum(itertools.islice(steps_s, measure.split_steps))
    return Run(
        row=row,
        seconds=begin_s + sum(timed_s) + split_s,
        untimed_s=untimed_s,
        timed_s=tuple(timed_s),
        ended=ended,
    )


class TablePlanner(Planner):
    """A planner for which exactly the points of the table are legal."""

    def __init__(self, table: Table, measure: MeasureConfig | None = None) -> None:
        self._table = table
        self._asked = measure or MeasureConfig()

    def is_active(self, key: str, point: Mapping[str, Scalar]) -> bool:
        return self._table.is_active(key, point)

    def plan(self, point: Mapping[str, Scalar]) -> Planned:
        overrides = tuple(f"{key}={value}" for key, value in point.items())
        row = self._table.find(point)
        if row is None:
            reason = Reason(rule="replay", text=f"{self._table.name} has no such row")
            return Planned(plan=Rejection(reasons=(reason,)), fingerprint=None, overrides=overrides)
        return Planned(plan=row.plan, fingerprint=row.fingerprint, overrides=overrides)

    def default(self, key: str, point: Mapping[str, Scalar]) -> Scalar:
        return DEFAULTS.get(key)

    def spec(self, trial: Trial, attempt: int, kind: AttemptKind) -> TrialSpec:
        assert trial.plan is not None, "only plans are launched"
        limits = LimitsConfig()
        return TrialSpec(
            study=self._table.name,
            trial=trial.number,
            attempt=attempt,
            kind=kind,
            device=self._table.machine.device,
            plan=trial.plan,
            model=self._table.model,
            data=DataSpec(kind="synthetic"),
            measure=measure_of(self._asked),
            limits=TimeLimits(
                attempt_s=limits.attempt_s,
                startup_silence_s=limits.startup_silence_s,
                step_silence_s=limits.step_silence_s,
            ),
        )


def measure_of(asked: MeasureConfig) -> MeasureSpec:
    return MeasureSpec(
        warmup_steps=asked.warmup_steps,
        steps=asked.steps,
        split_steps=asked.split_steps,
        precision=asked.precision,
        confidence=asked.confidence,
        min_steps=min(asked.min_steps, asked.steps),
        look_every=asked.look_every,
    )


@dataclass
class _Job:
    spec: TrialSpec
    slots: tuple[str, ...]
    began_s: float
    draws_seed: int
    run: Run
    asked_at_s: float = math.inf

    @property
    def ends_s(self) -> float:
        return self.began_s + self.run.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job that has ended."""

    spec: TrialSpec
    slots: tuple[str, ...]
    began_s: float
    ended_s: float
    run: Run

    @property
    def gpu_s(self) -> float:
        return self.spec.plan.ranks * (self.ended_s - self.began_s)


@dataclass
class ReplayCluster:
    """A cluster with the slots of the table's machine. Its clock only moves in `sleep`."""

    table: Table
    seed: int = 0
    parallel: int = 1
    noise: Noise = field(default_factory=Noise)
    hurries: bool = True  # if no slot is free, a sleep lasts until the first poll after the next job's end
    capacity: int | None = None  # number of slots; None: the machine's
    time_s: float = 0.0
    running: dict[AttemptDir, _Job] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draws = random.Random(f"{self.table.name} {self.seed}")

    # ------------------------------------------------------------------ the protocol

    @property
    def machine(self) -> Machine:
        return self.table.machine

    def free_ranks(self) -> int:
        return 0 if len(self.running) >= self.parallel else len(self._free())

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        free = self._free()
        if len(self.running) >= self.parallel or len(free) < ranks:
            return None
        return tuple(free[:ranks])

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        return False

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        attempt.submitit.mkdir()
        seed = self._draws.getrandbits(32)
        run = run_of(self.table.row_of(spec.plan), spec.measure, self.noise, random.Random(seed))
        self.running[attempt] = _Job(spec=spec, slots=slots, began_s=self.time_s, draws_seed=seed, run=run)
        return self.attach(attempt, spec.plan.ranks, slots)

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        return JobHandle(attempt=attempt, ranks=ranks, slots=slots, submitted_at=self.time_s)

    def poll(self, handle: JobHandle) -> JobState:
        job = self.running.get(handle.attempt)
        if job is None:
            return JobState.ENDED
        self._hear(handle.attempt, job)
        if self.time_s < job.ends_s:
            return JobState.RUNNING
        _write(handle.attempt, job)
        self._over(handle.attempt, job.ends_s)
        return JobState.ENDED

    def cancel(self, *handles: JobHandle) -> list[str]:
        for handle in handles:
            job = self.running[handle.attempt]
            seconds = self.time_s - job.began_s
            for rank in range(handle.ranks):
                _write_exit(handle.attempt, rank, -9, ExitReason.CANCELLED, seconds)
            self._over(handle.attempt, self.time_s)
        return []

    # ------------------------------------------------------------------ time

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.time_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        polls = 1
        if self.hurries and self.running and not self.free_ranks():
            wait_s = min(job.ends_s for job in self.running.values()) - self.time_s
            polls = max(1, math.ceil(wait_s / seconds))
        self.time_s += polls * seconds

    def _hear(self, attempt: AttemptDir, job: _Job) -> None:
        """Let the job notice a request to stop, and change its run accordingly."""
        if job.asked_at_s == math.inf and attempt.stop.exists():
            job.asked_at_s = self.time_s - job.began_s
            draws = random.Random(job.draws_seed)
            job.run = run_of(job.run.row, job.spec.measure, self.noise, draws, job.asked_at_s)

    def _over(self, attempt: AttemptDir, ended_s: float) -> None:
        job = self.running.pop(attempt)
        self.ended.append(
            Ended(spec=job.spec, slots=job.slots, began_s=job.began_s, ended_s=ended_s, run=job.run)
        )

    # ------------------------------------------------------------------ slots

    @property
    def slots(self) -> list[str]:
        return [f"gpu-{index}" for index in range(self.capacity or self.machine.capacity)]

    def _free(self) -> list[str]:
        taken = {slot for job in self.running.values() for slot in job.slots}
        return [slot for slot in self.slots if slot not in taken]

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of all ended jobs."""
        return sum(job.gpu_s for job in self.ended)

    def utilisation(self, until_s: float) -> float:
        """The share of the slots' time before `until_s` in which jobs ran."""
        busy_s = sum(
            len(job.slots) * (min(job.ended_s, until_s) - job.began_s)
            for job in self.ended
            if job.began_s < until_s
        )
        return busy_s / (len(self.slots) * until_s)

    def longest_idle_s(self, until_s: float) -> float:
        """The longest time without interruption for which any slot was free before `until_s`."""
        return max(self._longest_idle_s(slot, until_s) for slot in self.slots)

    def _longest_idle_s(self, slot: str, until_s: float) -> float:
        busy = sorted((job.began_s, job.ended_s) for job in self.ended if slot in job.slots)
        began = [min(begin, until_s) for begin, _ in busy] + [until_s]
        ended = [0.0, *(min(end, until_s) for _, end in busy)]
        return max(begin - end for begin, end in zip(began, ended, strict=True))


# ---------------------------------------------------------------- the files of a job


def _write(attempt: AttemptDir, job: _Job) -> None:
    run, ranks = job.run, range(job.spec.plan.ranks)
    if run.row.failure is None:
        attempt.metrics.write_text("".join(_metrics_lines(job)), encoding="utf-8")
    for rank in ranks:
        failed = run.row.failure is not None
        outcome = _failure(run.row, rank, ranks[-1]) if failed else _measured(job.spec.measure, run, rank)
        write_atomic(attempt.outcome(rank), dump(outcome))
        _write_exit(attempt, rank, int(failed), ExitReason.EXITED, run.seconds)


def _metrics_lines(job: _Job) -> Iterator[str]:
    run, tokens = job.run, job.spec.plan.tokens_per_step
    for step, seconds in enumerate((*run.untimed_s, *run.timed_s), start=1):
        line = StepMetrics(
            step=step,
            tokens=step * tokens,
            loss=run.row.loss,
            step_s=seconds,
            lr=1e-4,
            timed=step > len(run.untimed_s),
        )
        yield dump(line, indent=None) + "\n"


def _failure(row: TableRow, rank: int, last: int) -> RankOutcome:
    """The failure of a rank: the last rank fails by itself, all others because that peer is gone."""
    kind = row.failure if rank == last else FailureKind.PEER_LOST
    assert kind is not None
    return Failure(kind=kind, message="as recorded", rank=rank, phase=Phase.FIRST_STEP)


def _measured(measure: MeasureSpec, run: Run, rank: int) -> RankOutcome:
    row = run.row
    peak = MemoryPeak(allocated_bytes=row.peak_bytes, reserved_bytes=row.reserved_bytes)
    static = MemoryPeak(allocated_bytes=row.static_bytes, reserved_bytes=row.static_bytes)
    return RankMeasurement(
        rank=rank,
        host="replay",
        device_name="NVIDIA H200",
        parameters=0,
        memory_kind=MemoryKind.DEVICE,
        startup=static,
        first_step=peak,
        steady=peak,
        device_in_use_bytes=row.card_bytes,
        device_total_bytes=None,
        peak_flops_per_s=None,
        step_s=run.timed_s,
        split=None,
        startup_s=run.startup_s,
        ended=run.ended,
        step_s_half_width=half_width_s(run.timed_s, measure.confidence),
    )


def _write_exit(attempt: AttemptDir, rank: int, returncode: int, reason: ExitReason, seconds: float) -> None:
    ended = RankExit(
        rank=rank, returncode=returncode, reason=reason, phase=Phase.STEPS, silent_s=0.1, seconds=seconds
    )
    write_atomic(attempt.exit(rank), dump(ended))
