"""The enumerations of the contract."""

from __future__ import annotations

from enum import StrEnum

Scalar = str | int | float | bool | None


class Engine(StrEnum):
    """The library that shards the model and reduces the gradients."""

    DDP = "ddp"  # torch DistributedDataParallel: the plain baseline
    DEEPSPEED = "deepspeed"


class Precision(StrEnum):
    """Number format of the forward and backward pass; the optimizer's master weights are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Offload(StrEnum):
    """The place to which ZeRO moves states off the device."""

    NONE = "none"
    CPU = "cpu"  # host memory
    NVME = "nvme"  # files on a local disk, read and written through libaio


class Attention(StrEnum):
    """The implementation of attention that transformers uses."""

    SDPA = "sdpa"  # torch's scaled_dot_product_attention, which picks a kernel
    EAGER = "eager"  # plain matrix products: keeps the whole matrix of scores
    FLASH = "flash_attention_2"  # the flash-attn package


class Schedule(StrEnum):
    """The course of the learning rate after the warm-up."""

    CONSTANT = "constant"  # DeepSpeed's WarmupLR
    LINEAR = "linear"  # WarmupDecayLR
    COSINE = "cosine"  # WarmupCosineLR


class MemoryKind(StrEnum):
    """The kind of memory that a rank's figures count."""

    DEVICE = "device"  # torch's allocator on the rank's GPU
    HOST_RSS = "host_rss"  # resident set of the rank's process: a CPU run knows nothing finer


class State(StrEnum):
    """The state of a trial. Only a measured trial can win."""

    QUEUED = "queued"
    RUNNING = "running"
    MEASURED = "measured"
    REUSED = "reused"  # would run the same job as an earlier trial, whose measurement it shares
    INFEASIBLE = "infeasible"  # legal, but does not fit: by its estimate, or it ran out of memory
    REJECTED = "rejected"  # its knobs make no legal plan; nothing was launched
    STOPPED = "stopped"  # timing ended early: the trial could not beat the best, or a stop was requested
    FAILED = "failed"
    CANCELLED = "cancelled"  # the orchestrator ended it before it had a result; launched again on resume
    SUSPECT = "suspect"  # measured, but not to be trusted

    @property
    def is_closed(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING, State.CANCELLED)


class Fit(StrEnum):
    """An estimate's verdict on whether a plan fits into memory."""

    FITS = "fits"
    BORDERLINE = "borderline"  # may be too large, within the estimate's error: a few are launched, to learn
    TOO_LARGE = "too_large"


class Origin(StrEnum):
    """The reason why a trial exists."""

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
    """The reason why a trial is measured again."""

    CONFIRM = "confirm"  # the best trials are compared: each runs alone on the machine, round after round
    DRIFT = "drift"  # the same trial is repeated now and then, to see whether the machine has changed


class TimingEnd(StrEnum):
    """The reason why timing ended."""

    CAP = "cap"  # all requested steps were timed
    PRECISE = "precise"  # the step time is known with the requested precision
    FUTILE = "futile"  # known to be slower than the best
    ASKED = "asked"  # the orchestrator asked the job to stop


class Phase(StrEnum):
    """The phase that a rank has reached. Heartbeats and failures report it."""

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
    """The reason why an attempt gave no measurement."""

    explanation: str

    def __new__(cls, value: str, explanation: str) -> FailureKind:
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member

    INFEASIBLE = "infeasible", "the plan cannot fit; it was not launched"
    GPU_OOM = "gpu_oom", "a GPU ran out of memory"
    HOST_OOM = "host_oom", "a process ran out of host memory, or the kernel killed it because memory ran out"
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
    """The reason why a rank's process ended, as its supervisor saw it."""

    EXITED = "exited"  # by itself, with any status
    HUNG = "hung"
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"
    CANCELLED = "cancelled"
