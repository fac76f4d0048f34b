"""A study that was interrupted, or whose orchestrator died, goes on; single points and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sweeps.space.dimensions import Point
from sweeps.study.limits import StopReason
from tests.support.examples import an_attempt
from tests.support.fake_cluster import crash, lost, measured, oom
from tests.support.studies import FOUR_PLANS, NO_LIMIT, Bench, Crashed, die
from train_entry.contract import AttemptKind, Failure, Measurement, Origin, Outcome, State, Trial


def check_of(trial: Trial) -> Outcome | None:
    return trial.check.outcome if trial.check else None


# ---------------------------------------------------------------- interrupted


def test_an_interrupt_cancels_and_the_next_start_measures_nothing_twice(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[5] = study.interrupt  # during the second trial
    assert study.start(*FOUR_PLANS) is StopReason.INTERRUPTED
    assert study.states == [State.MEASURED, State.CANCELLED]
    assert study.cluster.jobs == {}
    study.stop = False
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 4
    assert [len(trial.attempts) for trial in study.trials] == [1, 2, 1, 1]
    assert len(set(study.launched_plans)) == 4


def test_a_cancelled_attempt_that_is_collected_again_costs_once(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = study.interrupt
    study.start("micro_batch=2,2")
    assert study.trials[0].gpu_s == 20.0
    study.stop = False
    study.start("micro_batch=2,2")
    assert [attempt.gpu_s for attempt in study.trials[0].attempts] == [20.0, 20.0]


def test_an_interrupt_may_leave_the_job_which_the_next_start_collects(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = study.interrupt
    assert study.start("micro_batch=2,2", cancel_on_interrupt=False) is StopReason.INTERRUPTED
    assert study.states == [State.RUNNING]
    study.stop = False
    study.start("micro_batch=2,2")
    assert study.states == [State.MEASURED]
    assert len(study.cluster.launched) == 1


def test_after_a_crash_the_next_start_attaches_and_collects(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = die
    with pytest.raises(Crashed):
        study.start(*FOUR_PLANS)
    assert study.states == [State.RUNNING]
    study.start(*FOUR_PLANS)
    assert study.states == [State.MEASURED] * 4
    assert len(study.cluster.launched) == len(set(study.launched_plans)) == 4


def test_a_job_that_ended_while_nobody_watched_is_collected(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = die
    with pytest.raises(Crashed):
        study.start("micro_batch=2,2")
    for attempt in list(study.cluster.jobs):
        study.cluster.finish(attempt)
    study.start("micro_batch=2,2")
    assert study.states == [State.MEASURED]
    assert len(study.cluster.launched) == 1


@pytest.mark.parametrize("sleep", range(1, 10))
def test_whenever_the_orchestrator_dies_no_plan_runs_twice(bench: Callable[..., Bench], sleep: int) -> None:
    study = bench({"ddp x1": [oom], "zero1 x2": [lost, measured(100.0)]}, parallel=2)
    study.clock.at[sleep] = die
    with pytest.raises(Crashed):
        study.start("ranks=1", *FOUR_PLANS)
    study.start("ranks=1", *FOUR_PLANS)
    assert sorted(study.states) == [State.INFEASIBLE, *[State.MEASURED] * 3]
    assert sorted(study.launched_plans) == ["ddp x1", "ddp x2", "zero1 x1", "zero1 x2", "zero1 x2"]


def test_a_trial_recorded_but_never_launched_is_launched_by_the_next_start(
    bench: Callable[..., Bench],
) -> None:
    study = bench()
    study.start("micro_batch=1,2", limits=dataclasses.replace(NO_LIMIT, trials=1))
    ledger = study.ledger()
    other = 3 - int(str(ledger[1].values["micro_batch"]))
    first = ledger[1]
    assert first.plan is not None
    unborn = dataclasses.replace(
        first,
        number=2,
        values={"micro_batch": other},
        plan=dataclasses.replace(first.plan, micro_batch=other),
        fingerprint="other",
        attempts=(an_attempt(),),
    )
    assert ledger.put(unborn).state is State.RUNNING
    assert study.start("micro_batch=1,2") is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 2
    assert [(spec.trial, spec.attempt) for spec in study.cluster.launched] == [(1, 1), (2, 2)]


# ---------------------------------------------------------------- one point, checks


def test_one_point_is_measured_anew_though_it_is_known(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("micro_batch=2,2")
    point: Point = {"micro_batch": 2}
    assert study.start("space=none", "micro_batch=2", point=point) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 2
    assert [trial.origin for trial in study.trials] == [Origin.SAMPLER, Origin.USER]


def test_a_trial_of_the_users_own_may_lie_outside_the_space(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("space=none", "strategy=ddp", point={"strategy": "ddp"})
    assert study.start("micro_batch=1,2") is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 3


def test_the_best_trials_are_trained_longer_one_after_another(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp": [measured(50.0)], "zero1": [measured(90.0)], "zero2": [measured(70.0)]})
    study.start("strategy=ddp,zero1,zero2", "check.tokens=32768", check_best=2)
    checks = [spec for spec in study.cluster.launched if spec.kind is AttemptKind.CHECK]
    assert [spec.plan.strategy for spec in checks] == ["zero1", "zero2"]
    # 32768 tokens in steps of 16 x 128 tokens: 16 steps, including 3 of warm-up.
    assert {(spec.measure.warmup_steps, spec.measure.steps) for spec in checks} == {(3, 13)}
    checked = [trial for trial in study.trials if isinstance(check_of(trial), Measurement)]
    assert [(trial.counted, trial.check) for trial in checked] == [trial.attempts for trial in checked]
    assert [[attempt.number for attempt in trial.attempts] for trial in checked] == [[1, 2]] * 2


def test_a_check_that_is_interrupted_is_done_by_the_next_start(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[4] = study.interrupt  # the measurement takes three sleeps
    assert study.start("micro_batch=2,2", check_best=1) is StopReason.INTERRUPTED
    assert (study.states, study.trials[0].check) == ([State.MEASURED], None)
    study.stop = False
    study.start("micro_batch=2,2", check_best=1)
    assert isinstance(check_of(study.trials[0]), Measurement)
    assert isinstance(study.trials[0].outcome, Measurement)


def test_a_check_survives_a_crash_of_the_orchestrator(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[4] = die
    with pytest.raises(Crashed):
        study.start("micro_batch=2,2", check_best=1)
    study.start("micro_batch=2,2", check_best=1)
    assert isinstance(check_of(study.trials[0]), Measurement)
    assert [spec.kind for spec in study.cluster.launched] == [AttemptKind.FIRST, AttemptKind.CHECK]


def test_a_check_recorded_but_never_launched_is_launched_by_the_next_start(
    bench: Callable[..., Bench],
) -> None:
    study = bench()
    study.start("micro_batch=2,2")
    study.ledger().put(study.trials[0].with_attempt(an_attempt(number=2, kind=AttemptKind.CHECK)))
    study.start("micro_batch=2,2", check_best=1)
    assert isinstance(check_of(study.trials[0]), Measurement)
    assert study.trials[0].check == study.trials[0].attempts[2]


def test_a_failed_check_is_recorded_and_leaves_the_measurement(bench: Callable[..., Bench]) -> None:
    study = bench({"check zero1": [crash]})
    study.start("micro_batch=2,2", check_best=1)
    assert study.states == [State.MEASURED]
    assert isinstance(check_of(study.trials[0]), Failure)
    assert isinstance(study.trials[0].outcome, Measurement)
