"""Observe a rank's GPU through NVML while steps are timed: clock, temperature, power, throttling.

A trial must not fail for this: if NVML is missing or refuses, nothing is recorded and nothing is raised.
"""

from __future__ import annotations

import importlib
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from train_entry.contract import DeviceHealth

# Bits of nvmlClocksEventReasons (nvml.h), formerly nvmlClocksThrottleReasons. Left out: idle, the display,
# and clocks set by a user or shared within a group of GPUs.
REASONS = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
}
MILLI = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The state of a GPU at one moment."""

    clock_mhz: int
    max_clock_mhz: int
    temperature_c: int
    power_w: float
    throttled: frozenset[str]


class Card:
    """A GPU's NVML handle."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def look(self) -> Look | None:
        """Return the GPU's state; None if NVML refuses."""
        nvml, handle = self._nvml, self._handle
        try:
            return Look(
                clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                max_clock_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                power_w=nvml.nvmlDeviceGetPowerUsage(handle) * MILLI,
                throttled=self._throttled(),
            )
        except nvml.NVMLError:
            return None

    def _throttled(self) -> frozenset[str]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return frozenset(name for name, bit in REASONS.items() if bits & bit)


class Watch:
    """Repeated looks at a rank's GPU."""

    def __init__(self, card: Card | None) -> None:
        self._card = card
        self._looks: list[Look] = []

    def look(self) -> None:
        """Record the GPU's state. This takes about a millisecond, so never call it inside a timed span."""
        found = self._card.look() if self._card is not None else None
        if found is not None:
            self._looks.append(found)

    @property
    def health(self) -> DeviceHealth | None:
        """The GPU's health over all looks; None before the first look."""
        looks = self._looks
        if not looks:
            return None
        return DeviceHealth(
            clock_mhz=round(statistics.median(look.clock_mhz for look in looks)),
            max_clock_mhz=max(look.max_clock_mhz for look in looks),
            temperature_c=max(look.temperature_c for look in looks),
            power_w=statistics.median(look.power_w for look in looks),
            throttled=tuple(sorted(frozenset[str]().union(*(look.throttled for look in looks)))),
        )


def card_of(device: torch.device) -> Card | None:
    """Return the device's GPU in NVML; None for a CPU, without pynvml, or if NVML does not know the GPU."""
    if device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    return open_card(nvml, torch.cuda.get_device_properties(device))


def open_card(nvml: Any, properties: Any) -> Card | None:
    """Find a GPU in NVML by its UUID or PCI address; None if that fails.

    CUDA's index would not do: CUDA counts only the GPUs that CUDA_VISIBLE_DEVICES leaves.
    """
    try:
        nvml.nvmlInit()
        return Card(nvml, _handle(nvml, properties))
    except (nvml.NVMLError, AttributeError):  # no driver, or an old torch that reports neither of the two
        return None


def _handle(nvml: Any, properties: Any) -> Any:
    if hasattr(properties, "uuid"):  # torch 2.5 and later
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return nvml.nvmlDeviceGetHandleByPciBusId(f"{domain:08x}:{bus:02x}:{slot:02x}.0")
