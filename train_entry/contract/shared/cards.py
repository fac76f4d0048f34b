"""What a card can do at best, from its maker's data sheets. For utilization, and for estimates."""

from __future__ import annotations

import re
from dataclasses import dataclass

from train_entry.contract.shared.words import Precision

TERA = 1e12
GIGA = 1e9
# One way and at best. A lane of PCIe carries 0.985 GB/s in generation 3, twice that in each one after.
PCIE3_X16 = 15.75
PCIE4_X16 = 31.5
PCIE5_X16 = 63.0
# A GeForce card may not write into another's memory: what two exchange passes the host's, in and out again.
THROUGH_HOST = PCIE4_X16 / 2
# Of the network a node has, a card's share: what NVIDIA's own systems of its time have, else 100 Gbit/s
# Ethernet for a node of eight.
DGX_B200 = DGX_H100 = 50.0  # DGX H100 and B200 data sheets: a 400 Gbit/s adapter a card
DGX_A100 = 25.0  # DGX A100 data sheet: a 200 Gbit/s adapter a card
DGX_1 = 6.25  # DGX-1 data sheet (V100): four of 100 Gbit/s for eight cards
ETHERNET = 1.56


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Peaks of a card: matrix products in TFLOP/s, at boost clock; bandwidths in 1e9 bytes/s, one way."""

    name: str  # a regular expression found in the name that CUDA reports
    half: float  # tensor cores, fp16: dense (no 2:4 sparsity), accumulated in fp32
    fp32: float  # without TF32: torch leaves it off unless asked
    has_bf16: bool = True
    memory: float  # of its own
    link: float  # to a card of the same node: NVLink where it is built in, else PCIe
    host_link: float  # to the host's memory
    network: float = ETHERNET  # to a card of another node

    def peak_tflops(self, precision: Precision) -> float | None:
        if precision is Precision.FP32:
            return self.fp32
        return self.half if precision is Precision.FP16 or self.has_bf16 else None


# The first that matches counts, so the special stands before the general. Data sheets print tensor-core
# figures of Ada and later with sparsity; those are halved here. NVLink's are the sum of both directions.
CARDS = (
    # V100 data sheet (2020): PCIe 112 and 14, SXM2 125 and 15.7, both 900 GB/s; NVLink 300. No bf16.
    Card(
        name=r"\bV100-PCIE", half=112, fp32=14, has_bf16=False,
        memory=900, link=PCIE3_X16, host_link=PCIE3_X16,
    ),
    Card(
        name=r"\bV100\b", half=125, fp32=15.7, has_bf16=False,
        memory=900, link=150, host_link=PCIE3_X16, network=DGX_1,
    ),
    # T4 data sheet (2019): 320 GB/s; Turing has no bf16.
    Card(
        name=r"\bT4\b", half=65, fp32=8.1, has_bf16=False,
        memory=320, link=PCIE3_X16, host_link=PCIE3_X16,
    ),
    # A100 data sheet (2021): 40 GB 1,555 GB/s, 80 GB 1,935 (PCIe) and 2,039 (SXM); NVLink 600.
    Card(name=r"\bA100-PCIE-40GB", half=312, fp32=19.5, memory=1555, link=PCIE4_X16, host_link=PCIE4_X16),
    Card(name=r"\bA100 80GB PCIe", half=312, fp32=19.5, memory=1935, link=PCIE4_X16, host_link=PCIE4_X16),
    Card(
        name=r"\bA100-SXM4-40GB", half=312, fp32=19.5,
        memory=1555, link=300, host_link=PCIE4_X16, network=DGX_A100,
    ),
    Card(
        name=r"\bA100\b", half=312, fp32=19.5,
        memory=2039, link=300, host_link=PCIE4_X16, network=DGX_A100,
    ),
    # A10 data sheet (2021): 600 GB/s. The A10G is another card, and does not match.
    Card(name=r"\bA10\b", half=125, fp32=31.2, memory=600, link=PCIE4_X16, host_link=PCIE4_X16),
    # L4 data sheet (2023): 242 with sparsity, 300 GB/s.
    Card(name=r"\bL4\b", half=121, fp32=30.3, memory=300, link=PCIE4_X16, host_link=PCIE4_X16),
    # L40S data sheet (2023): 733 with sparsity, 362.05 without; 864 GB/s.
    Card(name=r"\bL40S\b", half=362.05, fp32=91.6, memory=864, link=PCIE4_X16, host_link=PCIE4_X16),
    # Ada whitepaper, appendix A: 1,008 GB/s; with fp16 accumulation it would be 330. Laptop and D models
    # differ.
    Card(
        name=r"\bRTX 4090$", half=165.2, fp32=82.6,
        memory=1008, link=THROUGH_HOST, host_link=PCIE4_X16,
    ),
    # GA102 whitepaper, appendix A: 936 GB/s; with fp16 accumulation it would be 142. Its NVLink bridge is
    # sold apart, and is not counted on.
    Card(name=r"\bRTX 3090$", half=71, fp32=35.6, memory=936, link=THROUGH_HOST, host_link=PCIE4_X16),
    # H100 data sheet (2023): PCIe 1513, NVL 1671, SXM 1979 with sparsity; 2.0, 3.9 and 3.35 TB/s; NVLink
    # 600 (NVL), 900 (SXM).
    Card(name=r"\bH100 PCIe", half=756, fp32=51, memory=2000, link=PCIE5_X16, host_link=PCIE5_X16),
    Card(name=r"\bH100 NVL", half=835.5, fp32=60, memory=3900, link=300, host_link=PCIE5_X16),
    Card(
        name=r"\bH100\b", half=989.4, fp32=67,
        memory=3350, link=450, host_link=PCIE5_X16, network=DGX_H100,
    ),
    # H200 data sheet (2024): NVL 1671, SXM 1979 with sparsity; 4.8 TB/s; NVLink 900.
    Card(name=r"\bH200 NVL", half=835.5, fp32=60, memory=4800, link=450, host_link=PCIE5_X16),
    Card(
        name=r"\bH200\b", half=989.4, fp32=67,
        memory=4800, link=450, host_link=PCIE5_X16, network=DGX_H100,
    ),
    # HGX B200 data sheet (2025): 8 cards, 36 PFLOP/s with sparsity, 600 TFLOP/s fp32; DGX B200: 64 TB/s of
    # memory bandwidth for eight; NVLink 1,800.
    Card(
        name=r"\bB200\b", half=2250, fp32=75,
        memory=8000, link=900, host_link=PCIE5_X16, network=DGX_B200,
    ),
)  # fmt: skip


def card_of(device_name: str) -> Card | None:
    """The card of the name that CUDA reports; None for one that is not known here."""
    return next((card for card in CARDS if re.search(card.name, device_name)), None)
