from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from train_entry.engine import Held, Part
from train_entry.measure import PartTime, distance, medians


def micro_step(scale: float, exchange_s: float = 0.0) -> list[PartTime]:
    seconds = {
        Part.EXCHANGE: exchange_s,
        Part.FETCH: 1,
        Part.FORWARD: 10,
        Part.BACKWARD: 100,
        Part.UPDATE: 1000,
    }
    return [(part, scale * spent) for part, spent in seconds.items()]


def test_parts_are_summed_over_micro_batches_and_the_middle_step_counts() -> None:
    split = medians([micro_step(1) * 2, micro_step(2) + micro_step(3), micro_step(50) * 2])
    assert split is not None
    assert (split.forward_s, split.backward_s, split.update_s) == (50, 500, 5000)


def test_the_local_part_ends_with_the_first_forward_pass() -> None:
    split = medians([micro_step(2) + micro_step(99)])
    assert split is not None
    assert split.local_s == 22


def test_waiting_for_another_stage_is_a_part_of_its_own() -> None:
    split = medians([micro_step(1, exchange_s=7) + micro_step(1, exchange_s=3)])
    assert split is not None
    assert (split.exchange_s, split.local_s) == (10, 11)


def test_without_split_steps_there_is_no_split() -> None:
    assert medians([]) is None


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_distance_of_two_models_goes_over_all_parameters_once() -> None:
    before = [Held(torch.zeros(2), 1), Held(torch.zeros(1, dtype=torch.bfloat16), 4)]
    after = [
        Held(torch.tensor([2.0, 3.0]), 1),
        Held(torch.full((1,), 12.0, dtype=torch.bfloat16), 4),  # this rank answers for a quarter of it
    ]
    assert distance(before, after, torch.device("cpu")) == pytest.approx(7)
