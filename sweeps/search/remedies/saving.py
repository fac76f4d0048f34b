"""Tell what a remedy saves and which memory stays too small, from estimates before and after. Pure."""

from __future__ import annotations

from sweeps.search.remedies.base import Remedy
from train_entry.contract import Estimate, FailureKind, Fit, size_text

# The least saving of a minor remedy that is worth a launch: our choice.
WORTHWHILE_SHARE = 0.01  # of the peak
WORTHWHILE_BYTES = 64 * 2**20


def saved_bytes(kind: FailureKind, before: Estimate, after: Estimate) -> int:
    """Return the bytes saved of the memory that ran out.

    Where the GPU's peak stays the same, they are those saved of the fragmentation on top of it.
    """
    if kind is FailureKind.HOST_OOM:
        return before.host_bytes - after.host_bytes
    return before.peak_bytes - after.peak_bytes or before.needed_bytes - after.needed_bytes


def is_worthwhile(remedy: Remedy, saved: int, before: Estimate) -> bool:
    """True if the saving is worth a launch: any saving, but of a minor remedy a larger one."""
    return saved >= (max(WORTHWHILE_BYTES, WORTHWHILE_SHARE * before.peak_bytes) if remedy.is_minor else 1)


def saving_text(kind: FailureKind, saved: int) -> str:
    where = "of the node's host memory" if kind is FailureKind.HOST_OOM else "a rank"
    return f"saves about {size_text(saved)} {where}"


def too_small(estimate: Estimate, device: str) -> frozenset[FailureKind]:
    """Return how the plan is expected to fail: each memory that is too small even for the median."""
    if estimate.fit is not Fit.TOO_LARGE:
        return frozenset()
    is_host = estimate.host_limit_bytes is not None and estimate.host_bytes > estimate.host_limit_bytes
    is_device = device == "cuda" and estimate.needed_bytes > estimate.limit_bytes
    found = {FailureKind.HOST_OOM: is_host, FailureKind.GPU_OOM: is_device}
    return frozenset(kind for kind, is_full in found.items() if is_full)
