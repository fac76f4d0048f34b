"""Pipeline stages, run one after another, compute the whole model's loss and hold its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tests.support.parallel_cases import MODELS, parallel
from tests.train_entry.conftest import tiny_spec
from train_entry.contract import Attention, Coordinates, Plan
from train_entry.engines.choose import DTYPES
from train_entry.model import split
from train_entry.model.build import build_model, config_of, parameters_of
from train_entry.model.sharding import copies_of
from train_entry.model.stages import Stage, Staged, cut_out

CPU = torch.device("cpu")
TOKENS = torch.arange(64).reshape(2, 32)
SHAPES = {name: dataclasses.replace(shape, layers=4) for name, shape in MODELS.items()}


def stage_model(plan: Plan, family: str, place: Coordinates) -> Any:
    sharding = Staged(plan, place, DTYPES[plan.precision], CPU)
    return build_model(SHAPES[family], plan, CPU, sharding)


def stage_models(plan: Plan, family: str) -> list[Any]:
    return [
        stage_model(plan, family, Coordinates(stage=stage, data=0, tensor=0))
        for stage in range(plan.pipeline)
    ]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
@pytest.mark.parametrize("family", SHAPES)
def test_stages_in_turn_give_the_models_own_loss(family: str, attention: Attention, stages: int) -> None:
    plan = parallel(0, pipeline=stages, ranks=stages, attention=attention)
    whole = build_model(SHAPES[family], dataclasses.replace(plan, pipeline=1), CPU)
    passed = TOKENS
    for model in stage_models(plan, family):
        stage = Stage(model)
        passed = stage(passed)
    assert torch.equal(stage.loss(passed, TOKENS), whole(input_ids=TOKENS, labels=TOKENS).loss)


@pytest.mark.parametrize("family", SHAPES)
def test_every_parameter_lies_in_one_stage_but_a_tied_embedding_in_two(family: str) -> None:
    plan = parallel(0, pipeline=4, ranks=4)
    whole = build_model(SHAPES[family], dataclasses.replace(plan, pipeline=1), CPU)
    models = stage_models(plan, family)
    names = [name for model in models for name, _ in model.named_parameters()]
    head = {"lm_head.weight"} if SHAPES[family].tied_embeddings else set()
    assert sorted(names) == sorted({name for name, _ in whole.named_parameters()} | head)
    shares = [
        parameter.numel() * plan.data / copies_of(parameter, plan)
        for model in models
        for parameter in model.parameters()
    ]
    assert sum(shares) == parameters_of(whole)


@pytest.mark.parametrize("family", SHAPES)
def test_a_stage_has_the_values_of_the_whole_model(family: str) -> None:
    plan = parallel(0, pipeline=2, ranks=2)
    whole = build_model(SHAPES[family], dataclasses.replace(plan, pipeline=1), CPU)
    for model in stage_models(plan, family):
        assert all(
            torch.equal(values, whole.get_parameter(name)) for name, values in model.named_parameters()
        )


def test_the_parts_of_other_stages_are_cut_away_before_any_has_storage() -> None:
    plan = parallel(0, pipeline=2, ranks=2)
    sharding = Staged(plan, plan.coordinates(1), torch.float32, CPU)
    with sharding.construct(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config_of(SHAPES["llama"]))
    cut_out(model, plan, stage=1)
    blocks = {name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name}
    assert blocks == {"2", "3"}
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("every", [1, 2])
def test_stages_recompute_every_kth_of_their_blocks(every: int) -> None:
    plan = parallel(0, pipeline=2, ranks=2, checkpoint_every=every)
    for model in stage_models(plan, "llama"):
        recomputed = [block for block in model.modules() if getattr(block, "gradient_checkpointing", False)]
        assert len(recomputed) == 2 // every


def test_a_family_whose_parts_are_not_known_is_refused_by_name() -> None:
    model = build_model(SHAPES["llama"], parallel(0, ranks=1), CPU)
    model.config.model_type = "mamba"
    with pytest.raises(ValueError, match=r"type mamba cannot be cut .* only llama and gpt2 can"):
        cut_out(model, parallel(0, pipeline=2), stage=0)


# ---------------------------------------------------------------- split matrices


def test_parts_of_matrices_put_together_are_the_matrices() -> None:
    plan = parallel(0, pipeline=2, tensor=2, ranks=4)
    whole = build_model(SHAPES["untied"], dataclasses.replace(plan, pipeline=1, tensor=1), CPU)
    parts = [
        stage_model(plan, "untied", Coordinates(stage=0, data=0, tensor=tensor))
        for tensor in range(plan.tensor)
    ]
    for name, first in parts[0].named_parameters():
        second = parts[1].get_parameter(name)
        dim = getattr(first, "split_dim", None)
        together = first if dim is None else torch.cat([first, second], dim)
        assert torch.equal(together, whole.get_parameter(name)), name
        assert (dim is not None) == ("_proj" in name)


def test_a_split_parameter_has_half_the_copies_of_a_whole_one() -> None:
    plan = parallel(0, pipeline=2, tensor=2, ranks=8)
    model = stage_model(plan, "untied", plan.coordinates(0))
    copies = {name.split(".")[-2]: copies_of(values, plan) for name, values in model.named_parameters()}
    assert (copies["q_proj"], copies["input_layernorm"]) == (2, 4)


@pytest.mark.parametrize(
    ("family", "degree", "problem"),
    [("gpt2", 2, "type gpt2 cannot be split"), ("untied", 3, "cannot be split into 3 equal parts")],
)
def test_what_cannot_be_split_is_refused(family: str, degree: int, problem: str) -> None:
    model = build_model(SHAPES[family], parallel(0, ranks=1), CPU)
    with pytest.raises(ValueError, match=problem):
        split.shrink(model, degree)


def test_ranks_of_one_copy_see_the_same_samples() -> None:
    plan = tiny_spec(parallel(0, pipeline=2, tensor=2, ranks=8)).plan
    assert [plan.coordinates(rank).data for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
