"""Estimates of a plan, and their change by trials that have ended."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.estimate import estimator as forecast
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine
from tests.support.examples import a_measured_trial, a_measurement, a_plan, a_rank_measurement, a_trial
from tests.support.plans import LLAMA_1B3, LLAMA_160M
from train_entry.contract import (
    GIB,
    Estimate,
    Failure,
    FailureKind,
    Fit,
    MemoryKind,
    MemoryPeak,
    Plan,
    Precision,
    State,
    Trial,
)

H200 = Gpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 * GIB)
TWO_H200 = Machine(device="cuda", nodes=1, ranks_per_node=2, gpus=(H200, H200), host_memory_bytes=512 * GIB)
TWO_CORES = Machine(device="cpu", nodes=1, ranks_per_node=2, host_memory_bytes=16 * GIB)
RAN_OUT = Failure(kind=FailureKind.GPU_OOM, message="CUDA out of memory")


def plan_of(stage: int = 2, micro_batch: int = 4, checkpoint_every: int = 0) -> Plan:
    return a_plan(
        zero={"stage": stage},
        micro_batch=micro_batch,
        checkpoint_every=checkpoint_every,
        global_batch=32,
        seq_len=2048,
    )


PLANS = [plan_of(*each) for each in itertools.product((0, 1, 2, 3), (1, 2, 4, 8), (0, 1))]


def an_estimator(machine: Machine = TWO_H200, **cluster: Any) -> Estimator:
    gate = GateConfig()
    model = LLAMA_1B3 if machine.gpus else LLAMA_160M
    return Estimator(model, hardware_for(machine), room_of(ClusterConfig(**cluster), gate, machine), gate)


def ran(plan: Plan, expected: Estimate, memory: float = 1.0, time: float = 1.0, **changes: Any) -> Trial:
    """Return a trial that took so many times the expected memory and time."""
    seen = a_measurement(peak_bytes=int(memory * expected.peak_bytes), step_s=time * expected.step_s)
    changes = {"plan": plan, "estimate": expected, "outcome": seen, **changes}
    return a_measured_trial(**changes)


def ran_out(plan: Plan, expected: Estimate) -> Trial:
    return a_trial(plan=plan, estimate=expected, outcome=RAN_OUT, state=State.INFEASIBLE)


# ---------------------------------------------------------------- before any trial


def test_an_estimate_is_consistent_in_itself() -> None:
    estimator = an_estimator()
    for plan in PLANS:
        said = estimator.estimate(plan)
        assert sum(said.components.values()) == said.peak_bytes
        assert sum(said.parts.values()) == pytest.approx(said.step_s)
        assert said.peak_bytes < said.needed_bytes
        assert (said.fit is Fit.FITS) == (said.needed_bytes <= said.limit_bytes) == (said.why == "")
        assert said.tokens_per_s == pytest.approx(plan.tokens_per_step / said.step_s)
        assert said.tokens_per_s_per_gpu == pytest.approx(said.tokens_per_s / 2)
        assert (said.limit_bytes, said.host_limit_bytes) == (140 * GIB, 512 * GIB)
        assert said.observations == 0


def test_torch_may_reserve_what_the_context_leaves() -> None:
    counted = an_estimator(memory_limit_gib=40).estimate(plan_of())
    beside = an_estimator(memory_limit_gib=40, limit_counts_context=False).estimate(plan_of())
    assert beside.reservable_bytes == beside.limit_bytes == counted.limit_bytes == 40 * GIB
    assert counted.reservable_bytes is not None
    assert 1 * GIB < 40 * GIB - counted.reservable_bytes < 4 * GIB
    assert counted.needed_bytes - beside.needed_bytes == 40 * GIB - counted.reservable_bytes


def test_headroom_is_left_by_the_gate_and_not_taken_from_the_job() -> None:
    gate = GateConfig(headroom_gib=5)
    room = room_of(ClusterConfig(memory_limit_gib=40, limit_counts_context=False), gate, TWO_H200)
    said = Estimator(LLAMA_1B3, hardware_for(TWO_H200), room, gate).estimate(plan_of())
    assert (said.limit_bytes, said.reservable_bytes) == (35 * GIB, 40 * GIB)


def test_only_a_limit_below_the_card_is_imposed() -> None:
    limited, whole = an_estimator(memory_limit_gib=40), an_estimator()
    expected = limited.estimate(plan_of())
    assert limited.imposed_bytes(expected) == expected.reservable_bytes
    assert limited.imposed_bytes(None) is None
    assert whole.imposed_bytes(whole.estimate(plan_of())) is None


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_the_estimate_of_a_plan_moves_to_what_was_measured(ratio: float) -> None:
    estimator = an_estimator()
    plan = plan_of(micro_batch=8)
    before = estimator.estimate(plan)
    estimator.learn([ran(plan, before, memory=ratio)])
    after = estimator.estimate(plan)
    measured = ratio * before.peak_bytes
    assert abs(after.peak_bytes - measured) < 0.3 * abs(before.peak_bytes - measured)
    assert after.observations == estimator.observations == 1


def test_other_plans_learn_from_it_too() -> None:
    estimator = an_estimator()
    before = {plan: estimator.estimate(plan) for plan in PLANS}
    seen, unseen = PLANS[::4], set(PLANS) - set(PLANS[::4])
    estimator.learn([ran(plan, before[plan], memory=1.1) for plan in seen])
    errors = [estimator.estimate(plan).peak_bytes / before[plan].peak_bytes / 1.1 - 1 for plan in unseen]
    assert max(map(abs, errors)) < 0.06


def test_trials_as_expected_leave_less_doubt() -> None:
    estimator = an_estimator()
    before = {plan: estimator.estimate(plan) for plan in PLANS}
    estimator.learn([ran(plan, before[plan]) for plan in PLANS])
    after = estimator.estimate(PLANS[0])
    assert after.needed_bytes < before[PLANS[0]].needed_bytes
    assert after.peak_bytes == pytest.approx(before[PLANS[0]].peak_bytes, rel=1e-3)


@pytest.mark.parametrize(("ratio", "times"), [(1.1, 1), (1.2, 1), (1.4, 3)])
def test_a_plan_that_ran_out_is_known_to_need_more_than_its_limit(ratio: float, times: int) -> None:
    """The lower the estimate was, the more such trials it takes."""
    plan = plan_of()
    limit_gib = ratio * an_estimator().estimate(plan).peak_bytes / GIB
    estimator = an_estimator(memory_limit_gib=limit_gib, limit_counts_context=False)
    before = estimator.estimate(plan)
    estimator.learn([ran_out(plan, before)] * times)
    after = estimator.estimate(plan)
    assert before.fit is Fit.FITS
    assert after.fit is not Fit.FITS
    assert before.needed_bytes < before.limit_bytes < after.needed_bytes
    assert after.observations == times


def test_what_the_card_holds_beside_torch_is_learned() -> None:
    estimator = an_estimator()
    plan = plan_of()
    before = estimator.estimate(plan)
    peak = MemoryPeak(allocated_bytes=before.peak_bytes, reserved_bytes=before.peak_bytes)
    rank = a_rank_measurement(steady=peak, device_in_use_bytes=before.peak_bytes + 6 * GIB)
    seen = a_measurement(
        peak_bytes=before.peak_bytes, reserved_bytes=before.peak_bytes, step_s=1.0, ranks=(rank,)
    )
    estimator.learn([ran(plan, before, outcome=seen)] * 8)
    after = estimator.estimate(plan)
    assert after.needed_bytes - before.needed_bytes > 2 * GIB
    assert after.reservable_bytes == before.reservable_bytes  # all trials of a study have the same limit


# ---------------------------------------------------------------- time


def test_time_moves_to_what_was_measured() -> None:
    estimator = an_estimator()
    before = {plan: estimator.estimate(plan) for plan in PLANS}
    estimator.learn([ran(plan, before[plan], time=1.5) for plan in PLANS[:8]])
    ratios = [estimator.estimate(plan).step_s / before[plan].step_s for plan in PLANS]
    assert min(ratios) > 1.3


def test_a_shared_trials_time_is_ignored_and_its_memory_is_not() -> None:
    estimator = an_estimator()
    before = {plan: estimator.estimate(plan) for plan in PLANS}
    estimator.learn([ran(plan, before[plan], memory=1.1, time=3, is_shared=True) for plan in PLANS[:8]])
    after = estimator.estimate(PLANS[0])
    assert after.step_s == before[PLANS[0]].step_s
    assert after.peak_bytes > 1.05 * before[PLANS[0]].peak_bytes


# ---------------------------------------------------------------- trials that teach nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": None},
        {"outcome": None, "state": State.RUNNING},
        {"outcome": Failure(kind=FailureKind.CRASHED, message="x"), "state": State.FAILED},
        {"outcome": Failure(kind=FailureKind.INFEASIBLE, message="x"), "state": State.INFEASIBLE},
        {"state": State.REUSED},
    ],
)
def test_a_trial_that_says_nothing_new_is_passed_over(changes: dict[str, Any]) -> None:
    estimator = an_estimator()
    plan = plan_of()
    before = estimator.estimate(plan)
    estimator.learn([ran(**{"plan": plan, "expected": before, "memory": 2, "time": 2, **changes})])
    assert estimator.estimate(plan) == before


def test_running_out_without_a_known_limit_says_nothing() -> None:
    estimator = an_estimator()
    before = estimator.estimate(plan_of())
    estimator.learn([dataclasses.replace(ran_out(plan_of(), before), estimate=None)])
    assert dataclasses.replace(estimator.estimate(plan_of()), observations=0) == before


def test_only_the_latest_trials_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "MOST_OBSERVATIONS", 4)
    old, new = an_estimator(), an_estimator()
    before = {plan: old.estimate(plan) for plan in PLANS}
    latest = [ran(plan, before[plan], memory=1.1, time=1.2) for plan in PLANS[:4]]
    old.learn([ran(plan, before[plan], memory=2, time=5) for plan in PLANS] + latest)
    new.learn(latest)
    assert old.observations == 4
    assert old.estimate(plan_of()) == new.estimate(plan_of())


def test_learning_at_once_and_one_by_one_is_the_same() -> None:
    """A resumed study learns at once, one that never stopped learns one by one."""
    at_once, one_by_one = an_estimator(), an_estimator()
    before = {plan: at_once.estimate(plan) for plan in PLANS}
    trials = [ran(plan, before[plan], memory=1.1, time=1.3) for plan in PLANS[:5]]
    at_once.learn(trials)
    for trial in trials:
        one_by_one.learn([trial])
        one_by_one.estimate(plan_of())
    assert at_once.estimate(plan_of()) == one_by_one.estimate(plan_of())


# ---------------------------------------------------------------- a machine without GPUs


def test_on_a_cpu_resident_memory_counts() -> None:
    estimator = an_estimator(TWO_CORES)
    said = estimator.estimate(a_plan(precision=Precision.FP32))
    assert said.components["process"] > 2**28
    assert (said.limit_bytes, said.host_limit_bytes) == (8 * GIB, 16 * GIB)
    assert said.host_bytes == 2 * said.peak_bytes
    assert said.reservable_bytes is None
    assert estimator.imposed_bytes(said) is None


def test_on_a_cpu_ranks_share_the_host() -> None:
    plan = a_plan(precision=Precision.FP32)
    peak = an_estimator(TWO_CORES).estimate(plan).peak_bytes
    small = dataclasses.replace(TWO_CORES, host_memory_bytes=int(1.5 * peak))
    said = an_estimator(small).estimate(plan)
    assert said.fit is Fit.TOO_LARGE
    assert "of the host's memory" in said.why


def test_on_a_cpu_it_learns_as_well() -> None:
    estimator = an_estimator(TWO_CORES)
    plan = a_plan(precision=Precision.FP32)
    before = estimator.estimate(plan)
    seen = a_measurement(
        peak_bytes=before.peak_bytes + GIB,
        reserved_bytes=before.peak_bytes + GIB,
        step_s=2 * before.step_s,
        memory_kind=MemoryKind.HOST_RSS,
        ranks=(a_rank_measurement(),),
    )
    estimator.learn([ran(plan, before, outcome=seen)] * 3)
    after = estimator.estimate(plan)
    assert after.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
    assert after.step_s == pytest.approx(seen.step_s, rel=0.25)


def test_hardware_is_that_of_the_smallest_card() -> None:
    smaller = dataclasses.replace(H200, memory_bytes=139 * GIB)
    hardware = hardware_for(dataclasses.replace(TWO_H200, gpus=(H200, smaller)))
    assert (hardware.memory_bytes, hardware.host_memory_bytes) == (139 * GIB, 512 * GIB)
    assert (hardware.name, hardware.is_known, hardware.ranks_per_node) == ("NVIDIA H200", True, 2)
    unknown = hardware_for(dataclasses.replace(TWO_CORES, host_memory_bytes=None))
    assert (unknown.memory_bytes, unknown.is_cpu) == (0, True)
