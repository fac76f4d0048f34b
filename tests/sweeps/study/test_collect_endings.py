"""The reason why a measurement's timing ended, and its precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.study.collect import collect
from tests.support.examples import a_plan, a_rank_measurement, a_trial_spec, an_attempt
from train_entry.contract import (
    AttemptDir,
    DeviceHealth,
    Measurement,
    MeasureSpec,
    Plan,
    RankMeasurement,
    TimingEnd,
    dump,
)

COOL = DeviceHealth(clock_mhz=1900, max_clock_mhz=1980, temperature_c=60, power_w=500.0)
HOT = DeviceHealth(
    clock_mhz=1200, max_clock_mhz=1980, temperature_c=90, power_w=400.0, throttled=("hw_thermal_slowdown",)
)


def collected(path: Path, *ranks: RankMeasurement, plan: Plan | None = None) -> Measurement:
    """Return the measurement of two ranks that were to time 12 steps."""
    attempt = AttemptDir(path)
    for rank in ranks:
        attempt.outcome(rank.rank).write_text(dump(rank))
    measure = MeasureSpec(warmup_steps=3, steps=12, split_steps=0)
    spec = a_trial_spec(plan=plan or a_plan(), measure=measure)
    outcome = collect(attempt, spec, an_attempt()).outcome
    assert isinstance(outcome, Measurement)
    return outcome


@pytest.mark.parametrize("ended", [TimingEnd.PRECISE, TimingEnd.FUTILE, TimingEnd.ASKED])
def test_steps_that_were_not_timed_are_spared(tmp_path: Path, ended: TimingEnd) -> None:
    ranks = [a_rank_measurement(rank=rank, step_s=(2.0,) * 4, ended=ended) for rank in (0, 1)]
    seen = collected(tmp_path, *ranks)
    assert (seen.ended, seen.steps, seen.spared_steps) == (ended, 4, 8)


def test_at_the_cap_nothing_is_spared(tmp_path: Path) -> None:
    seen = collected(tmp_path, *(a_rank_measurement(rank=rank, step_s=(2.0,) * 12) for rank in (0, 1)))
    assert (seen.ended, seen.spared_steps, seen.relative_error) == (TimingEnd.CAP, 0, None)


def test_the_error_is_the_half_width_relative_to_the_mean_step(tmp_path: Path) -> None:
    steps_s = {0: (1.0, 1.0, 2.0, 4.0), 1: (3.0, 1.0, 2.0, 2.0)}
    ranks = [
        a_rank_measurement(rank=rank, step_s=seconds, step_s_half_width=0.5)
        for rank, seconds in steps_s.items()
    ]
    assert collected(tmp_path, *ranks).relative_error == 0.25  # of a mean step of 2 s, as rank 0 saw it
    staged = collected(tmp_path, *ranks, plan=a_plan(pipeline=2))
    assert staged.relative_error == 0.2  # of 2.5 s: a step ends when its last stage ends


def test_ranks_on_different_cards_make_a_measurement_suspect(tmp_path: Path) -> None:
    first = a_rank_measurement(rank=0, device_name="NVIDIA H100")
    assert not collected(tmp_path, first, a_rank_measurement(rank=1, device_name="NVIDIA H100")).is_suspect
    assert collected(tmp_path, first, a_rank_measurement(rank=1, device_name="NVIDIA A100")).is_suspect


def test_one_card_that_was_too_hot_makes_a_measurement_suspect(tmp_path: Path) -> None:
    cool = a_rank_measurement(rank=0, health=COOL)
    assert not collected(tmp_path, cool, a_rank_measurement(rank=1, health=COOL)).is_suspect
    seen = collected(tmp_path, cool, a_rank_measurement(rank=1, health=HOT))
    assert seen.is_suspect
    assert [rank.health for rank in seen.ranks] == [COOL, HOT]
