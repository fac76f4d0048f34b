"""GPU-hours, worked out by hand. A plan of the examples has two ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from analysis.account import Account, account, account_line
from analysis.load import load_study
from tests.support.examples import a_lost_attempt, a_measurement, a_repeat
from train_entry.contract import Attempt, AttemptKind, Failure, FailureKind, Goal, Outcome, Purpose, State

if TYPE_CHECKING:
    from tests.analysis.conftest import StudyBuilder

OOM = Failure(kind=FailureKind.GPU_OOM, message="full")
CRASH = Failure(kind=FailureKind.CRASHED, message="boom")


def found(built: StudyBuilder) -> Account:
    return account(load_study(built.directory))


def repeat(gpu_s: float, purpose: Purpose = Purpose.CONFIRM, outcome: Outcome | None = None) -> Attempt:
    return a_repeat(purpose, round=1, outcome=outcome or a_measurement(), gpu_s=gpu_s)


def of_old(
    attempt: int, purpose: Purpose = Purpose.CONFIRM, outcome: Outcome | None = None
) -> dict[str, Any]:
    """A repeat as the first edition wrote it."""
    seen = outcome or a_measurement()
    times = {"started_at": None, "ended_at": None}
    return {"attempt": attempt, "purpose": purpose, "turn": 1, "outcome": seen, **times}


def test_failures_and_what_ran_out_of_memory_are_told_apart(built: StudyBuilder) -> None:
    built.measured(1, gpu_s=100.0)
    built.trial(2, State.INFEASIBLE, outcome=OOM, gpu_s=30.0)
    built.trial(3, State.FAILED, outcome=CRASH, gpu_s=50.0)
    known = found(built)
    assert (known.spent_s, known.out_of_memory_s, known.failed_s) == (180.0, 30.0, 50.0)


def test_start_up_is_that_of_all_ranks(built: StudyBuilder) -> None:
    built.measured(1, startup_s=7.0)
    built.reused(2, 1, a_measurement(startup_s=7.0))
    assert found(built).startup_s == 14.0


def test_attempts_are_told_apart_by_what_they_were_for(built: StudyBuilder) -> None:
    lost = dataclasses.replace(a_lost_attempt(1), gpu_s=10.0)
    own = Attempt(number=2, kind=AttemptKind.RETRY, outcome=a_measurement(), gpu_s=100.0)
    repeats = (repeat(80.0), repeat(60.0, Purpose.DRIFT), repeat(40.0, outcome=CRASH))
    numbered = [dataclasses.replace(known, number=number) for number, known in enumerate(repeats, 3)]
    check = Attempt(number=6, kind=AttemptKind.CHECK, outcome=a_measurement(), gpu_s=110.0)
    built.trial(1, State.MEASURED, attempts=(lost, own, *numbered, check))
    known = found(built)
    assert (known.spent_s, known.confirmation_s, known.drift_s, known.check_s) == (400.0, 80.0, 60.0, 110.0)
    assert known.failed_s == 10.0 + 40.0  # the first attempt was lost, a repeat crashed


def test_attempts_of_the_first_edition_are_told_apart_by_how_long_their_processes_lived(
    built: StudyBuilder,
) -> None:
    repeats = (of_old(3), of_old(4, Purpose.DRIFT), of_old(5, outcome=CRASH))
    attempts = {"attempts": 6, "measured_attempt": 2, "check_attempt": 6, "repeats": repeats}
    built.of_first_edition(1, a_measurement(), gpu_s=400.0, **attempts)
    for attempt, seconds in enumerate((5.0, 50.0, 40.0, 30.0, 20.0, 55.0), 1):
        built.exit(1, attempt, seconds)
        built.exit(1, attempt, seconds - 1, rank=1)
    known = found(built)
    assert (known.confirmation_s, known.drift_s, known.check_s) == (80.0, 60.0, 110.0)
    assert known.failed_s == 2 * (5.0 + 20.0)  # the first attempt was lost, a repeat crashed


def test_attempts_that_left_no_seconds_share_the_trials_equally(built: StudyBuilder) -> None:
    attempts = {"attempts": 3, "measured_attempt": 1, "repeats": (of_old(2), of_old(3))}
    built.of_first_edition(1, a_measurement(), gpu_s=120.0, **attempts)
    assert found(built).confirmation_s == 80.0
    built.exit(1, 1, 40.0)
    assert found(built).confirmation_s == 40.0


def test_the_gate_spares_what_running_out_of_memory_took_elsewhere(built: StudyBuilder) -> None:
    for number, gpu_s in ((1, 30.0), (2, 50.0), (3, 90.0)):
        built.trial(number, State.INFEASIBLE, outcome=OOM, gpu_s=gpu_s)
    for number, fingerprint in ((4, "a"), (5, "a"), (6, "b")):  # the same plan fails once
        built.refused(number, fingerprint=fingerprint)
    assert found(built).gate_s == 2 * 50.0


def test_where_nothing_ran_out_of_memory_it_spares_a_start(built: StudyBuilder) -> None:
    built.refused(1)
    assert found(built).gate_s == 0.0
    built.measured(2, startup_s=7.0)
    assert found(built).gate_s == 14.0


def test_reuse_spares_the_twins_own_measurement_without_its_repeats(built: StudyBuilder) -> None:
    built.measured(1, gpu_s=45.0, trial={"repeats": (repeat(45.0),)})
    built.reused(2, 1)
    built.reused(3, 99)
    assert found(built).reuse_s == 45.0


def test_an_early_end_spares_steps_of_all_ranks(built: StudyBuilder) -> None:
    again = repeat(20.0, outcome=a_measurement(spared_steps=4, step_s=0.25))
    built.measured(1, spared_steps=10, step_s=0.5, trial={"repeats": (again,)})
    built.measured(2, state=State.STOPPED, spared_steps=16, step_s=1.0)
    built.reused(3, 1, a_measurement(spared_steps=10, step_s=0.5))
    assert found(built).early_s == 2 * (10 * 0.5 + 4 * 0.25 + 16 * 1.0)


def an_account(**changes: float) -> Account:
    names = ("out_of_memory_s", "failed_s", "startup_s", "confirmation_s", "drift_s", "check_s")
    nothing = dict.fromkeys((*names, "gate_s", "reuse_s", "early_s"), 0.0)
    return Account(**{"spent_s": 4464.0, **nothing, **changes})


def test_the_line_leaves_out_what_there_was_none_of() -> None:
    assert account_line(an_account()) == "GPU-hours: 1.24 spent"
    some = an_account(failed_s=396.0, confirmation_s=1080.0, gate_s=1440.0, reuse_s=360.0, early_s=2160.0)
    assert account_line(some) == (
        "GPU-hours: 1.24 spent (0.11 on failures, 0.3 on confirmation); "
        "saved: 0.4 on plans not launched, 0.1 by reuse, 0.6 by ending trials early"
    )


def test_money_is_counted_where_a_price_is_known(built: StudyBuilder) -> None:
    assert account_line(an_account(gate_s=3600.0, price_per_gpu_hour=3.0)).endswith(
        "; cost: 3.72 spent, 3.00 saved"
    )
    built.seeks(Goal(name="tokens_per_s", price_per_gpu_hour=2.5))
    assert found(built).price_per_gpu_hour == 2.5
    built.study(asked={"cluster.price_per_gpu_hour": 4.0})
    assert found(built).price_per_gpu_hour == 4.0


def test_a_large_study_is_counted_in_whole_hours() -> None:
    assert account_line(an_account(spent_s=3600 * 12_345.6)) == "GPU-hours: 12,346 spent"
    assert an_account(gate_s=1.0, reuse_s=2.0, early_s=4.0).spared_s == pytest.approx(7.0)
