"""Conditions under which knobs have an effect, and that deciding knobs are set first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweeps.config.conditions import DECIDING, Setting
from sweeps.config.keys import KEYS, value_at, with_value
from sweeps.config.schema import SweepConfig
from sweeps.machine import Machine
from sweeps.space.conditions import decision_rank, is_active, setting_of, without_inactive_knobs

CPU = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
GPUS = Machine(device="cuda", nodes=2, ranks_per_node=8, cores=64)
# Each condition holds in at least one of these.
BASES: tuple[dict[str, Any], ...] = (
    {"engine": "ddp", "lr.warmup": "20"},
    {"zero.stage": 1, "precision": "bf16", "grad_accum_dtype": "fp32"},
    {"zero.stage": 2, "zero.offload_optimizer": "cpu", "precision": "fp16"},
    {"zero.stage": 3, "zero.offload_optimizer": "cpu"},
    {"zero.stage": 3, "zero.offload_optimizer": "nvme", "zero.offload_param": "nvme", "ranks": 16},
    {"zero.stage": 1, "tensor": 2, "pipeline": 2},
    {"zero.stage": 3, "optimizer.name": "sgd", "lr.base_warmup": 5, "lr.schedule": "cosine"},
    {"zero.stage": 2, "zero.reduce_scatter": False, "precision": "fp16", "fp16.loss_scale": 8.0},
)


CONDITIONS = {key.name: key.active_when for key in KEYS.values() if key.active_when is not None}


class Watched(Setting):
    """A setting that remembers which of its keys were read."""

    read: set[str] = set()  # noqa: RUF012

    def __getattribute__(self, name: str) -> Any:
        if name in DECIDING:
            Watched.read.add(DECIDING[name])
        return super().__getattribute__(name)


def asked(**values: Any) -> SweepConfig:
    return with_values({key.replace("__", "."): value for key, value in values.items()})


def with_values(values: dict[str, Any]) -> SweepConfig:
    config = SweepConfig(precision="fp32")
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def setting(machine: Machine = CPU, **values: Any) -> Setting:
    return setting_of(asked(**values), machine)


def at(values: dict[str, Any], machine: Machine = CPU) -> Setting:
    return setting_of(with_values(values), machine)


def keys_read(key: str) -> set[str]:
    """Return the keys that the condition of a key reads, over all bases."""
    settings = [at(base, machine) for base in BASES for machine in (CPU, GPUS)]
    watched = [
        Watched(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
        for found in settings
    ]
    Watched.read.clear()
    for found in watched:
        is_active(key, found)
    return set(Watched.read)


def test_what_decides_is_a_key() -> None:
    assert set(DECIDING.values()) - set(KEYS) == set()


@pytest.mark.parametrize("key", CONDITIONS)
def test_a_condition_reads_only_what_is_settled_before_its_knob(key: str) -> None:
    assert {read for read in keys_read(key) if decision_rank(read) >= decision_rank(key)} == set()


def test_nothing_decides_that_no_condition_reads() -> None:
    assert set(DECIDING.values()) == set().union(*map(keys_read, CONDITIONS))


@pytest.mark.parametrize("key", sorted(set(CONDITIONS) - {"zero.allgather_bucket_size"}))
def test_every_condition_holds_somewhere_and_fails_somewhere(key: str) -> None:
    found = {is_active(key, at(base, machine)) for base in BASES for machine in (CPU, GPUS)}
    assert found == {True, False}


def test_the_text_of_a_condition_completes_a_sentence() -> None:
    assert [key for key, found in CONDITIONS.items() if not found.text or found.text.endswith(".")] == []


def test_groups_are_settled_first_then_what_decides_then_the_rest() -> None:
    ranks = [decision_rank(key) for key in ("strategy", "engine", "zero.stage", "lr.schedule", "micro_batch")]
    assert ranks == sorted(ranks)
    assert decision_rank("strategy") < decision_rank("engine")
    assert decision_rank("lr.schedule") < decision_rank("micro_batch") == float("inf")


@pytest.mark.parametrize(
    ("key", "where", "expected"),
    [
        ("zero.reduce_bucket_size", setting(engine="ddp"), False),
        ("zero.reduce_bucket_size", setting(zero__stage=0), False),
        ("zero.reduce_bucket_size", setting(zero__stage=1), True),
        ("ddp.bucket_cap_mb", setting(engine="ddp"), True),
        ("ddp.bucket_cap_mb", setting(zero__stage=1), False),
        ("offload.ratio", setting(GPUS, zero__stage=3, zero__offload_optimizer="cpu"), True),
        ("offload.ratio", setting(GPUS, zero__stage=2, zero__offload_optimizer="cpu"), False),
        ("offload.ratio", setting(GPUS, zero__stage=3), False),
        ("zero.offload_param", setting(zero__stage=2), False),
        ("optimizer.implementation", setting(engine="ddp", zero__offload_optimizer="cpu"), True),
        ("offload.pin_memory", setting(GPUS, zero__stage=2, zero__offload_param="cpu"), False),
        ("zero.allgather_bucket_size", setting(zero__stage=2), False),
        ("micro_batch", setting(engine="ddp"), True),
        ("tensor", setting(engine="ddp"), False),
        ("pipeline", setting(engine="ddp"), False),
        ("tensor", setting(zero__stage=0), True),
        ("pipeline", setting(zero__stage=2), True),  # a rule refuses it, so it must not be dropped
        ("tensor_across_nodes", setting(tensor=1), False),
        ("tensor_across_nodes", setting(tensor=2), True),
        ("tensor_across_nodes", setting(tensor=2, engine="ddp"), False),
        ("zero.overlap_comm", setting(zero__stage=1), True),
        ("zero.overlap_comm", setting(zero__stage=1, pipeline=2), False),
        ("zero.overlap_comm", setting(zero__stage=1, tensor=2), True),
        ("zero.reduce_bucket_size", setting(zero__stage=1, pipeline=2), True),
        ("zero.reduce_bucket_size", setting(zero__stage=0, pipeline=2), False),
        ("zero.reduce_bucket_size", setting(precision="bf16", zero__stage=1, pipeline=2), True),
        (
            "zero.reduce_bucket_size",
            setting(precision="bf16", grad_accum_dtype="fp32", zero__stage=1, pipeline=2),
            False,
        ),
    ],
)
def test_a_knob_matters_where_something_reads_it(key: str, where: Setting, expected: bool) -> None:
    assert is_active(key, where) is expected


def reset(config: SweepConfig) -> SweepConfig:
    return without_inactive_knobs(config, setting_of(config, CPU))


def test_what_has_no_effect_stands_at_its_default() -> None:
    found = asked(engine="ddp", zero__prefetch_bucket_size=3.0, ddp__bucket_cap_mb=7)
    config = reset(found)
    assert value_at(config, "zero.prefetch_bucket_size") == KEYS["zero.prefetch_bucket_size"].default == 5e7
    assert config.ddp.bucket_cap_mb == 7
    assert found.zero.prefetch_bucket_size == 3.0


def test_a_pipeline_stands_without_overlap_whatever_a_preset_says() -> None:
    config = reset(asked(zero__stage=1, pipeline=2, zero__overlap_comm=True))
    assert config.zero.overlap_comm is False
    assert config.pipeline == 2


def test_a_knob_that_is_exported_all_the_same_is_kept() -> None:
    config = reset(asked(zero__stage=2, zero__allgather_bucket_size=3.0))
    assert config.zero.allgather_bucket_size == 3.0


@pytest.mark.parametrize(
    ("lr", "used"),
    [
        ({}, False),
        ({"lr.base_warmup": 10}, True),
        ({"lr.base_warmup": 10, "lr.warmup": "0"}, False),
        ({"lr.warmup": "10"}, True),
        ({"lr.schedule": "linear"}, True),  # it warms up over at least two steps
    ],
)
def test_where_a_warm_up_begins_matters_where_there_is_one(lr: dict[str, Any], used: bool) -> None:
    assert is_active("lr.warmup_from", at(lr, CPU)) is used
