"""What takes less memory: each remedy as one step, with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sweeps.remedies import ALL, Remedy, footprint
from sweeps.remedies.base import rounded_up, size
from tests.examples import a_model, a_plan
from train_entry.contract import Engine, ModelShape, Offload, OffloadPlan, Plan, Precision, Scalar

BILLION = a_model(
    parameters=10**9, layers=16, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=32_000, positions=2048
)


def changes(name: str, plan: Plan, model: ModelShape = BILLION) -> Mapping[str, Scalar] | None:
    step = ALL[name](plan, model)
    return None if step is None else step.changes


def why(name: str, plan: Plan, model: ModelShape = BILLION) -> str:
    step = ALL[name](plan, model)
    assert step is not None
    return step.why


def offloaded(stage: int = 3, **where: Any) -> Plan:
    return a_plan(zero={"stage": stage}, offload=OffloadPlan(**where))


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize(("every", "step"), [(0, {"activation_checkpointing": "full"}), (1, None)])
def test_checkpointing_becomes_full_unless_it_is(every: int, step: Mapping[str, Scalar] | None) -> None:
    assert changes("activation_checkpointing", a_plan(checkpoint_every=every)) == step


def test_checkpointing_every_other_block_becomes_full_too() -> None:
    step = ALL["activation_checkpointing"](a_plan(checkpoint_every=2), BILLION)
    assert step is not None
    assert step.changes == {"activation_checkpointing": "full"}


@pytest.mark.parametrize(("micro_batch", "smaller"), [(8, 4), (6, 3), (9, 3), (5, 1)])
def test_a_micro_batch_is_divided_so_that_the_global_batch_stays(micro_batch: int, smaller: int) -> None:
    plan = a_plan(micro_batch=micro_batch, global_batch=2 * micro_batch)
    assert changes("micro_batch", plan) == {"micro_batch": smaller}
    assert f"so the global batch of {2 * micro_batch} stays" in why("micro_batch", plan)


def test_a_micro_batch_of_one_cannot_be_smaller() -> None:
    assert changes("micro_batch", a_plan(micro_batch=1)) is None


def test_halving_the_micro_batch_says_what_it_saves_and_how_often_it_accumulates() -> None:
    text = why("micro_batch", a_plan(micro_batch=4, global_batch=32))
    assert text == (
        "activations are proportional to it: about 559 MiB instead of 1.09 GiB of activations; "
        "accumulates 8 instead of 4 times, so the global batch of 32 stays"
    )


def test_a_bucket_larger_than_the_model_is_cut_to_the_model_first() -> None:
    model = a_model(parameters=123_456_789)
    assert changes("buckets", a_plan(), model) == {"zero.reduce_bucket_size": 130_000_000}
    assert why("buckets", a_plan(), model) == (
        "buffers for gradients, allocated whole: 248 MiB instead of 954 MiB; "
        "the model has 123,456,789 parameters only"
    )


def test_a_bucket_that_the_model_fills_becomes_a_quarter() -> None:
    assert changes("buckets", a_plan()) == {"zero.reduce_bucket_size": 130_000_000}


def test_a_bucket_so_small_that_no_launch_is_worth_it_stays() -> None:
    assert changes("buckets", a_plan(zero={"reduce_bucket_size": 20_000_000})) is None


@pytest.mark.parametrize("stage", [1, 2])
def test_without_overlap_stages_1_and_2_have_one_bucket_less(stage: int) -> None:
    plan = a_plan(zero={"stage": stage, "overlap_comm": True})
    assert changes("overlap", plan) == {"zero.overlap_comm": False}
    assert why("overlap", plan) == "one bucket instead of two: 954 MiB less"


def test_without_overlap_stage_3_saves_nothing() -> None:
    assert changes("overlap", a_plan(zero={"stage": 3, "overlap_comm": True})) is None


def test_stage_3_keeps_fewer_whole_weights_at_hand() -> None:
    assert changes("live_weights", a_plan(zero={"stage": 3})) == {
        "zero.max_live_parameters": 250_000_000,
        "zero.max_reuse_distance": 250_000_000,
        "zero.prefetch_bucket_size": 13_000_000,
    }
    assert changes("live_weights", a_plan(zero={"stage": 2})) is None


def test_whole_weights_at_hand_are_never_less_than_the_largest_parameter() -> None:
    seven = a_model(parameters=6_738_415_616, hidden=4096, ffn=11_008, vocab=32_000)
    small = {"stage": 3, "max_live_parameters": 60_000_000, "prefetch_bucket_size": 5_000_000}
    plan = a_plan(zero=small)
    assert footprint.gathered_weights(plan, seven) == 32_000 * 4096 * 2
    assert changes("live_weights", plan, seven) is None
    assert "at most 502 MiB instead of 1.96 GiB" in why("live_weights", a_plan(zero={"stage": 3}), seven)


def test_ddp_has_its_gradients_in_the_buckets() -> None:
    plan = a_plan(engine=Engine.DDP, zero={"stage": 0})
    assert changes("buckets", plan) == {"ddp.gradient_as_bucket_view": True}
    assert "3.73 GiB less" in why("buckets", plan)


@pytest.mark.parametrize(("stage", "then"), [(0, "zero1"), (1, "zero2"), (2, "zero3")])
def test_sharding_goes_one_stage_up(stage: int, then: str) -> None:
    assert changes("sharding", a_plan(zero={"stage": stage})) == {"strategy": then}


def test_sharding_of_ddp_says_what_each_rank_is_left_with() -> None:
    plan = a_plan(engine=Engine.DDP, zero={"stage": 0}, ranks=4)
    assert why("sharding", plan).startswith(
        "weights, gradients and optimizer on a device: 6.52 GiB instead of 14.9 GiB"
    )


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
    assert why(name, whole).startswith("5.59 GiB a rank leaves the host")
    assert why(name, half).startswith("2.79 GiB a rank leaves the host")


@pytest.mark.parametrize("remedy", ALL.values(), ids=lambda remedy: remedy.name)
def test_every_remedy_explains_itself_and_its_cost(remedy: Remedy) -> None:
    assert remedy.explanation.endswith(".")
    assert remedy.cost


def test_every_remedy_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "advice.md").read_text(encoding="utf-8")
    steps = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {name.strip(" `") for step in steps for name in step.split(",")} >= set(ALL)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("stage", "bytes_a_parameter"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_model_states_are_those_of_the_zero_paper(stage: int, bytes_a_parameter: float) -> None:
    plan = a_plan(zero={"stage": stage}, ranks=8)
    assert footprint.states(plan, BILLION).total == pytest.approx(bytes_a_parameter * 10**9)


def test_an_offloaded_optimizer_takes_its_gradients_along() -> None:
    left = footprint.states(offloaded(stage=2, optimizer=Offload.CPU), BILLION)
    assert (left.weights, left.gradients, left.optimizer) == (2e9, 0, 0)


def test_sgd_keeps_one_moment_less_than_adam() -> None:
    adam = footprint.states(a_plan(ranks=1), BILLION).total
    sgd = footprint.states(a_plan(ranks=1, optimizer={"name": "sgd", "momentum": 0.9}), BILLION).total
    assert adam - sgd == 4e9


def test_full_checkpointing_leaves_inputs_one_block_and_the_logits() -> None:
    plan = a_plan(checkpoint_every=1)
    parts = 16 * footprint.block_input(plan, BILLION) + footprint.block_activations(plan, BILLION)
    assert footprint.activations(plan, BILLION) == parts + footprint.logits(plan, BILLION)


def test_checkpointing_every_other_block_lies_between() -> None:
    held = [footprint.activations(a_plan(checkpoint_every=every), BILLION) for every in (1, 2, 0)]
    assert held == sorted(held)


@pytest.mark.parametrize(("precision", "bytes_a_place"), [(Precision.BF16, 34), (Precision.FP32, 68)])
def test_a_gpt2_block_keeps_34_bytes_a_place_in_half_precision(
    precision: Precision, bytes_a_place: int
) -> None:
    plan = a_plan(micro_batch=1, seq_len=1, precision=precision)
    model = a_model(family="gpt2", hidden=100)
    assert footprint.block_activations(plan, model) == 100 * bytes_a_place


def test_sizes_read_as_a_person_writes_them() -> None:
    assert [size(count) for count in (0, 2048, 3.5 * 2**20, 150 * 2**30)] == [
        "nothing",
        "2.00 KiB",
        "3.50 MiB",
        "150 GiB",
    ]


def test_sizes_of_buffers_lie_on_the_grid_of_two_digits() -> None:
    assert [rounded_up(number) for number in (3, 99, 101, 123_456_789)] == [3, 99, 110, 130_000_000]
