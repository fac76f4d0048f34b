"""One trial in full: what a person reads after measuring one configuration."""

from __future__ import annotations

import io
from typing import Any

from analysis.load import TrialRow
from analysis.trial import show_trial
from tests.examples import a_measured_trial, a_measurement, a_rank_measurement
from train_entry.contract import MemoryKind


def shown(**changes: Any) -> str:
    """A trial measured on a GPU of 80 GiB."""
    rank = a_rank_measurement(
        memory_kind=MemoryKind.DEVICE, device_in_use_bytes=6 * 2**30, device_total_bytes=80 * 2**30
    )
    trial = a_measured_trial(outcome=a_measurement(ranks=(rank,), **changes))
    row = TrialRow(number=1, state=trial.state, origin=trial.origin, strategy="zero2_offload")
    stream = io.StringIO()
    show_trial(trial, row, stream)
    return stream.getvalue()


def test_memory_of_the_card_and_of_the_host_stand_apart() -> None:
    text = shown(host_peak_bytes=9 * 2**30)
    assert "peak memory     3.00 GiB allocated on rank 0" in text
    assert "4.00 GiB reserved; 6.00 of 80.00 GiB in use on the card" in text
    assert "host memory     9.00 GiB at most, all ranks of the fullest node" in text


def test_a_record_from_before_host_memory_was_counted_says_nothing_of_it() -> None:
    assert "host memory" not in shown(host_peak_bytes=0)
