"""Each way to make no legal plan gives its reason, with the numbers and a way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweeps.config.schema import DataConfig, SweepConfig, ZeroConfig
from sweeps.machine import Gpu, Machine
from sweeps.plan import Rejection, resolve
from sweeps.rules import RULES, Rule
from sweeps.rules.base import divisors
from train_entry.contract import ModelShape

GPUS = tuple(Gpu(index=index, uuid=f"GPU-{index}", name="H200", memory_bytes=1) for index in range(8))


def config(**changes: Any) -> SweepConfig:
    """Legal on four ranks: 32 = micro-batch 2 x accumulation 4 x data degree 4."""
    return dataclasses.replace(SweepConfig(ranks=4, micro_batch=2, global_batch=32, seq_len=128), **changes)


def reasons(config: SweepConfig, model: ModelShape, machine: Machine) -> tuple[str, ...]:
    resolved = resolve(config, model, machine)
    return resolved.texts if isinstance(resolved, Rejection) else ()


def test_the_legal_configuration_breaks_no_rule(shape: ModelShape, machine: Machine) -> None:
    assert reasons(config(), shape, machine) == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"ranks": 5},
            "ranks=5 is more than the capacity of 4 (1 x 4 cores); ranks may be 1 to 4",
        ),
        (
            {"tensor": 3},
            "tensor=3 x pipeline=1 does not divide ranks=4",
        ),
        (
            {"micro_batch": 3},
            "global_batch=32 is not a multiple of micro_batch=3 x data degree 4; "
            "micro_batch may be 1, 2, 4 or 8",
        ),
        (
            {"global_batch": 30, "micro_batch": 1},
            "global_batch=30 is not a multiple of micro_batch=1 x data degree 4; "
            "no micro_batch would do; global_batch must be a multiple of 4, such as 32",
        ),
        (
            {"global_batch": 1, "micro_batch": 1},
            "global_batch=1 is not a multiple of micro_batch=1 x data degree 4; "
            "no micro_batch would do; global_batch must be a multiple of 4, such as 4",
        ),
        (
            {"global_batch": 4, "micro_batch": 2},
            "global_batch=4 is not a multiple of micro_batch=2 x data degree 4; micro_batch may be 1",
        ),
        (
            {"seq_len": 129},
            "seq_len=129 is longer than the 128 positions of tiny",
        ),
        (
            {"engine": "ddp", "zero": ZeroConfig(stage=1)},
            "engine=ddp cannot shard, but zero.stage=1; engine=deepspeed can",
        ),
        (
            {"precision": "fp16", "zero": ZeroConfig(stage=0)},
            "precision=fp16 with zero.stage=0 trains wrongly in DeepSpeed 0.19: it divides gradients by a "
            "loss scale that it never applied; zero.stage may be 1, 2 or 3",
        ),
    ],
)
def test_a_rule_broken_alone_gives_its_reason(
    shape: ModelShape, machine: Machine, changes: dict[str, Any], reason: str
) -> None:
    assert reasons(config(**changes), shape, machine) == (reason,)


def test_capacity_is_counted_in_gpus_where_there_are_any(shape: ModelShape) -> None:
    machine = Machine(device="cuda", nodes=2, ranks_per_node=8, gpus=GPUS)
    assert reasons(config(ranks=17), shape, machine) == (
        "ranks=17 is more than the capacity of 16 (2 x 8 GPUs); ranks may be 1 to 16",
    )


@pytest.mark.parametrize(("stage", "engine"), [(1, "deepspeed"), (3, "deepspeed"), (0, "ddp")])
def test_fp16_is_legal_elsewhere(shape: ModelShape, machine: Machine, stage: int, engine: str) -> None:
    asked = config(precision="fp16", engine=engine, zero=ZeroConfig(stage=stage))
    assert reasons(asked, shape, machine) == ()


@pytest.mark.parametrize(
    ("data", "legal"),
    [
        (DataConfig(kind="stdlib"), False),
        (DataConfig(kind="synthetic"), True),
        (DataConfig(kind="text", path="books", tokenizer="tok"), True),
    ],
)
def test_bytes_need_a_vocabulary_of_256(
    shape: ModelShape, machine: Machine, data: DataConfig, legal: bool
) -> None:
    small = dataclasses.replace(shape, vocab=255)
    reason = (
        "a vocabulary of 255 cannot hold 256 byte values; set model.vocab to 256 or more, or data.tokenizer"
    )
    assert reasons(config(data=data), small, machine) == (() if legal else (reason,))


def test_all_broken_rules_are_reported_at_once(shape: ModelShape, machine: Machine) -> None:
    asked = config(seq_len=4096, micro_batch=3, engine="ddp", zero=ZeroConfig(stage=2))
    found = reasons(asked, dataclasses.replace(shape, vocab=100), machine)
    assert [reason.partition("=")[0] for reason in found] == [
        "global_batch",
        "seq_len",
        "a vocabulary of 100 cannot hold 256 byte values; set model.vocab to 256 or more, or data.tokenizer",
        "engine",
    ]


def test_batches_are_not_judged_without_a_data_degree(shape: ModelShape, machine: Machine) -> None:
    found = reasons(config(ranks=6, tensor=4, micro_batch=5), shape, machine)
    assert [reason.partition("=")[0] for reason in found] == ["ranks", "tensor"]


def test_a_long_list_of_micro_batches_is_shortened(shape: ModelShape, machine: Machine) -> None:
    (reason,) = reasons(config(ranks=1, global_batch=5040, micro_batch=11), shape, machine)
    assert reason.endswith("micro_batch may be 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12 or 5040")


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_why_and_where_that_is_known_from(rule: Rule) -> None:
    assert rule.explanation.endswith(".")
    assert len(rule.source) > 10


def test_divisors_are_all_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
