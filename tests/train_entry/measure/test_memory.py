from __future__ import annotations

import dataclasses
import json

import psutil
import pytest
import torch

from sweeps.study.collect import measurement
from tests.support.examples import a_model, a_plan, a_rank_measurement
from train_entry.contract import Measurement, RankMeasurement, dump, load
from train_entry.measure.memory import HostMeter, hold_to

MIB = 2**20
GIB = 2**30


def test_the_highest_use_of_the_host_outlives_its_phase() -> None:
    HostMeter().take()  # resets the peak that other tests reached, if the system permits it
    meter = HostMeter()
    meter.take()
    before = meter.host_peak_bytes()
    unused = before - psutil.Process().memory_info().rss
    torch.ones(unused + 64 * MIB, dtype=torch.uint8)  # a new peak, freed at once
    with_it = meter.take().allocated_bytes
    assert with_it > before + 32 * MIB
    assert meter.take().allocated_bytes <= meter.host_peak_bytes()
    assert meter.host_peak_bytes() >= with_it


def test_the_host_memory_of_a_node_is_that_of_its_ranks_together() -> None:
    peaks = {0: ("one", 50), 1: ("one", 60), 2: ("two", 70), 3: ("two", 20)}
    ranks = [
        a_rank_measurement(rank=rank, host=host, host_peak_bytes=bytes_)
        for rank, (host, bytes_) in peaks.items()
    ]
    assert measurement(a_plan(ranks=4), a_model(), ranks, []).host_peak_bytes == 110


def test_records_from_before_it_was_measured_are_read() -> None:
    whole = dataclasses.replace(measurement(a_plan(), a_model(), [a_rank_measurement()], []), loss=5.5)
    old = json.loads(dump(whole))
    del old["host_peak_bytes"], old["ranks"][0]["host_peak_bytes"]
    unknown = a_rank_measurement(host_peak_bytes=0)
    assert load(Measurement, json.dumps(old)) == dataclasses.replace(
        whole, host_peak_bytes=0, ranks=(unknown,)
    )
    assert load(RankMeasurement, dump(unknown)) == unknown


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fractions that torch's allocator is given, for a GPU of 80 GiB."""
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: told.append(fraction)
    )
    return told


@pytest.mark.parametrize(
    ("limit_bytes", "fraction"), [(20 * GIB, 0.25), (80 * GIB, 1.0), (81 * GIB, 1.0), (0, 0.0), (-GIB, 0.0)]
)
def test_a_limit_is_a_share_of_the_card(fractions: list[float], limit_bytes: int, fraction: float) -> None:
    hold_to(limit_bytes, torch.device("cuda", 1))
    assert fractions == [fraction]


def test_torch_computes_the_limit_to_the_byte(fractions: list[float]) -> None:
    limit_bytes = 13 * GIB + 7 * MIB + 5
    hold_to(limit_bytes, torch.device("cuda", 0))
    assert abs(int(fractions[0] * 80 * GIB) - limit_bytes) <= 1


@pytest.mark.parametrize(("limit_bytes", "device"), [(None, "cuda:0"), (GIB, "cpu"), (None, "cpu")])
def test_without_a_limit_or_a_gpu_torch_is_left_alone(
    fractions: list[float], limit_bytes: int | None, device: str
) -> None:
    hold_to(limit_bytes, torch.device(device))
    assert fractions == []
