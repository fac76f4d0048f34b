"""Host memory and disk space of a node's ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweeps.estimate.memory.host import PROCESS_BYTES, host_bytes, nvme_bytes, pinned
from tests.support.examples import a_model, a_plan
from tests.support.plans import CPU, H200, LLAMA_8B, cases
from train_entry.contract import GIB, Offload, OffloadPlan, Plan

# 2**30 parameters, so that page-locked buffers are powers of two without rounding.
ROUND_1G = a_model(parameters=2**30, layers=4, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=2, positions=2)


def plan_of(stage: int = 2, ranks: int = 1, **offload: Any) -> Plan:
    return a_plan(
        zero={"stage": stage},
        ranks=ranks,
        micro_batch=1,
        global_batch=ranks,
        offload=OffloadPlan(**{"optimizer": Offload.CPU, "pin_memory": False, **offload}),
    )


def beyond_processes(plan: Plan) -> float:
    """Return the GiB per rank."""
    ranks = min(plan.ranks, H200.ranks_per_node)
    return (host_bytes(plan, ROUND_1G, H200, 0) / ranks - PROCESS_BYTES["cuda"]) / GIB


def test_page_locked_buffers_are_rounded_up_to_powers_of_two() -> None:
    assert pinned(2 * GIB) == 2 * GIB
    assert pinned(2 * GIB + 1) == 4 * GIB
    assert pinned(2 * GIB + 1, is_pinned=False) == 2 * GIB + 1
    assert pinned(0) == 0


def test_an_offloaded_optimizer_takes_18_bytes_a_parameter() -> None:
    """4 for master weights, 4 for gradients, 8 for moments, and 2 for weights on their way back."""
    assert beyond_processes(plan_of()) == pytest.approx(18, rel=0.01)


def test_ranks_of_a_node_share_what_is_offloaded() -> None:
    assert beyond_processes(plan_of(ranks=8)) == pytest.approx(18 / 8, rel=0.01)


def test_gradients_of_several_micro_batches_are_added_up_on_the_host() -> None:
    several = dataclasses.replace(plan_of(), global_batch=4)
    assert beyond_processes(several) == pytest.approx(20, rel=0.01)


def test_offloaded_weights_take_2_bytes_more_whatever_else() -> None:
    """Stage 3: 4 for master weights, 8 for moments, 4 + 2 for gradients; and the weights."""
    optimizer = beyond_processes(plan_of(stage=3))
    assert optimizer == pytest.approx(18, rel=0.01)
    assert beyond_processes(plan_of(stage=3, param=Offload.CPU)) == pytest.approx(optimizer + 2)


def test_a_disk_holds_optimizer_and_weights() -> None:
    plan = plan_of(stage=3, optimizer=Offload.NVME, param=Offload.NVME, max_in_cpu=0)
    assert nvme_bytes(plan, ROUND_1G, H200) == pytest.approx((16 + 2) * GIB, rel=0.001)
    assert nvme_bytes(plan_of(stage=3), ROUND_1G, H200) == 0


def test_nothing_offloaded_leaves_the_processes() -> None:
    plan = a_plan(ranks=16, global_batch=64)
    assert host_bytes(plan, LLAMA_8B, H200, 0) == 8 * PROCESS_BYTES["cuda"]


def test_on_a_cpu_the_device_is_the_host() -> None:
    plan = a_plan(ranks=4)
    assert host_bytes(plan, LLAMA_8B, CPU, GIB) == 4 * GIB


def test_pinning_never_takes_less() -> None:
    for plan, model, hardware in cases(200, seed=4):
        sizes = []
        for is_pinned in (False, True):
            offload = dataclasses.replace(plan.offload, pin_memory=is_pinned)
            changed = dataclasses.replace(plan, offload=offload)
            sizes.append(host_bytes(changed, model, hardware, GIB))
        assert sizes == sorted(sizes)
