"""Whole steps: properties of any plan, and measured or published times of some."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweeps.estimate.time.step import COLD, StepTime, time_of
from tests.support.examples import a_plan
from tests.support.plans import A100, CPU, H100, H200, LLAMA_1B3, LLAMA_8B, LLAMA_160M, cases
from train_entry.contract import Engine, Offload, OffloadPlan, Plan

RATES = (
    "half_flops_per_s",
    "fp32_flops_per_s",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "host_link_bytes_per_s",
    "host_memory_bytes_per_s",
    "nvme_bytes_per_s",
)
A_LITTLE = 1 + 1e-9  # rounding


def step_s(plan: Plan) -> float:
    return time_of(plan, LLAMA_1B3, H200).step_s


# ---------------------------------------------------------------- any plan


def test_parts_are_not_negative_and_sum_to_the_step() -> None:
    for case in cases():
        step = time_of(*case)
        assert min(step.parts.values()) >= 0
        assert step.step_s == pytest.approx(sum(step.parts.values()))
        assert len(step.parts) == 12


def test_tokens_are_counted_over_all_ranks() -> None:
    step = time_of(a_plan(ranks=4, global_batch=32, seq_len=128), LLAMA_160M, H200)
    assert step.tokens_per_s == pytest.approx(32 * 128 / step.step_s)
    assert step.tokens_per_s_per_gpu == pytest.approx(step.tokens_per_s / 4)


def test_more_micro_batches_take_longer() -> None:
    for plan, model, hardware in cases():
        longer = dataclasses.replace(plan, global_batch=2 * plan.global_batch)
        assert time_of(longer, model, hardware).step_s > time_of(plan, model, hardware).step_s


def test_recomputing_is_never_faster() -> None:
    for plan, model, hardware in cases():
        without = time_of(dataclasses.replace(plan, checkpoint_every=0), model, hardware).step_s
        with_it = time_of(dataclasses.replace(plan, checkpoint_every=1), model, hardware).step_s
        assert with_it > without


def test_a_faster_card_is_never_slower() -> None:
    for plan, model, hardware in cases():
        slow = time_of(plan, model, hardware).step_s
        for rate in RATES:
            faster = dataclasses.replace(hardware, **{rate: 3 * getattr(hardware, rate)})
            assert time_of(plan, model, faster).step_s <= slow * A_LITTLE


def test_a_larger_factor_is_never_faster() -> None:
    for case in cases():
        cold = time_of(*case).step_s
        for name in COLD.named:
            assert time_of(*case, dataclasses.replace(COLD, **{name: 2.0})).step_s >= cold / A_LITTLE


def test_the_pipelines_bubble_is_that_of_1f1b() -> None:
    for micro_batches in (1, 4, 32):
        step = time_of(a_plan(ranks=4, pipeline=4, global_batch=4 * micro_batches), LLAMA_8B, H200)
        passes = step.forward_s + step.backward_s + step.waiting_s + step.send_s
        assert step.bubble_s / (passes + step.bubble_s) == pytest.approx(3 / (micro_batches + 3))


def test_one_stage_has_no_bubble_and_sends_nothing() -> None:
    step = time_of(a_plan(), LLAMA_1B3, H200)
    assert (step.bubble_s, step.send_s) == (0, 0)


# ---------------------------------------------------------------- knobs


def test_small_micro_batches_wait_for_the_host() -> None:
    small, large = (a_plan(micro_batch=size, global_batch=32, seq_len=2048) for size in (1, 16))
    assert time_of(small, LLAMA_1B3, H200).waiting_s > 0.3 * step_s(small)
    assert time_of(large, LLAMA_1B3, H200).waiting_s < 0.01 * step_s(large)


def test_a_cpu_launches_and_computes_one_after_the_other() -> None:
    step = time_of(a_plan(micro_batch=1), LLAMA_160M, CPU)
    launched = time_of(a_plan(micro_batch=1), LLAMA_160M, CPU, dataclasses.replace(COLD, launch=2.0))
    passes = launched.waiting_s - step.waiting_s
    assert step.waiting_s > 0
    assert passes == pytest.approx(step.waiting_s)


def test_stage_3_is_held_up_by_its_hooks() -> None:
    plans = [a_plan(micro_batch=1, seq_len=2048, zero={"stage": stage}) for stage in (1, 2, 3)]
    first, second, third = (step_s(plan) for plan in plans)
    assert first < second < third / 2


def test_compiling_helps_all_but_stage_3() -> None:
    def gain(stage: int) -> float:
        plan = a_plan(zero={"stage": stage}, seq_len=2048)
        return step_s(plan) / step_s(dataclasses.replace(plan, compile=True))

    assert gain(1) > 1.2
    assert gain(3) == pytest.approx(1)


def test_tensor_parallelism_in_a_node_is_faster_than_across_nodes() -> None:
    plan = a_plan(ranks=2, tensor=2, seq_len=2048)
    inside = time_of(plan, LLAMA_8B, H200)
    across = time_of(plan, LLAMA_8B, dataclasses.replace(H200, ranks_per_node=1))
    assert inside.tensor_s < across.tensor_s / 5


# ---------------------------------------------------------------- measured and published


def speed(step: StepTime) -> float:
    return step.tokens_per_s_per_gpu


@pytest.mark.parametrize(
    ("tokens_per_s_per_gpu", "changes"),
    [
        (222_500, {"zero": {"stage": 2}}),
        (350_000, {"zero": {"stage": 2}, "compile": True}),
        (206_000, {"engine": Engine.DDP}),
        (322_000, {"engine": Engine.DDP, "compile": True}),
        (65_500, {"zero": {"stage": 3, "overlap_comm": True}}),
        (63_300, {"zero": {"stage": 3, "overlap_comm": True}, "compile": True}),
        (66_000, {"zero": {"stage": 3, "overlap_comm": True, "hpz_partition_size": 2}}),
        (127_000, {"zero": {"stage": 2}, "offload": OffloadPlan(optimizer=Offload.CPU)}),
        (73_000, {"zero": {"stage": 2}, "offload": OffloadPlan(optimizer=Offload.CPU, pin_memory=False)}),
        (51_000, {"zero": {"stage": 3}, "offload": OffloadPlan(optimizer=Offload.CPU)}),
    ],
)
def test_two_h200s_did_about_that(tokens_per_s_per_gpu: float, changes: dict[str, Any]) -> None:
    plan = a_plan(micro_batch=16, seq_len=1024, global_batch=64, **changes)
    assert speed(time_of(plan, LLAMA_160M, H200)) == pytest.approx(tokens_per_s_per_gpu, rel=0.25)


def test_eight_h100s_did_about_that() -> None:
    """torchtitan, docs/performance.md: Llama 3.1 8B, FSDP, 2 sequences of 8,192, selective recomputation."""
    plan = a_plan(ranks=8, micro_batch=2, global_batch=16, seq_len=8192, zero={"stage": 3})
    whole = speed(time_of(dataclasses.replace(plan, checkpoint_every=1), LLAMA_8B, H100))
    none = speed(time_of(plan, LLAMA_8B, H100))
    assert 0.8 * whole < 5762 < 1.2 * none


def test_an_a100_is_slower_by_about_what_users_see() -> None:
    plan = a_plan(ranks=8, micro_batch=2, global_batch=16, seq_len=2048, zero={"stage": 1})
    ratio = speed(time_of(plan, LLAMA_8B, H100)) / speed(time_of(plan, LLAMA_8B, A100))
    assert 1.7 < ratio < 3.2
