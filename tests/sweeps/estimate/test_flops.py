"""Floating-point operations of a model."""

from __future__ import annotations

from sweeps.estimate.flops import flops_per_token
from train_entry.contract import ModelShape


def test_flops_follow_the_palm_formula(shape: ModelShape) -> None:
    assert flops_per_token(shape, 1) == 6 * 1000 + 12 * 2 * 8
