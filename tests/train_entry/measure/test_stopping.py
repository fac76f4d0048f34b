"""The interval and the decision hold over repeated looks.

Seeds are fixed here; `make bench` draws more runs and more kinds of noise.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import pytest

from train_entry.contract import MeasureSpec, TimingEnd
from train_entry.measure.stopping import EFFECT_VARIANCE, decide, depends_on_times, half_width_s, is_due

RUNS = 4000
MEASURE = MeasureSpec(warmup_steps=3, steps=20, split_steps=0, precision=0.005)
STEADY = (1.000, 1.001, 0.999, 1.000)  # known to 0.3%


def measure(**changes: object) -> MeasureSpec:
    return dataclasses.replace(MEASURE, **changes)  # type: ignore[arg-type]


def martingale(steps_s: Sequence[float], mean_s: float) -> float:
    """Return the Bayes factor against this mean."""
    n, spread = len(steps_s), 1 + len(steps_s) * EFFECT_VARIANCE
    t_squared = n * (fmean(steps_s) - mean_s) ** 2 / stdev(steps_s) ** 2
    odds = (1 + t_squared / (n - 1)) / (1 + t_squared / (n - 1) / spread)
    return float(odds ** (n / 2) / math.sqrt(spread))


# ---------------------------------------------------------------- the interval


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_interval_ends_where_the_evidence_against_a_mean_is_one_over_alpha(confidence: float) -> None:
    steps_s = (3.0, 1.0, 3.5, 1.2, 2.9, 0.8, 3.3, 1.1)  # alternating: no positive correlation to correct for
    width_s = half_width_s(steps_s, confidence)
    assert width_s is not None
    for end_s in (fmean(steps_s) - width_s, fmean(steps_s) + width_s):
        assert martingale(steps_s, end_s) == pytest.approx(1 / (1 - confidence))


def test_three_steps_say_nothing_at_95_percent() -> None:
    assert [half_width_s((1.0, 1.1, 0.9)[:n], 0.95) for n in (0, 1, 2, 3)] == [None] * 4


def test_the_interval_scales_with_the_steps_and_narrows_with_their_number() -> None:
    steps_s = (1.0, 1.2, 0.9, 1.1)
    once, twice = half_width_s(steps_s, 0.95), half_width_s(steps_s * 2, 0.95)
    longer = half_width_s([10 * seconds for seconds in steps_s], 0.95)
    assert once is not None and twice is not None and longer is not None
    assert longer == pytest.approx(10 * once)
    assert twice < once / 2


def test_steps_of_one_length_are_known() -> None:
    assert half_width_s((0.5,) * 4, 0.95) == 0.0


def test_slow_steps_side_by_side_say_less_than_scattered_ones() -> None:
    side_by_side = half_width_s((1.0, 1.0, 1.0, 1.0, 1.1, 1.1, 1.1, 1.1), 0.95)
    scattered = half_width_s((1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1), 0.95)
    assert side_by_side is not None and scattered is not None
    assert side_by_side > 2 * scattered


# ---------------------------------------------------------------- how often the interval misses

Draw = Callable[[random.Random], list[float]]


def normal(rng: random.Random) -> list[float]:
    return [rng.gauss(1, 0.01) for _ in range(20)]


def correlated(rng: random.Random) -> list[float]:
    """Draw steps whose neighbours are correlated by 0.2."""
    noise = [rng.gauss(0, 1)]
    for _ in range(19):
        noise.append(0.2 * noise[-1] + math.sqrt(1 - 0.2**2) * rng.gauss(0, 1))
    return [1 + 0.01 * one for one in noise]


def with_hiccups(rng: random.Random) -> list[float]:
    """Draw steps of typically one second, of which one in twenty takes half as long again on average."""
    steps_s = [rng.lognormvariate(0, 0.05) for _ in range(20)]
    return [s * (1 + rng.expovariate(2)) if rng.random() < 0.05 else s for s in steps_s]


def misses(draw: Draw) -> float:
    """Return the share of runs in which the interval misses 1 s at any look from 2 to 20 steps."""
    rng = random.Random(1)
    runs = [draw(rng) for _ in range(RUNS)]
    return fmean(any(is_missed(steps_s[:n]) for n in range(2, 21)) for steps_s in runs)


def is_missed(steps_s: Sequence[float]) -> bool:
    width_s = half_width_s(steps_s, 0.95)
    return width_s is not None and abs(fmean(steps_s) - 1) > width_s


@pytest.mark.parametrize("draw", [normal, correlated, with_hiccups])
def test_at_95_percent_it_is_wrong_at_any_look_in_one_run_of_20_at_most(draw: Draw) -> None:
    assert misses(draw) <= 0.05


# ---------------------------------------------------------------- the decision


def test_timing_ends_when_the_step_time_is_known_as_asked() -> None:
    assert decide(STEADY, measure()) is TimingEnd.PRECISE
    assert decide(STEADY, measure(precision=0.002)) is None
    assert decide(STEADY, measure(precision=0.0)) is None


def test_timing_ends_when_the_best_cannot_be_beaten() -> None:
    assert decide(STEADY, measure(beat_step_s=0.99)) is TimingEnd.FUTILE
    assert decide(STEADY, measure(beat_step_s=0.99, precision=0.0)) is TimingEnd.FUTILE
    assert decide(STEADY, measure(beat_step_s=0.9999)) is TimingEnd.PRECISE


def test_one_looks_after_the_least_steps_and_then_every_few_but_not_after_the_last() -> None:
    looked = [n for n in range(25) if is_due(n, measure(min_steps=5, look_every=3))]
    assert looked == [5, 8, 11, 14, 17]
    assert decide(STEADY[:3], measure()) is None
    assert decide((*STEADY, 1.0), measure()) is None
    assert decide(STEADY * 5, measure()) is None


def test_a_run_for_its_loss_is_never_ended_by_its_times() -> None:
    assert depends_on_times(measure())
    assert depends_on_times(measure(precision=0.0, beat_step_s=1.0))
    assert not depends_on_times(measure(precision=0.0))


@pytest.mark.parametrize("slow", [1.05, 1.5, 30.0])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("steps", [4, 8, 18])
def test_one_slow_step_makes_it_look_longer_and_never_give_up(slow: float, place: int, steps: int) -> None:
    steps_s = (STEADY * 5)[:steps]
    steps_s = (*steps_s[:place], slow, *steps_s[place + 1 :])
    assert decide(steps_s, measure(beat_step_s=0.9999)) is None


def test_a_slow_start_is_not_taken_for_a_slow_plan() -> None:
    settling = (1.6, 1.4, 1.25, 1.15, 1.08, 1.04, 1.01, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [decide(settling[:n], measure(beat_step_s=1.0)) for n in (4, 6, 8, 10, 12)] == [None] * 5
