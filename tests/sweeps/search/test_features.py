"""Distances between plans."""

from __future__ import annotations

import pytest

from sweeps.search.features import BUFFER, Features, features_of
from tests.support.estimates import an_estimate
from tests.support.examples import a_plan
from train_entry.contract import Engine, Plan


def features(plan: Plan) -> Features:
    return features_of(plan, an_estimate())


def apart(one: Plan, other: Plan) -> float:
    first, second = features(one), features(other)
    counted = sum(abs(a - b) for a, b in zip(first.counts, second.counts, strict=True))
    return counted + sum(a != b for a, b in zip(first.kinds, second.kinds, strict=True))


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (a_plan(), 0.0),
        (a_plan(micro_batch=8), 1.0),
        (a_plan(micro_batch=1), 2.0),
        (a_plan(checkpoint_every=2), 0.5),
        (a_plan(zero={"stage": 3}), 1.0),
        (a_plan(zero={"stage": 0}), 1.0),
        (a_plan(engine=Engine.DDP), 1.0),
        (a_plan(compile=True), 1.0),
        (a_plan(zero={"reduce_bucket_size": 1_000_000_001}), BUFFER),
        (a_plan(optimizer={"lr": 1.0}, seed=7), 0.0),
    ],
)
def test_plans_are_as_far_apart_as_they_differ(other: Plan, distance: float) -> None:
    assert apart(a_plan(), other) == pytest.approx(distance, abs=1e-6)


def test_errors_of_a_part_count_as_far_as_the_step_consists_of_it() -> None:
    found = features_of(a_plan(), an_estimate(step_s=0.4, parts={"forward": 0.3, "offload": 0.1}))
    assert found.parts == pytest.approx((0.75 * 0.25, 0.0, 0.0, 0.25 * 0.5, 0.0))


def test_errors_are_wider_the_longer_a_device_waits() -> None:
    shares = (0.0, 0.5, 1.0)
    widths = [
        features_of(a_plan(), an_estimate(step_s=1.0, parts={"waiting": share})).width for share in shares
    ]
    assert widths == pytest.approx([1.0, (1 + 1.5**2) ** 0.5, 10**0.5])
