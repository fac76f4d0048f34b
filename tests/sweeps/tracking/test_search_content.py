"""The metrics and tags of a trial's part in the search."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sweeps.tracking.background import BackgroundTracker
from sweeps.tracking.content import run_content
from sweeps.tracking.mlflow import MlflowTracker
from tests.support.examples import a_rank_measurement
from tests.support.tracking import measured, runs, study_record, write_attempt
from train_entry.contract import (
    DeviceHealth,
    Goal,
    Standing,
    StudyDir,
    TimingEnd,
    Winner,
    dump,
    write_atomic,
)

SPEED = Goal(name="tokens_per_s_per_gpu")


def standing(trial: int, value: float) -> Standing:
    return Standing(trial=trial, value=value, low=value - 5, high=value + 5, repeats=3)


def a_winner(**changes: Any) -> Winner:
    """A record of the winner, trial 7, and the best baseline, trial 3."""
    winner = Winner(
        goal=SPEED.name,
        trial=7,
        confidence=0.95,
        standings=(standing(7, 1230.0), standing(3, 1000.0)),
        baseline=3,
        gain=1.23,
        gain_low=1.21,
        gain_high=1.25,
    )
    return dataclasses.replace(winner, **changes)


def test_the_winner_has_its_interval_and_its_gain_over_the_best_baseline() -> None:
    content = run_content(measured(7), None, (SPEED,), a_winner())

    intervals = [content.metrics[f"confirmed{end}"] for end in ("", "_low", "_high")]
    assert intervals == [1230.0, 1225.0, 1235.0]
    gains = [content.metrics[f"{gain}_over_best_baseline"] for gain in ("gain", "gain_low")]
    assert gains == [1.23, 1.21]
    assert content.tags["winner"] == "confirmed"
    assert content.tags["headline"] == "1.23 times the best baseline, trial 0003 (95%: 1.21 to 1.25)"


def test_its_rivals_have_their_intervals_alone_and_all_others_nothing() -> None:
    rival, other = (run_content(measured(number), None, (SPEED,), a_winner()) for number in (3, 4))

    assert (rival.metrics["confirmed"], "gain_over_best_baseline" in rival.metrics) == (1000.0, False)
    assert "confirmed" not in other.metrics
    assert {"winner", "headline"}.isdisjoint({*rival.tags, *other.tags})


def test_a_gain_of_less_time_is_said_as_better() -> None:
    goal = Goal(name="time_to_tokens", tokens=1e9)

    content = run_content(measured(7), None, (goal,), a_winner(goal=goal.name, gain_low=None))

    assert content.tags["headline"] == "1.23 times better than the best baseline, trial 0003"


def test_a_baseline_that_won_is_not_compared_with_itself() -> None:
    content = run_content(measured(3), None, (SPEED,), a_winner(trial=3, gain=1.0))

    assert content.tags["headline"] == "no configuration beat this one, the best baseline"


def test_goals_that_no_other_metric_tells_have_one_without_the_machines_drift() -> None:
    goals = (
        SPEED,
        Goal(name="time_to_tokens", tokens=24_690.0 * 3600),
        Goal(name="cost", tokens=24_690.0 * 3600, price_per_gpu_hour=3.0),
    )

    metrics = run_content(measured(1), None, goals, drift=0.5).metrics  # the machine was half as fast

    assert metrics["time_to_tokens_s"] == pytest.approx(1800.0)
    assert metrics["cost"] == pytest.approx(3.0)  # 2 GPUs for half an hour
    assert (metrics["drift"], metrics["tokens_per_s"]) == (0.5, 24_690.0)


def test_cards_an_early_end_and_the_baselines_are_told() -> None:
    health = DeviceHealth(
        clock_mhz=1410, max_clock_mhz=1980, temperature_c=87, power_w=600.0, throttled=("sw_power_cap",)
    )
    seen = measured(2, ended=TimingEnd.PRECISE, spared_steps=9, ranks=(a_rank_measurement(health=health),))
    trial = dataclasses.replace(seen, baseline="zero2 x4", is_single_gpu=True)

    content = run_content(trial, None)

    metrics = {name: content.metrics[name] for name in ("clock_mhz", "temperature_c", "spared_steps")}
    assert metrics == {"clock_mhz": 1410, "temperature_c": 87, "spared_steps": 9}
    tags = {name: content.tags[name] for name in ("baseline", "ended", "throttled", "single_gpu")}
    assert tags == {
        "baseline": "zero2 x4",
        "ended": "precise",
        "throttled": "sw_power_cap",
        "single_gpu": "for comparison only",
    }


def test_the_winner_is_shown_once_it_is_known(mlflow_uri: str, tmp_path: Path) -> None:
    study, directory = study_record("won"), StudyDir(tmp_path / "studies" / "won")
    tracker = MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study, directory)
    background = BackgroundTracker(tracker, directory.path)
    for number in (3, 7):
        write_atomic(directory.trial(number).record, dump(measured(number)))
        background.record(measured(number), write_attempt(directory.trial(number).attempt(1)))
    write_atomic(directory.winner, dump(a_winner()))

    background.close()

    rival, winner = runs(mlflow_uri, "won")
    assert (background.missed, winner.data.tags["shardsweep.trial"]) == (0, "7")
    assert winner.data.tags["winner"] == "confirmed"
    assert winner.data.metrics["gain_over_best_baseline"] == 1.23
    assert (rival.data.metrics["confirmed"], "winner" in rival.data.tags) == (1000.0, False)
