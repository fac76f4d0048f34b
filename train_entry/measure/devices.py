"""A device's name, and what it can do at best: the denominator of model FLOPs utilization."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from train_entry.contract import Precision
from train_entry.contract.shared.cards import TERA, card_of


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """FLOP/s that the card reaches at best in this precision; None for a card, or format, not known here."""
    card = card_of(device_name)
    tflops = card.peak_tflops(precision) if card else None
    return None if tflops is None else tflops * TERA


def name_of(device: torch.device) -> str:
    """What CUDA, or Linux, calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())  # absent on ARM
    return found[1] if found else platform.machine()
