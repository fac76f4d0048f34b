"""The verdict on whether a plan fits devices, host memory and disk, and the reason if it does not."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.errors import ConfigError
from sweeps.estimate.fit import Room, judge, require_room, room_of
from sweeps.estimate.memory.account import Component, Memory, PhaseMemory, StageMemory
from sweeps.estimate.memory.model import COLD, memory_of, needed_bytes
from sweeps.machine import Gpu, Machine, Nvme
from tests.support.examples import a_model, a_plan
from tests.support.plans import H200, LLAMA_1B3, cases
from train_entry.contract import GIB, Fit

EXACT = dataclasses.replace(COLD, fragmentation=0.0, spread=0.0)
UNSURE = dataclasses.replace(EXACT, spread=0.1)
QUANTILE = 0.9
CARD = Gpu(index=0, uuid="GPU-0", name="NVIDIA A100", memory_bytes=80 * GIB)
SMALLER = dataclasses.replace(CARD, index=1, uuid="GPU-1", memory_bytes=79 * GIB)
GPUS = Machine(
    device="cuda",
    nodes=1,
    ranks_per_node=2,
    gpus=(CARD, SMALLER),
    host_memory_bytes=512 * GIB,
    nvme=Nvme(path="/scratch", free_bytes=100 * GIB),
)
CORES = Machine(device="cpu", nodes=1, ranks_per_node=4, host_memory_bytes=16 * GIB)


def a_memory(*stage_gib: float, **changes: Any) -> Memory:
    """Return a memory of one rank per pipeline stage, and a context of 2 GiB."""
    stages = []
    for stage, gib in enumerate(stage_gib):
        held = Component(name="weights", bytes=int(gib * GIB))
        stages.append(StageMemory(stage=stage, phases=(PhaseMemory(phase="loss", components=(held,)),)))
    memory = Memory(stages=tuple(stages), context_bytes=2 * GIB, host_bytes=0, nvme_bytes=0)
    return dataclasses.replace(memory, **changes)


def a_room(device_gib: float = 40, **changes: Any) -> Room:
    room = Room(device_bytes=int(device_gib * GIB), counts_context=False, what="the GPU")
    return dataclasses.replace(room, **changes)


# ---------------------------------------------------------------- devices


def test_a_plan_that_needs_less_than_there_is_fits() -> None:
    verdict = judge(a_memory(40), EXACT, a_room(40), QUANTILE)
    assert (verdict.fit, verdict.why) == (Fit.FITS, "")
    assert (verdict.needed_bytes, verdict.limit_bytes) == (40 * GIB, 40 * GIB)


def test_a_plan_that_needs_more_is_too_large_and_says_when_and_by_how_much() -> None:
    verdict = judge(a_memory(41.5), EXACT, a_room(40), QUANTILE)
    assert verdict.fit is Fit.TOO_LARGE
    assert verdict.why == "needs 41.50 GiB (loss) of 40.00 GiB, the GPU"


@pytest.mark.parametrize(
    ("gib", "fit"), [(35, Fit.FITS), (37, Fit.BORDERLINE), (40, Fit.BORDERLINE), (40.1, Fit.TOO_LARGE)]
)
def test_a_plan_is_borderline_where_only_the_doubt_is_too_much(gib: float, fit: Fit) -> None:
    verdict = judge(a_memory(gib), UNSURE, a_room(40), QUANTILE)
    assert verdict.fit is fit
    assert (verdict.why == "") is (fit is Fit.FITS)


def test_without_doubt_nothing_is_borderline() -> None:
    memory = a_memory(37)
    assert judge(memory, UNSURE, a_room(40), 0.5).fit is Fit.FITS
    assert judge(memory, UNSURE, a_room(40), 0.999).fit is Fit.BORDERLINE


def test_what_fragments_counts() -> None:
    assert judge(a_memory(39), dataclasses.replace(EXACT, fragmentation=0.1), a_room(40), 0.5).fit is (
        Fit.TOO_LARGE
    )


def test_the_fullest_stage_decides_and_is_named() -> None:
    verdict = judge(a_memory(10, 50, 20), EXACT, a_room(40), QUANTILE)
    assert verdict.why == "needs 50.00 GiB on stage 1 (loss) of 40.00 GiB, the GPU"


def test_headroom_is_left_free() -> None:
    room = a_room(40, headroom_bytes=3 * GIB)
    verdicts = [judge(a_memory(gib), EXACT, room, QUANTILE) for gib in (37, 37.5)]
    assert [verdict.fit for verdict in verdicts] == [Fit.FITS, Fit.TOO_LARGE]
    assert {verdict.limit_bytes for verdict in verdicts} == {37 * GIB}


def test_the_context_counts_where_the_limit_holds_it_and_is_then_said() -> None:
    beside, within = [
        judge(a_memory(39), EXACT, a_room(40, counts_context=counts), QUANTILE) for counts in (False, True)
    ]
    assert (beside.fit, within.fit) == (Fit.FITS, Fit.TOO_LARGE)
    assert within.needed_bytes - beside.needed_bytes == 2 * GIB
    assert within.why == "needs 41.00 GiB (loss, 2.00 GiB of it CUDA's context) of 40.00 GiB, the GPU"


def test_the_doubt_is_not_of_the_context() -> None:
    memory = a_memory(20)
    verdict = judge(memory, UNSURE, a_room(40, counts_context=True), QUANTILE)
    assert verdict.needed_bytes == needed_bytes(memory, UNSURE, QUANTILE) + 2 * GIB


# ---------------------------------------------------------------- host and disk


def test_host_and_disk_are_compared_too() -> None:
    room = a_room(40, host_bytes=64 * GIB, nvme_bytes=100 * GIB)
    fitting = a_memory(10, host_bytes=64 * GIB, nvme_bytes=100 * GIB)
    assert judge(fitting, EXACT, room, QUANTILE).fit is Fit.FITS
    verdict = judge(a_memory(10, host_bytes=65 * GIB, nvme_bytes=101 * GIB), EXACT, room, QUANTILE)
    assert verdict.fit is Fit.TOO_LARGE
    assert verdict.why == (
        "needs 65.00 GiB of the node's 64.00 GiB of host memory; "
        "needs 101.00 GiB of the 100.00 GiB free on the NVMe"
    )


def test_a_host_that_is_too_small_is_never_borderline() -> None:
    verdict = judge(a_memory(37, host_bytes=2 * GIB), UNSURE, a_room(40, host_bytes=GIB), QUANTILE)
    assert verdict.fit is Fit.TOO_LARGE
    assert [part.partition(" GiB")[0] for part in verdict.why.split("; ")] == ["needs 41.74", "needs 2.00"]


def test_processes_alone_fill_no_host_since_they_share_pages() -> None:
    memory = a_memory(10, host_bytes=19 * GIB, process_bytes=19 * GIB)
    assert judge(memory, EXACT, a_room(40, host_bytes=16 * GIB), QUANTILE).fit is Fit.FITS
    kept = a_memory(10, host_bytes=36 * GIB, process_bytes=19 * GIB)
    assert judge(kept, EXACT, a_room(40, host_bytes=16 * GIB), QUANTILE).fit is Fit.TOO_LARGE


def test_a_cpus_ranks_have_equal_shares_of_the_host_and_the_margin_counts_there_too() -> None:
    room = a_room(16, is_host=True, host_bytes=16 * GIB)
    memory = a_memory(3.9, context_bytes=0, host_bytes=4 * int(3.9 * GIB))  # four ranks
    assert judge(memory, EXACT, room, QUANTILE).limit_bytes == 4 * GIB
    assert judge(memory, EXACT, room, QUANTILE).fit is Fit.FITS
    assert judge(memory, UNSURE, room, QUANTILE).fit is Fit.BORDERLINE


def test_trials_side_by_side_share_the_host_and_the_disk() -> None:
    room = room_of(ClusterConfig(parallel=2), GateConfig(), GPUS)
    assert (room.host_bytes, room.nvme_bytes) == (256 * GIB, 50 * GIB)
    assert room.device_bytes == SMALLER.memory_bytes


def test_a_limit_below_the_context_is_refused_with_the_number() -> None:
    room = room_of(ClusterConfig(memory_limit_gib=0.1), GateConfig(), GPUS)
    with pytest.raises(ConfigError, match=r"memory_limit_gib=0\.1: CUDA's context alone takes"):
        require_room(room, H200)
    bare = room_of(ClusterConfig(memory_limit_gib=0.1, limit_counts_context=False), GateConfig(), GPUS)
    require_room(bare, H200)


def test_what_is_not_known_of_host_and_disk_refuses_nothing() -> None:
    memory = a_memory(10, host_bytes=2**60, nvme_bytes=2**60)
    assert judge(memory, EXACT, a_room(), QUANTILE).fit is Fit.FITS


# ---------------------------------------------------------------- no ZeRO stage is assumed to need less


def test_stage_3_may_be_too_large_where_stage_2_fits() -> None:
    plans = {stage: a_plan(seq_len=2048, zero={"stage": stage}) for stage in range(4)}
    memories = {stage: memory_of(plan, LLAMA_1B3, H200) for stage, plan in plans.items()}
    between = (memories[2].peak_bytes + memories[3].peak_bytes) / 2 / GIB
    fits = {stage: judge(memory, EXACT, a_room(between), 0.5).fit for stage, memory in memories.items()}
    assert fits == {0: Fit.TOO_LARGE, 1: Fit.TOO_LARGE, 2: Fit.FITS, 3: Fit.TOO_LARGE}


def test_stage_1_may_be_too_large_where_stage_0_fits() -> None:
    tiny = a_model(parameters=869_504, layers=4, hidden=128, heads=4, kv_heads=4, ffn=352)
    memories = [memory_of(a_plan(zero={"stage": stage}), tiny, H200) for stage in (0, 1)]
    fits = [judge(memory, EXACT, a_room(0.9), 0.5).fit for memory in memories]
    assert fits == [Fit.FITS, Fit.TOO_LARGE]  # DeepSpeed's bucket is larger than the model


def test_more_room_never_makes_a_plan_larger() -> None:
    order = [Fit.TOO_LARGE, Fit.BORDERLINE, Fit.FITS]
    for plan, model, hardware in cases(100):
        memory = memory_of(plan, model, hardware)
        fits = [judge(memory, COLD, a_room(gib), QUANTILE).fit for gib in (1, 10, 40, 80, 1000)]
        assert fits == sorted(fits, key=order.index)


# ---------------------------------------------------------------- room on a machine


def test_a_gpu_is_the_limit_where_none_is_set() -> None:
    room = room_of(ClusterConfig(), GateConfig(), GPUS)
    assert (room.device_bytes, room.what) == (79 * GIB, "NVIDIA A100")  # the smaller one
    assert (room.counts_context, room.is_imposed) == (True, False)
    assert (room.host_bytes, room.nvme_bytes) == (512 * GIB, 100 * GIB)


@pytest.mark.parametrize("counts", [True, False])
def test_a_limit_says_whether_it_counts_the_context(counts: bool) -> None:
    cluster = ClusterConfig(memory_limit_gib=40, limit_counts_context=counts)
    room = room_of(cluster, GateConfig(), GPUS)
    assert (room.device_bytes, room.counts_context, room.is_imposed) == (40 * GIB, counts, True)
    assert room.what == "cluster.memory_limit_gib=40"


def test_a_limit_that_the_card_has_no_more_than_is_the_cards() -> None:
    cluster = ClusterConfig(memory_limit_gib=79.5, limit_counts_context=False)
    room = room_of(cluster, GateConfig(), GPUS)
    assert (room.device_bytes, room.counts_context, room.is_imposed) == (79 * GIB, True, False)


def test_headroom_is_said() -> None:
    gate = GateConfig(headroom_gib=1.5)
    room = room_of(ClusterConfig(memory_limit_gib=40), gate, GPUS)
    assert (room.headroom_bytes, room.device_bytes) == (1.5 * GIB, 40 * GIB)
    assert room.what == "cluster.memory_limit_gib=40 less gate.headroom_gib=1.5"


def test_ranks_on_a_cpu_have_the_hosts_memory() -> None:
    room = room_of(ClusterConfig(), GateConfig(headroom_gib=1), CORES)
    assert (room.device_bytes, room.host_bytes, room.is_host) == (16 * GIB, 16 * GIB, True)
    assert (room.counts_context, room.is_imposed, room.headroom_bytes) == (False, False, 0)


def test_a_host_that_is_not_known_limits_nothing() -> None:
    room = room_of(ClusterConfig(), GateConfig(), dataclasses.replace(CORES, host_memory_bytes=None))
    assert (room.device_bytes, room.host_bytes, room.nvme_bytes) == (sys.maxsize, None, None)
    assert judge(a_memory(1000), COLD, room, QUANTILE).fit is Fit.FITS
