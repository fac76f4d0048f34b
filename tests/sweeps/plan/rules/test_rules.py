"""Each broken rule gives its reason, with the numbers and a way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweeps.config.schema import DataConfig, LrConfig, SweepConfig, ZeroConfig
from sweeps.machine import Gpu, Machine
from sweeps.plan.resolve import Rejection, resolve
from sweeps.plan.rules import RULES, Rule
from sweeps.plan.rules.base import divisors
from tests.support.examples import a_model
from train_entry.contract import ModelShape, Plan

GPUS = tuple(Gpu(index=index, uuid=f"GPU-{index}", name="H200", memory_bytes=1) for index in range(8))


WIDE = a_model(layers=8, hidden=64, heads=16, kv_heads=8, ffn=256, vocab=1024)
TIED_GPT2 = dataclasses.replace(WIDE, family="gpt2", kv_heads=16, tied_embeddings=True)
MISTRAL = dataclasses.replace(WIDE, family="mistral")
ODD = dataclasses.replace(WIDE, layers=6, kv_heads=2, vocab=1026)
TWO_NODES = Machine(device="cuda", nodes=2, ranks_per_node=8, gpus=GPUS)


def config(**changes: Any) -> SweepConfig:
    """Apply changes to a legal plan of four ranks: 32 = micro-batch 2 x accumulation 4 x data degree 4."""
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
            {"pipeline": 2, "tensor": 4},
            "tensor=4 x pipeline=2 does not divide ranks=4; their product may be 1, 2 or 4",
        ),
        (
            {"micro_batch": 3},
            "global_batch=32 is not a multiple of micro_batch=3 x data degree 4; "
            "micro_batch may be 1, 2, 4 or 8",
        ),
        (
            {"global_batch": 30, "micro_batch": 1},
            "global_batch=30 is not a multiple of micro_batch=1 x data degree 4; "
            "no micro_batch is legal; global_batch must be a multiple of 4, such as 32",
        ),
        (
            {"global_batch": 1, "micro_batch": 1},
            "global_batch=1 is not a multiple of micro_batch=1 x data degree 4; "
            "no micro_batch is legal; global_batch must be a multiple of 4, such as 4",
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
def test_a_rule_broken_alone_gives_its_reason(machine: Machine, changes: dict[str, Any], reason: str) -> None:
    assert reasons(config(**changes), WIDE, machine) == (reason,)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        (
            WIDE,
            {"engine": "ddp", "tensor": 2},
            "engine=ddp cannot split a model, but tensor=2 and pipeline=1; engine=deepspeed can",
        ),
        (
            TIED_GPT2,
            {"tensor": 2},
            "tensor=2: matrices of tiny, a gpt2 model, cannot be split, only those of llama models; "
            "tensor may be 1",
        ),
        (
            MISTRAL,
            {"pipeline": 2},
            "pipeline=2: tiny, a mistral model, cannot be cut into stages, only llama or gpt2 models can; "
            "pipeline may be 1",
        ),
        (
            ODD,
            {"tensor": 4},
            "tensor=4 does not divide kv_heads=2, vocab=1026 of tiny; tensor may be 1 or 2",
        ),
        (
            ODD,
            {"pipeline": 4},
            "pipeline=4 does not divide the 6 blocks of tiny; pipeline may be 1 or 2",
        ),
        (
            WIDE,
            {"pipeline": 2, "zero": ZeroConfig(stage=2)},
            "pipeline=2 with zero.stage=2: DeepSpeed refuses it; zero.stage may be 0 or 1, or use tensor "
            "instead of pipeline",
        ),
        (
            WIDE,
            {"pipeline": 2, "zero": ZeroConfig(stage=1, offload_optimizer="cpu")},
            "pipeline=2 with zero.offload_optimizer=cpu: a pipeline cannot offload; "
            "pipeline may be 1, or offload none",
        ),
        (
            WIDE,
            {"tensor": 2, "zero": ZeroConfig(stage=3, offload_optimizer="cpu", offload_param="cpu")},
            "tensor=2 with zero.stage=3 and zero.offload_optimizer=cpu, zero.offload_param=cpu is "
            "untested; leave them out, or tensor may be 1",
        ),
        (
            WIDE,
            {"tensor": 2, "precision": "bf16"},
            "tensor=2 with zero.stage=0, precision=bf16 and gradient_clipping=1 clips by only a part of the "
            "norm; zero.stage may be 1, 2 or 3, or precision fp32, or gradient_clipping 0",
        ),
        (
            TIED_GPT2,
            {
                "pipeline": 2,
                "precision": "fp16",
                "grad_accum_dtype": "fp32",
                "zero": ZeroConfig(stage=1),
            },
            "pipeline=2 with tied embeddings, precision=fp16 and grad_accum_dtype=fp32: DeepSpeed never adds "
            "up the gradients of the two copies; grad_accum_dtype may be auto, or "
            "model.tied_embeddings false",
        ),
        (
            WIDE,
            {"tensor": 2, "pipeline": 2, "compile": True},
            "compile=true with tensor=2 and pipeline=2 is untested; compile may be false, or one of "
            "the degrees 1",
        ),
    ],
)
def test_a_division_that_is_illegal_gives_its_reason(
    machine: Machine, model: ModelShape, changes: dict[str, Any], reason: str
) -> None:
    assert reasons(config(**changes), model, machine) == (reason,)


def test_a_tensor_group_beyond_a_node_must_be_asked_for() -> None:
    asked = config(ranks=16, tensor=16, zero=ZeroConfig(stage=1))
    wide = dataclasses.replace(WIDE, kv_heads=16)
    assert reasons(asked, wide, TWO_NODES) == (
        "tensor=16 is more than the 8 ranks of a node; tensor may be at most 8, with pipeline for the rest, "
        "or set tensor_across_nodes=true",
    )
    assert reasons(dataclasses.replace(asked, tensor_across_nodes=True), wide, TWO_NODES) == ()


def test_tensor_groups_that_straddle_nodes_are_told_what_would_not() -> None:
    nodes = dataclasses.replace(TWO_NODES, ranks_per_node=6)
    asked = config(ranks=12, tensor=4, micro_batch=1, global_batch=36, zero=ZeroConfig(stage=1))
    assert reasons(asked, WIDE, nodes) == (
        "tensor=4 does not divide the 6 ranks of a node: some groups would span two nodes; "
        "tensor may be 1, 2, 3 or 6",
    )


def test_the_batch_triad_and_the_rate_know_that_tensor_ranks_see_the_same_samples() -> None:
    asked = config(
        ranks=16,
        tensor=2,
        micro_batch=4,
        global_batch=32,
        zero=ZeroConfig(stage=1),
        lr=LrConfig(base=1e-3, base_batch=8),
    )
    plan = resolve(asked, WIDE, TWO_NODES)
    assert isinstance(plan, Plan)
    assert (plan.data, plan.grad_accum, plan.micro_batch * plan.data) == (8, 1, 32)
    assert plan.optimizer.lr == pytest.approx(1e-3 * 2)  # sqrt(32 / 8): from the batch, not from the ranks


def test_sixteen_copies_would_need_another_batch() -> None:
    (reason,) = reasons(config(ranks=16, micro_batch=4, zero=ZeroConfig(stage=1)), WIDE, TWO_NODES)
    assert reason.startswith("global_batch=32 is not a multiple of micro_batch=4 x data degree 16")


def test_capacity_is_counted_in_gpus_where_there_are_any(shape: ModelShape) -> None:
    machine = Machine(device="cuda", nodes=2, ranks_per_node=8, gpus=GPUS)
    assert reasons(config(ranks=17), shape, machine) == (
        "ranks=17 is more than the capacity of 16 (2 x 8 GPUs); ranks may be 1 to 16",
    )


def test_a_trial_spans_no_more_nodes_than_one_held_allocation_has(shape: ModelShape) -> None:
    machine = Machine(device="cuda", nodes=4, ranks_per_node=8, gpus=GPUS, nodes_of_a_trial=2)
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
    found = reasons(config(ranks=6, tensor=4, micro_batch=5), WIDE, machine)
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
