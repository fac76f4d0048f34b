"""Bounds, choices, whole numbers and relations between keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sweeps.config.keys import KEYS
from sweeps.config.schema import SweepConfig
from sweeps.config.validate import bad_value, bad_values, suggest, unknown_keys


def config(**groups: dict[str, Any]) -> SweepConfig:
    """Return the schema's defaults with some keys changed."""
    made = SweepConfig()
    for group, changes in groups.items():
        for name, value in changes.items():
            setattr(getattr(made, group), name, value)
    return made


def test_the_defaults_of_the_schema_are_good() -> None:
    assert list(bad_values(SweepConfig())) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("micro_batch", 0, "0 is too small; at least 1"),
        ("zero.stage", 4, "4 is too large; at most 3"),
        ("optimizer.eps", 0.0, "0 is too small; more than 0"),
        ("lr.base", math.inf, "inf is not a finite number"),
        ("lr.base", math.nan, "nan is not a finite number"),
        ("zero.reduce_bucket_size", 5.5, "5.5 is not a whole number"),
        ("precision", "int8", "'int8' is not one of auto, fp32, bf16, fp16"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_what_would_do(key: str, value: Any, problem: str) -> None:
    assert bad_value(KEYS[key], value) == problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("micro_batch", 1),
        ("zero.stage", 3),
        ("optimizer.eps", 1e-30),
        ("zero.reduce_bucket_size", 5e7),
        ("ranks", None),
        ("zero.overlap_comm", True),
        ("study", "anything"),
    ],
)
def test_a_value_within_bounds_is_good(key: str, value: Any) -> None:
    assert bad_value(KEYS[key], value) is None


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (config(optimizer={"betas": [0.9]}), "optimizer.betas"),
        (config(optimizer={"betas": [0.9, 1.0]}), "optimizer.betas"),
        (config(lr={"warmup": "-5"}), "lr.warmup"),
        (config(model={"family": "hf"}), "model.path"),
        (config(data={"kind": "text"}), "data.path"),
        (config(cluster={"memory_limit_gib": 8.0}, gate={"headroom_gib": 8.0}), "gate.headroom_gib"),
        (config(cluster={"sbatch_args": ["--requeue"]}), "cluster.sbatch_args"),
        (SweepConfig(dry_run=True, dry_run_to="plans.txt"), "dry_run_to"),
        (SweepConfig(dry_run_to="plans.csv"), "dry_run_to"),
        (SweepConfig(study=""), "study"),
        (SweepConfig(study="../other"), "study"),
        (SweepConfig(study="a/b"), "study"),
        (SweepConfig(study="two words"), "study"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changed: SweepConfig, key: str) -> None:
    assert [found for found, _ in bad_values(changed)] == [key]


@pytest.mark.parametrize("warmup", ["steps", "samples", "0", "200"])
def test_a_warmup_keeps_steps_or_samples_or_has_a_number(warmup: str) -> None:
    assert list(bad_values(config(lr={"warmup": warmup}))) == []


def test_all_bad_values_are_found() -> None:
    changed = config(zero={"stage": 9}, lr={"base": 0.0}, search={"sampler": "cma"})
    assert [key for key, _ in bad_values(changed)] == ["zero.stage", "lr.base", "search.sampler"]


def test_unknown_keys_are_found_at_any_depth() -> None:
    container = {"zero": {"stage": 1, "stages": 2}, "foo": {"bar": 1}, "space": {"zero.stage": "1,2"}}
    assert list(unknown_keys(container)) == ["zero.stages", "foo.bar"]


def test_a_suggestion_names_near_keys_or_where_to_look() -> None:
    assert suggest("zero.stages") == "did you mean zero.stage?"
    assert suggest("qqqq") == "`python sweep.py --help` lists the keys"
