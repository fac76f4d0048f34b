"""The oracle of every change to an engine: all strategies train the same model in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from train_entry.contract import RankMeasurement

pytestmark = pytest.mark.slow

STEPS = 20
PEAK_LR = 1e-3
WARMUP_STEPS = 6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_trains_exactly_as_ddp_does(oracle: Callable[..., Any], stage: int) -> None:
    zero, ddp = oracle(stage).steps, oracle(None).steps
    assert len(zero) == len(ddp) == STEPS
    assert [step.loss for step in zero] == pytest.approx([step.loss for step in ddp], rel=1e-4)
    assert [step.update_norm for step in zero] == pytest.approx(
        [step.update_norm for step in ddp], rel=1e-4, abs=1e-9
    )


def test_the_oracle_clips_accumulates_and_learns(oracle: Callable[..., Any]) -> None:
    steps = oracle(None).steps
    assert all(step.grad_norm > 0.5 for step in steps)  # the plan's limit: every gradient is clipped
    assert steps[-1].loss < steps[0].loss - 0.2
    assert [step.update_norm > 0 for step in steps] == [False, False] + [True] * (STEPS - 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sees_the_gradient_norm_that_ddp_sees(oracle: Callable[..., Any], stage: int) -> None:
    norms = [step.grad_norm for step in oracle(stage).steps]
    assert norms == pytest.approx([step.grad_norm for step in oracle(None).steps], rel=1e-4)


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_the_running_engine_warms_up_as_computed_by_hand(
    oracle: Callable[..., Any], stage: int | None
) -> None:
    by_hand = [0, *(PEAK_LR * step / WARMUP_STEPS for step in range(WARMUP_STEPS))]
    by_hand += [PEAK_LR] * (STEPS - len(by_hand))
    assert [step.lr for step in oracle(stage).steps] == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("stage", [None, 3])
def test_parameters_are_counted_before_they_are_sharded(
    oracle: Callable[..., Any], stage: int | None
) -> None:
    outcome = oracle(stage).outcome(1)
    assert isinstance(outcome, RankMeasurement)
    assert outcome.parameters == 26_784
