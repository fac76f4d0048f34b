"""The oracle for changes to engines: all strategies and settings must train the same model in the same way.

Cases of `oracle_cases.py` that must train alike are compared step by step. `pytest -sv
tests/train_entry/test_oracle.py` prints the largest deviations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle_cases as cases
from tests.support.facilities import has_async_io
from tests.support.oracle_cases import Plans
from tests.train_entry.conftest import tiny_spec
from train_entry.contract import MeasureSpec, Offload, RankMeasurement, StepMetrics, TrialSpec
from train_entry.engines.schedule import rate

# The first test that runs waits until one pair of processes has trained all cases.
pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(1800)]

STEPS = 10
PEAK_LR = 1e-3
WARMUP_STEPS = 6
TrainAll = Callable[[dict[str, TrialSpec]], Any]


def specs(plans: Plans, steps: int = STEPS, **changes: Any) -> dict[str, TrialSpec]:
    measure = MeasureSpec(warmup_steps=0, steps=steps, split_steps=0, update_norms=True)
    return {name: tiny_spec(plan, measure=measure, **changes) for name, plan in plans.items()}


@pytest.fixture(scope="module")
def two_ranks(train_all: TrainAll, tmp_path_factory: pytest.TempPathFactory) -> Any:
    on_nvme: Plans = cases.on_nvme(tmp_path_factory.mktemp("nvme")) if has_async_io() else {}
    ddp = cases.STRATEGIES["ddp"]
    wide = dataclasses.replace(tiny_spec(ddp).model, **cases.WIDE)
    on_nvme = {"ddp, wide": ddp, **on_nvme}
    return train_all({**specs(cases.TWO_RANKS), **specs(on_nvme, steps=5, model=wide)})


@pytest.fixture(scope="module")
def one_rank(train_all: TrainAll) -> Any:
    return train_all(specs(cases.ONE_PROCESS))


def assert_alike(steps: Sequence[StepMetrics], like: Sequence[StepMetrics], rel: float) -> None:
    """Assert equal losses, update norms and learning rates, and gradient norms where both sides have them."""
    assert len(steps) == len(like) > 4  # the first two updates of a warm-up change nothing
    assert [step.lr for step in steps] == pytest.approx([step.lr for step in like], rel=1e-12)
    for name, least in (("loss", 0.0), ("update_norm", 1e-9), ("grad_norm", 0.0)):
        pairs = [(getattr(step, name), getattr(other, name)) for step, other in zip(steps, like, strict=True)]
        known = [(one, other) for one, other in pairs if one is not None and other is not None]
        worst = max((abs(one - other) / max(other, 1e-9) for one, other in known), default=0.0)
        print(f"  {name} {worst:.0e}", end="")
        assert [one for one, _ in known] == pytest.approx(
            [other for _, other in known], rel=rel if name == "loss" else 10 * rel, abs=least
        )


@pytest.mark.parametrize("name", cases.LIKE_DDP)
def test_it_trains_exactly_as_ddp_does(two_ranks: Any, name: str) -> None:
    assert_alike(two_ranks.steps(name), two_ranks.steps("ddp"), rel=1e-5)


@pytest.mark.parametrize("name", cases.ONE_PROCESS)
def test_one_process_trains_as_two_do(two_ranks: Any, one_rank: Any, name: str) -> None:
    assert_alike(one_rank.steps(name), two_ranks.steps("ddp"), rel=1e-5)


@pytest.mark.libaio
@pytest.mark.parametrize("name", cases.on_nvme(Path()))
def test_offload_to_nvme_changes_nothing_and_takes_place(two_ranks: Any, name: str) -> None:
    assert_alike(two_ranks.steps(name), two_ranks.steps("ddp, wide"), rel=1e-5)
    offload = cases.on_nvme(Path())[name].offload
    kinds = {"optimizer": offload.optimizer, "float32params": offload.param}
    expected = {kind for kind, device in kinds.items() if device is Offload.NVME}
    assert set(two_ranks.attempts[name].path.joinpath("offloaded.rank0.txt").read_text().split()) == expected


@pytest.mark.parametrize("name", cases.COMPILED)
def test_compiled_code_trains_as_what_it_was_compiled_from(two_ranks: Any, name: str) -> None:
    assert_alike(two_ranks.steps(name), two_ranks.steps("ddp"), rel=1e-4)


@pytest.mark.parametrize("name", [*cases.WITH_SGD, *cases.WITH_LINEAR, *cases.WITH_COSINE])
def test_optimizers_and_schedules_are_the_same_everywhere(two_ranks: Any, name: str) -> None:
    ddp = re.sub("zero[0-9]", "ddp", name)
    assert_alike(two_ranks.steps(name), two_ranks.steps(ddp), rel=1e-5)


@pytest.mark.parametrize("name", [*cases.IN_BF16, *cases.IN_FP16, *cases.WITH_STATIC_SCALE])
def test_half_precision_is_the_same_at_every_stage(two_ranks: Any, name: str) -> None:
    """Results differ slightly: the rounding of partial sums depends on which rank adds which ones."""
    stage1 = "zero1, fp16" if "fp16" in name else "zero1, bf16"
    assert_alike(two_ranks.steps(name), two_ranks.steps(stage1), rel=1e-3)


@pytest.mark.parametrize("name", cases.AUTOCAST)
def test_autocast_trains_nearly_as_half_precision_parameters_do(two_ranks: Any, name: str) -> None:
    losses = [step.loss for step in two_ranks.steps(name)]
    zero1 = [step.loss for step in two_ranks.steps(name.replace("ddp", "zero1"))]
    assert losses == pytest.approx(zero1, rel=1e-3)


def test_the_oracle_clips_accumulates_and_learns(two_ranks: Any) -> None:
    steps = two_ranks.steps("ddp")
    assert all(step.grad_norm > 0.5 for step in steps)  # the plan's limit: every gradient is clipped
    assert steps[-1].loss < steps[0].loss - 0.2
    assert [step.update_norm > 0 for step in steps] == [False, False] + [True] * (STEPS - 2)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_knows_the_norm_of_its_gradient(two_ranks: Any, name: str) -> None:
    assert None not in [step.grad_norm for step in two_ranks.steps(name)]


@pytest.mark.parametrize("name", cases.STRATEGIES)
def test_the_running_engine_warms_up_as_computed_by_hand(two_ranks: Any, name: str) -> None:
    by_hand = [0, *(PEAK_LR * step / WARMUP_STEPS for step in range(WARMUP_STEPS))]
    by_hand += [PEAK_LR] * (STEPS - len(by_hand))
    assert [step.lr for step in two_ranks.steps(name)] == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("name", [*cases.WITH_LINEAR, *cases.WITH_COSINE])
def test_the_running_engine_decays_as_the_schedule_says(two_ranks: Any, name: str) -> None:
    schedule = cases.TWO_RANKS[name].schedule
    rates = [rate(PEAK_LR, schedule, updates) for updates in range(STEPS)]
    assert [step.lr for step in two_ranks.steps(name)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("name", ["ddp", "zero3", "zero3, all on cpu"])
def test_parameters_are_counted_whole(two_ranks: Any, name: str) -> None:
    outcome = two_ranks.outcome(name, rank=1)
    assert isinstance(outcome, RankMeasurement)
    assert outcome.parameters == 26_784
