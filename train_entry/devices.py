"""What a card can do at best: the denominator of model FLOPs utilization."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from train_entry.contract import Precision

TERA = 1e12  # FLOP/s in a TFLOP/s


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Peak TFLOP/s of matrix products: dense (no 2:4 sparsity), accumulated in fp32, at boost clock."""

    name: str  # a regular expression found in the name that CUDA reports
    half: float  # tensor cores, fp16
    fp32: float  # without TF32: torch leaves it off unless asked
    has_bf16: bool = True

    def peak_tflops(self, precision: Precision) -> float | None:
        if precision is Precision.FP32:
            return self.fp32
        return self.half if precision is Precision.FP16 or self.has_bf16 else None


# The first that matches counts, so the special stands before the general. Data sheets print tensor-core
# figures of Ada and later with sparsity; those are halved here.
CARDS = (
    # V100 data sheet (2020): PCIe 112 and 14, SXM2 125 and 15.7; Volta has no bf16.
    Card(name=r"\bV100-PCIE", half=112, fp32=14, has_bf16=False),
    Card(name=r"\bV100\b", half=125, fp32=15.7, has_bf16=False),
    # T4 data sheet (2019); Turing has no bf16.
    Card(name=r"\bT4\b", half=65, fp32=8.1, has_bf16=False),
    # A100 data sheet (2021).
    Card(name=r"\bA100\b", half=312, fp32=19.5),
    # A10 data sheet (2021). The A10G is another card, and does not match.
    Card(name=r"\bA10\b", half=125, fp32=31.2),
    # L4 data sheet (2023): 242 with sparsity.
    Card(name=r"\bL4\b", half=121, fp32=30.3),
    # L40S data sheet (2023): 733 with sparsity, 362.05 without.
    Card(name=r"\bL40S\b", half=362.05, fp32=91.6),
    # Ada whitepaper, appendix A; with fp16 accumulation it would be 330. Laptop and D models differ.
    Card(name=r"\bRTX 4090$", half=165.2, fp32=82.6),
    # GA102 whitepaper, appendix A; with fp16 accumulation it would be 142.
    Card(name=r"\bRTX 3090$", half=71, fp32=35.6),
    # H100 data sheet (2023): PCIe 1513, NVL 1671, SXM 1979 with sparsity.
    Card(name=r"\bH100 PCIe", half=756, fp32=51),
    Card(name=r"\bH100 NVL", half=835.5, fp32=60),
    Card(name=r"\bH100\b", half=989.4, fp32=67),
    # H200 data sheet (2024): NVL 1671, SXM 1979 with sparsity.
    Card(name=r"\bH200 NVL", half=835.5, fp32=60),
    Card(name=r"\bH200\b", half=989.4, fp32=67),
    # HGX B200 data sheet (2025): 8 cards, 36 PFLOP/s with sparsity, 600 TFLOP/s fp32.
    Card(name=r"\bB200\b", half=2250, fp32=75),
)


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """FLOP/s that the card reaches at best in this precision; None for a card, or format, not known here."""
    card = next((card for card in CARDS if re.search(card.name, device_name)), None)
    tflops = card.peak_tflops(precision) if card else None
    return None if tflops is None else tflops * TERA


def name_of(device: torch.device) -> str:
    """What CUDA, or Linux, calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())  # absent on ARM
    return found[1] if found else platform.machine()
