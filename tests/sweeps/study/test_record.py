"""The study that a command line means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sweeps.config.keys import scope_of
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError
from sweeps.machine import Gpu, Machine
from sweeps.space.dimensions import Choices, Dimension, SearchSpace
from sweeps.study.record import comparable, goals, joined_record, study_record, versions
from train_entry.contract import ModelShape, Scalar, StudyRecord

FLAT: dict[str, Scalar] = {
    "model.name": "tiny",
    "data.kind": "stdlib",
    "measure.steps": 12,
    "global_batch": 32,
    "micro_batch": 1,
    "strategy": "zero1",
    "limits.trials": 4,
    "limits.hours": None,
    "search.seed": 0,
    "tracking.uri": None,
    "check.best": 0,
    "cluster.nodes": 1,
    "cluster.parallel": None,
    "study": None,
    "studies_dir": "studies",
    "objective": "auto",
}
MICRO_BATCH = Dimension(key="micro_batch", text="1,2", range=Choices(values=(1, 2)))
RANKS = Dimension(key="ranks", text="1,2", range=Choices(values=(1, 2)))
FREE = {
    "limits.trials": 9,
    "search.seed": 7,
    "tracking.uri": "http://elsewhere",
    "check.best": 3,
    "cluster.parallel": 2,
    "studies_dir": "/elsewhere",
    "micro_batch": 8,
}


@pytest.fixture
def record(shape: ModelShape, machine: Machine) -> Callable[..., StudyRecord]:
    """Make the record of a command line. Changes apply to its flat keys."""

    def make(
        config: SweepConfig | None = None,
        dimensions: tuple[Dimension, ...] = (MICRO_BATCH,),
        overrides: tuple[str, ...] = ("micro_batch=1,2",),
        **changes: Any,
    ) -> StudyRecord:
        space = SearchSpace(dimensions=dimensions)
        flat = FLAT | {key.replace("__", "."): value for key, value in changes.items()}
        return study_record(config or SweepConfig(), flat, space, shape, machine, overrides)

    return make


def test_a_record_holds_what_must_stay_the_same(record: Callable[..., StudyRecord]) -> None:
    made = record()
    assert set(made.asked) == {
        "model.name",
        "data.kind",
        "measure.steps",
        "global_batch",
        "strategy",
        "cluster.nodes",
        "ranks",
    }
    assert made.asked["ranks"] == 2
    assert made.dimensions == {"micro_batch": "1,2"}
    assert made.limits == {"limits.trials": 4, "limits.hours": None}
    assert made.overrides == ("micro_batch=1,2",)


def test_what_may_hold_a_password_is_not_on_record(record: Callable[..., StudyRecord]) -> None:
    secret = (
        "+tracking.uri=http://me:word@x",
        'cluster.setup=["export TOKEN=x"]',
        'cluster.srun_args=["--x"]',
    )
    assert record(overrides=(*secret, "cluster.partition=gpu")).overrides == ("cluster.partition=gpu",)


def test_the_name_is_the_users_where_given(record: Callable[..., StudyRecord]) -> None:
    assert record(SweepConfig(study="mine")).name == "mine"


@pytest.mark.parametrize("key", FREE)
def test_how_a_study_is_run_does_not_change_its_derived_name(
    record: Callable[..., StudyRecord], key: str
) -> None:
    assert record(**{key: FREE[key]}).name == record().name


@pytest.mark.parametrize("key", ["global_batch", "measure.steps", "model.name", "cluster.nodes"])
def test_what_is_compared_does(record: Callable[..., StudyRecord], key: str) -> None:
    assert record(**{key: 64}).name != record().name


def test_another_range_is_another_study(record: Callable[..., StudyRecord]) -> None:
    wider = dataclasses.replace(MICRO_BATCH, text="1,2,4")
    assert record(dimensions=(wider,)).name != record().name
    assert record().name.startswith("tiny-")


@pytest.mark.parametrize(
    ("asked", "ranks_vary", "expected"),
    [
        ("auto", False, "tokens_per_s_per_gpu"),
        ("tokens_per_s", False, "tokens_per_s"),
        ("tokens_per_s", True, "tokens_per_s"),
    ],
)
def test_the_objective_is_per_gpu_unless_said(asked: str, ranks_vary: bool, expected: str) -> None:
    assert [goal.name for goal in goals(SweepConfig(objective=asked), ranks_vary)] == [expected]


def test_with_varying_ranks_only_the_user_can_say_it(record: Callable[..., StudyRecord]) -> None:
    with pytest.raises(ConfigError, match="objective may be tokens_per_s or tokens_per_s_per_gpu"):
        record(dimensions=(RANKS,))


def test_versions_name_the_packages_and_the_card(machine: Machine) -> None:
    gpu = Gpu(index=0, uuid="GPU-1", name="H200", memory_bytes=1)
    assert set(versions(machine)) == {"torch", "deepspeed", "transformers", "device"}
    assert versions(machine)["device"] == "CPU"
    assert versions(dataclasses.replace(machine, gpus=(gpu,)))["device"] == "H200"


def test_a_single_trial_shares_model_data_and_batch_with_the_study_it_joins(
    record: Callable[..., StudyRecord],
) -> None:
    known, single = record(), record(dimensions=(), global_batch=64, measure__steps=50, data__kind="text")
    joined = joined_record(known, single)
    assert joined.asked["measure.steps"] == 12
    # open_study refuses these differences.
    assert (joined.asked["global_batch"], joined.asked["data.kind"]) == (64, "text")
    assert (joined.name, joined.dimensions) == (known.name, known.dimensions)


def test_trials_in_one_table_compare_by_model_data_and_batch(record: Callable[..., StudyRecord]) -> None:
    assert set(comparable(record().asked)) == {"model.name", "data.kind", "global_batch", "ranks"}


@pytest.mark.parametrize(
    ("key", "expected"),
    [("limits", True), ("limits.trials", True), ("limitless", False), ("a.limits", False)],
)
def test_a_key_lies_under_a_name_at_a_dot_only(key: str, expected: bool) -> None:
    assert (scope_of(key) is scope_of("limits")) is expected
