"""A point assembled from parts gives the same configuration as composing it."""

from __future__ import annotations

import random

import pytest

from sweeps.config.compose import Composer
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.space.dimensions import Point
from sweeps.space.grammar import read_request
from sweeps.space.points import Settings
from train_entry.contract import Scalar


@pytest.fixture(scope="module")
def settings(composer: Composer) -> Settings:
    return Settings(composer, Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2))


def test_points_of_the_full_space_are_the_same_either_way(composer: Composer, settings: Settings) -> None:
    space = read_request(["space=full"], composer).space
    points = [space.draw(random.Random(seed), settings.is_active) for seed in range(30)]
    assert [settings.config(point) for point in points] == [composer.compose(point) for point in points]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr.base", 1),
        ("zero.reduce_bucket_size", 50_000_000),
        ("optimizer.betas", "[0.8, 0.9]"),
        ("ranks", None),
        ("activation_checkpointing", 2),
        ("compile", True),
        ("lr", "none"),
        ("optimizer", "sgd"),
        ("seed", "3"),
    ],
)
def test_a_value_gets_the_type_of_its_key(
    composer: Composer, settings: Settings, key: str, value: Scalar
) -> None:
    found, expected = settings.config({key: value}), composer.compose({key: value})
    assert repr(found) == repr(expected)  # repr tells 1 from 1.0 and from True


def test_a_value_that_is_set_wins_over_a_group_and_its_place_does_not_matter(settings: Settings) -> None:
    point: Point = {"strategy": "zero3", "zero.stage": 1}
    assert settings.config(point).zero.stage == 1
    assert settings.config(dict(reversed(point.items()))).zero.stage == 1


@pytest.mark.parametrize(
    "point", [{"micro_batch": 0}, {"lr.schedule": "cosine"}, {"strategy": "zero9"}, {"seq_len": "long"}]
)
def test_a_point_that_is_wrong_is_refused_with_the_same_words(
    composer: Composer, settings: Settings, point: dict[str, Scalar]
) -> None:
    with pytest.raises(ConfigError) as composed:
        composer.compose(point)
    with pytest.raises(ConfigError) as refused:
        settings.config(point)
    assert refused.value.problems == composed.value.problems


def test_values_that_are_right_only_together_are_accepted(settings: Settings) -> None:
    config = settings.config({"lr.schedule": "cosine", "lr.total_steps": 100})
    assert (config.lr.schedule, config.lr.total_steps) == ("cosine", 100)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ({"strategy": "ddp"}, False),
        ({"strategy": "zero2"}, False),
        ({"strategy": "zero3"}, True),
        ({"strategy": "ddp", "engine": "deepspeed", "zero.stage": 3}, True),
        ({"strategy": "zero3", "zero.stage": 2}, False),
    ],
)
def test_prefetching_matters_at_stage_3(settings: Settings, point: dict[str, Scalar], expected: bool) -> None:
    assert settings.is_active("zero.prefetch_bucket_size", point) is expected


def test_a_knob_that_nothing_decides_matters_everywhere(settings: Settings) -> None:
    assert settings.is_active("micro_batch", {"strategy": "ddp"})


def test_a_decision_is_not_judged_before_what_it_needs_is_settled(settings: Settings) -> None:
    """A cosine schedule without its last step is invalid, but that step is set later."""
    assert settings.is_active("lr.total_steps", {"lr.schedule": "cosine"})
    assert not settings.is_active("lr.total_steps", {"lr.schedule": "constant"})


def test_nothing_matters_where_no_group_is_of_that_name(settings: Settings) -> None:
    assert not settings.is_active("zero.prefetch_bucket_size", {"strategy": "zero9"})
