"""A user's own trials, those without -m, beside a study's search; and the cost of cancelling."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from sweeps.space.dimensions import Point
from sweeps.study.limits import Limits, StopReason
from tests.support.fake_cluster import lost, measured
from tests.support.studies import FOUR_PLANS, Bench, Crashed, die
from train_entry.contract import Origin, State

OWN: Point = {"strategy": "zero1", "micro_batch": 2}
ALONE = ("strategy=zero1", "micro_batch=2", "space=none")


def abandoned(bench: Callable[..., Bench]) -> Bench:
    """Return a study with one trial, a user's own, that runs on after its orchestrator died."""
    study = bench()
    study.clock.at[1] = die
    with pytest.raises(Crashed):
        study.start(*ALONE, point=OWN)
    return study


def test_a_search_collects_an_abandoned_trial_of_ones_own_and_shares_it(bench: Callable[..., Bench]) -> None:
    study = abandoned(bench)
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert study.trials[0].state is State.MEASURED
    assert sorted(study.states[1:]) == [State.MEASURED] * 3 + [State.REUSED]
    assert len(study.cluster.launched) == 4


def test_another_trial_of_ones_own_collects_it_too(bench: Callable[..., Bench]) -> None:
    study = abandoned(bench)
    study.start(*ALONE, point=OWN)
    assert study.states == [State.MEASURED] * 2
    assert [len(trial.attempts) for trial in study.trials] == [1, 1]


def test_one_that_was_never_launched_is_closed_and_not_launched_by_others(
    bench: Callable[..., Bench],
) -> None:
    study = abandoned(bench)
    study.cluster.jobs.clear()
    shutil.rmtree(study.directory.trial(1).attempt(1).submitit)
    study.start(*FOUR_PLANS)
    assert study.trials[0].state is State.CANCELLED
    assert study.trials[0].closed_at is not None
    assert study.states[1:] == [State.MEASURED] * 4


def test_a_trial_of_ones_own_does_not_use_up_the_searchs_trials(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start(*ALONE, point=OWN)
    study.start("strategy=ddp", "micro_batch=1,2", limits=Limits(trials=2, hours=None, retries=1))
    assert [trial.origin for trial in study.trials] == [Origin.USER, Origin.SAMPLER, Origin.SAMPLER]
    assert study.states == [State.MEASURED] * 3


def test_a_trial_of_ones_own_leaves_the_studys_cancelled_ones_alone(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = study.interrupt
    study.start(*FOUR_PLANS)
    study.stop = False
    study.start(*ALONE, point=OWN)
    assert study.states == [State.CANCELLED, State.MEASURED]


def test_cancelled_attempts_use_up_no_retries(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(1.0), lost, measured(2.0)]})
    study.clock.at[1] = study.interrupt
    study.start("micro_batch=2,2")
    study.stop = False
    study.start("micro_batch=2,2")
    (trial,) = study.trials
    assert (trial.state, len(trial.attempts), trial.used_retries) == (State.MEASURED, 3, 1)


def test_a_trial_that_runs_again_has_nothing_of_its_cancelled_attempt(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = study.interrupt
    study.start("micro_batch=2,2")
    assert study.trials[0].outcome is not None
    study.stop = False
    study.clock.at[study.clock.sleeps + 1] = die
    with pytest.raises(Crashed):
        study.start("micro_batch=2,2")
    (trial,) = study.trials
    assert (trial.state, trial.outcome, trial.closed_at) == (State.RUNNING, None, None)


def test_a_cancelled_job_that_wrote_nothing_is_cancelled_not_lost(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [lost, measured(2.0)]})
    study.clock.at[1] = study.interrupt
    study.cluster.silent_when_cancelled = True
    study.start("micro_batch=2,2")
    (trial,) = study.trials
    assert (trial.state, trial.used_retries) == (State.CANCELLED, 0)


def test_a_finite_space_ends_only_when_all_of_it_is_known(bench: Callable[..., Bench]) -> None:
    """The first 600 of 601 points are illegal: ddp cannot shard."""
    study = bench()
    illegal = ("engine=ddp,deepspeed", "zero.stage=1", "seed=range(0,25)", "lr.warmup=range(0,24)")
    study.start(*illegal, "search=grid", "space=none", limits=Limits(trials=1, hours=None, retries=1))
    assert study.states == [State.REJECTED] * 600 + [State.MEASURED]
