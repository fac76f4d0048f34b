"""A device's name and its peak FLOP/s, the denominator of model FLOPs utilization."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from train_entry.contract import Precision
from train_entry.contract.shared.cards import TERA, card_of


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """The GPU's peak FLOP/s in this precision; None if the GPU is unknown or lacks the format."""
    card = card_of(device_name)
    tflops = card.peak_tflops(precision) if card else None
    return None if tflops is None else tflops * TERA


def name_of(device: torch.device) -> str:
    """The device's name according to CUDA, or of a CPU according to Linux."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())  # absent on ARM
    return found[1] if found else platform.machine()
