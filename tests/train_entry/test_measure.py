from __future__ import annotations

import pytest
import torch

from train_entry.measure import MicroStepParts, distance, medians


def parts(scale: float) -> MicroStepParts:
    return MicroStepParts(
        fetch_s=1 * scale, forward_s=10 * scale, backward_s=100 * scale, update_s=1000 * scale
    )


def test_parts_are_summed_over_micro_batches_and_the_middle_step_counts() -> None:
    steps = [[parts(1), parts(1)], [parts(2), parts(3)], [parts(50), parts(50)]]
    split = medians(steps)
    assert split is not None
    assert (split.forward_s, split.backward_s, split.update_s) == (50, 500, 5000)


def test_the_local_part_ends_with_the_first_forward_pass() -> None:
    split = medians([[parts(2), parts(99)]])
    assert split is not None
    assert split.local_s == 22


def test_without_split_steps_there_is_no_split() -> None:
    assert medians([]) is None


def test_the_distance_of_two_models_goes_over_all_parameters() -> None:
    before = [torch.zeros(2), torch.zeros(1, dtype=torch.bfloat16)]
    after = [torch.tensor([2.0, 3.0]), torch.full((1,), 6.0, dtype=torch.bfloat16)]
    assert distance(before, after) == pytest.approx(7)
