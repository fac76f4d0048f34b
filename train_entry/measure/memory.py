"""Peak memory of a rank, phase by phase."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

import torch

from train_entry.contract import MemoryKind, MemoryPeak

KIB = 1024


class MemoryMeter(Protocol):
    """Peaks between two calls of `take`."""

    kind: MemoryKind

    def take(self) -> MemoryPeak:
        """The highest use since the last call, or since the process began; a new phase begins."""
        ...

    def host_peak_bytes(self) -> int:
        """The process's highest resident memory so far, over all phases: what is offloaded lies there."""
        ...

    def in_use_bytes(self) -> tuple[int, int] | tuple[None, None]:
        """What is taken of the whole card right now, CUDA contexts included, and its size."""
        ...


class DeviceMeter:
    """Counts what torch's allocator gave out, and what it holds, on the rank's GPU."""

    kind = MemoryKind.DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> MemoryPeak:
        peak = MemoryPeak(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def host_peak_bytes(self) -> int:
        return _high_water_bytes()

    def in_use_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total


class HostMeter:
    """Counts resident memory of the process, which on a CPU is all there is to say."""

    kind = MemoryKind.HOST_RSS

    def __init__(self) -> None:
        self._highest_bytes = 0  # of the phases that have ended

    def take(self) -> MemoryPeak:
        peak_bytes = _high_water_bytes()
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; proc(5)
        except OSError:
            pass  # not everywhere permitted; then peaks are those of the process so far
        return MemoryPeak(allocated_bytes=peak_bytes, reserved_bytes=peak_bytes)

    def host_peak_bytes(self) -> int:
        return max(self._highest_bytes, _high_water_bytes())

    def in_use_bytes(self) -> tuple[None, None]:
        return None, None


def meter_for(device: torch.device) -> MemoryMeter:
    """The meter that fits the rank's device."""
    return DeviceMeter(device) if device.type == "cuda" else HostMeter()


def hold_to(limit_bytes: int | None, device: torch.device) -> None:
    """Let torch's allocator reserve no more of the GPU: what goes beyond is out of memory, as on a full card.

    None, or more than there is: the GPU itself is the limit. What is below zero, since others take more than
    may be had, is nothing at all. A CPU has no such allocator, and is left alone.
    """
    if limit_bytes is None or device.type != "cuda":
        return
    _, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, limit_bytes / total_bytes)), device)


def _high_water_bytes() -> int:
    """VmHWM of proc(5): the process's own pages, and those of mapped files and shared memory, while present.

    A page that several processes map counts in each of them.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux writes VmHWM for every process that has memory of its own"
    return int(found[1]) * KIB
