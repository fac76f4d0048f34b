"""The cases in which another attempt takes the place of one that ended."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.search.verdicts import VERDICTS, Verdict
from sweeps.study.retry import is_replaced
from tests.support.examples import a_lost_attempt, a_measurement, a_trial, an_attempt
from train_entry.contract import AttemptKind, Failure, FailureKind, Origin, Outcome, Trial

ENVIRONMENT = [kind for kind in FailureKind if VERDICTS[kind] is Verdict.RETRY]
NOT_OF_TRIES = (AttemptKind.REPEAT, AttemptKind.CHECK)


def after(outcome: Outcome | FailureKind, retries: int = 1, lost: int = 0, **changes: Any) -> bool:
    """True if a trial of the search that has lost so many attempts is launched again."""
    known: dict[str, Any] = {"trial": running(lost), "kind": AttemptKind.FIRST, "retries": retries}
    if isinstance(outcome, FailureKind):
        outcome = Failure(kind=outcome, message="")
    return is_replaced(outcome=outcome, **{**known, **changes})


def running(lost: int = 0, kind: FailureKind = FailureKind.NODE_LOST, **changes: Any) -> Trial:
    gone = [a_lost_attempt(number, kind) for number in range(1, lost + 1)]
    return a_trial(attempts=(*gone, an_attempt(number=lost + 1)), **changes)


OWN = running(origin=Origin.USER)


@pytest.mark.parametrize("kind", list(AttemptKind))
def test_what_was_measured_is_not_launched_again(kind: AttemptKind) -> None:
    assert not after(a_measurement(), kind=kind)


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind not in ENVIRONMENT])
def test_a_failure_that_may_tell_of_the_plan_is_not_retried(kind: FailureKind) -> None:
    assert not after(kind, retries=9)


@pytest.mark.parametrize("kind", ENVIRONMENT)
def test_a_failure_that_tells_nothing_of_the_plan_is_retried(kind: FailureKind) -> None:
    assert after(kind)


def test_a_lost_attempt_is_retried_as_often_as_the_study_allows() -> None:
    assert [after(FailureKind.NODE_LOST, retries=2, lost=lost) for lost in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert not after(FailureKind.NODE_LOST, retries=0)


def test_an_attempt_whose_nodes_were_taken_back_is_retried_without_end() -> None:
    assert after(FailureKind.PREEMPTED, retries=0)
    assert after(FailureKind.PREEMPTED, retries=1, lost=5)


def test_attempts_whose_nodes_were_taken_back_leave_the_retries_to_others() -> None:
    preempted = running(lost=5, kind=FailureKind.PREEMPTED)
    assert after(FailureKind.NODE_LOST, retries=1, trial=preempted)


@pytest.mark.parametrize("kind", NOT_OF_TRIES)
def test_repeats_and_checks_are_retried_from_the_trials_own_retries(kind: AttemptKind) -> None:
    assert after(FailureKind.NODE_LOST, kind=kind)
    assert not after(FailureKind.NODE_LOST, kind=kind, lost=1)
    assert not after(FailureKind.CRASHED, kind=kind)


# ---------------------------------------------------------------- cancelled


def test_what_was_cancelled_by_hand_is_launched_again() -> None:
    assert after(FailureKind.CANCELLED, retries=0)


def test_what_ctrl_c_cancelled_is_left_to_the_next_start() -> None:
    assert not after(FailureKind.CANCELLED, is_interrupted=True)


@pytest.mark.parametrize("kind", NOT_OF_TRIES)
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_cancelled_repeat_or_check_never_counts(kind: AttemptKind, is_interrupted: bool) -> None:
    assert after(FailureKind.CANCELLED, kind=kind, is_interrupted=is_interrupted)
    assert after(FailureKind.CANCELLED, kind=kind, is_interrupted=is_interrupted, trial=OWN)


# ---------------------------------------------------------------- a user's own


@pytest.mark.parametrize("kind", ENVIRONMENT)
def test_a_trial_of_the_users_own_is_retried_only_while_it_is_the_one_that_runs(kind: FailureKind) -> None:
    assert after(kind, trial=OWN, is_alone=True)
    assert not after(kind, trial=OWN)
