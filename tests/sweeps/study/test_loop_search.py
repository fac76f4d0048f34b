"""The search in the loop: its order, its end, and what saves steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sweeps.config.schema import ConfirmConfig
from sweeps.study.limits import Limits, StopReason
from tests.support.fake_cluster import as_estimated, crash, measured, measured_as, oom
from tests.support.studies import NO_LIMIT, PLAIN, Bench, Crashed, die
from train_entry.contract import Failure, FailureKind, Goal, Measurement, Origin, Ranking, State

INFORMED = ("search.startup_trials=2",)  # baselines, prior, dominance, sampler
NINE_PLANS = ("strategy=ddp,zero1,zero2", "micro_batch=1,2,4")
TOKENS_PER_S = Goal(name="tokens_per_s")
TWO_PLANS = ("strategy=ddp,zero1", "micro_batch=2,2")


@pytest.fixture
def informed(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """Make studies that begin with the baselines. Their jobs are as fast as estimated."""

    def make(scripts: dict[str, object] | None = None, **changes: object) -> Bench:
        study = bench({"*": [as_estimated()], **(scripts or {})}, **changes)
        study.settings = INFORMED
        return study

    return make


def origins(study: Bench) -> list[Origin]:
    return [trial.origin for trial in study.trials]


# ---------------------------------------------------------------- the order


def test_the_baselines_come_first_then_the_prior_then_the_sampler(informed: Callable[..., Bench]) -> None:
    """A small space is measured completely, and needs no single-GPU baseline."""
    study = informed()
    assert study.start(*NINE_PLANS, "search.prior=2") is StopReason.EXHAUSTED
    baselines = [(trial.baseline, trial.values["micro_batch"]) for trial in study.trials if trial.baseline]
    assert baselines == [("ddp", 4), ("zero1", 4), ("zero2", 4)]
    assert origins(study) == [Origin.BASELINE] * 3 + [Origin.PRIOR] * 2 + [Origin.SAMPLER] * 4
    assert (len(set(study.launched_plans)), study.states) == (9, [State.MEASURED] * 9)
    assert len(study.told) == 9


def test_a_resumed_study_goes_on_where_it_was(informed: Callable[..., Bench]) -> None:
    whole, parts = informed(), informed()
    parts.directory = dataclasses.replace(parts.directory, path=parts.directory.path.with_name("parts"))
    whole.start(*NINE_PLANS, limits=dataclasses.replace(NO_LIMIT, trials=5))
    for trials in (1, 3, 5):
        parts.start(*NINE_PLANS, limits=dataclasses.replace(NO_LIMIT, trials=trials))
    assert parts.launched_plans == whole.launched_plans
    assert [(trial.origin, trial.baseline) for trial in parts.trials] == [
        (trial.origin, trial.baseline) for trial in whole.trials
    ]


def test_a_baseline_out_of_memory_is_followed_by_its_remedy(informed: Callable[..., Bench]) -> None:
    """The remedy is in the space and may be the best."""
    study = informed({"zero1 x4": [oom]})
    study.start(
        "strategy=ddp,zero1", "micro_batch=2,4", "activation_checkpointing=none,full", "search.prior=0"
    )
    baseline = next(trial for trial in study.trials if trial.state is State.INFEASIBLE)
    assert (baseline.origin, baseline.baseline, baseline.values["activation_checkpointing"]) == (
        Origin.BASELINE,
        "zero1",
        "none",
    )
    remedy = study.trials[baseline.number]
    assert (remedy.origin, remedy.parent, remedy.baseline) == (Origin.REMEDY, baseline.number, "zero1")
    assert remedy.values == {**baseline.values, "activation_checkpointing": "full"}
    assert remedy.state is State.INFEASIBLE
    # Half the micro-batch, still checkpointed, is next, since little is known about the machine yet.
    assert remedy.advice is not None
    assert remedy.advice.changes == {"micro_batch": 2}
    second, *others = study.trials[remedy.number :]
    assert (second.origin, second.parent) == (Origin.REMEDY, remedy.number)
    assert [trial.origin for trial in others] == [Origin.SAMPLER] * len(others)


# ---------------------------------------------------------------- one GPU alone

ALONE_IS_FASTEST = measured_as(lambda attempt, spec: 900.0 if spec.plan.ranks == 1 else 100.0)


@pytest.mark.parametrize("end", ["die", "interrupt"])
def test_one_gpu_alone_is_measured_once_and_cannot_win(informed: Callable[..., Bench], end: str) -> None:
    study = informed({"*": [ALONE_IS_FASTEST]})
    asked = (*TWO_PLANS, "search.single_gpu=always")
    study.clock.at[1] = die if end == "die" else study.interrupt
    if end == "die":
        with pytest.raises(Crashed):
            study.start(*asked)
    else:
        assert study.start(*asked) is StopReason.INTERRUPTED
    study.stop = False
    for _ in range(2):
        assert study.start(*asked) is StopReason.EXHAUSTED
    alone, *others = study.trials
    assert (alone.is_single_gpu, alone.origin, alone.baseline) == (True, Origin.BASELINE, "1 GPU")
    assert (alone.state, alone.values["ranks"]) == (State.MEASURED, 1)
    assert [trial.plan.ranks for trial in others if trial.plan] == [2, 2]
    assert len(alone.attempts) == (1 if end == "die" else 2)  # another follows a cancelled one
    assert study.told == [[100.0], [100.0]]
    assert [value for value, _ in Ranking(study.trials, TOKENS_PER_S).contenders] == [100.0, 100.0]
    limits = [spec.measure.beat_step_s is not None for spec in study.cluster.launched if spec.plan.ranks == 2]
    assert limits == [False, True]  # the single-GPU baseline is no time to beat, so the first trial has none


# ---------------------------------------------------------------- ends


def test_a_search_ends_when_nothing_left_is_expected_to_be_better(informed: Callable[..., Bench]) -> None:
    study = informed()
    space = ("strategy=ddp,zero1,zero2,zero3", "micro_batch=1,2,4", "activation_checkpointing=none,full")
    assert study.start(*space, "limits.improvement=0.02") is StopReason.NO_BETTER
    assert 3 <= len(study.launched_plans) < 12
    assert study.launched_plans[0] == "ddp x4"  # the best by estimate, and here also when measured
    launched = len(study.launched_plans)
    assert study.start(*space, "limits.improvement=0.02") is StopReason.NO_BETTER
    assert len(study.launched_plans) == launched


def test_failures_alike_end_the_study_with_their_message_and_a_new_start_tries_again(
    bench: Callable[..., Bench],
) -> None:
    study = bench({"*": [crash], "zero1 x8": [measured(50.0)]})
    limits = dataclasses.replace(NO_LIMIT, failures=3)
    asked = ("micro_batch=1,2,4,8", "search=grid")
    assert study.start(*asked, limits=limits) is StopReason.FAILURES
    assert study.states == [State.FAILED] * 3
    assert study.heard.messages == ["3 trials in a row failed in the same way: crashed: as scripted"]
    study.clock.time_s += 1
    assert study.start(*asked, limits=limits) is StopReason.EXHAUSTED
    assert study.states == [State.FAILED] * 3 + [State.MEASURED]


def test_out_of_memory_is_no_failure_that_ends_a_study(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [oom]})
    limits = dataclasses.replace(NO_LIMIT, failures=2)
    assert study.start("micro_batch=1,2,4,8", limits=limits) is StopReason.EXHAUSTED
    assert study.states == [State.INFEASIBLE] * 4


def test_patience_ends_a_study_that_improves_by_noise_only(bench: Callable[..., Bench]) -> None:
    study = bench(
        {"zero1 x2": [measured(100.2)], "zero1 x4": [measured(99.0)], "zero1 x8": [measured(200.0)]}
    )
    limits = dataclasses.replace(NO_LIMIT, patience=2)
    assert study.start("micro_batch=1,2,4,8", "search=grid", limits=limits) is StopReason.PATIENCE
    assert study.launched_plans == ["zero1 x1", "zero1 x2", "zero1 x4"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (dataclasses.replace(NO_LIMIT, cost=5.01, price_per_gpu_hour=180.0), StopReason.COST),
        (dataclasses.replace(NO_LIMIT, gpu_hours=100.1 / 3600), StopReason.GPU_HOURS),
    ],
    ids=["money", "GPU-hours"],
)
def test_of_money_and_gpu_hours_what_the_confirmation_takes_is_left_for_it(
    bench: Callable[..., Bench], limits: Limits, reason: StopReason
) -> None:
    """Each launch takes 20 of 100 GPU-seconds: three trials, and two rounds of the best."""
    study = bench({"zero1 x2": [measured(200.0)]})
    asked = ("micro_batch=1,2,4,8", "search=grid")
    confirm = ConfirmConfig(best=1, drift_every=0)
    ended = study.start(*asked, limits=limits, confirm=confirm)
    assert ended is reason
    assert study.launched_plans == ["zero1 x1", "zero1 x2", "zero1 x4", "zero1 x2", "zero1 x2"]
    assert sum(trial.gpu_s for trial in study.trials) == pytest.approx(100)


def test_of_hours_what_the_confirmation_takes_is_left_for_it(bench: Callable[..., Bench]) -> None:
    study = bench({"zero1 x2": [measured(200.0)]})
    asked = ("micro_batch=1,2,4,8", "search=grid")
    confirm = ConfirmConfig(best=1, drift_every=0)
    limits = dataclasses.replace(NO_LIMIT, hours=31 / 3600)  # one launch and two rounds of 10 s each
    assert study.start(*asked, limits=limits, confirm=confirm) is StopReason.HOURS
    _, *repeats = (spec.kind for spec in study.cluster.launched if spec.plan.micro_batch == 2)
    assert len(study.trials) < 4
    assert len(repeats) == 2


# ---------------------------------------------------------------- no plan that is known to fail


def test_what_needs_no_less_than_a_plan_that_failed_is_not_launched(bench: Callable[..., Bench]) -> None:
    study = bench({"zero1 x2": [oom]})
    asked = ("micro_batch=1,2,4,8", "search=grid", "search.dominance=true")
    assert study.start(*asked) is StopReason.EXHAUSTED
    assert study.launched_plans == ["zero1 x1", "zero1 x2"]
    assert [trial.is_refused for trial in study.trials] == [False, False, True, True]
    said = study.trials[3].outcome
    assert isinstance(said, Failure)
    assert "needs at least as much memory as trial 0002, which failed" in said.message
    study.start(*asked)  # the next start knows it too
    assert (len(study.launched_plans), len(study.trials)) == (2, 4)
    study.start("micro_batch=8", "space=none", "search.dominance=true", point={"micro_batch": 8})
    assert study.launched_plans[-1] == "zero1 x8"  # a user who asks for it directly gets it


# ---------------------------------------------------------------- no longer than needed


def test_a_trial_that_cannot_beat_the_best_is_stopped_and_cannot_win(bench: Callable[..., Bench]) -> None:
    study = bench({"zero1": [measured(50.0, watched=True)], "ddp": [measured(100.0, watched=True)]})
    assert study.start("strategy=ddp,zero1", "micro_batch=2,2", "search=grid") is StopReason.EXHAUSTED
    best, futile = study.trials
    assert (best.state, futile.state) == (State.MEASURED, State.STOPPED)
    assert isinstance(futile.outcome, Measurement)
    assert study.told == [[100.0], [50.0]]
    assert [trial.number for _, trial in Ranking(study.trials, TOKENS_PER_S).contenders] == [1]
    tokens = 16 * 128
    assert [spec.measure.beat_step_s for spec in study.cluster.launched] == [
        None,
        pytest.approx(tokens / 100.0 * 1.01),
    ]
    study.start("strategy=zero1", "space=none", point={"strategy": "zero1"})
    assert study.cluster.launched[-1].measure.beat_step_s is None  # a user wants the full measurement
    assert study.states[-1] is State.MEASURED


def test_no_trial_is_ended_early_where_that_is_not_wanted(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(50.0, watched=True)], "ddp": [measured(100.0)]})
    study.start("strategy=ddp,zero1", "micro_batch=2,2", "search=grid", futility=False)
    assert study.states == [State.MEASURED] * 2


def test_duplicates_are_measured_again_where_that_is_asked(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("activation_checkpointing=1,full", "search.repeat_duplicates=true")
    assert [(trial.state, trial.reused_from) for trial in study.trials] == [(State.MEASURED, None)] * 2
    assert len({trial.fingerprint for trial in study.trials}) == 1
    assert len(study.cluster.launched) == 2


# ---------------------------------------------------------------- several goals

BOTH = (TOKENS_PER_S, Goal(name="peak_bytes"))


@pytest.mark.parametrize("sampler", ["nsga2", "tpe"])
def test_two_goals_are_searched_and_taught_together(informed: Callable[..., Bench], sampler: str) -> None:
    """No trial is ended early, since a slow one may need least memory."""
    scripts = {"ddp": [measured(100.0, 900)], "zero1": [measured(90.0, 500)], "zero1 x4": [oom]}
    study = informed({**scripts, "zero2": [measured(80.0, 400)]})
    study.goals = BOTH
    asked = (
        *NINE_PLANS,
        "objective=[tokens_per_s,peak_bytes]",
        f"search.sampler={sampler}",
        "search.prior=1",
    )
    limits = dataclasses.replace(NO_LIMIT, trials=5)
    assert study.start(*asked, limits=limits) is StopReason.TRIALS
    assert study.start(*asked) is StopReason.EXHAUSTED
    assert len(set(study.launched_plans)) == len(study.trials) == 9
    assert [spec for spec in study.cluster.launched if spec.measure.beat_step_s is not None] == []
    failed = [trial for trial in study.trials if isinstance(trial.outcome, Failure)]
    assert [trial.outcome.kind for trial in failed if isinstance(trial.outcome, Failure)] == [
        FailureKind.GPU_OOM
    ]
    speeds = [tuple(values) for values in study.told]
    assert speeds.count((100.0, -900.0)) == 4  # a plan that ran out of memory counts as the worst so far
    assert speeds.count((80.0, -400.0)) >= 3
    assert Origin.SAMPLER in origins(study)


def test_a_plain_study_knows_no_baselines(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start(*TWO_PLANS)
    assert PLAIN == study.settings
    assert [(trial.origin, trial.baseline) for trial in study.trials] == [(Origin.SAMPLER, None)] * 2
