from __future__ import annotations

import dataclasses

import pytest

from sweeps.estimate.hardware import LINK_SHARE, Hardware, hardware_of
from train_entry.contract import GIB, Precision
from train_entry.contract.shared.cards import CARDS, card_of


def on_gpus(name: str, gib: float = 80) -> Hardware:
    return hardware_of(name, "cuda", 8, round(gib * GIB), 1024 * GIB)


def test_a_known_card_has_the_figures_of_its_data_sheet() -> None:
    h200 = on_gpus("NVIDIA H200", 139.8)
    assert h200.is_known
    assert h200.flops_per_s(Precision.BF16) == pytest.approx(989.4e12)
    assert h200.flops_per_s(Precision.FP32) == pytest.approx(67e12)
    assert h200.memory_bytes_per_s == pytest.approx(4.8e12)
    assert h200.link_bytes_per_s == pytest.approx(396e9)
    assert h200.host_link_bytes_per_s == pytest.approx(55.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "memory", "link"),
    [
        ("NVIDIA A100-SXM4-40GB", 1555, 300),
        ("NVIDIA A100-SXM4-80GB", 2039, 300),
        ("NVIDIA A100 80GB PCIe", 1935, 31.5),
        ("NVIDIA H100 PCIe", 2000, 63),
        ("NVIDIA H100 NVL", 3900, 300),
        ("NVIDIA H100 80GB HBM3", 3350, 450),
        ("Tesla V100-PCIE-16GB", 900, 15.75),
        ("Tesla V100-SXM2-32GB", 900, 150),
        ("NVIDIA GeForce RTX 4090", 1008, 15.75),
    ],
)
def test_cards_of_one_name_differ_in_memory_and_links(name: str, memory: float, link: float) -> None:
    card = on_gpus(name)
    assert card.memory_bytes_per_s == pytest.approx(memory * 1e9)
    assert card.link_bytes_per_s == pytest.approx(link * 1e9 * LINK_SHARE)


def test_what_the_machine_says_of_itself_is_kept() -> None:
    machine = hardware_of("NVIDIA L4", "cuda", 4, 24 * GIB, 64 * GIB)
    assert (machine.name, machine.device, machine.ranks_per_node) == ("NVIDIA L4", "cuda", 4)
    assert (machine.memory_bytes, machine.host_memory_bytes) == (24 * GIB, 64 * GIB)


@pytest.mark.parametrize(
    ("name", "gib", "like"),
    [
        ("NVIDIA A10G", 22.1, "NVIDIA A10"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "NVIDIA L40S"),
        ("AMD Instinct MI300X", 191, "NVIDIA B200"),
        ("Some GPU", 8, "Tesla T4"),
    ],
)
def test_an_unknown_card_has_the_figures_of_one_with_as_much_memory(name: str, gib: float, like: str) -> None:
    unknown, known = on_gpus(name, gib), on_gpus(like, gib)
    assert not unknown.is_known
    assert unknown == dataclasses.replace(known, name=name, is_known=False)


def test_a_rank_on_a_cpu_has_a_core_and_the_hosts_memory() -> None:
    cpu = hardware_of("CPU", "cpu", 4, 0, 32 * GIB)
    assert cpu.is_cpu
    assert cpu.memory_bytes == cpu.host_memory_bytes == 32 * GIB
    assert cpu.host_memory_bytes_per_s == 4 * cpu.memory_bytes_per_s
    assert cpu.flops_per_s(Precision.FP32) > cpu.flops_per_s(Precision.BF16)


def test_many_cores_share_one_memory() -> None:
    few, many = (hardware_of("CPU", "cpu", cores, 0, GIB) for cores in (50, 500))
    assert many.host_memory_bytes_per_s == few.host_memory_bytes_per_s


def test_every_card_is_found_before_a_more_general_one() -> None:
    names = [card.name.replace(r"\b", "").removesuffix("$") for card in CARDS]
    assert [card_of(name) for name in names] == list(CARDS)


def test_no_card_is_slower_in_half_precision() -> None:
    assert [card.name for card in CARDS if card.half <= card.fp32] == []
