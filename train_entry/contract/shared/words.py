"""The enumerations: each value explains itself."""

from __future__ import annotations

from enum import StrEnum

Scalar = str | int | float | bool | None


class Engine(StrEnum):
    """Who shards and reduces."""

    DDP = "ddp"  # torch DistributedDataParallel: the plain baseline
    DEEPSPEED = "deepspeed"


class Precision(StrEnum):
    """Number format of the forward and backward pass; the optimizer's master weights are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Offload(StrEnum):
    """Where states live that ZeRO moves off the device."""

    NONE = "none"
    CPU = "cpu"  # host memory
    NVME = "nvme"  # files on a local disk, read and written through libaio


class Attention(StrEnum):
    """Which implementation of attention transformers uses."""

    SDPA = "sdpa"  # torch's scaled_dot_product_attention, which picks a kernel
    EAGER = "eager"  # written out: keeps the whole matrix of scores
    FLASH = "flash_attention_2"  # the flash-attn package


class Schedule(StrEnum):
    """What the learning rate does after the warm-up."""

    CONSTANT = "constant"  # DeepSpeed's WarmupLR
    LINEAR = "linear"  # WarmupDecayLR
    COSINE = "cosine"  # WarmupCosineLR


class MemoryKind(StrEnum):
    """What a rank's memory figures count."""

    DEVICE = "device"  # torch's allocator on the rank's GPU
    HOST_RSS = "host_rss"  # resident set of the rank's process: all a CPU run can say


class State(StrEnum):
    """Where a trial stands. Only `measured` can win."""

    QUEUED = "queued"
    RUNNING = "running"
    MEASURED = "measured"
    REUSED = "reused"  # would run the same job as an earlier trial, whose measurement it shares
    INFEASIBLE = "infeasible"  # legal, but cannot fit: predicted, or seen to run out of memory
    REJECTED = "rejected"  # its knobs make no legal plan; nothing was launched
    STOPPED = "stopped"  # ended early, because it could not beat the best
    FAILED = "failed"
    CANCELLED = "cancelled"  # ended by us before it had a result; launched anew on resume
    SUSPECT = "suspect"  # measured, but not to be trusted

    @property
    def is_closed(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING, State.CANCELLED)


class Fit(StrEnum):
    """What an estimate says of a plan before it runs."""

    FITS = "fits"
    BORDERLINE = "borderline"  # too large only if the estimate is too low: a few are launched, to learn
    TOO_LARGE = "too_large"


class Origin(StrEnum):
    """Why a trial exists."""

    BASELINE = "baseline"
    PRIOR = "prior"
    SAMPLER = "sampler"
    REMEDY = "remedy"
    LR_HALVED = "lr_halved"
    USER = "user"


class AttemptKind(StrEnum):
    FIRST = "first"
    RETRY = "retry"
    REPEAT = "repeat"
    CHECK = "check"


class Purpose(StrEnum):
    """Why a trial is measured again."""

    CONFIRM = "confirm"  # the best against each other, alone on the machine, by turns
    DRIFT = "drift"  # one and the same trial now and then, to see whether the machine has changed


class TimingEnd(StrEnum):
    """Why no further step was timed."""

    CAP = "cap"  # all that were asked for
    PRECISE = "precise"  # the step time is known as exactly as asked
    FUTILE = "futile"  # known to be slower than the best
    ASKED = "asked"  # the orchestrator has asked for an end


class Phase(StrEnum):
    """How far a rank has come; part of its heartbeat and of what a failure reports."""

    IMPORTS = "imports"
    RENDEZVOUS = "rendezvous"
    MODEL = "model"
    DATA = "data"
    ENGINE = "engine"
    FIRST_STEP = "first_step"
    STEPS = "steps"
    REPORT = "report"

    @property
    def is_startup(self) -> bool:
        return self not in (Phase.STEPS, Phase.REPORT)


class FailureKind(StrEnum):
    """Why an attempt gave no measurement."""

    explanation: str

    def __new__(cls, value: str, explanation: str) -> FailureKind:
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member

    INFEASIBLE = "infeasible", "the plan cannot fit; it was not launched"
    GPU_OOM = "gpu_oom", "a GPU ran out of memory"
    HOST_OOM = "host_oom", "a process ran out of host memory, or the kernel killed it for that"
    DIVERGED = "diverged", "the loss became infinite or not a number"
    BAD_CONFIG = "bad_config", "the job refused its configuration"
    HUNG = "hung", "a rank made no progress for longer than the limit"
    TIMED_OUT = "timed_out", "the attempt reached its time limit"
    CANCELLED = "cancelled", "the attempt was cancelled"
    PREEMPTED = "preempted", "the scheduler took the nodes back; says nothing about the plan"
    NODE_LOST = "node_lost", "a node, or the job's whole process tree, disappeared"
    PEER_LOST = "peer_lost", "a rank ended because another rank had ended"
    COMMS = "comms", "ranks could not connect (port, network interface, NCCL)"
    CRASHED = "crashed", "a rank ended with an error of its own"


class ExitReason(StrEnum):
    """Why a rank's process ended, as its supervisor saw it."""

    EXITED = "exited"  # by itself, whatever its status
    HUNG = "hung"
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"
    CANCELLED = "cancelled"
