"""The health of a GPU, with a fake NVML whose answers a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train_entry.contract import DeviceHealth
from train_entry.measure.health import Watch, card_of, open_card


class NvmlError(Exception):
    pass


class FakeNvml:
    """An NVML with one GPU, which can be found by its UUID and by its PCI address."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NvmlError

    def __init__(self) -> None:
        self.clock_mhz, self.temperature_c, self.power_mw, self.reasons = 1980, 50, 600_000, 0
        self.refuses = ""  # the name of a call that fails

    def nvmlInit(self) -> None:
        self._answer("nvmlInit", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-8a56":
            raise NvmlError
        return "the card"

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        if bus_id != "00000001:1b:00.0":
            raise NvmlError
        return "the card"

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> Any:
        assert (handle, clock) == ("the card", self.NVML_CLOCK_SM)
        return self.clock_mhz

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> Any:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        return self.temperature_c

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        return self._answer("nvmlDeviceGetPowerUsage", self.power_mw)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self.reasons

    def _answer(self, call: str, value: Any) -> Any:
        if call == self.refuses:
            raise NvmlError
        return value


BY_UUID = SimpleNamespace(uuid="8a56", pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
BY_BUS = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


def health(nvml: FakeNvml, *looks: dict[str, int], properties: Any = BY_UUID) -> DeviceHealth | None:
    """Return the health after several looks. NVML's answers change before each look as given."""
    watch = Watch(open_card(nvml, properties))
    for look in looks:
        vars(nvml).update(look)
        watch.look()
    return watch.health


def test_health_is_the_middle_clock_and_power_and_the_highest_temperature(nvml: FakeNvml) -> None:
    assert health(
        nvml,
        {"clock_mhz": 1980, "temperature_c": 55, "power_mw": 650_000},
        {"clock_mhz": 1755, "temperature_c": 61, "power_mw": 690_000},
        {"clock_mhz": 1800, "temperature_c": 60, "power_mw": 700_000},
    ) == DeviceHealth(clock_mhz=1800, max_clock_mhz=1980, temperature_c=61, power_w=690.0)


def test_every_reason_that_slowed_it_at_any_look_is_named(nvml: FakeNvml) -> None:
    seen = health(nvml, {"reasons": 0x04 | 0x08}, {"reasons": 0x80}, {"reasons": 0x20 | 0x40}, {"reasons": 0})
    assert seen is not None
    assert set(seen.throttled) == {
        *("sw_power_cap", "hw_slowdown", "hw_power_brake"),
        *("sw_thermal_slowdown", "hw_thermal_slowdown"),
    }
    assert seen.is_suspect


def test_what_a_card_does_by_itself_or_a_user_has_set_is_no_reason(nvml: FakeNvml) -> None:
    idle, user_clocks, sync_boost, display = 0x01, 0x02, 0x10, 0x100
    seen = health(nvml, {"reasons": idle | user_clocks | sync_boost | display}, {"reasons": 0x04})
    assert seen is not None
    assert (seen.throttled, seen.is_suspect) == (("sw_power_cap",), False)


def test_an_old_torch_names_the_card_by_its_place_on_the_bus(nvml: FakeNvml) -> None:
    assert health(nvml, {}, properties=BY_BUS) is not None
    assert health(nvml, {}, properties=SimpleNamespace(uuid="other")) is None
    assert health(nvml, {}, properties=SimpleNamespace()) is None


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetPowerUsage"])
def test_where_nvml_refuses_nothing_is_known(nvml: FakeNvml, call: str) -> None:
    nvml.refuses = call
    assert health(nvml, {}, {}) is None


def test_without_a_look_or_a_gpu_nothing_is_known(nvml: FakeNvml) -> None:
    assert health(nvml) is None
    assert card_of(torch.device("cpu")) is None
    watch = Watch(None)
    watch.look()
    assert watch.health is None
