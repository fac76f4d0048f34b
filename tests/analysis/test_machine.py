"""The lines below the table on the machine: drift and slowed GPUs."""

from __future__ import annotations

from analysis.load import load_study
from analysis.machine import machine_lines
from tests.analysis.conftest import StudyBuilder, measured_again
from tests.support.examples import a_rank_measurement
from train_entry.contract import DeviceHealth, State


def said(built: StudyBuilder, *, everything: bool = False) -> list[str]:
    return machine_lines(load_study(built.directory), everything=everything)


def hot(
    built: StudyBuilder,
    number: int,
    *reasons: str,
    state: State = State.MEASURED,
    clock_mhz: int = 1500,
    temperature_c: int = 80,
) -> None:
    cool = DeviceHealth(clock_mhz=1980, max_clock_mhz=1980, temperature_c=60, power_w=500.0, throttled=())
    card = DeviceHealth(
        clock_mhz=clock_mhz,
        max_clock_mhz=1980,
        temperature_c=temperature_c,
        power_w=700.0,
        throttled=reasons,
    )
    ranks = tuple(a_rank_measurement(rank=rank, health=health) for rank, health in enumerate((cool, card)))
    built.measured(number, state=state, ranks=ranks)


def test_a_steady_machine_with_cool_cards_is_not_spoken_of(built: StudyBuilder) -> None:
    built.measured(1)
    hot(built, 2)
    assert said(built) == []


def test_drift_that_lasts_says_since_when_and_how_it_was_seen(built: StudyBuilder) -> None:
    built.measured(1, trial=measured_again({12.0: 0.969}))
    for number, closed_at in ((2, 1.0), (12, 12.0), (13, 13.0)):
        built.measured(number, trial={"closed_at": closed_at})
    built.trial(14, State.RUNNING)
    assert said(built) == [
        "drift: the machine was 3.1% slower from trial 0012 on (measured by repeats of trial 0001); "
        "the ranking is corrected for it"
    ]


def test_drift_that_passed_says_for_which_trials_and_in_what_range(built: StudyBuilder) -> None:
    built.measured(1, trial=measured_again({2.0: 0.99, 3.0: 1.02, 4.0: 1.0}))
    for number in (2, 3, 4):
        built.measured(number, trial={"closed_at": float(number)})
    by = "(measured by repeats of trial 0001); the ranking is corrected for it"
    assert said(built) == [f"drift: the machine was 1.0% slower to 2.0% faster for trials 0002 to 0003 {by}"]
    built.measured(3, trial={"closed_at": 4.0})
    assert said(built) == [f"drift: the machine was 1.0% slower for trial 0002 {by}"]


def test_cards_that_were_slowed_are_grouped_by_the_reason(built: StudyBuilder) -> None:
    hot(built, 1, "sw_power_cap", clock_mhz=1700, temperature_c=71)
    hot(built, 2, "sw_power_cap", clock_mhz=1600, temperature_c=69)
    hot(built, 3, "hw_thermal_slowdown", "sw_power_cap", state=State.SUSPECT, temperature_c=91)
    assert said(built) == [
        "GPUs slowed by sw_power_cap in trials 0001, 0002: down to 1,600 of 1,980 MHz, up to 71 °C",
        "GPUs slowed by hw_thermal_slowdown and sw_power_cap in trial 0003: down to 1,500 of 1,980 MHz, "
        "up to 91 °C",
    ]


def test_a_long_list_of_trials_is_cut_unless_everything_is_asked_for(built: StudyBuilder) -> None:
    for number in range(10):
        hot(built, number, "sw_power_cap")
    assert "0006, 0007 and 2 more: down to" in said(built)[0]
    assert "0008, 0009: down to" in said(built, everything=True)[0]
