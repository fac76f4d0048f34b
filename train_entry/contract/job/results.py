"""The results of a job: measurements per step, per rank and over all ranks, or a failure."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract.shared.words import ExitReason, FailureKind, MemoryKind, Phase, TimingEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step: a line of metrics.rank0.jsonl."""

    step: int  # counted from 1
    tokens: int  # seen by all ranks together up to the end of this step
    loss: float  # mean over the global batch, before this step's update
    step_s: float
    lr: float  # used by this step's update
    timed: bool  # False: a warm-up or split step
    grad_norm: float | None = None  # before clipping, where the engine knows it
    update_norm: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSplit:
    """Medians over the split steps. The device is synchronized after each part."""

    local_s: float  # fetching data and the first forward pass: before this rank's first gradient collective
    forward_s: float
    backward_s: float
    update_s: float
    exchange_s: float = 0.0  # in a pipeline: sending to the neighbouring stages and waiting for them


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHealth:
    """The state of a rank's GPU while steps were timed. Clock and power are medians over all looks."""

    clock_mhz: int  # of the multiprocessors
    max_clock_mhz: int
    temperature_c: int  # the highest seen
    power_w: float
    throttled: tuple[
        str, ...
    ] = ()  # reasons that slowed the GPU, by NVML's names; idling and limits set by the user do not count

    @property
    def is_suspect(self) -> bool:
        """True if heat or the power supply slowed the GPU: on another day it would be faster."""
        return any("thermal" in reason or reason == "hw_power_brake" for reason in self.throttled)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """The measurement of one rank."""

    rank: int
    host: str
    device_name: str
    parameters: int  # of the whole model, summed over what the ranks hold
    memory_kind: MemoryKind
    startup: MemoryPeak
    first_step: MemoryPeak  # Adam's states appear here
    steady: MemoryPeak
    device_in_use_bytes: int | None  # by all processes on the GPU, CUDA contexts included; None on a CPU
    device_total_bytes: int | None
    peak_flops_per_s: float | None  # of the GPU in this precision; None: not known
    step_s: tuple[float, ...]  # every timed step
    split: StepSplit | None
    startup_s: float  # from the start of the process to the end of the first step
    host_peak_bytes: int = 0  # highest resident memory of the process, over all phases; 0: not measured

    ended: TimingEnd = TimingEnd.CAP  # the same on all ranks
    step_s_half_width: float | None = None  # seconds: half-width of the mean step time's interval at the end
    health: DeviceHealth | None = None  # None: no GPU, or not known

    @property
    def peak(self) -> MemoryPeak:
        phases = (self.startup, self.first_step, self.steady)
        return MemoryPeak(
            allocated_bytes=max(phase.allocated_bytes for phase in phases),
            reserved_bytes=max(phase.reserved_bytes for phase in phases),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The measurement of one attempt, over all its ranks."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    samples_per_s: float
    step_s: float  # median of the timed steps
    step_s_iqr: float  # interquartile range of the timed steps, in seconds
    steps: int
    peak_bytes: int  # allocated: the maximum over ranks and phases
    reserved_bytes: int
    memory_kind: MemoryKind
    # Model FLOPs utilization: (6 P + 12 L h s) x tokens/s over the GPUs' peak; PaLM, appendix B.
    mfu: float | None
    loss: float  # mean of the last five steps
    tokens: int  # seen by the end
    startup_s: float
    ranks: tuple[RankMeasurement, ...]
    host_peak_bytes: int = 0  # resident memory of all ranks of the fullest node; 0: not measured
    # Share of the forward and backward phase in which a pipeline's ranks wait for other stages or send to
    # them, mean over ranks; None: no pipeline, or no split step was run.
    bubble: float | None = None
    tensor_volume_bytes: int = 0  # by formula: what one rank sends to its tensor ranks per step
    ended: TimingEnd = TimingEnd.CAP
    spared_steps: int = 0  # steps not timed because timing ended early
    relative_error: float | None = None  # half-width of the step time's interval over its mean; None: unknown

    @property
    def is_mixed(self) -> bool:
        """True if the ranks ran on GPUs of different models."""
        return len({rank.device_name for rank in self.ranks}) > 1

    @property
    def is_suspect(self) -> bool:
        """True if heat or power supply slowed a GPU, or if the GPUs are of different models."""
        return self.is_mixed or any(rank.health is not None and rank.health.is_suspect for rank in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    kind: FailureKind
    message: str  # one line
    rank: int | None = None
    phase: Phase | None = None
    evidence: str = ""  # traceback, stacks, or the end of the log


RankOutcome = RankMeasurement | Failure
Outcome = Measurement | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A rank's sign of progress, rewritten at each one.

    A rank is stale if its counter no longer moves; file times never count.
    """

    rank: int
    pid: int
    counter: int
    phase: Phase
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """The end of a rank's process. Its supervisor writes this record."""

    rank: int
    returncode: int  # negative: the signal that ended it
    reason: ExitReason
    phase: Phase | None
    silent_s: float  # since the last progress
    seconds: float  # lifetime of the process
    oom_kills: int = 0  # processes that the kernel's OOM killer ended on this host during that time
    startup_s: float | None = None  # part of `seconds` until the end of the first step; None: it did not end


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A running job's identity. The job writes it first, so it can be found if its submitter died."""

    job_id: str
    host: str
    leader_pid: int  # the session to which all processes of the job belong
    leader_start_ticks: int  # detects a reused pid
    started_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job that a scheduler has accepted. The orchestrator writes this record."""

    cluster: str  # slurm, ...: the scheduler that knows the job's state and can end it
    job_id: str  # the scheduler's id
    submitted_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerWord:
    """The scheduler's statement on why a job ended, recorded if the job's own files do not tell."""

    scheduler: str
    job_id: str
    state: str  # the scheduler's own name for it, such as NODE_FAIL
    kind: FailureKind  # the corresponding failure kind
    detail: str = ""  # one line
