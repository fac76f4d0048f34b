"""Fitted factors follow the measurements, and stay sane whatever these are."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from sweeps.estimate.memory.fitting import MemoryObservation, fit_memory
from sweeps.estimate.memory.model import COLD, MemoryFactors, memory_of, needed_bytes
from tests.support.examples import a_plan
from tests.support.plans import H200, LLAMA_1B3
from train_entry.contract import GIB, Plan


def plan_of(stage: int = 2, micro_batch: int = 4, checkpoint_every: int = 0) -> Plan:
    return a_plan(
        ranks=2,
        zero={"stage": stage},
        micro_batch=micro_batch,
        global_batch=32,
        seq_len=2048,
        checkpoint_every=checkpoint_every,
    )


PLANS = [plan_of(*each) for each in itertools.product((0, 1, 2, 3), (1, 2, 4, 8), (0, 1))]


def ran(plan: Plan, peak_bytes: float, limit_gib: float | None = None) -> MemoryObservation:
    return MemoryObservation(
        plan=plan,
        model=LLAMA_1B3,
        hardware=H200,
        is_oom=False,
        peak_bytes=int(peak_bytes),
        limit_bytes=int(limit_gib * GIB) if limit_gib is not None else None,
    )


def ran_out(plan: Plan, limit_bytes: float) -> MemoryObservation:
    return dataclasses.replace(ran(plan, 0), is_oom=True, peak_bytes=None, limit_bytes=int(limit_bytes))


def peak(plan: Plan, factors: MemoryFactors = COLD) -> int:
    return memory_of(plan, LLAMA_1B3, H200, factors).peak_bytes


def is_sane(factors: MemoryFactors) -> bool:
    names = [name for name in MemoryFactors.__slots__ if name != "by_class"]
    values = [*[getattr(factors, name) for name in names], *dict(factors.by_class).values()]
    return all(math.isfinite(value) and value >= 0 for value in values) and factors.activations < 5


def test_without_measurements_nothing_changes() -> None:
    assert fit_memory([]) == COLD


def test_measurements_as_estimated_change_next_to_nothing() -> None:
    factors = fit_memory([ran(plan, peak(plan)) for plan in PLANS[:3]])
    assert (factors.activations, factors.logits, factors.optimizer_step) == pytest.approx((1, 1, 1))
    assert factors.spread < COLD.spread


def test_three_trials_teach_that_activations_are_larger() -> None:
    true = dataclasses.replace(COLD, activations=1.2, logits=1.1)
    seen = [ran(plan, peak(plan, true)) for plan in (plan_of(2, 8), plan_of(2, 8, 1), plan_of(1, 4))]
    factors = fit_memory(seen)
    before = [abs(peak(plan) / peak(plan, true) - 1) for plan in PLANS]
    after = [abs(peak(plan, factors) / peak(plan, true) - 1) for plan in PLANS]
    assert max(before) > 0.1
    assert max(after) < 0.03


def test_memory_that_nothing_explains_is_taken_as_a_constant() -> None:
    seen = [ran(plan, peak(plan) + GIB) for plan in PLANS]
    factors = fit_memory(seen)
    assert factors.unseen_bytes == pytest.approx(GIB, rel=0.35)


def test_a_plan_that_ran_out_raises_the_estimate() -> None:
    plan = plan_of(2, 4)
    limit = 1.10 * peak(plan)
    factors = fit_memory([ran_out(plan, limit)])
    before = needed_bytes(memory_of(plan, LLAMA_1B3, H200))
    after = needed_bytes(memory_of(plan, LLAMA_1B3, H200, factors), factors)
    assert before < after
    assert after == pytest.approx(limit, rel=0.05)


def test_a_plan_that_ran_out_as_estimated_says_nothing() -> None:
    plan = plan_of(2, 8)
    factors = fit_memory([ran_out(plan, 0.9 * peak(plan))])
    assert dataclasses.replace(factors, observations=0) == COLD


def test_a_plan_that_ran_close_to_its_limit_leaves_fewer_gaps() -> None:
    plan = plan_of(2, 4)
    limit_gib = 1.01 * peak(plan) / GIB
    assert fit_memory([ran(plan, peak(plan), limit_gib)] * 5).fragmentation < COLD.fragmentation


def test_one_odd_trial_among_many_moves_little() -> None:
    seen = [ran(plan, peak(plan)) for plan in PLANS]
    odd = ran(PLANS[5], 3 * peak(PLANS[5]))
    factors = fit_memory([*seen, odd])
    assert max(abs(peak(plan, factors) / peak(plan) - 1) for plan in PLANS) < 0.05


def test_contradictions_stay_sane() -> None:
    plan = plan_of(2, 4)
    seen = [
        ran(plan, 10 * peak(plan)),
        ran(plan, peak(plan) / 10),
        ran_out(plan, 100 * peak(plan)),
        ran(plan, 1),
    ]
    assert is_sane(fit_memory(seen))
    assert is_sane(fit_memory(seen[::-1] * 5))


def test_useless_observations_are_left_out() -> None:
    plan = plan_of(2, 4)
    assert fit_memory([ran(plan, 0), ran_out(plan, 0)]) == COLD


def test_the_context_follows_what_the_card_held() -> None:
    memory = memory_of(plan_of(), LLAMA_1B3, H200)
    seen = dataclasses.replace(
        ran(plan_of(), memory.peak_bytes),
        reserved_bytes=memory.peak_bytes,
        card_bytes=memory.peak_bytes + 2 * memory.context_bytes,
    )
    assert fit_memory([seen] * 9).context == pytest.approx(1.9)


def test_scattered_trials_widen_what_a_quantile_asks_for() -> None:
    chooser = random.Random(0)
    seen = [ran(plan, peak(plan) * chooser.uniform(0.7, 1.3)) for plan in PLANS]
    assert fit_memory(seen).spread > 2 * COLD.spread


# ---------------------------------------------------------------- one class of plans is counted wrongly


PIPELINED = [
    dataclasses.replace(plan_of(1, micro_batch), ranks=2, pipeline=2, global_batch=32)
    for micro_batch in (1, 2, 4, 8)
]


def test_a_kind_that_is_counted_wrongly_leaves_others_as_they_are() -> None:
    right = [ran(plan, peak(plan)) for plan in PLANS[::3]]
    factors = fit_memory([*right, *[ran(plan, 1.2 * peak(plan)) for plan in PIPELINED[:3]]])
    assert max(abs(peak(plan, factors) / peak(plan) - 1) for plan in PLANS) < 0.02
    assert peak(PIPELINED[3], factors) == pytest.approx(1.2 * peak(PIPELINED[3]), rel=0.06)


def test_what_all_share_is_no_matter_of_one_kind() -> None:
    true = dataclasses.replace(COLD, activations=1.2, logits=1.1)
    factors = fit_memory([ran(plan, peak(plan, true)) for plan in PLANS[::2]])
    assert all(abs(ratio - 1) < 0.02 for _, ratio in factors.by_class)


@pytest.mark.parametrize("too_low", [0.8, 0.6])
def test_a_plan_that_ran_out_is_said_to_need_more_than_its_limit(too_low: float) -> None:
    plan = plan_of(2, 8)
    limit = needed_bytes(memory_of(plan, LLAMA_1B3, H200)) / too_low
    factors = fit_memory([ran_out(plan, limit)])
    assert limit < needed_bytes(memory_of(plan, LLAMA_1B3, H200, factors), factors) < 1.03 * limit


def test_a_kind_that_also_ran_is_not_judged_by_what_ran_out() -> None:
    seen = [ran(plan, peak(plan)) for plan in (plan_of(2, 1), plan_of(2, 2), plan_of(1, 4))]
    factors = fit_memory([*seen, ran_out(plan_of(2, 8), 1.5 * peak(plan_of(2, 8)))])
    assert peak(plan_of(2, 4), factors) < 1.2 * peak(plan_of(2, 4))
