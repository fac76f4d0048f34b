"""The loop where estimates say that a plan does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine
from sweeps.plan.planner import Planner
from sweeps.space.grammar import read_request
from sweeps.study.limits import StopReason
from tests.support.fake_cluster import measured, oom
from tests.support.studies import Bench
from train_entry.contract import Estimate, Failure, FailureKind, Fit, Plan, State, Trial

GIB = 2**30
CARDS = tuple(
    Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0))
    for index in range(2)
)
GPUS = Machine(device="cuda", nodes=1, ranks_per_node=2, gpus=CARDS, cores=2, host_memory_bytes=500 * GIB)
# zero1's bucket alone is a GiB; ddp needs little for this model.
SPACE = ("strategy=ddp,zero1", "micro_batch=1,2", "precision=bf16")
UNLIMITED = (*SPACE, "gate.enabled=false")


@pytest.fixture
def study(bench: Callable[..., Bench]) -> Bench:
    return bench({"*": [measured(100.0, peak_bytes=150 * 2**20)]}, machine=GPUS)


def estimate(study: Bench, strategy: str) -> Estimate:
    """Return the estimate before anything is measured."""
    request = read_request([*SPACE], study.composer)
    config = request.composer.compose()
    planner = Planner(request.composer, study.model, GPUS, "mine")
    plan = planner.plan({"strategy": strategy, "micro_batch": 2}).plan
    assert isinstance(plan, Plan)
    room = room_of(config.cluster, config.gate, GPUS)
    return Estimator(study.model, hardware_for(GPUS), room, config.gate).estimate(plan)


def limit(bytes_: float) -> str:
    return f"cluster.memory_limit_gib={bytes_ / GIB:.4f}"


def between(study: Bench) -> str:
    """Return a memory limit that ddp stays below and zero1 does not."""
    ddp, zero1 = (estimate(study, strategy).needed_bytes for strategy in ("ddp", "zero1"))
    assert ddp < 0.8 * zero1
    return limit((ddp + zero1) / 2)


def trials_of(study: Bench, strategy: str) -> list[Trial]:
    return [trial for trial in study.trials if trial.plan and trial.plan.strategy == strategy]


def test_what_cannot_fit_is_recorded_with_its_reason_and_never_launched(study: Bench) -> None:
    assert study.start(*SPACE, between(study)) is StopReason.EXHAUSTED
    assert sorted(study.launched_plans) == ["ddp x1", "ddp x2"]
    for trial in trials_of(study, "zero1"):
        assert (trial.state, len(trial.attempts), trial.gpu_s) == (State.INFEASIBLE, 0, 0.0)
        assert isinstance(trial.outcome, Failure)
        assert trial.outcome.kind is FailureKind.INFEASIBLE
        assert trial.outcome.message.startswith("not launched: needs ")
        assert "cluster.memory_limit_gib" in trial.outcome.message
        assert trial.closed_at is not None


def test_every_legal_trial_has_its_estimate_on_record(study: Bench) -> None:
    study.start(*SPACE, between(study))
    estimates = [trial.estimate for trial in study.trials]
    assert all(found is not None and found.peak_bytes > 0 and found.step_s > 0 for found in estimates)
    assert {found.fit for found in estimates if found} == {Fit.FITS, Fit.TOO_LARGE}


def test_without_a_gate_everything_is_launched_and_estimated_all_the_same(study: Bench) -> None:
    study.start(*UNLIMITED, between(study))
    assert len(study.launched_plans) == 4
    assert Fit.TOO_LARGE in {trial.estimate.fit for trial in trials_of(study, "zero1") if trial.estimate}


def test_jobs_are_held_to_the_limit_less_the_context(study: Bench) -> None:
    asked = between(study)
    study.start(*SPACE, asked)
    limit_bytes = float(asked.partition("=")[2]) * GIB
    told = {spec.memory_limit_bytes for spec in study.cluster.launched}
    assert all(held is not None and 0 < held < limit_bytes - GIB for held in told)


def test_a_card_that_is_not_limited_holds_jobs_to_nothing(study: Bench) -> None:
    study.start(*SPACE)
    assert {spec.memory_limit_bytes for spec in study.cluster.launched} == {None}
    assert study.states == [State.MEASURED] * 4


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_few_borderline_plans_are_launched_to_learn_and_no_more(study: Bench, most: int) -> None:
    """The plan exceeds the limit only by the safety margin for the estimate's own error."""
    just_too_little = limit(0.995 * estimate(study, "zero1").needed_bytes)
    asked = ("strategy=zero1", "micro_batch=1,2", "precision=bf16", "gate.quantile=0.999", just_too_little)
    study.start(*asked, f"gate.borderline={most}")
    borderline = [trial for trial in study.trials if trial.estimate and trial.estimate.fit is Fit.BORDERLINE]
    assert borderline
    assert sum(len(trial.attempts) for trial in borderline) == min(most, len(borderline))


def test_what_a_user_asks_for_alone_is_launched_with_a_warning(study: Bench) -> None:
    study.start(*SPACE, between(study), point={"strategy": "zero1", "micro_batch": 2})
    assert study.launched_plans == ["zero1 x2"]
    assert any(message.startswith("may not fit: needs ") for message in study.heard.messages)


def test_a_study_that_fits_nowhere_ends_without_a_launch(study: Bench) -> None:
    assert study.start(*SPACE, "cluster.memory_limit_gib=1.5") is StopReason.EXHAUSTED
    assert study.launched_plans == []
    assert study.states == [State.INFEASIBLE] * 4


def test_a_trial_that_ran_out_raises_the_estimate_of_its_likes(bench: Callable[..., Bench]) -> None:
    study = bench({"zero1": [oom], "*": [measured(100.0, peak_bytes=150 * 2**20)]}, machine=GPUS)
    cold = estimate(study, "zero1")
    study.start("strategy=zero1", "micro_batch=1,2", "precision=bf16", limit(1.1 * cold.needed_bytes))
    first, second = (trial.estimate for trial in study.trials)
    assert first is not None and second is not None
    assert (first.observations, second.observations) == (0, 1)
    assert second.needed_bytes > first.needed_bytes


def test_a_refused_trial_stays_refused_where_nothing_has_changed(study: Bench) -> None:
    asked = between(study)
    study.start(*SPACE, asked)
    refused = trials_of(study, "zero1")
    study.start(*SPACE, asked)
    assert [len(trial.attempts) for trial in trials_of(study, "zero1")] == [0, 0]
    assert [trial.closed_at for trial in trials_of(study, "zero1")] == [trial.closed_at for trial in refused]
    assert len(study.trials) == 4


def test_a_refused_trial_is_launched_once_the_gate_lets_it_through(study: Bench) -> None:
    asked = between(study)
    study.start(*SPACE, asked)
    study.start(*SPACE, asked, "gate.enabled=false")
    assert len(study.trials) == 4
    assert study.states == [State.MEASURED] * 4
    assert [len(trial.attempts) for trial in trials_of(study, "zero1")] == [1, 1]


def test_what_was_queued_faces_the_gate_again_on_resume(study: Bench) -> None:
    asked = between(study)
    study.clock.at[1] = lambda: setattr(study, "stop", True)  # while a trial runs and others are queued
    study.start("strategy=zero1", "micro_batch=1,2", "precision=bf16", asked, "gate.enabled=false")
    waiting = [trial for trial in study.trials if not trial.attempts]
    study.stop = False
    study.start("strategy=zero1", "micro_batch=1,2", "precision=bf16", asked)
    for trial in waiting:
        assert study.ledger()[trial.number].state is State.INFEASIBLE


def test_refused_plans_are_judged_again_when_nothing_else_is_left(study: Bench) -> None:
    """The measurements of ddp show that much less memory is needed than estimated."""
    asked = between(study)
    study.start(*SPACE, asked)
    first = {trial.number: trial for trial in trials_of(study, "zero1")}
    assert all(trial.estimate and trial.estimate.observations >= 0 for trial in first.values())
    latest = max(trial.estimate.observations for trial in study.trials if trial.estimate)
    assert latest == 2  # both trials of ddp, whenever they ran
