from __future__ import annotations

import pytest
import torch

from train_entry.contract import Precision
from train_entry.measure.devices import name_of, peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", Precision.BF16, 989.4),
        ("NVIDIA H100 PCIe", Precision.BF16, 756),
        ("NVIDIA H200", Precision.FP16, 989.4),
        ("NVIDIA A100-SXM4-80GB", Precision.BF16, 312),
        ("NVIDIA A100-PCIE-40GB", Precision.FP32, 19.5),
        ("Tesla V100-SXM2-16GB", Precision.FP16, 125),
        ("NVIDIA L40S", Precision.BF16, 362.05),
        ("NVIDIA GeForce RTX 4090", Precision.BF16, 165.2),
        ("NVIDIA B200", Precision.BF16, 2250),
    ],
)
def test_a_known_card_has_a_peak(name: str, precision: Precision, tflops: float) -> None:
    assert peak_flops_per_s(name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC", ""])
def test_an_unknown_device_has_none(name: str) -> None:
    assert peak_flops_per_s(name, Precision.BF16) is None


def test_a_card_without_bf16_has_no_peak_in_it() -> None:
    assert peak_flops_per_s("Tesla T4", Precision.BF16) is None
    assert peak_flops_per_s("Tesla T4", Precision.FP16) == 65e12


def test_a_cpu_has_a_name() -> None:
    assert name_of(torch.device("cpu"))
