"""The loop with the real planner, sampler, ledger and files; only jobs and time are scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sweeps.machine import Machine
from sweeps.study.limits import StopReason
from tests.support.examples import a_rank_measurement
from tests.support.fake_cluster import Script, crash, failing, lost, measured, oom
from tests.support.studies import FOUR_PLANS, NO_LIMIT, Bench
from train_entry.contract import (
    AttemptDir,
    AttemptKind,
    Failure,
    FailureKind,
    Measurement,
    State,
    Trial,
    TrialSpec,
    dump,
    write_atomic,
)


def kinds(trial: Trial) -> FailureKind | None:
    return trial.outcome.kind if isinstance(trial.outcome, Failure) else None


# ---------------------------------------------------------------- searching


def test_a_finite_space_is_measured_whole_and_each_plan_once(bench: Callable[..., Bench]) -> None:
    study = bench()
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 4
    assert sorted(study.launched_plans) == ["ddp x1", "ddp x2", "zero1 x1", "zero1 x2"]
    assert study.cluster.most_at_once == 1


def test_a_measured_trial_is_on_record_with_its_numbers(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(1024.0)]})
    study.start("micro_batch=2,4", "strategy=zero2")
    trial = study.trials[0]
    assert isinstance(trial.outcome, Measurement)
    assert (trial.outcome.tokens_per_s, trial.outcome.tokens_per_s_per_gpu) == (1024.0, 512.0)
    (attempt,) = trial.attempts
    assert (trial.gpu_s, trial.counted, attempt.number) == (20.0, attempt, 1)
    assert trial.overrides[-1] == f"micro_batch={trial.values['micro_batch']}"
    assert "strategy=zero2" in trial.overrides


def test_trials_on_different_cards_are_told_once(bench: Callable[..., Bench]) -> None:
    def on(card: str) -> Script:
        def write(attempt: AttemptDir, spec: TrialSpec) -> None:
            measured(1024.0)(attempt, spec)
            for rank in range(spec.plan.ranks):
                write_atomic(attempt.outcome(rank), dump(a_rank_measurement(rank=rank, device_name=card)))

        return write

    study = bench({"ddp": [on("A100")], "zero1": [on("H100")]})
    study.start(*FOUR_PLANS)
    told = [text for text in study.heard.messages if "they are not comparable" in text]
    assert len(told) == 1
    assert "A100" in told[0]
    assert "H100" in told[0]


def test_every_change_is_heard_after_it_is_on_record(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("micro_batch=2,2")
    assert study.heard.states == [(1, State.QUEUED), (1, State.RUNNING), (1, State.MEASURED)]


def test_the_limit_counts_trials_that_were_launched(bench: Callable[..., Bench]) -> None:
    study = bench()
    limits = dataclasses.replace(NO_LIMIT, trials=2)
    assert study.start("micro_batch=1,3,2,5,4,7,8", "search=grid", limits=limits) is StopReason.TRIALS
    assert study.launched_plans == ["zero1 x1", "zero1 x2"]
    assert study.states == [State.MEASURED, State.REJECTED, State.MEASURED]


def test_a_raised_limit_goes_on_where_the_study_ended(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start(*FOUR_PLANS, limits=dataclasses.replace(NO_LIMIT, trials=1))
    assert study.start(*FOUR_PLANS, limits=dataclasses.replace(NO_LIMIT, trials=3)) is StopReason.TRIALS
    assert len(set(study.launched_plans)) == len(study.launched_plans) == 3


def test_a_rejected_point_costs_no_launch_and_keeps_its_reasons(bench: Callable[..., Bench]) -> None:
    study = bench()
    assert study.start("micro_batch=3,5") is StopReason.EXHAUSTED
    assert study.states == [State.REJECTED] * 2
    assert study.cluster.launched == []
    assert "micro_batch may be 1, 2, 4 or 8" in study.trials[0].reasons[0].text


def test_out_of_memory_closes_a_trial_as_infeasible_and_the_study_goes_on(
    bench: Callable[..., Bench],
) -> None:
    study = bench({"ddp": [oom]})
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    found = {(trial.values["strategy"], trial.state, kinds(trial)) for trial in study.trials}
    assert found == {
        ("ddp", State.INFEASIBLE, FailureKind.GPU_OOM),
        ("zero1", State.MEASURED, None),
    }
    assert len(study.launched_plans) == 4


def test_a_crash_closes_a_trial_as_failed_without_a_retry(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [crash]})
    study.start("micro_batch=1,2")
    assert study.states == [State.FAILED] * 2
    assert [len(trial.attempts) for trial in study.trials] == [1, 1]


def test_a_finished_study_launches_nothing_again(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp x1": [oom], "ddp x2": [crash]})
    study.start(*FOUR_PLANS)
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert len(study.launched_plans) == len(study.trials) == 4


def test_the_hours_count_only_while_trials_are_open(bench: Callable[..., Bench]) -> None:
    study = bench(polls={"*": 900})  # polls of 0.2 s: 3 minutes a trial
    limits = dataclasses.replace(NO_LIMIT, hours=0.09)  # 5.4 minutes: no third trial is begun
    study.start(*FOUR_PLANS, limits=dataclasses.replace(limits, trials=1))
    study.clock.time_s += 24 * 3600
    assert study.start(*FOUR_PLANS, limits=limits) is StopReason.HOURS
    assert len(study.trials) == 2


# ---------------------------------------------------------------- advice


def test_a_trial_that_ran_out_of_memory_is_closed_with_what_to_try_next(bench: Callable[..., Bench]) -> None:
    study = bench({"zero1 x2": [oom]})
    study.start("micro_batch=1,2", "search=grid", "space=none")
    fits, full = study.trials
    assert full.advice is not None
    assert full.advice.changes == {"activation_checkpointing": "full"}
    assert full.advice.overrides == (*full.overrides, "activation_checkpointing=full")
    assert fits.advice is None


def test_advice_builds_on_what_the_study_has_tried(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [oom]})
    study.start("activation_checkpointing=full,none", "micro_batch=2", "search=grid", "space=none")
    assert [dict(trial.advice.changes) for trial in study.trials if trial.advice] == [
        {"micro_batch": 1},
        {"activation_checkpointing": "full", "micro_batch": 1},
    ]


@pytest.mark.parametrize("script", [crash, failing(FailureKind.DIVERGED), lost])
def test_other_failures_get_no_advice(bench: Callable[..., Bench], script: Script) -> None:
    study = bench({"*": [script]})
    study.start("micro_batch=2,2")
    assert (study.states, study.trials[0].advice) == ([State.FAILED], None)


# ---------------------------------------------------------------- lost attempts


def test_a_lost_node_is_retried(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [lost, measured(100.0)]})
    study.start("micro_batch=2,2")
    assert study.states == [State.MEASURED]
    assert [(spec.attempt, spec.kind) for spec in study.cluster.launched] == [
        (1, AttemptKind.FIRST),
        (2, AttemptKind.RETRY),
    ]
    assert study.trials[0].counted == study.trials[0].attempts[1]


def test_after_its_retries_a_lost_trial_has_failed(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [lost]})
    study.start("micro_batch=1,2", limits=dataclasses.replace(NO_LIMIT, retries=2))
    assert study.states == [State.FAILED] * 2
    assert [len(trial.attempts) for trial in study.trials] == [3, 3]
    assert kinds(study.trials[0]) is FailureKind.NODE_LOST


def test_preempted_attempts_use_up_no_retries(bench: Callable[..., Bench]) -> None:
    preempted = failing(FailureKind.PREEMPTED)
    study = bench({"*": [preempted, preempted, preempted, measured(100.0)]})
    study.start("micro_batch=2,2", limits=dataclasses.replace(NO_LIMIT, retries=1))
    assert [(trial.state, len(trial.attempts), trial.used_retries) for trial in study.trials[:1]] == [
        (State.MEASURED, 4, 0)
    ]


def test_the_cost_of_all_attempts_is_summed(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [failing(FailureKind.COMMS), measured(100.0)]})
    study.start("micro_batch=2,2")
    assert study.trials[0].gpu_s == 2 * 20.0


# ---------------------------------------------------------------- the same job

SAME_JOB = "activation_checkpointing=1,full"  # every block, written in two ways


def test_a_plan_that_would_run_the_same_job_shares_its_measurement(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(70.0)]})
    study.start(SAME_JOB, "precision=auto,fp32")
    assert study.states == [State.MEASURED, *[State.REUSED] * 3]
    assert [trial.reused_from for trial in study.trials] == [None, 1, 1, 1]
    outcome = study.trials[3].outcome
    assert isinstance(outcome, Measurement)
    assert (len(study.cluster.launched), outcome.tokens_per_s) == (1, 70.0)


def test_a_twin_of_an_infeasible_trial_is_not_launched_either(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [oom]})
    study.start(SAME_JOB)
    assert study.states == [State.INFEASIBLE, State.REUSED]
    assert len(study.cluster.launched) == 1


def test_a_twin_of_a_running_trial_waits_for_it(bench: Callable[..., Bench]) -> None:
    study = bench(parallel=2)
    study.start("ranks=1", SAME_JOB)
    assert study.heard.states.index((2, State.QUEUED)) < study.heard.states.index((1, State.MEASURED))
    assert study.states == [State.MEASURED, State.REUSED]
    assert len(study.cluster.launched) == 1


def test_a_twin_of_a_trial_that_came_to_nothing_is_launched_itself(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [crash]}, parallel=2)
    study.start("ranks=1", SAME_JOB)
    assert study.states == [State.FAILED, State.FAILED]
    assert [spec.trial for spec in study.cluster.launched] == [1, 2]
    assert study.trials[1].reused_from is None


# ---------------------------------------------------------------- side by side


def test_two_slots_run_two_trials_at_once_and_mark_them_shared(bench: Callable[..., Bench]) -> None:
    study = bench(parallel=2)
    study.start("ranks=1", *FOUR_PLANS)
    assert study.cluster.most_at_once == 2
    assert [trial.is_shared for trial in study.trials] == [True] * 4
    assert {attempt.slots for trial in study.trials for attempt in trial.attempts} == {
        ("core-0",),
        ("core-1",),
    }


def test_a_trial_that_ran_alone_is_not_shared(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start(*FOUR_PLANS)
    assert [trial.is_shared for trial in study.trials] == [False] * 4


def test_a_freed_slot_is_filled_while_a_slow_trial_runs_on(bench: Callable[..., Bench]) -> None:
    study = bench(parallel=2, polls={"ddp x1": 30})
    study.start("ranks=1", "search=grid", *FOUR_PLANS)
    closed = [number for number, state in study.heard.states if state is State.MEASURED]
    assert list(dict.fromkeys(closed))[-1] == 1
    assert study.states == [State.MEASURED] * 4


# ---------------------------------------------------------------- other studies on the machine


def test_while_another_study_holds_the_slots_it_waits_and_says_so_once(bench: Callable[..., Bench]) -> None:
    study = bench(taken={"core-0"})
    study.clock.at[20] = study.cluster.taken.clear
    assert study.start("micro_batch=2,2") is StopReason.EXHAUSTED
    assert study.heard.messages == ["waiting for 2 free slots; another study holds them"]
    assert study.states == [State.MEASURED]


def test_a_timing_taken_beside_another_study_is_marked_shared(bench: Callable[..., Bench]) -> None:
    study = bench(machine=Machine(device="cpu", nodes=1, ranks_per_node=4, cores=4), taken={"core-0"})
    study.start("micro_batch=2,2", "ranks=2")
    assert [trial.is_shared for trial in study.trials] == [True]
