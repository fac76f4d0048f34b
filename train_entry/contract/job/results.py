"""What a job saw: per step, per rank, and over all ranks; or why it saw nothing."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract.shared.words import ExitReason, FailureKind, MemoryKind, Phase, TimingEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step, a line of metrics.rank0.jsonl."""

    step: int  # from 1
    tokens: int  # seen by the end of this step, over all ranks
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
    """Medians over the split steps, device synchronized between the parts."""

    local_s: float  # fetching data and the first forward pass: before this rank's first gradient collective
    forward_s: float
    backward_s: float
    update_s: float
    exchange_s: float = 0.0  # a pipeline's: sending to the neighbouring stages, and waiting for them


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHealth:
    """How a rank's card was while steps were timed; medians over looks."""

    clock_mhz: int  # of its multiprocessors
    max_clock_mhz: int
    temperature_c: int  # the highest seen
    power_w: float
    throttled: tuple[
        str, ...
    ] = ()  # reasons that slowed it, in NVML's words; not: idle, and the user's limits

    @property
    def is_suspect(self) -> bool:
        """Slowed by heat or by its power supply: another day it would be faster."""
        return any("thermal" in reason or reason == "hw_power_brake" for reason in self.throttled)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """What one rank saw."""

    rank: int
    host: str
    device_name: str
    parameters: int  # of the whole model, counted on what the ranks hold
    memory_kind: MemoryKind
    startup: MemoryPeak
    first_step: MemoryPeak  # Adam's state appears here
    steady: MemoryPeak
    device_in_use_bytes: int | None  # on the whole card, contexts included; None on CPU
    device_total_bytes: int | None
    peak_flops_per_s: float | None  # of the card in this precision, where known
    step_s: tuple[float, ...]  # every timed step
    split: StepSplit | None
    startup_s: float  # process start to the end of the first step
    host_peak_bytes: int = 0  # resident memory of the process, over all phases; 0: not measured

    ended: TimingEnd = TimingEnd.CAP  # the same on all ranks
    step_s_half_width: float | None = None  # of the mean step time's interval, when timing ended
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
    """What one attempt showed, over all its ranks."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    samples_per_s: float
    step_s: float  # median of the timed steps
    step_s_iqr: float  # distance between their quartiles
    steps: int
    peak_bytes: int  # allocated, the fullest rank, the worst phase
    reserved_bytes: int
    memory_kind: MemoryKind
    # Model FLOPs utilization: (6 P + 12 L h s) x tokens/s over the cards' peak; PaLM, appendix B.
    mfu: float | None
    loss: float  # mean of the last five steps
    tokens: int  # seen by the end
    startup_s: float
    ranks: tuple[RankMeasurement, ...]
    host_peak_bytes: int = 0  # resident memory of a node's ranks together, the fullest node; 0: not measured
    # Share of the forward and backward phase in which a pipeline's ranks wait for other stages or send to
    # them, mean over ranks; None: no pipeline, or no step was taken apart.
    bubble: float | None = None
    tensor_volume_bytes: int = 0  # by formula: what a rank sends in a step to those it shares matrices with
    ended: TimingEnd = TimingEnd.CAP
    spared_steps: int = 0  # that were not timed since timing ended early
    relative_error: float | None = None  # half-width of the step time's interval over its mean; None: unknown

    @property
    def is_mixed(self) -> bool:
        """Whether its ranks ran on different cards."""
        return len({rank.device_name for rank in self.ranks}) > 1

    @property
    def is_suspect(self) -> bool:
        """Whether a card was slowed down by its surroundings meanwhile, or by slower ones beside it."""
        return self.is_mixed or any(rank.health is not None and rank.health.is_suspect for rank in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    kind: FailureKind
    message: str  # one line
    rank: int | None = None
    phase: Phase | None = None
    evidence: str = ""  # traceback, stacks or the end of the log


RankOutcome = RankMeasurement | Failure
Outcome = Measurement | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Rewritten at every sign of progress. Staleness is a counter that no longer moves, never a file time."""

    rank: int
    pid: int
    counter: int
    phase: Phase
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """Written by the supervisor when its rank's process is gone."""

    rank: int
    returncode: int  # negative: the signal that ended it
    reason: ExitReason
    phase: Phase | None
    silent_s: float  # since the last progress
    seconds: float  # the process lived
    oom_kills: int = 0  # processes the kernel killed for want of memory on this host meanwhile
    startup_s: float | None = None  # of `seconds`, until its first step had ended; None: it did not


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """Written by the job as its first act, so that a job whose submitter died can be found."""

    job_id: str
    host: str
    leader_pid: int  # the session all processes of the job belong to
    leader_start_ticks: int  # tells a reused pid apart
    started_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Written by the orchestrator when a scheduler has taken the job."""

    cluster: str  # slurm, ...: who is asked about the job, and told to end it
    job_id: str  # the scheduler's
    submitted_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerWord:
    """What the scheduler said of a job that ended; left where the job's own files do not say why."""

    scheduler: str
    job_id: str
    state: str  # in the scheduler's own words, such as NODE_FAIL
    kind: FailureKind  # what that means to us
    detail: str = ""  # one line
