"""What an exception means for the search: its type decides, its text only where torch has no type for it."""

from __future__ import annotations

import traceback

import torch
import torch.distributed as dist

from train_entry.contract import Failure, FailureKind, Phase

MESSAGE_CHARS = 500
EVIDENCE_CHARS = 20_000  # the end of a traceback holds its cause

# A ValueError here is a plan, model or data set that cannot be; later it is a bug.
CONFIGURING = (Phase.MODEL, Phase.DATA, Phase.ENGINE)

# torch's CPU allocator raises a plain RuntimeError: c10/core/impl/alloc_cpu.cpp.
HOST_OOM_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
# Memory that libraries take past torch's allocator: CUDA's own, cuBLAS handles, NCCL buffers.
GPU_OOM_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
# gloo, gloo/transport/tcp/pair.cc and unbound_buffer.cc.
PEER_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")
# deepspeed/runtime/fp16/loss_scaler.py raises a bare Exception.
DIVERGED_TEXTS = ("Current loss scale already at minimum",)


class DivergedError(ArithmeticError):
    """The loss is infinite or not a number."""


def failure_from(error: BaseException, rank: int, phase: Phase) -> Failure:
    """The record of an exception that ended a rank."""
    lines = str(error).strip().splitlines() or [""]
    return Failure(
        kind=kind_of(error, phase),
        message=f"{type(error).__name__}: {lines[0]}"[:MESSAGE_CHARS],
        rank=rank,
        phase=phase,
        evidence="".join(traceback.format_exception(error))[-EVIDENCE_CHARS:],
    )


def kind_of(error: BaseException, phase: Phase) -> FailureKind:
    """Whose fault it is."""
    match error:
        case torch.OutOfMemoryError():
            return FailureKind.GPU_OOM
        case MemoryError():
            return FailureKind.HOST_OOM
        case DivergedError():
            return FailureKind.DIVERGED
        case ValueError() | AssertionError() if phase in CONFIGURING:
            return FailureKind.BAD_CONFIG
        case _:
            return _kind_by_text(error, phase)


def _kind_by_text(error: BaseException, phase: Phase) -> FailureKind:
    """Before the communication types, since NCCL reports a full card as a failed collective."""
    text = str(error)
    kinds = {
        FailureKind.HOST_OOM: HOST_OOM_TEXTS,
        FailureKind.GPU_OOM: GPU_OOM_TEXTS,
        FailureKind.DIVERGED: DIVERGED_TEXTS,
    }
    for kind, known in kinds.items():
        if any(part in text for part in known):
            return kind
    if isinstance(error, dist.DistError) or any(part in text for part in PEER_TEXTS):
        return FailureKind.COMMS if phase is Phase.RENDEZVOUS else FailureKind.PEER_LOST
    return FailureKind.CRASHED
