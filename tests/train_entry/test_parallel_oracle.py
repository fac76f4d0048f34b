"""Tensor and pipeline degrees change only speed and memory: the losses are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import parallel_cases as cases
from tests.support.oracle_cases import Plans
from tests.train_entry.test_oracle import assert_alike, specs
from train_entry.contract import Plan, StepMetrics, TrialSpec

# The first test of a run waits until its processes have trained all its plans.
pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(1200)]

TrainAll = Callable[[dict[str, TrialSpec]], Any]


def with_models(plans: Plans) -> dict[str, TrialSpec]:
    """Return each plan with the usual model, and some plans with other models too."""
    made = {f"llama: {name}": spec for name, spec in specs(plans).items()}
    for model, names in cases.ALSO.items():
        wanted = {name: plan for name, plan in plans.items() if name in names}
        more = specs(wanted, model=cases.MODELS[model])
        made |= {f"{model}: {name}": spec for name, spec in more.items()}
    return made


@pytest.fixture(scope="module")
def alone(train_all: TrainAll) -> Any:
    return train_all(with_models(cases.ALONE))


@pytest.fixture(scope="module", params=range(len(cases.RUNS)), ids=["staged", "split", "4 staged", "4 split"])
def run(request: pytest.FixtureRequest, train_all: TrainAll) -> Iterator[tuple[Plans, Any]]:
    plans = cases.RUNS[request.param]
    yield plans, train_all(with_models(plans))


def like(name: str) -> str:
    """Return the one-process case with which a case is compared."""
    ends = ("not clipped", "adamw, bf16", "bf16", "fp16")
    return "one process" + next((f", {end}" for end in ends if name.endswith(end)), "")


def test_it_trains_as_one_process_does(run: tuple[Plans, Any], alone: Any) -> None:
    plans, trained = run
    for full_name in with_models(plans):
        model, _, name = full_name.partition(": ")
        print(f"\n{full_name}:", end="")
        is_half = name.endswith(("bf16", "fp16"))
        steps: list[StepMetrics] = trained.steps(full_name)
        assert_alike(steps, alone.steps(f"{model}: {like(name)}"), rel=5e-4 if is_half else 1e-5)


def test_the_norm_of_the_gradient_counts_every_parameter_once(run: tuple[Plans, Any], alone: Any) -> None:
    """The norm matters for training: every gradient is clipped by it."""
    plans, trained = run
    expected = [step.grad_norm for step in alone.steps("llama: one process")]
    known = [name for name, plan in plans.items() if plan.zero.stage and name.startswith(plan.strategy)]
    exact = [name for name in known if not name.endswith(("bf16", "fp16"))]
    assert exact
    for name in exact:
        assert [step.grad_norm for step in trained.steps(f"llama: {name}")] == pytest.approx(
            expected, rel=1e-5
        )


def test_parameters_are_counted_whole_on_every_rank(run: tuple[Plans, Any]) -> None:
    plans, trained = run
    for name, plan in plans.items():
        outcomes = [trained.outcome(f"llama: {name}", rank) for rank in range(plan.ranks)]
        assert {outcome.parameters for outcome in outcomes} == {26_784}


def test_neighbours_share_matrices_and_the_farthest_are_stages() -> None:
    plan: Plan = cases.parallel(1, ranks=8, tensor=2, pipeline=2)
    places = [(at.stage, at.data, at.tensor) for at in map(plan.coordinates, range(8))]
    assert places == [(s, d, t) for s in (0, 1) for d in (0, 1) for t in (0, 1)]
