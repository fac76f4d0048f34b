"""We use the same GPUs as CUDA does when it reads CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os

import pytest

from sweeps.cluster.node import devices
from sweeps.cluster.node.devices import detect, visible
from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.errors import ConfigError
from sweeps.machine import Gpu, Machine

GPUS = [
    Gpu(index=index, uuid=f"GPU-{letters}", name="H200", memory_bytes=1)
    for index, letters in enumerate(("aa11", "ab22", "bc33", "cd44"))
]
GIB = 2**30


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        (None, ["aa11", "ab22", "bc33", "cd44"]),
        ("", []),
        ("2", ["bc33"]),
        ("3,0", ["cd44", "aa11"]),
        (" 1 , 2 ", ["ab22", "bc33"]),
        ("GPU-bc33", ["bc33"]),
        ("GPU-c,GPU-b", ["cd44", "bc33"]),
        ("GPU-bc33,0", ["bc33", "aa11"]),
        ("GPU-a", []),  # ambiguous
        ("0,9,1", ["aa11"]),
        ("0,-1,1", ["aa11"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,,1", ["aa11"]),
        ("GPU-xx,0", []),
    ],
)
def test_a_setting_shows_gpus_in_its_order_up_to_the_first_unknown_one(
    setting: str | None, uuids: list[str]
) -> None:
    assert [gpu.uuid for gpu in visible(GPUS, setting)] == [f"GPU-{uuid}" for uuid in uuids]


def test_without_gpus_nothing_is_visible() -> None:
    assert visible([], None) == visible([], "0") == ()


def test_a_cpu_machine_holds_a_rank_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    machine = detect(ClusterConfig(device="cpu"))
    assert (machine.device, machine.nodes, machine.ranks_per_node, machine.cores) == ("cpu", 1, cores, cores)
    assert machine.nvme is None


def test_ranks_of_a_cpu_node_can_be_said() -> None:
    assert detect(ClusterConfig(device="cpu", gpus_per_node=3)).ranks_per_node == 3


def test_a_hidden_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect(ClusterConfig(device="auto")).device == "cpu"
    with pytest.raises(ConfigError, match="no GPU is visible; see nvidia-smi, and CUDA_VISIBLE_DEVICES"):
        detect(ClusterConfig(device="cuda"))


def test_capacity_is_ranks_of_all_nodes() -> None:
    machine = Machine(device="cuda", nodes=2, ranks_per_node=4, gpus=tuple(GPUS))
    assert (machine.capacity, machine.device_name) == (8, "H200")
    assert Machine(device="cpu", nodes=1, ranks_per_node=2).device_name == "CPU"


@pytest.mark.parametrize(("setting", "device"), [("", "cpu"), ("-1", "cpu")])
def test_gpus_hidden_on_purpose_leave_the_cpu(
    monkeypatch: pytest.MonkeyPatch, setting: str, device: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert detect(ClusterConfig(device="auto")).device == device


def test_a_setting_that_names_no_gpu_is_refused_rather_than_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-no-such-instance")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        detect(ClusterConfig(device="auto"))
    assert detect(ClusterConfig(device="cpu")).device == "cpu"


# ---------------------------------------------------------------- memory limits


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 80 GiB, one with a byte less."""
    sizes = (80 * GIB, 80 * GIB - 1)
    cards = [
        Gpu(index=index, uuid=f"GPU-{index}", name="A100", memory_bytes=size)
        for index, size in enumerate(sizes)
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_nvml_gpus", lambda: cards)


def test_a_limit_below_the_card_is_good(two_cards: None) -> None:
    machine = detect(ClusterConfig(memory_limit_gib=40))
    assert (machine.device, machine.ranks_per_node) == ("cuda", 2)


def test_a_limit_above_the_card_is_refused(two_cards: None) -> None:
    with pytest.raises(
        ConfigError, match=r"^cluster.memory_limit_gib=141: A100 has 80.0 GiB; null uses all of it$"
    ):
        detect(ClusterConfig(memory_limit_gib=141))


def test_a_limit_is_for_gpus_only() -> None:
    with pytest.raises(
        ConfigError, match=r"^cluster.memory_limit_gib=8: it applies to GPUs; on a CPU ranks .*$"
    ):
        detect(ClusterConfig(device="cpu", memory_limit_gib=8))


@pytest.mark.parametrize("headroom_gib", [80, 81])
def test_a_headroom_of_the_whole_card_is_refused(two_cards: None, headroom_gib: float) -> None:
    with pytest.raises(ConfigError) as refused:
        detect(ClusterConfig(), GateConfig(headroom_gib=headroom_gib))
    assert refused.value.problems == (
        f"gate.headroom_gib={headroom_gib}: A100 has 80.0 GiB, so no memory would be left; lower it",
    )


def test_a_headroom_of_the_whole_limit_is_refused(two_cards: None) -> None:
    with pytest.raises(ConfigError, match=r"nothing would be left of cluster.memory_limit_gib=40 \(A100 has"):
        detect(ClusterConfig(memory_limit_gib=40), GateConfig(headroom_gib=40))


def test_a_headroom_below_the_card_is_good(two_cards: None) -> None:
    assert detect(ClusterConfig(memory_limit_gib=40), GateConfig(headroom_gib=39)).device == "cuda"


def test_a_headroom_is_for_gpus_only() -> None:
    with pytest.raises(ConfigError) as refused:
        detect(ClusterConfig(device="cpu", memory_limit_gib=8), GateConfig(headroom_gib=1))
    assert [problem.partition(": it applies to GPUs")[0] for problem in refused.value.problems] == [
        "cluster.memory_limit_gib=8",
        "gate.headroom_gib=1",
    ]
    assert detect(ClusterConfig(device="cpu"), GateConfig()).device == "cpu"


def test_a_machine_knows_its_memory() -> None:
    assert (detect(ClusterConfig(device="cpu")).host_memory_bytes or 0) > GIB / 2
