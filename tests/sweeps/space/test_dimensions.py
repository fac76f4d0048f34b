"""Dimensions and the points that they span."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from sweeps.space.dimensions import Choices, Dimension, Interval, SearchSpace, powers_of_two
from train_entry.contract import Scalar

STRATEGY = Dimension(key="strategy", text="ddp,zero1", range=Choices(values=("ddp", "zero1")))
MICRO_BATCH = Dimension(key="micro_batch", text="1,2,4", range=Choices(values=(1, 2, 4)))
BUCKET = Dimension(
    key="zero.reduce_bucket_size",
    text="tag(log,interval(5e7,1e9))",
    range=Interval(low=5e7, high=1e9, log=True, integral=True, digits=2),
)


def test_the_size_of_a_space_is_the_product_of_its_choices() -> None:
    assert SearchSpace(dimensions=(STRATEGY, MICRO_BATCH)).size() == 6
    assert SearchSpace(dimensions=()).size() == 1
    assert SearchSpace(dimensions=(STRATEGY, BUCKET)).size() is None


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
    point = space.reduce({"strategy": "ddp", "zero.reduce_bucket_size": 123_456_789})
    assert point == {"strategy": "ddp", "zero.reduce_bucket_size": 120_000_000}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 8, (1, 2, 4, 8)), (3, 17, (4, 8, 16)), (5, 7, ()), (0, 2, (1, 2)), (8, 8, (8,)), (1.5, 2.5, (2,))],
)
def test_powers_of_two_within_bounds(low: float, high: float, expected: tuple[int, ...]) -> None:
    assert powers_of_two(low, high) == expected


# ---------------------------------------------------------------- knobs with an effect at some points

PREFETCH = Dimension(key="zero.prefetch_bucket_size", text="1,2", range=Choices(values=(1, 2)))
OFFLOAD = Dimension(key="zero.offload_optimizer", text="none,cpu", range=Choices(values=("none", "cpu")))
PINNED = Dimension(key="offload.pin_memory", text="true,false", range=Choices(values=(True, False)))


def is_active(key: str, point: Mapping[str, Scalar]) -> bool:
    """Conditions like ZeRO's: ddp neither prefetches nor offloads, and only an offloaded state is pinned."""
    if key in (PREFETCH.key, OFFLOAD.key):
        return point["strategy"] != "ddp"
    return key != PINNED.key or point.get(OFFLOAD.key) == "cpu"


CONDITIONAL = SearchSpace(dimensions=(PINNED, PREFETCH, STRATEGY, OFFLOAD))


def test_a_knob_is_in_a_point_only_where_it_matters() -> None:
    points = list(SearchSpace(dimensions=(STRATEGY, PREFETCH)).points(is_active))
    assert points == [
        {"strategy": "ddp"},
        {"strategy": "zero1", "zero.prefetch_bucket_size": 1},
        {"strategy": "zero1", "zero.prefetch_bucket_size": 2},
    ]


def test_each_point_is_listed_once_and_counted_once() -> None:
    points = [tuple(point.items()) for point in CONDITIONAL.points(is_active)]
    assert len(set(points)) == len(points) == CONDITIONAL.size(is_active) == 1 + 2 * (1 + 2)


def test_what_decides_is_settled_first_but_a_point_reads_as_written() -> None:
    longest = max(CONDITIONAL.points(is_active), key=len)
    assert list(longest) == [dimension.key for dimension in CONDITIONAL.dimensions]


def test_without_conditions_points_go_in_the_order_written() -> None:
    first, second, *_ = SearchSpace(dimensions=(MICRO_BATCH, STRATEGY)).points(is_active)
    assert (first, second) == (
        {"micro_batch": 1, "strategy": "ddp"},
        {"micro_batch": 1, "strategy": "zero1"},
    )


def test_points_are_listed_lazily() -> None:
    many = tuple(Dimension(key=f"knob{n}", text="", range=Choices(values=(1, 2, 3))) for n in range(60))
    space = SearchSpace(dimensions=many)
    assert set(next(space.points()).values()) == {1}


def test_a_large_space_is_counted_without_listing_it() -> None:
    steps = tuple(range(1000))
    plain = ("seed", "seq_len", "global_batch", "zero.prefetch_bucket_size")
    wide = tuple(Dimension(key=key, text="", range=Choices(values=steps)) for key in plain)
    assert SearchSpace(dimensions=(STRATEGY, *wide)).size(is_active) == 1000**3 + 1000**4


def test_a_random_point_holds_what_matters_in_it() -> None:
    source = random.Random(0)
    drawn = {tuple(CONDITIONAL.draw(source, is_active).items()) for _ in range(200)}
    assert drawn == {tuple(point.items()) for point in CONDITIONAL.points(is_active)}


def test_a_point_loses_what_does_not_matter_in_it() -> None:
    idle: dict[str, Scalar] = {"strategy": "ddp", "zero.prefetch_bucket_size": 1, "elsewhere": 3}
    assert CONDITIONAL.reduce(idle, is_active) == {"strategy": "ddp"}


def test_the_corners_of_an_interval_are_its_ends() -> None:
    space = SearchSpace(dimensions=(STRATEGY, BUCKET))
    corners = [point["zero.reduce_bucket_size"] for point in space.ends.points()]
    assert corners == [5e7, 1e9] * 2


def test_a_small_space_is_sampled_whole_and_a_large_one_in_part() -> None:
    space = SearchSpace(dimensions=(STRATEGY, MICRO_BATCH))
    assert space.sample(6, random.Random(0)) == list(space.points())
    few = SearchSpace(dimensions=(STRATEGY, BUCKET)).sample(5, random.Random(0))
    assert len({tuple(point.items()) for point in few}) == len(few) == 5


def test_a_sample_is_the_same_by_the_same_seed() -> None:
    space = SearchSpace(dimensions=(STRATEGY, BUCKET))
    first, again, other = (space.sample(5, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again != other
