"""Map an exception to a failure kind by its type, or by its text where torch has no type for it.

Types are compared by name, so that this module imports neither torch nor DeepSpeed: if an import of these
fails, that failure must be recorded too.
"""

from __future__ import annotations

import re
import traceback

from train_entry.contract import Failure, FailureKind, Phase

MESSAGE_CHARS = 500
EVIDENCE_CHARS = 20_000  # from the end of a traceback, which holds the cause

TYPES = {
    "torch.OutOfMemoryError": FailureKind.GPU_OOM,
    "builtins.MemoryError": FailureKind.HOST_OOM,
    "train_entry.failures.DivergedError": FailureKind.DIVERGED,
    # DeepSpeed must compile an operator for GPUs, and the CUDA toolkit is missing or of another version.
    "deepspeed.ops.op_builder.builder.MissingCUDAException": FailureKind.BAD_CONFIG,
    "deepspeed.ops.op_builder.builder.CUDAMismatchException": FailureKind.BAD_CONFIG,
}
# In the phases that read plan, model or data, these mean that one of them is invalid; later they are bugs.
REFUSALS = (
    "builtins.ValueError",
    "builtins.AssertionError",
    "builtins.NotImplementedError",
    "deepspeed.runtime.config.DeepSpeedConfigError",
)
CONFIGURING = (Phase.MODEL, Phase.DATA, Phase.ENGINE)
COMMUNICATION = "torch.distributed.DistError"  # base of DistBackendError, DistNetworkError, DistStoreError

TEXTS = {
    # torch's CPU allocator raises a plain RuntimeError: c10/core/impl/alloc_cpu.cpp.
    "DefaultCPUAllocator: can't allocate memory": FailureKind.HOST_OOM,
    "DefaultCPUAllocator: not enough memory": FailureKind.HOST_OOM,
    # Memory that libraries allocate outside of torch's allocator: CUDA itself, cuBLAS handles, NCCL buffers.
    "CUDA error: out of memory": FailureKind.GPU_OOM,
    "CUBLAS_STATUS_ALLOC_FAILED": FailureKind.GPU_OOM,
    "Cuda failure 2 'out of memory'": FailureKind.GPU_OOM,
    # deepspeed/ops/op_builder/builder.py: an operator lacks a library (libaio) or a feature of the machine.
    "op due to it not being compatible due to hardware/software issue": FailureKind.BAD_CONFIG,
    # deepspeed/runtime/fp16/loss_scaler.py raises a bare Exception.
    "Current loss scale already at minimum": FailureKind.DIVERGED,
}
# c10/cuda/CUDACachingAllocator.cpp: the limit that `memory.hold_to` set, after figures of the whole GPU.
ALLOWED = re.compile(r"(\d[\d.]* (?:bytes|[KMG]iB)) allowed; ")
# gloo: transport/tcp/pair.cc and unbound_buffer.cc.
PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "Application timeout caused pair closure",
)


class DivergedError(ArithmeticError):
    """The loss is infinite or not a number."""


def failure_from(error: BaseException, rank: int, phase: Phase) -> Failure:
    """Return the failure record of an exception that ended a rank."""
    lines = str(error).strip().splitlines() or [_raised_by(error)]
    return Failure(
        kind=kind_of(error, phase),
        message=f"{type(error).__name__}: {_limit_of(lines[0])}{lines[0]}"[:MESSAGE_CHARS],
        rank=rank,
        phase=phase,
        evidence="".join(traceback.format_exception(error))[-EVIDENCE_CHARS:],
    )


def kind_of(error: BaseException, phase: Phase) -> FailureKind:
    """Return the failure kind of an exception that ended a rank in this phase."""
    kind = _kind_of(error, phase)
    if kind is FailureKind.GPU_OOM and _is_pinning(error):
        return FailureKind.HOST_OOM
    return kind


def _kind_of(error: BaseException, phase: Phase) -> FailureKind:
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__]
    for name in names:
        if name in TYPES:
            return TYPES[name]
    if phase in CONFIGURING and not set(REFUSALS).isdisjoint(names):
        return FailureKind.BAD_CONFIG
    # Texts come before the communication type: NCCL reports a full GPU as a failed collective.
    text = str(error)
    for part, kind in TEXTS.items():
        if part in text:
            return kind
    if COMMUNICATION in names or any(part in text for part in PEER_TEXTS):
        return FailureKind.COMMS if phase is Phase.RENDEZVOUS else FailureKind.PEER_LOST
    return FailureKind.CRASHED


def _is_pinning(error: BaseException) -> bool:
    """True if pinning host memory failed: CUDA then reports out of memory with the same text as for a GPU."""
    return any(frame.name == "pin_memory" for frame in traceback.extract_tb(error.__traceback__))


def _limit_of(line: str) -> str:
    """The limit that torch's message names, as a prefix: by its other figures the GPU is not full."""
    found = ALLOWED.search(line)
    return f"limited to {found[1]} of the GPU: " if found else ""


def _raised_by(error: BaseException) -> str:
    """The source line that raised an exception, for one without a message, such as a bare assert."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""
