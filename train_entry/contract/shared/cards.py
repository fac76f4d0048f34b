"""Peak FLOP/s and bandwidths of GPUs, from their data sheets. Used for utilization and for estimates."""

from __future__ import annotations

import re
from dataclasses import dataclass

from train_entry.contract.shared.words import Precision

TERA = 1e12
GIGA = 1e9
# Peak, one direction. A PCIe lane carries 0.985 GB/s in generation 3 and twice as much in each later one.
PCIE3_X16 = 15.75
PCIE4_X16 = 31.5
PCIE5_X16 = 63.0
# A GeForce GPU cannot write into another GPU's memory: data goes into host memory and out again.
THROUGH_HOST = PCIE4_X16 / 2
# One GPU's share of its node's network: that of NVIDIA's own system with this GPU; for other GPUs, an
# eighth of 100 Gbit/s Ethernet (a node of eight GPUs).
DGX_B200 = DGX_H100 = 50.0  # DGX H100 and B200 data sheets: one 400 Gbit/s adapter per GPU
DGX_A100 = 25.0  # DGX A100 data sheet: one 200 Gbit/s adapter per GPU
DGX_1 = 6.25  # DGX-1 data sheet (V100): four 100 Gbit/s adapters for eight GPUs
ETHERNET = 1.56


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A GPU's peaks: matrix products in TFLOP/s at boost clock, bandwidths in 1e9 bytes/s, one direction."""

    name: str  # a regular expression that matches part of the name that CUDA reports
    half: float  # tensor cores, fp16: dense (no 2:4 sparsity), accumulated in fp32
    fp32: float  # without TF32, which torch leaves off by default
    has_bf16: bool = True
    memory: float  # the GPU's own memory
    link: float  # to a GPU of the same node: NVLink where it is built in, else PCIe
    host_link: float  # to the host's memory
    network: float = ETHERNET  # to a GPU of another node

    def peak_tflops(self, precision: Precision) -> float | None:
        if precision is Precision.FP32:
            return self.fp32
        return self.half if precision is Precision.FP16 or self.has_bf16 else None


# The first entry that matches counts, so special names stand before general ones. Data sheets give
# tensor-core figures of Ada and later GPUs with sparsity, and NVLink as the sum of both directions: both are
# halved here.
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
    # A10 data sheet (2021): 600 GB/s. The A10G is another GPU and does not match.
    Card(name=r"\bA10\b", half=125, fp32=31.2, memory=600, link=PCIE4_X16, host_link=PCIE4_X16),
    # L4 data sheet (2023): 242 with sparsity, 300 GB/s.
    Card(name=r"\bL4\b", half=121, fp32=30.3, memory=300, link=PCIE4_X16, host_link=PCIE4_X16),
    # L40S data sheet (2023): 733 with sparsity, 362.05 without; 864 GB/s.
    Card(name=r"\bL40S\b", half=362.05, fp32=91.6, memory=864, link=PCIE4_X16, host_link=PCIE4_X16),
    # Ada whitepaper, appendix A: 1,008 GB/s; with fp16 accumulation `half` would be 330. The laptop and D
    # models are other GPUs and do not match.
    Card(
        name=r"\bRTX 4090$", half=165.2, fp32=82.6,
        memory=1008, link=THROUGH_HOST, host_link=PCIE4_X16,
    ),
    # GA102 whitepaper, appendix A: 936 GB/s; with fp16 accumulation `half` would be 142. Its NVLink bridge is
    # sold separately, so `link` does not assume one.
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
    # HGX B200 data sheet (2025): 8 GPUs with 36 PFLOP/s with sparsity and 600 TFLOP/s fp32; DGX B200: 64 TB/s
    # of memory bandwidth for eight GPUs; NVLink 1,800.
    Card(
        name=r"\bB200\b", half=2250, fp32=75,
        memory=8000, link=900, host_link=PCIE5_X16, network=DGX_B200,
    ),
)  # fmt: skip


def card_of(device_name: str) -> Card | None:
    """Return the GPU by the name that CUDA reports; None if it is not in CARDS."""
    return next((card for card in CARDS if re.search(card.name, device_name)), None)
