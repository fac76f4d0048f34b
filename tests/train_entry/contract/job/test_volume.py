"""Bytes sent for tensor parallelism, computed by hand. volume.py says what was counted on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.examples import a_model, a_plan
from train_entry.contract import Precision, tensor_volume_bytes

A_SUM_BYTES = 4 * 128 * 8 * 2  # micro_batch x seq_len x hidden, two bytes per element


def sent(layers: int = 4, **changes: Any) -> float:
    """Return the bytes that one of 8 ranks sends per step, in units of one all-reduce's size.

    The global batch is 32, in micro-batches of 4.
    """
    plan = a_plan(ranks=8, **changes)
    return tensor_volume_bytes(plan, a_model(layers=layers)) / A_SUM_BYTES


def test_a_rank_that_shares_no_matrices_sends_nothing() -> None:
    assert sent(tensor=1) == 0
    assert sent(tensor=1, pipeline=4, checkpoint_every=1) == 0


def test_two_ranks_of_a_pipeline_send_each_sum_once() -> None:
    # 2 blocks per stage x 4 sums x 4 micro-batches (2 copies); a ring of two sends 2 x 1/2 of the size
    assert sent(tensor=2, pipeline=2) == 2 * 4 * 4


def test_a_larger_ring_sends_up_to_twice_the_size() -> None:
    # 2 blocks x 4 sums x 8 micro-batches (1 copy), 2 x 3/4 each
    assert sent(tensor=4, pipeline=2) == 2 * 4 * 8 * 1.5


def test_without_a_pipeline_deepspeed_sums_for_each_of_five_matrices() -> None:
    # 4 blocks x (2 forward + 5 backward) x 2 micro-batches (4 copies)
    assert sent(tensor=2) == 4 * 7 * 2


@pytest.mark.parametrize(("every", "recomputed"), [(1, 3), (2, 2), (3, 1), (9, 1)])
def test_every_kth_block_of_a_stage_sums_once_more(every: int, recomputed: int) -> None:
    # 3 blocks per stage; the first of them is always recomputed
    assert sent(layers=6, tensor=2, pipeline=2, checkpoint_every=every) == (3 * 4 + recomputed) * 4


def test_elements_are_those_of_the_working_precision() -> None:
    half = sent(tensor=2, precision=Precision.FP16)
    assert sent(tensor=2, precision=Precision.BF16) == half
    assert sent(tensor=2, precision=Precision.FP32) == 2 * half
