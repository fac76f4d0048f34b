from __future__ import annotations

import dataclasses
import json

import psutil
import torch

from sweeps.collect import measurement
from tests.examples import a_model, a_plan, a_rank_measurement
from train_entry.contract import Measurement, RankMeasurement, dump, load
from train_entry.memory import HostMeter

MIB = 2**20


def test_the_highest_use_of_the_host_outlives_its_phase() -> None:
    HostMeter().take()  # where permitted, what other tests took is forgotten
    meter = HostMeter()
    meter.take()
    before = meter.host_peak_bytes()
    unused = before - psutil.Process().memory_info().rss
    torch.ones(unused + 64 * MIB, dtype=torch.uint8)  # more than ever, and gone at once
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
