"""The properties that follow from a trial's attempts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.examples import (
    a_lost_attempt,
    a_measured_trial,
    a_measurement,
    a_rank_measurement,
    a_repeat,
    a_trial,
    an_attempt,
)
from train_entry.contract import (
    Attempt,
    AttemptKind,
    Closing,
    Failure,
    FailureKind,
    Outcome,
    Purpose,
    State,
    TimingEnd,
    Trial,
    dump,
    load,
    state_of,
)

MEASURED = an_attempt(started_at=5.0, ended_at=60.0, outcome=a_measurement(), gpu_s=20.0)
MIXED = (a_rank_measurement(rank=0, device_name="H100"), a_rank_measurement(rank=1, device_name="A100"))


def failure(kind: FailureKind) -> Failure:
    return Failure(kind=kind, message="")


def retry(number: int, **changes: Any) -> Attempt:
    return an_attempt(number=number, kind=AttemptKind.RETRY, **changes)


# ---------------------------------------------------------------- the state that follows from an outcome


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (FailureKind.GPU_OOM, State.INFEASIBLE),
        (FailureKind.HOST_OOM, State.INFEASIBLE),
        (FailureKind.INFEASIBLE, State.INFEASIBLE),
        (FailureKind.DIVERGED, State.FAILED),
        (FailureKind.TIMED_OUT, State.FAILED),
        (FailureKind.CRASHED, State.FAILED),
        (FailureKind.NODE_LOST, State.FAILED),
        (FailureKind.CANCELLED, State.CANCELLED),
    ],
)
def test_a_failure_closes_a_trial_in_its_state(kind: FailureKind, state: State) -> None:
    assert state_of(failure(kind)) is state


def test_a_measurement_closes_a_trial_as_measured() -> None:
    assert state_of(a_measurement()) is State.MEASURED


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"ended": TimingEnd.PRECISE}, State.MEASURED),
        ({"ended": TimingEnd.FUTILE}, State.STOPPED),
        ({"ended": TimingEnd.ASKED}, State.STOPPED),
        ({"ranks": MIXED}, State.SUSPECT),
    ],
    ids=["precise", "futile", "asked", "mixed GPUs"],
)
def test_a_measurement_that_ended_early_or_is_suspect_closes_a_trial_as_such(
    changes: dict[str, Any], state: State
) -> None:
    assert state_of(a_measurement(**changes)) is state


# ---------------------------------------------------------------- the counted attempt


def test_before_its_first_launch_a_trial_is_queued() -> None:
    trial = a_trial()
    assert (trial.state, trial.outcome, trial.closed_at, trial.is_launched) == (
        State.QUEUED,
        None,
        None,
        False,
    )
    assert (trial.counted, trial.running, trial.latest, trial.shown) == (None, None, None, None)


def test_while_its_first_attempt_runs_so_does_the_trial() -> None:
    trial = a_trial(attempts=(an_attempt(),))
    assert (trial.state, trial.outcome, trial.closed_at, trial.is_launched) == (
        State.RUNNING,
        None,
        None,
        True,
    )
    assert trial.counted == trial.running == trial.latest == an_attempt()


def test_an_attempt_that_has_ended_closes_the_trial() -> None:
    trial = a_trial(attempts=(MEASURED,))
    assert (trial.state, trial.outcome, trial.closed_at) == (State.MEASURED, MEASURED.outcome, 60.0)
    assert (trial.counted, trial.running) == (MEASURED, None)


def test_after_a_lost_attempt_a_trial_is_queued_again() -> None:
    trial = a_trial(attempts=(a_lost_attempt(1),))
    assert (trial.state, trial.outcome, trial.counted) == (State.QUEUED, None, None)
    assert trial.latest == trial.shown == a_lost_attempt(1)


def test_of_several_tries_the_latest_counts() -> None:
    told = retry(3, outcome=a_measurement(), ended_at=90.0)
    trial = a_trial(attempts=(a_lost_attempt(1), a_lost_attempt(2), told))
    assert (trial.state, trial.counted, trial.shown, trial.closed_at) == (State.MEASURED, told, told, 90.0)


def test_a_last_try_that_nothing_replaces_counts_though_it_was_lost() -> None:
    lost = retry(2, outcome=failure(FailureKind.NODE_LOST), ended_at=70.0)
    trial = a_trial(attempts=(a_lost_attempt(1), lost))
    assert (trial.state, trial.counted, trial.closed_at) == (State.FAILED, lost, 70.0)


def test_repeats_and_a_check_change_nothing_of_what_was_measured() -> None:
    failed = failure(FailureKind.CRASHED)
    repeats = (a_repeat(number=2, round=1, outcome=failed), a_repeat(number=3, round=2))
    check = an_attempt(number=4, kind=AttemptKind.CHECK, outcome=failed)
    trial = a_trial(attempts=(MEASURED, *repeats, check))
    assert (trial.state, trial.counted, trial.shown, trial.closed_at) == (
        State.MEASURED,
        MEASURED,
        MEASURED,
        60.0,
    )
    assert (trial.repeats, trial.check, trial.running, trial.latest) == (repeats, check, repeats[1], check)


def test_a_lost_repeat_or_check_that_is_replaced_is_none() -> None:
    lost = a_repeat(number=2, round=1, outcome=failure(FailureKind.NODE_LOST), is_replaced=True)
    check = an_attempt(number=3, kind=AttemptKind.CHECK, outcome=lost.outcome, is_replaced=True)
    trial = a_trial(attempts=(MEASURED, lost, check))
    assert (trial.repeats, trial.check, trial.used_retries) == ((), None, 2)


@pytest.mark.parametrize(
    ("kind", "uses"),
    [
        (FailureKind.NODE_LOST, 1),
        (FailureKind.PEER_LOST, 1),
        (FailureKind.COMMS, 1),
        (FailureKind.PREEMPTED, 0),
        (FailureKind.CANCELLED, 0),
    ],
)
def test_a_lost_attempt_uses_up_a_retry_unless_others_ended_it(kind: FailureKind, uses: int) -> None:
    assert a_trial(attempts=(a_lost_attempt(1, kind), retry(2))).used_retries == uses
    last = an_attempt(outcome=failure(kind))
    assert a_trial(attempts=(last,)).used_retries == 0  # no attempt replaces it


# ---------------------------------------------------------------- trials that closed without a launch


@pytest.mark.parametrize(
    ("outcome", "reused_from", "state"),
    [
        (failure(FailureKind.INFEASIBLE), None, State.INFEASIBLE),
        (failure(FailureKind.GPU_OOM), 3, State.REUSED),
        (a_measurement(), 3, State.REUSED),
        (None, None, State.CANCELLED),
        (None, 3, State.CANCELLED),
    ],
    ids=["refused", "shares a failure", "shares a measurement", "cancelled", "cancelled while it waited"],
)
def test_a_closing_says_why_a_trial_was_never_launched(
    outcome: Outcome | None, reused_from: int | None, state: State
) -> None:
    trial = a_trial(number=4, closing=Closing(at=7.0, outcome=outcome), reused_from=reused_from)
    assert (trial.state, trial.outcome, trial.closed_at) == (state, outcome, 7.0)
    assert (trial.is_launched, trial.gpu_s) == (False, 0.0)
    assert trial.is_refused is (state is State.INFEASIBLE)


def test_what_has_no_plan_was_rejected_as_soon_as_it_was_made() -> None:
    trial = a_trial(plan=None, created_at=4.0)
    assert (trial.state, trial.outcome, trial.closed_at, trial.is_refused) == (
        State.REJECTED,
        None,
        4.0,
        False,
    )


def test_what_ran_out_of_memory_was_not_refused() -> None:
    trial = a_trial(attempts=(an_attempt(outcome=failure(FailureKind.GPU_OOM)),))
    assert (trial.state, trial.is_refused) == (State.INFEASIBLE, False)


def test_a_trial_cancelled_between_two_attempts_is_cancelled() -> None:
    trial = a_trial(attempts=(a_lost_attempt(1),), closing=Closing(at=7.0))
    assert (trial.state, trial.closed_at, trial.is_launched) == (State.CANCELLED, 7.0, True)


# ---------------------------------------------------------------- over all attempts


def test_the_cost_of_all_attempts_is_summed() -> None:
    lost = dataclasses.replace(a_lost_attempt(1), gpu_s=3.0)
    told = retry(2, outcome=a_measurement(), gpu_s=20.0)
    repeat = a_repeat(number=3, outcome=a_measurement(), gpu_s=21.5)
    assert a_trial(attempts=(lost, told, repeat)).gpu_s == 44.5


def test_only_the_attempt_that_counts_says_whether_the_node_was_shared() -> None:
    shared = dataclasses.replace(MEASURED, is_shared=True)
    assert a_trial(attempts=(shared,)).is_shared
    assert not a_trial(attempts=(MEASURED, a_repeat(number=2, is_shared=True))).is_shared
    assert not a_trial().is_shared


def test_an_attempt_begins_and_then_changes_in_its_place() -> None:
    begun = a_trial(attempts=(a_lost_attempt(1),)).with_attempt(retry(2))
    assert [attempt.number for attempt in begun.attempts] == [1, 2]
    ended = begun.with_attempt(retry(2, outcome=a_measurement(), ended_at=9.0))
    assert ended.attempts[:1] == begun.attempts[:1]
    assert (begun.state, ended.state, len(ended.attempts)) == (State.RUNNING, State.MEASURED, 2)
    older = ended.with_attempt(dataclasses.replace(a_lost_attempt(1), gpu_s=1.0))
    assert [attempt.number for attempt in older.attempts] == [1, 2]


@pytest.mark.parametrize(
    "trial",
    [
        a_trial(),
        a_trial(state=State.REJECTED),
        a_trial(state=State.REUSED),
        a_trial(state=State.INFEASIBLE, attempts=0),
        a_trial(lost=1, state=State.RUNNING),
        a_measured_trial(
            lost=1,
            repeats=(a_repeat(round=1, outcome=a_measurement()), a_repeat(Purpose.DRIFT)),
            check=failure(FailureKind.CRASHED),
            gpu_s=12.5,
        ),
    ],
    ids=["queued", "rejected", "reused", "refused", "in its second try", "measured again"],
)
def test_a_trial_is_read_as_it_was_written(trial: Trial) -> None:
    assert load(Trial, dump(trial)) == trial
