"""Objections to plans that need at least as much as a plan that failed."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.search.dominance import Dominance
from tests.support.estimates import GIB, an_estimate
from tests.support.examples import a_measured_trial, a_plan, a_trial
from train_entry.contract import Estimate, Failure, FailureKind, Offload, OffloadPlan, Plan, Trial


def estimate(plan: Plan) -> Estimate:
    """Return an estimate of which every need grows with the micro-batch."""
    size = plan.micro_batch
    return an_estimate(needed_bytes=size * GIB, host_bytes=size * GIB, step_s=float(size))


def failed(size: int, kind: FailureKind = FailureKind.GPU_OOM, **changes: Any) -> Trial:
    plan = a_plan(micro_batch=size)
    outcome = Failure(kind=kind, message="no")
    return a_trial(**{"number": 7, "plan": plan, "outcome": outcome, **changes})


def ran(size: int, **changes: Any) -> Trial:
    return a_measured_trial(plan=a_plan(micro_batch=size, **changes))


def objection(trials: list[Trial], plan: Plan) -> str | None:
    found = Dominance(estimate=estimate)
    for trial in trials:
        found.learn(trial)
    return found.objection(plan, estimate(plan))


OFFLOADED = OffloadPlan(optimizer=Offload.CPU)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (FailureKind.GPU_OOM, "memory"),
        (FailureKind.HOST_OOM, "host memory"),
        (FailureKind.TIMED_OUT, "time"),
    ],
)
def test_a_plan_that_needs_no_less_than_one_that_failed_is_objected_to(kind: FailureKind, what: str) -> None:
    said = f"needs at least as much {what} as trial 0007, which failed: {kind.explanation}"
    assert objection([failed(4, kind)], a_plan(micro_batch=8)) == said
    assert objection([failed(4, kind)], a_plan(micro_batch=4)) == said
    assert objection([failed(4, kind)], a_plan(micro_batch=2)) is None


@pytest.mark.parametrize("kind", [FailureKind.CRASHED, FailureKind.HUNG, FailureKind.DIVERGED])
def test_failures_for_want_of_nothing_say_nothing_of_other_plans(kind: FailureKind) -> None:
    assert objection([failed(4, kind)], a_plan(micro_batch=8)) is None


@pytest.mark.parametrize(
    "changes",
    [{"zero": {"stage": 3}}, {"tensor": 2}, {"pipeline": 2}, {"offload": OFFLOADED}],
    ids=["zero3", "tensor", "pipeline", "offload"],
)
def test_plans_whose_memory_follows_other_rules_are_not_objected_to(changes: dict[str, Any]) -> None:
    assert objection([failed(4)], a_plan(micro_batch=8, **changes)) is None


def test_stages_up_to_two_follow_the_same_rules() -> None:
    assert objection([failed(4)], a_plan(zero={"stage": 1}, micro_batch=8)) is not None


def test_a_plan_that_needed_as_much_and_ran_speaks_against_it() -> None:
    assert objection([failed(4), ran(8)], a_plan(micro_batch=8)) is None
    assert objection([failed(4), ran(8)], a_plan(micro_batch=16)) is not None


def test_a_plan_of_other_rules_that_ran_does_not() -> None:
    assert objection([failed(4), ran(16, offload=OFFLOADED)], a_plan(micro_batch=8)) is not None


def test_estimates_are_as_they_are_now() -> None:
    bytes_by_size = {4: 10, 8: 20}

    def now(plan: Plan) -> Estimate:
        return an_estimate(needed_bytes=bytes_by_size[plan.micro_batch])

    found = Dominance(estimate=now)
    found.learn(failed(4))
    assert found.objection(a_plan(micro_batch=8), now(a_plan(micro_batch=8))) is not None
    bytes_by_size[4] = 30
    assert found.objection(a_plan(micro_batch=8), now(a_plan(micro_batch=8))) is None


def test_nothing_is_learnt_from_a_trial_that_was_not_launched() -> None:
    assert objection([failed(4, attempts=0)], a_plan(micro_batch=8)) is None
    assert objection([failed(4, plan=None)], a_plan(micro_batch=8)) is None
