"""The order of untried plans by what is expected of them."""

from __future__ import annotations

import dataclasses

import pytest

from sweeps.plan.resolve import Planned
from sweeps.search.candidates import Candidate
from sweeps.search.improvement import Predictor
from sweeps.search.prior import RANKED, WORTH_SPREADING, Prior, spread
from tests.support.estimates import an_estimate
from tests.support.examples import a_plan
from train_entry.contract import Estimate, Fit, Goal, Plan


def candidate(size: int, stage: int = 2) -> Candidate:
    plan = a_plan(zero={"stage": stage}, micro_batch=size)
    planned = Planned(plan=plan, fingerprint=f"{stage}/{size}", overrides=())
    return Candidate(point={"micro_batch": size}, planned=planned, plan=plan, fingerprint=f"{stage}/{size}")


def prior(speeds: dict[int, float], goal: str = "tokens_per_s", too_large: int = 1000) -> Prior:
    """Return a prior over plans with these speeds, by micro-batch. The dict may change afterwards."""

    def estimate(plan: Plan) -> Estimate:
        fit = Fit.FITS if plan.micro_batch < too_large else Fit.TOO_LARGE
        return an_estimate(tokens_per_s=speeds[plan.micro_batch], fit=fit)

    predictor = Predictor(estimate, Goal(name=goal, tokens=1e6), "cuda")
    return Prior([candidate(size) for size in speeds], predictor)


def prints(found: list[tuple[float, Candidate]]) -> list[str]:
    return [each.fingerprint for _, each in found]


def test_the_fastest_by_its_estimate_comes_first() -> None:
    assert prints(prior({1: 50.0, 2: 90.0, 4: 70.0}).promising((), 60.0)) == ["2/2", "2/4", "2/1"]


def test_it_comes_first_also_while_nothing_is_measured() -> None:
    assert prints(prior({1: 50.0, 2: 90.0, 4: 70.0}).promising((), None)) == ["2/2", "2/4", "2/1"]


def test_the_shortest_time_to_a_token_budget_comes_first() -> None:
    found = prior({1: 50.0, 2: 90.0}, goal="time_to_tokens")
    assert prints(found.promising((), 1e6 / 60)) == ["2/2", "2/1"]


def test_plans_that_are_known_or_do_not_fit_are_left_out() -> None:
    found = prior({1: 50.0, 2: 90.0, 4: 70.0, 8: 99.0}, too_large=8)
    assert prints(found.promising({"2/2"}, 60.0)) == ["2/4", "2/1"]


@pytest.mark.parametrize("best", [60.0, None])
def test_the_order_follows_estimates_that_have_changed(best: float | None) -> None:
    speeds = {1: 50.0, 2: 90.0}
    found = prior(speeds)
    found.promising((), best)
    speeds[1] = 100.0
    assert prints(found.promising((), best)) == ["2/1", "2/2"]


def test_of_many_plans_the_best_are_looked_at_again() -> None:
    found = prior({size: float(size) for size in range(1, RANKED + 51)})
    for _ in range(2):
        leading = prints(found.promising((), 60.0))
        assert len(leading) == RANKED
        assert leading[0] == f"2/{RANKED + 50}"


# ---------------------------------------------------------------------- spread over strategies

FIRST, SECOND, OTHER = (0.2, candidate(1)), (0.15, candidate(2)), (0.1, candidate(4, stage=3))


def test_a_strategy_that_was_not_tried_goes_first() -> None:
    assert spread([FIRST, SECOND, OTHER], {"zero2"}) is OTHER


def test_of_strategies_that_were_all_tried_or_none_the_most_promising_plan_goes_first() -> None:
    assert spread([FIRST, SECOND, OTHER], {"zero2", "zero3"}) is FIRST
    assert spread([FIRST, SECOND, OTHER], ()) is FIRST


def test_another_strategy_does_not_go_first_where_it_promises_too_little() -> None:
    poor = (FIRST[0] * WORTH_SPREADING * 0.99, dataclasses.replace(OTHER[1]))
    assert spread([FIRST, poor], {"zero2"}) is FIRST


def test_no_plan_left_is_none_to_try() -> None:
    assert spread([], ()) is None
