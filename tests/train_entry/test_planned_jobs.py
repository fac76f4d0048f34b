"""Configurations as the orchestrator plans them, run by real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sweeps.config.models import model_shape
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.study.collect import collect
from tests.support.examples import a_trial, an_attempt
from tests.support.paths import ROOT
from tests.sweeps.conftest import composer_on
from train_entry.contract import AttemptKind, Measurement, Plan, TrialSpec

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

FOUR_CORES = Machine(device="cpu", nodes=1, ranks_per_node=4, cores=4)
Launch = Callable[[TrialSpec], Any]


def planned(*overrides: str) -> TrialSpec:
    """The job of `python sweep.py` with these overrides on a machine of four cores."""
    composer = composer_on(ROOT / "conf").with_fixed(["space=none", *overrides])
    planner = Planner(composer, model_shape(composer.compose().model), FOUR_CORES, "study")
    found = planner.plan({}).plan
    assert isinstance(found, Plan), found
    return planner.spec(a_trial(plan=found), 1, AttemptKind.FIRST)


@pytest.mark.parametrize(
    ("strategy", "rule", "warmup", "peak", "warmup_steps"),
    [
        ("zero1", "sqrt", "steps", 4 * 3e-4, 32),  # 512 is 16 times 32
        ("zero1", "linear", "samples", 16 * 3e-4, 2),
        ("ddp", "sqrt", "samples", 4 * 3e-4, 2),
        ("ddp", "linear", "steps", 16 * 3e-4, 32),
    ],
)
def test_the_running_engine_has_the_scaled_learning_rate_and_warm_up(
    launch: Launch, strategy: str, rule: str, warmup: str, peak: float, warmup_steps: int
) -> None:
    spec = planned(
        *(f"strategy={strategy}", f"lr={rule}", f"lr.warmup={warmup}", "lr.base_warmup=32", "lr.base=3e-4"),
        *("lr.base_batch=32", "global_batch=512", "micro_batch=256", "seq_len=8", "ranks=2"),
        *("model.layers=1", "measure.warmup_steps=1", "measure.steps=5", "measure.split_steps=0"),
    )
    job = launch(spec)
    assert job.wait() == [0, 0], job.logs
    # DeepSpeed counts from -1 and warms up linearly: nothing at the first two updates.
    by_hand = [peak * min(1, max(0, update - 1) / warmup_steps) for update in range(6)]
    assert [step.lr for step in job.steps] == pytest.approx(by_hand, rel=1e-6)


def test_stages_wait_and_matrices_are_exchanged_as_planned_and_the_loss_is_the_same(launch: Launch) -> None:
    """Pipelines of two stages on four ranks, with whole matrices and with split ones."""
    losses = set()
    for tensor in (1, 2):
        degrees = ("ranks=4", "strategy=zero1", f"tensor={tensor}", "pipeline=2", "micro_batch=1")
        spec = planned(*degrees, "measure.warmup_steps=1", "measure.steps=3", "measure.split_steps=1")
        assert spec.plan.strategy == ("pp2_zero1" if tensor == 1 else "tp2_pp2_zero1")
        job = launch(spec)
        assert job.wait() == [0] * 4, job.logs
        outcome = collect(job.attempt, spec, an_attempt()).outcome
        assert isinstance(outcome, Measurement)
        assert outcome.bubble is not None
        assert 0 < outcome.bubble < 1
        assert all(rank.split and rank.split.exchange_s > 0 for rank in outcome.ranks)
        assert (outcome.tensor_volume_bytes > 0) == (tensor > 1)
        losses.add(round(outcome.loss, 4))
    assert len(losses) == 1
