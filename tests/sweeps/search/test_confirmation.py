"""The confirmation: the best are measured again, round by round, and the winner is named."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import pytest

from sweeps.config.schema import ConfirmConfig
from sweeps.search.confirmation import conclude, next_repeat, to_confirm
from sweeps.search.students_t import quantile
from tests.support.examples import a_measured_trial, a_measurement, a_repeat
from train_entry.contract import Failure, FailureKind, Goal, State, Trial

GOAL = Goal(name="tokens_per_s")
FAILED = Failure(kind=FailureKind.CRASHED, message="no")


def config(**changes: Any) -> ConfirmConfig:
    return ConfirmConfig(**changes)


def trial(number: int, first: float, repeats: Sequence[float] = (), peak: int = 100, **changes: Any) -> Trial:
    """Return a trial first measured at `first` tokens/s, then at one value per round."""
    seen = a_measurement(tokens_per_s=first, peak_bytes=peak)
    taken = tuple(
        a_repeat(round=at, outcome=a_measurement(tokens_per_s=value), ended_at=100.0 * at)
        for at, value in enumerate(repeats, start=1)
    )
    return a_measured_trial(number=number, **{"outcome": seen, "repeats": taken, **changes})


def numbers(trials: Sequence[Trial]) -> list[int]:
    return [each.number for each in trials]


def repeated(known: list[Trial], number: int, at: int, value: float | None) -> list[Trial]:
    """Return the trials after a further repeat, which failed if it has no value."""
    outcome = FAILED if value is None else a_measurement(tokens_per_s=value)
    return [
        each.with_attempt(a_repeat(number=len(each.attempts) + 1, round=at, outcome=outcome, ended_at=1.0))
        if each.number == number
        else each
        for each in known
    ]


# ---------------------------------------------------------------------- trials to measure again


def test_the_best_that_are_close_to_the_best_and_the_best_baseline_are_measured_again() -> None:
    known = [trial(1, 80.0, baseline="ddp"), trial(2, 70.0, baseline="zero1"), trial(3, 94.0)]
    known += [trial(4, 100.0), trial(5, 99.0), trial(6, 98.0), trial(7, 97.0)]
    assert numbers(to_confirm(known, GOAL, config())) == [4, 5, 6, 1]
    assert numbers(to_confirm(known, GOAL, config(best=9))) == [4, 5, 6, 7, 1]


def test_the_best_baseline_is_not_measured_twice() -> None:
    assert numbers(to_confirm([trial(1, 100.0, baseline="ddp"), trial(2, 99.0)], GOAL, config())) == [1, 2]


def test_on_a_noisy_machine_trials_further_behind_are_measured_again_as_well() -> None:
    noisy = a_measurement(tokens_per_s=100.0, relative_error=0.04)
    known = [trial(1, 100.0, outcome=noisy), trial(2, 93.0), trial(3, 91.0)]
    assert numbers(to_confirm(known, GOAL, config())) == [1, 2]


@pytest.mark.parametrize(
    "changes", [{"is_single_gpu": True}, {"state": State.SUSPECT}, {"state": State.STOPPED}]
)
def test_a_trial_that_cannot_win_is_not_measured_again(changes: dict[str, Any]) -> None:
    assert numbers(to_confirm([trial(1, 100.0, **changes), trial(2, 99.0)], GOAL, config())) == [2]


@pytest.mark.parametrize("goal", [Goal(name="loss"), Goal(name="peak_bytes")])
def test_only_speeds_are_confirmed(goal: Goal) -> None:
    known = [trial(1, 100.0, [100.0, 100.0]), trial(2, 99.0, [99.0, 99.0])]
    assert to_confirm(known, goal, config()) == []
    assert next_repeat(known, goal, config()) is None
    assert conclude(known, goal, config()) is None


def test_nothing_is_confirmed_where_that_is_not_asked_or_nothing_measured() -> None:
    assert next_repeat([trial(1, 100.0)], GOAL, config(best=0)) is None
    assert next_repeat([], GOAL, config()) is None


# ---------------------------------------------------------------------- round by round


def play(known: list[Trial], values: dict[int, list[float | None]], **changes: Any) -> list[tuple[int, int]]:
    """Return trial and round of each repeat, in the order taken."""
    taken = []
    while (found := next_repeat(known, GOAL, config(**changes))) is not None:
        chosen, at = found
        known = repeated(known, chosen.number, at, values[chosen.number][at - 1])
        taken.append((chosen.number, at))
    return taken


def test_trials_that_stay_close_are_measured_in_each_round_to_the_last() -> None:
    values: dict[int, list[float | None]] = {1: [100.0, 101.0, 100.0], 2: [100.5, 100.2, 100.1]}
    taken = play([trial(1, 100.0), trial(2, 99.0)], values)
    assert taken == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)]


def test_a_trial_that_is_clearly_behind_is_dropped_after_two_rounds() -> None:
    values: dict[int, list[float | None]] = {
        1: [100.0, 101.0, 99.0],
        2: [101.0, 100.0, 99.0],
        3: [60.0, 60.5],
    }
    taken = play([trial(1, 100.0), trial(2, 99.0), trial(3, 98.0)], values)
    assert taken[6:] == [(1, 3), (2, 3)]


def test_no_third_round_is_taken_where_two_have_decided() -> None:
    values: dict[int, list[float | None]] = {1: [100.0, 100.1], 2: [80.0, 80.1], 3: [70.0, 70.1]}
    taken = play([trial(1, 100.0), trial(2, 99.0), trial(3, 98.0)], values)
    assert [at for _, at in taken] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("values", "rounds"), [([100.0, 101.0, 100.5], 2), ([100.0, 110.0, 105.0], 3)], ids=["steady", "noisy"]
)
def test_who_is_alone_takes_a_third_round_only_where_two_leave_its_value_vague(
    values: list[float | None], rounds: int
) -> None:
    assert play([trial(1, 100.0)], {1: values}) == [(1, at) for at in range(1, rounds + 1)]


def test_two_noisy_rounds_of_one_who_is_alone_say_something() -> None:
    """Launches on a CPU differ by a tenth: with the first measurement, two repeats give a useful interval."""
    found = conclude([trial(1, 4300.0, [4100.0, 4500.0])], GOAL, config())
    assert found is not None
    assert found.standings[0].high / found.standings[0].low < 1.6


def test_what_a_round_has_in_common_does_not_count() -> None:
    """Two plans 2% apart stay as easy to tell apart on a machine that becomes a fifth slower."""
    values: dict[int, list[float | None]] = {1: [100.0, 80.001], 2: [98.0, 78.4]}
    assert len(play([trial(1, 100.0), trial(2, 99.0)], values)) == 4


def test_a_trial_of_which_a_repeat_failed_is_measured_no_more() -> None:
    values: dict[int, list[float | None]] = {1: [None], 2: [100.0, 99.0, 100.0], 3: [99.0, 100.0, 99.0]}
    taken = play([trial(1, 100.0), trial(2, 99.0), trial(3, 98.0)], values)
    assert [number for number, _ in taken] == [1, 2, 3, 2, 3, 2, 3]


# ---------------------------------------------------------------------- the winner


def test_the_winner_is_of_the_repeats_and_not_of_the_first_measurements() -> None:
    found = conclude([trial(1, 110.0, [100.0, 100.1]), trial(2, 106.0, [104.0, 104.1])], GOAL, config())
    assert found is not None
    assert (found.trial, found.tied) == (2, ())
    assert [standing.trial for standing in found.standings] == [2, 1]
    assert found.standings[0].value == pytest.approx(104.05, abs=0.001)
    assert found.standings[0].low < 104.05 < found.standings[0].high


def test_of_trials_that_cannot_be_told_apart_the_one_with_least_memory_wins() -> None:
    known = [trial(1, 100.0, [100.0, 102.0], peak=50), trial(2, 99.0, [101.0, 101.5], peak=40)]
    found = conclude(known, GOAL, config())
    assert found is not None
    assert (found.trial, found.tied) == (2, (1,))


def test_of_trials_that_need_as_much_the_earlier_wins() -> None:
    found = conclude([trial(4, 100.0, [100.0, 102.0]), trial(2, 99.0, [101.0, 100.9])], GOAL, config())
    assert found is not None
    assert (found.trial, found.tied) == (2, (4,))


def test_memory_does_not_count_between_trials_that_can_be_told_apart() -> None:
    known = [trial(1, 100.0, [100.0, 100.1], peak=50), trial(2, 99.0, [90.0, 90.1], peak=1)]
    found = conclude(known, GOAL, config())
    assert found is not None
    assert (found.trial, found.tied) == (1, ())


def test_a_third_round_counts_for_those_who_took_it() -> None:
    known = [
        trial(1, 100.0, [100.0, 100.5, 99.0]),
        trial(2, 99.0, [100.1, 100.3, 103.0]),
        trial(3, 98.0, [60, 60]),
    ]
    found = conclude(known, GOAL, config())
    assert found is not None
    assert [(each.trial, each.repeats) for each in found.standings] == [(2, 3), (1, 3), (3, 2)]
    assert 3 not in found.tied
    widths = {each.trial: math.log(each.high / each.low) for each in found.standings}
    assert widths[1] == pytest.approx(widths[3] * math.sqrt(2 / 3))


def test_a_plan_of_which_a_repeat_failed_cannot_win() -> None:
    known = repeated([trial(1, 100.0, [100.0, 100.1]), trial(2, 99.0, [90.0, 90.1])], 1, 3, None)
    found = conclude(known, GOAL, config())
    assert found is not None
    assert found.trial == 2
    assert [each.trial for each in found.standings] == [2]


def test_too_few_repeats_have_no_winner() -> None:
    assert conclude([trial(1, 100.0, [100.0]), trial(2, 99.0, [99.0])], GOAL, config()) is None
    assert conclude([trial(1, 100.0, [100.0, 99.0]), trial(2, 99.0, [99.0])], GOAL, config()) is None
    assert conclude([], GOAL, config()) is None


def test_where_only_one_is_left_all_its_measurements_say_how_sure_it_is() -> None:
    found = conclude([trial(1, 100.0, [100.0, 102.0])], GOAL, config())
    assert found is not None
    (standing,) = found.standings
    assert found.noise == pytest.approx(stdev(map(math.log, (100.0, 102.0))))
    reach = quantile(1 - 0.025 / 2, 2) * stdev(map(math.log, (100.0, 100.0, 102.0))) / math.sqrt(2)
    assert standing.high / standing.value == pytest.approx(math.exp(reach))
    assert standing.value / standing.low == pytest.approx(math.exp(reach))


def test_the_least_time_wins_where_time_is_sought() -> None:
    known = [trial(1, 100.0, [100.0, 100.1]), trial(2, 99.0, [90.0, 90.1])]
    found = conclude(known, Goal(name="time_to_tokens", tokens=1e6), config())
    assert found is not None
    assert found.trial == 1
    assert [each.trial for each in found.standings] == [1, 2]
    assert found.standings[0].value == pytest.approx(1e6 / 100.05, rel=1e-4)
    assert found.standings[0].low < found.standings[0].value < found.standings[0].high


# ---------------------------------------------------------------------- against the best baseline


@pytest.mark.parametrize("first", [120.0, 90.0], ids=["like the repeats", "unlike them"])
@pytest.mark.parametrize("goal", [GOAL, Goal(name="time_to_tokens", tokens=1e6)])
def test_the_gain_over_the_best_baseline_has_the_narrower_interval_of_two_paired_t_tests(
    goal: Goal, first: float
) -> None:
    """One with the first measurements and one without, each at half of the permitted error."""
    ours, baselines = (120.0, 118.0), (100.0, 99.5)
    known = [trial(1, first, ours), trial(2, 100.0, baselines, baseline="ddp")]
    found = conclude(known, goal, config(within=0.5))
    assert found is not None
    gains = [math.log(own / baseline) for own, baseline in zip(ours, baselines, strict=True)]
    with_first = stdev([math.log(first / 100.0), *gains])
    reach = min(quantile(1 - 0.025 / 2, 1) * stdev(gains), quantile(1 - 0.025 / 2, 2) * with_first)
    ends = [fmean(gains) + step * reach / math.sqrt(2) for step in (0, -1, 1)]
    assert (found.trial, found.baseline) == (1, 2)
    assert (found.gain, found.gain_low, found.gain_high) == pytest.approx(tuple(map(math.exp, ends)))


def test_a_baseline_that_wins_has_no_gain_over_itself() -> None:
    known = [trial(1, 100.0, [100.0, 100.1], baseline="ddp"), trial(2, 99.0, [90.0, 90.1])]
    found = conclude(known, GOAL, config())
    assert found is not None
    assert (found.trial, found.baseline) == (1, 1)
    assert (found.gain, found.gain_low, found.gain_high) == (1.0, 1.0, 1.0)


def test_without_a_baseline_there_is_no_gain_to_tell() -> None:
    found = conclude([trial(1, 100.0, [100.0, 100.1])], GOAL, config())
    assert found is not None
    assert (found.baseline, found.gain, found.gain_low, found.gain_high) == (None, None, None, None)


def a_study(source: random.Random, speeds: dict[int, float]) -> list[Trial]:
    """Return a study confirmed to its end.

    The machine's speed varies by 2% from round to round, and each repeat by 0.5%.
    """
    rounds = [source.gauss(0, 0.02) for _ in range(3)]
    known = [
        trial(number, speed * math.exp(source.gauss(0, 0.005)), baseline="ddp" if number == 4 else None)
        for number, speed in speeds.items()
    ]
    while (found := next_repeat(known, GOAL, config())) is not None:
        chosen, at = found
        value = speeds[chosen.number] * math.exp(rounds[at - 1] + source.gauss(0, 0.005))
        known = repeated(known, chosen.number, at, value)
    return known


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    source = random.Random(0)
    speeds = {1: 100.0, 2: 99.8, 3: 99.5, 4: 80.0}
    holds = 0
    for _ in range(300):
        found = conclude(a_study(source, speeds), GOAL, config())
        assert found is not None and found.gain_low is not None and found.gain_high is not None
        holds += found.gain_low <= speeds[found.trial] / speeds[4] <= found.gain_high
    assert holds / 300 >= 0.92  # expected 0.95; two standard errors are 0.025


def test_equal_plans_are_seldom_told_apart() -> None:
    source = random.Random(1)
    told_apart = 0
    for _ in range(300):
        found = conclude(a_study(source, {1: 100.0, 2: 100.0}), GOAL, config())
        assert found is not None
        told_apart += not found.tied
    assert told_apart / 300 <= 0.05
