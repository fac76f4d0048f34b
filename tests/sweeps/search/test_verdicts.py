"""The meaning of a closed trial: its verdict, and what the sampler hears of it."""

from __future__ import annotations

import math

import pytest

from sweeps.search.verdicts import BROKEN, HOLDS, VERDICTS, Lesson, Verdict, lesson
from sweeps.space.dimensions import Point
from tests.support.examples import a_measured_trial, a_measurement, a_trial
from train_entry.contract import Failure, FailureKind, Goal, State

POINT: Point = {"strategy": "zero2", "micro_batch": 4}
GOALS = [Goal(name="tokens_per_s_per_gpu")]


def failure(kind: FailureKind) -> Failure:
    return Failure(kind=kind, message="")


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_has_a_verdict_and_an_explanation(kind: FailureKind) -> None:
    assert isinstance(VERDICTS[kind], Verdict)
    assert kind.explanation


def test_a_measurement_teaches_its_objective() -> None:
    measured = a_measurement(tokens_per_s=2000.0, tokens_per_s_per_gpu=500.0)
    expected = Lesson(point=POINT, scores=(500.0,), legal=HOLDS, memory=HOLDS, trained=HOLDS)
    assert lesson(a_measured_trial(outcome=measured), GOALS) == expected
    total = lesson(a_measured_trial(outcome=measured), [Goal(name="tokens_per_s")])
    assert total is not None
    assert total.scores == (2000.0,)


def test_a_value_that_is_no_number_counts_as_the_worst() -> None:
    found = lesson(a_measured_trial(outcome=a_measurement(tokens_per_s_per_gpu=math.nan)), GOALS)
    assert found is not None
    assert found.scores is None


def test_a_rejection_breaks_the_legal_constraint() -> None:
    rejected = a_trial(state=State.REJECTED, plan=None)
    expected = Lesson(point=POINT, scores=None, legal=BROKEN, memory=HOLDS, trained=HOLDS)
    assert lesson(rejected, GOALS) == expected


@pytest.mark.parametrize("kind", [FailureKind.GPU_OOM, FailureKind.HOST_OOM, FailureKind.INFEASIBLE])
def test_out_of_memory_breaks_the_memory_constraint(kind: FailureKind) -> None:
    expected = Lesson(point=POINT, scores=None, legal=HOLDS, memory=BROKEN, trained=HOLDS)
    assert lesson(a_trial(outcome=failure(kind)), GOALS) == expected


@pytest.mark.parametrize("kind", [FailureKind.DIVERGED, FailureKind.TIMED_OUT])
def test_what_never_trained_breaks_the_trained_constraint(kind: FailureKind) -> None:
    expected = Lesson(point=POINT, scores=None, legal=HOLDS, memory=HOLDS, trained=BROKEN)
    assert lesson(a_trial(outcome=failure(kind)), GOALS) == expected


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if VERDICTS[kind] is not Verdict.LEARN])
def test_what_says_nothing_of_the_plan_teaches_nothing(kind: FailureKind) -> None:
    assert lesson(a_trial(outcome=failure(kind)), GOALS) is None
    assert lesson(a_trial(state=State.CANCELLED), GOALS) is None


def test_a_kind_is_retried_only_where_it_tells_nothing_of_the_plan() -> None:
    retried = {kind for kind, verdict in VERDICTS.items() if verdict is Verdict.RETRY}
    about_the_plan = {FailureKind.GPU_OOM, FailureKind.DIVERGED, FailureKind.BAD_CONFIG, FailureKind.CRASHED}
    assert retried & about_the_plan == set()
    assert {FailureKind.NODE_LOST, FailureKind.PREEMPTED, FailureKind.COMMS} <= retried
