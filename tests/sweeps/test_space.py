"""Dimensions and the points they span."""

from __future__ import annotations

import pytest

from sweeps.space import Choices, Dimension, Interval, SearchSpace, powers_of_two
from train_entry.contract import Scalar

STRATEGY = Dimension(key="strategy", text="ddp,zero1", range=Choices(values=("ddp", "zero1")))
MICRO_BATCH = Dimension(key="micro_batch", text="1,2,4", range=Choices(values=(1, 2, 4)))
BUCKET = Dimension(
    key="zero.reduce_bucket_size",
    text="tag(log,interval(5e7,1e9))",
    range=Interval(low=5e7, high=1e9, log=True, integral=True, digits=2),
)


def test_the_size_of_a_space_is_the_product_of_its_choices() -> None:
    assert SearchSpace(dimensions=(STRATEGY, MICRO_BATCH)).size == 6
    assert SearchSpace(dimensions=()).size == 1
    assert SearchSpace(dimensions=(STRATEGY, BUCKET)).size is None


def test_points_go_through_the_last_dimension_fastest() -> None:
    points = list(SearchSpace(dimensions=(STRATEGY, MICRO_BATCH)).points())
    assert points[:4] == [
        {"strategy": "ddp", "micro_batch": 1},
        {"strategy": "ddp", "micro_batch": 2},
        {"strategy": "ddp", "micro_batch": 4},
        {"strategy": "zero1", "micro_batch": 1},
    ]
    assert len(points) == 6


def test_an_infinite_space_cannot_be_enumerated() -> None:
    with pytest.raises(ValueError, match="infinite"):
        SearchSpace(dimensions=(BUCKET,)).points()


@pytest.mark.parametrize(
    ("values", "ordinal"),
    [
        ((1, 2, 4), True),
        ((0.5, 1, 1.5), True),
        ((4, 2, 1), False),
        ((1, 2), False),
        ((False, True, True), False),
        (("a", "b", "c"), False),
        ((1, 2, "three"), False),
        ((1, 2, None), False),
    ],
)
def test_three_numbers_in_order_are_ordinal(values: tuple[Scalar, ...], ordinal: bool) -> None:
    assert Choices(values=values).is_ordinal is ordinal


@pytest.mark.parametrize(
    ("value", "snapped"),
    [
        (123_456_789.4, 120_000_000),
        (125_999_999.0, 130_000_000),
        (50_400_000.0, 50_000_000),
        (999_999_999.0, 1_000_000_000),
        (49_000_000.0, 50_000_000),
        (2e9, 1_000_000_000),
    ],
)
def test_buckets_are_rounded_to_two_digits_within_the_interval(value: float, snapped: int) -> None:
    found = BUCKET.snap(value)
    assert found == snapped
    assert isinstance(found, int)


def test_without_digits_a_value_stays_as_it_is() -> None:
    assert Interval(low=0, high=1, log=False, integral=False).snap(0.123456) == 0.123456
    assert Interval(low=0, high=1, log=False, integral=False, digits=2).snap(0) == 0.0
    assert Interval(low=64, high=128, log=False, integral=True).snap(100) == 100


def test_a_point_is_snapped_knob_by_knob() -> None:
    space = SearchSpace(dimensions=(STRATEGY, BUCKET))
    point = space.snap({"strategy": "ddp", "zero.reduce_bucket_size": 123_456_789})
    assert point == {"strategy": "ddp", "zero.reduce_bucket_size": 120_000_000}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 8, (1, 2, 4, 8)), (3, 17, (4, 8, 16)), (5, 7, ()), (0, 2, (1, 2)), (8, 8, (8,)), (1.5, 2.5, (2,))],
)
def test_powers_of_two_within_bounds(low: float, high: float, expected: tuple[int, ...]) -> None:
    assert powers_of_two(low, high) == expected
