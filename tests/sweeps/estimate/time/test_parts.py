"""Parts of a step, compared with values computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweeps.estimate import flops
from sweeps.estimate.time.collectives import (
    NETWORK_HOP_S,
    NODE_HOP_S,
    RING_SHARE,
    Group,
    data_group,
    pipeline_group,
    tensor_group,
)
from sweeps.estimate.time.exchange import ALONE, Exchange, exchange_of, gathers, held_parameters
from sweeps.estimate.time.step import time_of
from sweeps.estimate.time.update import CPU_ADAM_SHARE, PAGEABLE_BYTES_PER_S, PIECES_SHARE, update_of
from tests.support.examples import a_plan
from tests.support.plans import CPU, GPT2_124M, H200, LLAMA_1B3, LLAMA_8B, LLAMA_160M
from train_entry.contract import Attention, Engine, Offload, OffloadPlan, Plan, Precision

# ---------------------------------------------------------------- counts


def test_an_8b_llama_takes_54_6_gflop_a_token() -> None:
    """6 x 8.03e9 + 12 x 32 x 4096 x 4096."""
    assert flops.flops_per_token(LLAMA_8B, 4096) == pytest.approx(54.6e9, rel=0.001)
    assert flops.recomputed_flops_per_token(LLAMA_8B, 4096) == pytest.approx(72.8e9, rel=0.001)


def test_blocks_and_embeddings_are_the_whole_model() -> None:
    """Besides them, a llama has one norm, and GPT-2 two vectors."""
    for model, rest in ((LLAMA_8B, 4096), (GPT2_124M, 2 * 768)):
        counted = model.layers * flops.block_parameters(model) + flops.embedding_parameters(model)
        assert counted == model.parameters
        assert flops.block_parameters(model) % 1 == pytest.approx(rest / model.layers % 1)


def test_passes_add_up_to_six_operations_a_parameter() -> None:
    """Forward takes 2, backward 4; the embedding is looked up, not multiplied."""
    forward = LLAMA_8B.layers * flops.block_matmul_flops(LLAMA_8B, 1) + flops.head_flops(LLAMA_8B, 1)
    lookup = LLAMA_8B.vocab * LLAMA_8B.hidden
    assert 3 * forward == pytest.approx(6 * (LLAMA_8B.parameters - lookup))


def test_fused_attention_skips_half_and_keeps_no_scores() -> None:
    fused, written_out = Attention.SDPA, Attention.EAGER
    half, whole = (flops.attention_flops(LLAMA_1B3, 2048, 10, kind) for kind in (fused, written_out))
    assert whole == 2 * half == 4 * 2048 * 2048 * 10
    assert flops.score_elements(LLAMA_1B3, 2048, 10, fused) == 0
    assert flops.score_elements(LLAMA_1B3, 2048, 10, written_out) == 16 * 2048 * 10


def test_tensor_parallelism_leaves_norms_whole() -> None:
    one, two = (flops.block_traffic_bytes(LLAMA_1B3, 1, tensor, Precision.BF16) for tensor in (1, 2))
    assert one == 128 * 2048 + 10 * 5504
    assert two == 84 * 2048 + (44 * 2048 + 10 * 5504) / 2


# ---------------------------------------------------------------- collectives


def test_a_ring_moves_so_many_bytes() -> None:
    group = Group(size=4, bytes_per_s=100e9, hop_s=0)
    assert group.all_reduce_s(1e9) == pytest.approx(0.015)
    assert group.all_gather_s(1e9) == group.reduce_scatter_s(1e9) == pytest.approx(0.0075)
    assert group.send_s(1e9) == pytest.approx(0.01)


def test_a_ring_takes_so_many_hops() -> None:
    group = Group(size=4, bytes_per_s=100e9, hop_s=1)
    assert (group.all_reduce_s(0), group.all_gather_s(0), group.send_s(0)) == (6, 3, 1)


def test_one_rank_exchanges_nothing() -> None:
    group = Group(size=1, bytes_per_s=1, hop_s=1)
    assert group.all_reduce_s(1e9) == group.all_gather_s(1e9) == group.send_s(1e9) == 0


def test_tensor_groups_lie_inside_a_node_and_pipelines_across() -> None:
    plan = a_plan(ranks=16, tensor=4, pipeline=2)  # two nodes: data 2 inside, one stage each
    groups = [group(plan, H200) for group in (tensor_group, data_group, pipeline_group)]
    assert [group.size for group in groups] == [4, 2, 2]
    assert [group.hop_s for group in groups] == [NODE_HOP_S, NODE_HOP_S, NETWORK_HOP_S]
    assert groups[2].bytes_per_s == H200.network_bytes_per_s * RING_SHARE


def test_every_rank_of_a_node_brings_its_adapter() -> None:
    full = data_group(a_plan(ranks=16), H200)
    split = data_group(a_plan(ranks=16, tensor=4), H200)
    assert full.bytes_per_s == pytest.approx(8 * H200.network_bytes_per_s * RING_SHARE)
    assert split.bytes_per_s == pytest.approx(2 * H200.network_bytes_per_s * RING_SHARE)


# ---------------------------------------------------------------- exchange between data-parallel ranks


def exchange(**changes: Any) -> Exchange:
    """Return the exchange of llama_1b3 on two ranks with four micro-batches per step."""
    return exchange_of(a_plan(**changes), LLAMA_1B3, H200)


def seconds(size_bytes: float) -> float:
    """Return the seconds of a link of the ring, without latency."""
    return size_bytes / (H200.link_bytes_per_s * RING_SHARE)


def test_one_rank_of_its_kind_reduces_nothing() -> None:
    assert exchange(ranks=1) == exchange(ranks=2, tensor=2) == ALONE


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_stages_2_and_3_reduce_every_micro_batch(stage: int, times: int) -> None:
    assert exchange(zero={"stage": stage}).reductions == times


def test_stages_0_to_2_all_reduce_and_stage_3_scatters() -> None:
    """In a ring of two ranks, an all-reduce sends all bytes over each link, a reduce-scatter half of them."""
    whole = pytest.approx(seconds(2 * LLAMA_1B3.parameters), rel=0.01)
    half = pytest.approx(seconds(LLAMA_1B3.parameters), rel=0.01)
    assert [exchange(zero={"stage": stage}).reduce_s for stage in (0, 1, 2)] == [whole] * 3
    assert exchange(zero={"stage": 3}).reduce_s == half
    assert exchange(zero={"stage": 2, "use_multi_rank_bucket_allreduce": False}).reduce_s == half


def test_ddp_reduces_fp32() -> None:
    assert exchange(engine=Engine.DDP).reduce_s == pytest.approx(
        2 * exchange(zero={"stage": 0}).reduce_s, rel=0.01
    )


def test_stages_1_and_2_gather_updated_weights_once() -> None:
    once = pytest.approx(seconds(LLAMA_1B3.parameters), rel=0.01)
    updates = [exchange(zero={"stage": stage}).update_s for stage in range(4)]
    assert updates == [0, once, once, 0]


def test_a_small_model_fits_one_bucket_and_hides_nothing() -> None:
    small, large = (
        exchange(zero={"stage": 2, "overlap_comm": True, "reduce_bucket_size": size})
        for size in (10**8, 2 * 10**9)
    )
    assert large.tail_s == large.reduce_s
    assert small.tail_s == pytest.approx(small.reduce_s * 1e8 / LLAMA_1B3.parameters)


@pytest.mark.parametrize(
    ("reuse", "recomputes", "times"), [(0, False, 2), (0, True, 3), (10**10, False, 1), (10**8, True, 1.963)]
)
def test_stage_3_gathers_what_it_has_not_kept(reuse: int, recomputes: bool, times: float) -> None:
    plan = a_plan(zero={"stage": 3, "max_reuse_distance": reuse}, checkpoint_every=int(recomputes))
    assert gathers(plan, LLAMA_1B3) == pytest.approx(times, abs=0.001)


def test_a_second_copy_in_the_node_saves_the_network() -> None:
    plain = exchange(ranks=16, zero={"stage": 3})
    kept = exchange(ranks=16, zero={"stage": 3, "hpz_partition_size": 8})
    narrow = dataclasses.replace(H200, network_bytes_per_s=1e9)
    slow = [
        exchange_of(a_plan(ranks=16, zero=z), LLAMA_1B3, narrow)
        for z in ({"stage": 3}, {"stage": 3, "hpz_partition_size": 8})
    ]
    assert kept.gather_s <= plain.gather_s
    assert slow[1].gather_s < 0.7 * slow[0].gather_s


def test_weights_as_int8_take_half() -> None:
    plain, quantized = (exchange(zero={"stage": 3, "quantized_weights": on}) for on in (False, True))
    assert quantized.gather_s == pytest.approx(plain.gather_s / 2, rel=0.01)


def test_only_blocks_are_split_by_tensor_parallelism() -> None:
    embeddings = 2 * 32000 * 2048
    halved = held_parameters(a_plan(tensor=2), LLAMA_1B3)
    assert halved == pytest.approx((LLAMA_1B3.parameters - embeddings) / 2 + embeddings)


def test_overlapping_hides_reductions_behind_the_backward_pass() -> None:
    apart, beside = (
        a_plan(seq_len=2048, zero={"overlap_comm": on, "reduce_bucket_size": 10**7}) for on in (False, True)
    )
    assert time_of(beside, LLAMA_1B3, H200).reduce_s < time_of(apart, LLAMA_1B3, H200).reduce_s / 2


# ---------------------------------------------------------------- updates


def offloaded(stage: int, **offload: Any) -> Plan:
    """Return a plan on one rank with four micro-batches per step."""
    plan = OffloadPlan(**{"optimizer": Offload.CPU, **offload})
    return a_plan(ranks=1, micro_batch=8, zero={"stage": stage}, offload=plan)


def test_a_fused_optimizer_passes_over_memory_once() -> None:
    plain, fused = (
        update_of(a_plan(engine=Engine.DDP, optimizer={"fused": on}), LLAMA_1B3, H200) for on in (False, True)
    )
    assert plain.device_s / fused.device_s == pytest.approx(92 / 40)


def test_sharded_optimizers_update_their_part() -> None:
    whole, half = (update_of(a_plan(zero={"stage": stage}), LLAMA_1B3, H200) for stage in (0, 1))
    assert half.device_s == pytest.approx(whole.device_s / 2)


def test_offload_moves_the_update_to_the_host() -> None:
    update = update_of(offloaded(1), LLAMA_1B3, H200)
    copy_rate = H200.host_link_bytes_per_s * PIECES_SHARE
    on_cpu = LLAMA_1B3.parameters * 42 / (H200.host_memory_bytes_per_s * CPU_ADAM_SHARE)
    assert update.device_s == 0
    assert update.streamed_s == pytest.approx(4 * LLAMA_1B3.parameters / copy_rate)
    assert update.offload_s == pytest.approx(on_cpu + 2 * LLAMA_1B3.parameters / copy_rate)


def test_stage_2_brings_sums_back_for_every_micro_batch() -> None:
    """Three copies each way of 2 bytes, then the last one of 4 bytes."""
    first, second = (update_of(offloaded(stage), LLAMA_1B3, H200).streamed_s for stage in (1, 2))
    assert second / first == pytest.approx((3 * 4 + 4) / 4)


def test_stage_3_returns_weights_through_memory_that_is_not_locked() -> None:
    second, third = (update_of(offloaded(stage), LLAMA_1B3, H200).offload_s for stage in (2, 3))
    locked = 2 * LLAMA_1B3.parameters / (H200.host_link_bytes_per_s * PIECES_SHARE)
    assert third - second == pytest.approx(2 * LLAMA_1B3.parameters / PAGEABLE_BYTES_PER_S - locked)


def test_without_locked_memory_all_wait_for_copies() -> None:
    update = update_of(offloaded(2, pin_memory=False), LLAMA_1B3, H200)
    assert update.streamed_s == 0
    assert update.offload_s > 2 * update_of(offloaded(2), LLAMA_1B3, H200).offload_s


def test_a_ratio_counts_whole_subgroups() -> None:
    """llama_160m has one sub-group: half of it, rounded down, is none. llama_8b has nine: four stay."""
    half = offloaded(3, ratio=0.5)
    assert update_of(half, LLAMA_160M, H200) == update_of(offloaded(3), LLAMA_160M, H200)
    kept = update_of(half, LLAMA_8B, H200).device_s
    whole = update_of(a_plan(ranks=1, zero={"stage": 3}), LLAMA_8B, H200).device_s
    assert kept == pytest.approx(whole * 4 / 9)


def test_a_disk_is_read_and_written_every_step() -> None:
    host, disk = (
        update_of(offloaded(3, optimizer=where), LLAMA_1B3, H200).offload_s
        for where in (Offload.CPU, Offload.NVME)
    )
    assert disk - host == pytest.approx(32 * LLAMA_1B3.parameters / H200.nvme_bytes_per_s)


def test_parameters_on_the_host_come_for_every_gathering() -> None:
    plan = offloaded(3, param=Offload.CPU)
    moved = update_of(plan, LLAMA_1B3, H200).streamed_s - update_of(offloaded(3), LLAMA_1B3, H200).streamed_s
    size = 2 * LLAMA_1B3.parameters * gathers(plan, LLAMA_1B3) * plan.grad_accum
    assert moved == pytest.approx(size / (H200.host_link_bytes_per_s * PIECES_SHARE))


def test_on_a_cpu_there_is_nothing_to_copy() -> None:
    assert update_of(offloaded(3, param=Offload.CPU), LLAMA_1B3, CPU).streamed_s == 0
