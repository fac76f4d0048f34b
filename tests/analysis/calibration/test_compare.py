"""Estimates against measurements. The numbers are worked out by hand."""

from __future__ import annotations

import pytest

from analysis.calibration.compare import (
    calibrate,
    peak_errors,
    quantile,
    rank_correlation,
    spread,
    step_errors,
)
from analysis.load import load_study
from tests.analysis.conftest import StudyBuilder, measured_again
from tests.support.estimates import GIB, an_estimate, too_large
from tests.support.examples import a_measurement
from train_entry.contract import Failure, FailureKind, Fit, Goal, State

OOM = Failure(kind=FailureKind.GPU_OOM, message="full")


def test_an_error_is_relative_to_what_was_measured(built: StudyBuilder) -> None:
    built.estimated(0, an_estimate(), peak_bytes=3 * GIB, step_s=0.25)
    built.estimated(1, an_estimate(), peak_bytes=66 * GIB // 10, step_s=0.6)
    pairs = calibrate(load_study(built.directory)).pairs
    assert peak_errors(pairs) == pytest.approx([0.1, -0.5])
    assert step_errors(pairs) == pytest.approx([0.2, -0.5])


def test_only_trials_that_were_estimated_and_measured_are_compared(built: StudyBuilder) -> None:
    built.measured(0)  # of a version without estimates
    built.refused(1)
    built.trial(2, State.REUSED, estimate=an_estimate(), outcome=a_measurement(), reused_from=4)
    built.measured(3, state=State.SUSPECT, trial={"estimate": an_estimate()})
    built.estimated(4, an_estimate())
    assert [pair.row.number for pair in calibrate(load_study(built.directory)).pairs] == [4]


def test_a_step_timed_beside_another_trial_says_nothing_of_time_but_of_memory(built: StudyBuilder) -> None:
    built.estimated(0, an_estimate(), trial={"is_shared": True})
    pairs = calibrate(load_study(built.directory)).pairs
    assert (len(peak_errors(pairs)), step_errors(pairs)) == (1, [])


def test_estimates_are_grouped_by_what_they_had_learned_from(built: StudyBuilder) -> None:
    for number in range(5):
        built.estimated(number, an_estimate(observations=number))
    groups = calibrate(load_study(built.directory)).groups
    assert {name: [pair.row.number for pair in pairs] for name, pairs in groups.items()} == {
        "all": [0, 1, 2, 3, 4],
        "from formulas alone": [0],
        "from 3 trials or more": [3, 4],
    }


def test_quantiles_are_of_sizes_and_the_bias_keeps_its_sign() -> None:
    found = spread([-0.4, 0.1, -0.2, 0.3, -0.5])  # sizes 0.1, 0.2, 0.3, 0.4, 0.5
    assert found is not None
    assert (found.count, found.median, found.largest, found.bias) == (5, 0.3, 0.5, -0.2)
    assert found.p90 == pytest.approx(0.46)  # place 3.6 of 0 to 4
    assert found.p95 == pytest.approx(0.48)
    assert spread([]) is None


def test_a_quantile_lies_between_the_two_nearest_values() -> None:
    assert quantile([2.0, 4.0], 0.5) == 3.0
    assert quantile([7.0], 0.95) == 7.0
    assert quantile([0.0, 10.0, 20.0], 0.25) == 5.0


def test_the_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 200.0, 3000.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 4.0, 1.0]) == pytest.approx(-1.0)
    # 1 - 6 x (0 + 1 + 1 + 0) / (4 x 15)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)
    # ranks 1.5, 1.5, 3 and 1, 2, 3: 1.5 / sqrt(1.5 x 2)
    assert rank_correlation([5.0, 5.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(0.75**0.5)
    assert rank_correlation([1.0, 1.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0], [1.0]) is None


def test_the_fastest_has_a_place_among_what_was_expected(built: StudyBuilder) -> None:
    for number, (said, seen) in enumerate([(90.0, 10.0), (80.0, 50.0), (70.0, 20.0), (60.0, 5.0)]):
        built.estimated(number, an_estimate(tokens_per_s_per_gpu=said), tokens_per_s_per_gpu=seen)
    order = calibrate(load_study(built.directory)).order
    assert (order.timed, order.fastest, order.place) == (4, 1, 2)
    # ranks 4, 3, 2, 1 against 2, 4, 3, 1: 1 - 6 x (4 + 1 + 1 + 0) / 60
    assert order.correlation == pytest.approx(0.4)


def test_throughput_in_all_is_compared_where_that_is_the_objective(built: StudyBuilder) -> None:
    built.seeks(Goal(name="tokens_per_s"))
    built.estimated(0, an_estimate(tokens_per_s=1.0, tokens_per_s_per_gpu=9.0), tokens_per_s=5.0)
    built.estimated(1, an_estimate(tokens_per_s=2.0, tokens_per_s_per_gpu=8.0), tokens_per_s=6.0)
    order = calibrate(load_study(built.directory)).order
    assert (order.fastest, order.place) == (1, 1)
    assert order.correlation == pytest.approx(1.0)


def test_the_order_is_by_a_goal_that_is_the_better_the_less_it_is(built: StudyBuilder) -> None:
    built.seeks(Goal(name="peak_bytes"))
    built.estimated(0, an_estimate(peak_bytes=4 * GIB), peak_bytes=5 * GIB, tokens_per_s_per_gpu=9.0)
    built.estimated(1, an_estimate(peak_bytes=3 * GIB), peak_bytes=2 * GIB, tokens_per_s_per_gpu=1.0)
    order = calibrate(load_study(built.directory)).order
    assert (order.goal.name, order.fastest, order.place) == ("peak_bytes", 1, 1)
    assert order.correlation == pytest.approx(1.0)


def test_a_loss_that_estimates_do_not_know_leaves_the_order_to_the_speed(built: StudyBuilder) -> None:
    built.seeks(Goal(name="loss"))
    for number, speed in enumerate((10.0, 20.0)):
        built.estimated(number, an_estimate(tokens_per_s_per_gpu=speed), tokens_per_s_per_gpu=speed)
    order = calibrate(load_study(built.directory)).order
    assert (order.goal.name, order.timed, order.correlation) == ("tokens_per_s_per_gpu", 2, 1.0)


def test_a_single_gpu_baseline_has_no_place_in_the_order(built: StudyBuilder) -> None:
    built.estimated(0, an_estimate(tokens_per_s_per_gpu=90.0), trial={"is_single_gpu": True})
    built.estimated(1, an_estimate(tokens_per_s_per_gpu=50.0))
    calibration = calibrate(load_study(built.directory))
    assert (len(calibration.pairs), calibration.order.fastest, calibration.order.place) == (2, 1, 1)


def test_a_machine_that_has_become_slower_is_not_the_estimates_error(built: StudyBuilder) -> None:
    built.estimated(0, an_estimate(step_s=0.3), step_s=0.375, trial={"closed_at": 60.0})
    built.measured(1, trial=measured_again({50.0: 0.8}))
    assert step_errors(calibrate(load_study(built.directory)).pairs) == pytest.approx([0.0])


def test_the_gates_decisions_are_held_against_what_became_of_them(built: StudyBuilder) -> None:
    borderline = too_large(fit=Fit.BORDERLINE)
    built.refused(0, fingerprint="a")
    built.refused(1, borderline, fingerprint="b")
    built.estimated(2, too_large(), trial={"fingerprint": "a"})  # as its user asked, and it fitted
    built.trial(3, State.INFEASIBLE, estimate=an_estimate(), outcome=OOM)
    built.trial(4, State.INFEASIBLE, estimate=borderline, outcome=OOM)
    built.estimated(5, borderline)
    built.trial(6, State.INFEASIBLE, estimate=too_large(), outcome=OOM)
    built.out_of_memory(7)  # of a version without estimates
    gate = calibrate(load_study(built.directory)).gate
    assert gate.refuted == ((0, 2),)
    names = ("refused", "ran_out", "missed", "borderline", "too_large")
    assert {name: [trial.number for trial in getattr(gate, name)] for name in names} == {
        "refused": [0, 1],
        "ran_out": [3, 4, 6],
        "missed": [3],
        "borderline": [4, 5],
        "too_large": [2, 6],
    }


def test_a_study_without_estimates_has_nothing_to_compare(built: StudyBuilder) -> None:
    built.measured(0)
    calibration = calibrate(load_study(built.directory))
    assert (calibration.pairs, calibration.order.place, calibration.gate.refused) == ((), None, ())
