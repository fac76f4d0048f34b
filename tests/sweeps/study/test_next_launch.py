"""The next launch of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sweeps.config.schema import ConfirmConfig
from sweeps.study.limits import StopReason
from sweeps.study.next_launch import Done, Launch, Policy, Situation, Wait, next_launch
from tests.support.examples import a_measured_trial, a_measurement, a_repeat, a_trial, an_attempt
from train_entry.contract import AttemptKind, Failure, FailureKind, Goal, Origin, Purpose, State, Trial

GOAL = Goal(name="tokens_per_s")
ENDED = StopReason.EXHAUSTED
LOST = Failure(kind=FailureKind.NODE_LOST, message="gone")


def following(
    *trials: Trial,
    ended: StopReason | None = None,
    running: Sequence[int] = (),
    is_spent: bool = False,
    check_best: int = 0,
    **confirm: Any,
) -> Launch | Wait | Done:
    """Return what follows if drift is looked for after two trials and two trials have two rounds."""
    known = {"best": 2, "rounds": 2, "drift_every": 2, **confirm}
    policy = Policy(confirm=ConfirmConfig(**known), check_best=check_best)
    now = Situation(running=running, search_end=ended, is_spent=is_spent)
    return next_launch(trials, GOAL, policy, now)


def trial(number: int, tokens_per_s: float = 100.0, rounds: int = 0, **changes: Any) -> Trial:
    """Return a trial that ended as many seconds after the start as its number says, then `rounds` repeats."""
    seen = a_measurement(tokens_per_s=tokens_per_s)
    repeats = [a_repeat(round=at, outcome=seen, ended_at=50.0) for at in range(1, rounds + 1)]
    known = {"number": number, "outcome": seen, "closed_at": float(number), "repeats": repeats}
    return a_measured_trial(**{**known, **changes})


def queued(number: int, **changes: Any) -> Trial:
    return a_trial(number=number, **changes)


def first(trial: Trial) -> Launch:
    return Launch(trial=trial, kind=AttemptKind.FIRST)


def confirming(trial: Trial, at: int) -> Launch:
    return Launch(trial=trial, kind=AttemptKind.REPEAT, purpose=Purpose.CONFIRM, round=at)


# ---------------------------------------------------------------- first runs, retries


def test_a_queued_trial_is_launched_for_the_first_time() -> None:
    assert following(queued(1)) == first(queued(1))


def test_queued_trials_are_launched_in_the_order_of_their_numbers() -> None:
    assert following(trial(1), queued(2), queued(3)) == first(queued(2))


def test_a_trial_that_was_lost_is_launched_as_a_retry() -> None:
    lost = queued(1, lost=1)
    assert following(lost, queued(2)) == Launch(trial=lost, kind=AttemptKind.RETRY)


def test_a_first_run_of_a_lower_number_goes_before_a_retry() -> None:
    assert following(queued(1), queued(2, lost=1)) == first(queued(1))


def test_a_trial_that_waits_for_its_twin_is_not_launched() -> None:
    twin = queued(2, reused_from=1)
    assert following(a_trial(state=State.RUNNING), twin, running=[1]) == Wait()
    assert following(a_trial(state=State.RUNNING), twin, queued(3), running=[1]) == first(queued(3))


@pytest.mark.parametrize("is_spent", [False, True])
def test_what_is_queued_is_launched_though_the_search_has_ended(is_spent: bool) -> None:
    assert following(trial(1), queued(2), ended=ENDED, is_spent=is_spent) == first(queued(2))


# ---------------------------------------------------------------- while the search goes on


def test_with_nothing_queued_the_search_proposes() -> None:
    assert following() == Wait()
    assert following(trial(1), trial(2)) == Wait()


def test_after_so_many_trials_the_best_baseline_is_measured_again_to_see_drift() -> None:
    baseline = trial(1, baseline="ddp")
    look = Launch(trial=baseline, kind=AttemptKind.REPEAT, purpose=Purpose.DRIFT)
    assert following(baseline, trial(2)) == Wait()
    assert following(baseline, trial(2), trial(3)) == look
    assert following(baseline, trial(2), trial(3), drift_every=0) == Wait()


def test_a_look_for_drift_comes_while_others_run_but_not_while_its_own_trial_does() -> None:
    baseline = trial(1, baseline="ddp")
    known = (baseline, trial(2), trial(3), a_trial(number=4, state=State.RUNNING))
    look = Launch(trial=baseline, kind=AttemptKind.REPEAT, purpose=Purpose.DRIFT)
    assert following(*known, running=[4]) == look
    assert following(*known, running=[1, 4]) == Wait()


def test_first_runs_go_before_a_look_for_drift() -> None:
    assert following(trial(1, baseline="ddp"), trial(2), trial(3), queued(4)) == first(queued(4))


def test_once_the_search_has_ended_nobody_looks_for_drift() -> None:
    known = (trial(1, baseline="ddp"), trial(2), trial(3))
    assert following(*known, ended=ENDED, best=0) == Done(reason=ENDED)


# ---------------------------------------------------------------- the confirmation


def test_after_the_search_the_best_are_measured_again_round_by_round() -> None:
    fast, slow = (100.0, 99.0)
    taken = [
        following(trial(1, fast, rounds=ours), trial(2, slow, rounds=theirs), ended=ENDED)
        for ours, theirs in ((0, 0), (1, 0), (1, 1), (2, 1))
    ]
    assert taken == [
        confirming(trial(1, fast), 1),
        confirming(trial(2, slow), 1),
        confirming(trial(1, fast, rounds=1), 2),
        confirming(trial(2, slow, rounds=1), 2),
    ]
    assert following(trial(1, fast, rounds=2), trial(2, slow, rounds=2), ended=ENDED) == Done(reason=ENDED)


def test_a_repeat_that_was_lost_is_launched_again_in_its_round() -> None:
    lost = trial(1, repeats=[a_repeat(round=1, outcome=LOST, is_replaced=True)])
    assert following(lost, ended=ENDED) == confirming(lost, 1)


def test_the_confirmation_waits_until_nothing_runs() -> None:
    assert following(trial(1), a_trial(number=2, state=State.RUNNING), ended=ENDED, running=[2]) == Wait()
    assert following(trial(1), ended=ENDED, running=[1]) == Wait()


def test_the_confirmation_waits_until_nothing_is_queued() -> None:
    assert following(trial(1), queued(2, reused_from=1), ended=ENDED) == Wait()


def test_while_the_search_goes_on_nothing_is_confirmed() -> None:
    assert following(trial(1), trial(2), drift_every=0) == Wait()


# ---------------------------------------------------------------- checks


def test_after_the_confirmation_the_best_are_trained_longer() -> None:
    known = (trial(1, 90.0), trial(2, 100.0))
    assert following(*known, ended=ENDED, check_best=1) == confirming(known[1], 1)
    check = Launch(trial=known[1], kind=AttemptKind.CHECK)
    assert following(*known, ended=ENDED, check_best=1, best=0) == check


@pytest.mark.parametrize(
    "check", [a_measurement(), Failure(kind=FailureKind.CRASHED, message="no")], ids=["ran", "failed"]
)
def test_each_of_the_best_is_trained_longer_once_whatever_comes_of_it(check: Any) -> None:
    best, next_best, last = trial(1, 100.0, check=check), trial(2, 90.0), trial(3, 80.0)
    known: dict[str, Any] = {"ended": ENDED, "best": 0, "check_best": 2}
    assert following(best, next_best, last, **known) == Launch(trial=next_best, kind=AttemptKind.CHECK)
    checked = trial(2, 90.0, check=check)
    assert following(best, checked, last, **known) == Done(reason=ENDED)


def test_a_check_that_was_lost_is_launched_again() -> None:
    lost = trial(1).with_attempt(an_attempt(number=2, kind=AttemptKind.CHECK, outcome=LOST, is_replaced=True))
    check = Launch(trial=lost, kind=AttemptKind.CHECK)
    assert following(lost, ended=ENDED, best=0, check_best=1) == check


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("reason", StopReason)
def test_when_nothing_is_left_the_study_ends_for_the_reason_that_ended_its_search(
    reason: StopReason,
) -> None:
    assert following(trial(1), ended=reason, best=0) == Done(reason=reason)
    assert following(ended=reason) == Done(reason=reason)


def test_spent_limits_end_the_study_without_confirmation_or_checks() -> None:
    known = (trial(1), trial(2))
    ended = following(*known, ended=StopReason.HOURS, is_spent=True, check_best=2)
    assert ended == Done(reason=StopReason.HOURS)


def test_even_with_spent_limits_what_runs_is_waited_for() -> None:
    running = a_trial(number=2, state=State.RUNNING)
    assert following(trial(1), running, ended=StopReason.HOURS, is_spent=True, running=[2]) == Wait()


def test_a_trial_of_the_users_own_brings_no_look_for_drift_nearer() -> None:
    own = trial(3, origin=Origin.USER)
    assert following(trial(1, baseline="ddp"), trial(2), own) == Wait()
