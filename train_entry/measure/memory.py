"""Measure a rank's peak memory in each phase, and limit the memory that torch may reserve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

import torch

from train_entry.contract import MemoryKind, MemoryPeak

KIB = 1024


class MemoryMeter(Protocol):
    """A meter of peak memory between two calls of `take`."""

    kind: MemoryKind

    def take(self) -> MemoryPeak:
        """Return the peak since the last call, or since the process began, and begin a new phase."""
        ...

    def host_peak_bytes(self) -> int:
        """The process's highest resident memory so far, over all phases. It includes offloaded states."""
        ...

    def in_use_bytes(self) -> tuple[int, int] | tuple[None, None]:
        """Bytes in use on the whole GPU right now, CUDA contexts included, and the GPU's size in bytes."""
        ...


class DeviceMeter:
    """The meter for a GPU: bytes that torch's allocator has allocated and reserved on it."""

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
    """The meter for a CPU: resident memory of the process, for allocated and reserved bytes alike."""

    kind = MemoryKind.HOST_RSS

    def __init__(self) -> None:
        self._highest_bytes = 0  # over the phases that have ended

    def take(self) -> MemoryPeak:
        peak_bytes = _high_water_bytes()
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; proc(5)
        except OSError:
            pass  # some systems forbid it; the peaks are then those since the process began
        return MemoryPeak(allocated_bytes=peak_bytes, reserved_bytes=peak_bytes)

    def host_peak_bytes(self) -> int:
        return max(self._highest_bytes, _high_water_bytes())

    def in_use_bytes(self) -> tuple[None, None]:
        return None, None


def meter_for(device: torch.device) -> MemoryMeter:
    """Return the meter for the rank's device."""
    return DeviceMeter(device) if device.type == "cuda" else HostMeter()


def hold_to(limit_bytes: int | None, device: torch.device) -> None:
    """Let torch's allocator reserve at most `limit_bytes` of the GPU; beyond that it raises out of memory.

    If the limit is None or exceeds the GPU's size, the GPU itself is the limit. A negative limit, which
    results if other needs exceed the memory, counts as zero. On a CPU nothing is limited.
    """
    if limit_bytes is None or device.type != "cuda":
        return
    _, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, limit_bytes / total_bytes)), device)


def _high_water_bytes() -> int:
    """Return VmHWM of proc(5) in bytes: the peak of resident pages, private, file-backed and shared.

    A page that several processes map counts in each of them.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux writes VmHWM for every process that has memory of its own"
    return int(found[1]) * KIB
