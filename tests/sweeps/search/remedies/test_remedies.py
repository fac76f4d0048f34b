"""Each remedy as one step, with its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from sweeps.estimate.memory.model import memory_of
from sweeps.search.remedies import ALL, Remedy
from sweeps.search.remedies.base import rounded_up
from sweeps.search.remedies.saving import is_worthwhile, saved_bytes, too_small
from tests.support.dry_runs import GIB, an_estimate, too_large
from tests.support.examples import a_model, a_plan
from tests.support.paths import ROOT
from tests.support.recorded import Row, tables
from train_entry.contract import (
    Engine,
    Estimate,
    FailureKind,
    Fit,
    ModelShape,
    Offload,
    OffloadPlan,
    Plan,
    Scalar,
    size_text,
)

BILLION = a_model(
    parameters=10**9, layers=16, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=32_000, positions=2048
)


def changes(name: str, plan: Plan, model: ModelShape = BILLION) -> Mapping[str, Scalar] | None:
    """Return the changes of the first step; None: there is none."""
    return next((step.changes for step in ALL[name](plan, model)), None)


def how(name: str, plan: Plan, model: ModelShape = BILLION) -> str:
    return ALL[name](plan, model)[0].how


def offloaded(stage: int = 3, **where: Any) -> Plan:
    return a_plan(zero={"stage": stage}, offload=OffloadPlan(**where))


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize(("every", "step"), [(0, {"activation_checkpointing": "full"}), (1, None)])
def test_checkpointing_becomes_full_unless_it_is(every: int, step: Mapping[str, Scalar] | None) -> None:
    assert changes("activation_checkpointing", a_plan(checkpoint_every=every)) == step


def test_checkpointing_every_other_block_becomes_full_too() -> None:
    plan = a_plan(checkpoint_every=2)
    assert changes("activation_checkpointing", plan) == {"activation_checkpointing": "full"}


@pytest.mark.parametrize(("micro_batch", "smaller"), [(8, 4), (6, 3), (9, 3), (5, 1)])
def test_a_micro_batch_is_divided_so_that_the_global_batch_stays(micro_batch: int, smaller: int) -> None:
    plan = a_plan(micro_batch=micro_batch, global_batch=2 * micro_batch)
    assert changes("micro_batch", plan) == {"micro_batch": smaller}
    assert f"so the global batch of {2 * micro_batch} stays" in how("micro_batch", plan)


def test_a_micro_batch_of_one_cannot_be_smaller() -> None:
    assert changes("micro_batch", a_plan(micro_batch=1)) is None


def test_halving_the_micro_batch_says_how_often_it_accumulates() -> None:
    assert how("micro_batch", a_plan(micro_batch=4, global_batch=32)) == (
        "activations are proportional to it; accumulates 8 instead of 4 times, "
        "so the global batch of 32 stays"
    )


def bucket_sizes(plan: Plan, model: ModelShape = BILLION) -> list[Scalar]:
    return [step.changes["zero.reduce_bucket_size"] for step in ALL["buckets"](plan, model)]


def test_a_bucket_larger_than_the_model_is_cut_to_the_model_first() -> None:
    model = a_model(parameters=123_456_789)
    assert bucket_sizes(a_plan(), model)[0] == 130_000_000
    assert how("buckets", a_plan(), model) == (
        "gradient buckets are allocated at full size; the model has only 123,456,789 parameters"
    )


def test_a_bucket_that_the_model_fills_becomes_a_quarter() -> None:
    assert bucket_sizes(a_plan()) == [130_000_000]


def test_the_smallest_bucket_stays() -> None:
    assert bucket_sizes(a_plan(zero={"reduce_bucket_size": 5_000_000})) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_without_overlap_stages_1_and_2_have_one_bucket_less(stage: int) -> None:
    plan = a_plan(zero={"stage": stage, "overlap_comm": True})
    assert changes("overlap", plan) == {"zero.overlap_comm": False}
    assert how("overlap", plan) == "one bucket instead of two"


def test_without_overlap_stage_3_saves_nothing() -> None:
    assert changes("overlap", a_plan(zero={"stage": 3, "overlap_comm": True})) is None


def test_stage_3_keeps_fewer_whole_weights_at_hand() -> None:
    assert changes("live_weights", a_plan(zero={"stage": 3})) == {
        "zero.max_live_parameters": 250_000_000,
        "zero.max_reuse_distance": 250_000_000,
        "zero.prefetch_bucket_size": 13_000_000,
    }
    assert changes("live_weights", a_plan(zero={"stage": 2})) is None


def test_whole_weights_at_hand_are_cut_down_to_the_smallest_bucket_and_no_further() -> None:
    small = {"stage": 3, "max_live_parameters": 5_000_000, "prefetch_bucket_size": 5_000_000}
    assert changes("live_weights", a_plan(zero=small)) is None


def test_ddp_has_its_gradients_in_the_buckets() -> None:
    plan = a_plan(engine=Engine.DDP, zero={"stage": 0})
    assert changes("buckets", plan) == {"ddp.gradient_as_bucket_view": True}
    assert changes("buckets", dataclasses.replace(plan, ranks=1)) is None


@pytest.mark.parametrize(("stage", "then"), [(0, "zero1"), (1, "zero2"), (2, "zero3")])
def test_sharding_goes_one_stage_up(stage: int, then: str) -> None:
    assert changes("sharding", a_plan(zero={"stage": stage})) == {"strategy": then}


def test_sharding_says_what_is_shared_and_goes_on_where_a_stage_does_not_help() -> None:
    steps = ALL["sharding"](a_plan(engine=Engine.DDP, zero={"stage": 0}, ranks=4), BILLION)
    assert [step.how for step in steps] == [
        "zero1 divides the optimizer's states among 4 ranks",
        "zero2 divides the optimizer's states and gradients among 4 ranks",
        "zero3 divides all model states among 4 ranks",
    ]


def test_a_model_smaller_than_the_default_bucket_is_sharded_with_one_of_its_own_size() -> None:
    plan = a_plan(zero={"stage": 0})
    assert changes("sharding", plan, a_model(parameters=10**8)) == {
        "strategy": "zero1",
        "zero.reduce_bucket_size": 100_000_000,
    }


@pytest.mark.parametrize("plan", [a_plan(ranks=1), a_plan(zero={"stage": 3})])
def test_there_is_nothing_to_shard_on_one_rank_or_beyond_stage_3(plan: Plan) -> None:
    assert changes("sharding", plan) is None


def test_sharding_keeps_what_is_offloaded() -> None:
    assert changes("sharding", offloaded(stage=2, optimizer=Offload.CPU)) == {"zero.stage": 3}


@pytest.mark.parametrize(
    ("plan", "step"),
    [
        (a_plan(engine=Engine.DDP, zero={"stage": 0}), {"strategy": "zero2_offload"}),
        (a_plan(zero={"stage": 1}), {"zero.offload_optimizer": "cpu"}),
        (a_plan(zero={"stage": 3}), {"zero.offload_optimizer": "cpu"}),
        (offloaded(optimizer=Offload.CPU), None),
        (offloaded(optimizer=Offload.NVME), None),
    ],
)
def test_the_optimizer_goes_to_the_cpu_once(plan: Plan, step: Mapping[str, Scalar] | None) -> None:
    assert changes("optimizer_to_cpu", plan) == step


def test_the_weights_follow_at_stage_3_only() -> None:
    assert changes("weights_to_cpu", offloaded(optimizer=Offload.CPU)) == {"zero.offload_param": "cpu"}
    assert changes("weights_to_cpu", offloaded(stage=2, optimizer=Offload.CPU)) is None


def test_on_one_rank_the_weights_bring_stage_3_along() -> None:
    plan = a_plan(ranks=1, offload=OffloadPlan(optimizer=Offload.CPU))
    assert changes("weights_to_cpu", plan) == {"strategy": "zero3_offload"}


def test_moving_from_host_to_disk_helps_the_host_and_not_the_gpu() -> None:
    plan = offloaded(optimizer=Offload.CPU, param=Offload.CPU)
    assert changes("optimizer_to_nvme", plan) is None
    assert changes("optimizer_on_to_nvme", plan) == {"zero.offload_optimizer": "nvme"}
    assert changes("weights_on_to_nvme", plan) == {"zero.offload_param": "nvme"}


def test_a_full_host_first_loses_its_page_locked_buffers() -> None:
    assert changes("unpinned", offloaded(optimizer=Offload.CPU)) == {"offload.pin_memory": False}
    assert changes("unpinned", offloaded(optimizer=Offload.CPU, pin_memory=False)) is None
    assert changes("unpinned", a_plan()) is None


def test_half_of_the_optimizer_stays_on_the_gpu_as_a_sub_group_of_its_own() -> None:
    assert changes("half_the_optimizer", offloaded(optimizer=Offload.CPU)) == {
        "offload.ratio": 0.5,
        "zero.sub_group_size": 250_000_000,
    }


@pytest.mark.parametrize(("name", "place"), [("optimizer_on_to_nvme", "nvme"), ("optimizer_back", "none")])
def test_where_half_of_the_optimizer_is_on_the_host_only_that_half_leaves_it(name: str, place: str) -> None:
    whole, half = (offloaded(optimizer=Offload.CPU, ratio=ratio) for ratio in (1.0, 0.5))
    assert changes(name, whole) == {"zero.offload_optimizer": place}
    assert changes(name, half) == {"zero.offload_optimizer": place, "offload.ratio": 1.0}


@pytest.mark.parametrize("remedy", ALL.values(), ids=lambda remedy: remedy.name)
def test_every_remedy_explains_itself_and_its_cost(remedy: Remedy) -> None:
    assert remedy.explanation.endswith(".")
    assert remedy.cost


def test_every_remedy_is_documented() -> None:
    text = (ROOT / "docs" / "advice.md").read_text(encoding="utf-8")
    steps = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {name.strip(" `") for step in steps for name in step.split(",")} >= set(ALL)


# ---------------------------------------------------------------- savings and fit


def test_a_saving_on_the_gpu_is_that_of_the_peak() -> None:
    before, after = an_estimate(), an_estimate(peak_bytes=5 * GIB, host_bytes=9 * GIB)
    assert saved_bytes(FailureKind.GPU_OOM, before, after) == int(3.5 * GIB)
    assert saved_bytes(FailureKind.HOST_OOM, before, after) == -6 * GIB


def test_where_the_peak_stays_what_is_needed_beside_it_counts() -> None:
    assert saved_bytes(FailureKind.GPU_OOM, an_estimate(), an_estimate(needed_bytes=int(8.6 * GIB))) > 0


@pytest.mark.parametrize(
    ("name", "saved", "is_worth_it"),
    [
        ("micro_batch", 1, True),
        ("micro_batch", 0, False),
        ("buckets", 64 * 2**20, False),  # less than one percent of 8.5 GiB
        ("buckets", 90 * 2**20, True),
    ],
)
def test_a_buffer_must_save_more_than_nothing_to_be_worth_a_launch(
    name: str, saved: int, is_worth_it: bool
) -> None:
    assert is_worthwhile(ALL[name], saved, an_estimate()) is is_worth_it


@pytest.mark.parametrize(
    ("estimate", "kinds"),
    [
        (an_estimate(), set()),
        (an_estimate(fit=Fit.BORDERLINE, needed_bytes=11 * GIB), set()),
        (too_large(12), {FailureKind.GPU_OOM}),
        (too_large(9, host_bytes=65 * GIB), {FailureKind.HOST_OOM}),
        (too_large(12, host_bytes=65 * GIB), {FailureKind.GPU_OOM, FailureKind.HOST_OOM}),
        (too_large(9), set()),  # the disk is too small
        (too_large(9, host_bytes=65 * GIB, host_limit_bytes=None), set()),
    ],
)
def test_a_plan_is_expected_to_fail_by_the_memory_that_is_too_small(
    estimate: Estimate, kinds: set[FailureKind]
) -> None:
    assert too_small(estimate, "cuda") == kinds


def test_on_a_cpu_it_is_always_the_host() -> None:
    assert too_small(too_large(12, host_bytes=65 * GIB), "cpu") == {FailureKind.HOST_OOM}


def pairs(**changes: Any) -> list[tuple[Row, Row]]:
    """Return recorded trials with those that differ from them by these changes only."""
    recorded = tables()
    rows = [row for table in ("h200x1_1b3_cap40", "h200x2_1b3_cap40") for row in recorded[table]]
    found = [(row.table, row.model, row.plan, row) for row in rows]
    return [
        (row, other)
        for table, model, plan, row in found
        for their_table, their_model, their_plan, other in found
        if (table, model, dataclasses.replace(plan, **changes)) == (their_table, their_model, their_plan)
        and plan != their_plan
    ]


@pytest.mark.parametrize(
    "changes", [{"checkpoint_every": 1}, *({"micro_batch": size} for size in (1, 2, 4, 8))]
)
def test_what_a_recorded_step_saved_is_what_it_was_estimated_to(changes: Mapping[str, Any]) -> None:
    compared = [
        (before.peak_bytes - after.peak_bytes, _peak(before) - _peak(after))
        for before, after in pairs(**changes)
        if not before.is_oom and not after.is_oom and before.peak_bytes and after.peak_bytes
    ]
    assert len(compared) > 5
    assert max(abs(seen - estimated) for seen, estimated in compared) < 0.1 * GIB


def _peak(row: Row) -> int:
    return memory_of(row.plan, row.model, row.hardware).peak_bytes


def test_sizes_read_as_a_person_writes_them() -> None:
    assert [size_text(count) for count in (-1, 0, 2048, 3.5 * 2**20, 150 * 2**30)] == [
        "nothing",
        "nothing",
        "2.00 KiB",
        "3.50 MiB",
        "150 GiB",
    ]


def test_sizes_of_buffers_lie_on_the_grid_of_two_digits() -> None:
    assert [rounded_up(number) for number in (3, 99, 101, 123_456_789)] == [3, 99, 110, 130_000_000]
