from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from train_entry.contract import Attention, ModelShape, Plan, TrialSpec
from train_entry.model.build import build_model, config_of, count_parameters, parameters_of, recompute_blocks

CPU = torch.device("cpu")
BATCH = torch.arange(64).reshape(2, 32)


@pytest.fixture(params=["llama", "gpt2"])
def shape(request: pytest.FixtureRequest, spec: TrialSpec) -> ModelShape:
    return dataclasses.replace(spec.model, family=request.param, layers=5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_count_on_meta_equals_the_real_model(spec: TrialSpec, shape: ModelShape, tied: bool) -> None:
    shape = dataclasses.replace(shape, tied_embeddings=tied)
    model = build_model(shape, spec.plan, CPU)
    assert count_parameters(config_of(shape)) == parameters_of(model)
    assert model.config.tie_word_embeddings is tied


def test_the_same_seed_gives_the_same_weights_whatever_came_before(
    spec: TrialSpec, shape: ModelShape
) -> None:
    first = build_model(shape, spec.plan, CPU)
    second = build_model(shape, spec.plan, CPU)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_what_is_drawn_after_the_model_is_the_same_on_every_rank(spec: TrialSpec, shape: ModelShape) -> None:
    build_model(shape, spec.plan, CPU)
    drawn = torch.rand(3)
    torch.manual_seed(spec.plan.seed)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(("every", "recomputed"), [(1, 5), (2, 3), (3, 2), (9, 1)])
def test_every_kth_block_runs_twice_and_no_gradient_changes(
    spec: TrialSpec, shape: ModelShape, every: int, recomputed: int
) -> None:
    plans = [dataclasses.replace(spec.plan, checkpoint_every=k) for k in (0, every)]
    models = [build_model(shape, plan, CPU) for plan in plans]
    calls = [count_calls_of_mlps(model) for model in models]
    losses = [model(input_ids=BATCH, labels=BATCH).loss for model in models]
    for loss in losses:
        loss.backward()
    assert [len(called) for called in calls] == [5, 5 + recomputed]
    assert losses[0] == losses[1]
    for plain, again in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(plain.grad, again.grad)


def count_calls_of_mlps(model: torch.nn.Module) -> list[None]:
    """Return a list that grows by one item at each call of an MLP."""
    calls: list[None] = []
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


def test_a_model_without_blocks_cannot_recompute_them(spec: TrialSpec) -> None:
    model = build_model(dataclasses.replace(spec.model, layers=0), spec.plan, CPU)
    with pytest.raises(ValueError, match=r"checkpoint_every=2: .* llama has no blocks .* 0 turns this off"):
        recompute_blocks(model, 2)


def with_attention(plan: Plan, attention: Attention) -> Plan:
    return dataclasses.replace(plan, attention=attention)


def test_attention_written_out_gives_the_same_loss(spec: TrialSpec, shape: ModelShape) -> None:
    plans = [with_attention(spec.plan, attention) for attention in (Attention.SDPA, Attention.EAGER)]
    models = [build_model(shape, plan, CPU) for plan in plans]
    assert [model.config._attn_implementation for model in models] == ["sdpa", "eager"]
    losses = [float(model(input_ids=BATCH, labels=BATCH).loss.detach()) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_missing_flash_attention_is_one_clear_line(
    spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_entry.model.build.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^attention=flash_attention_2 needs the package flash-attn, .*$"):
        build_model(spec.model, with_attention(spec.plan, Attention.FLASH), CPU)


def test_what_transformers_has_against_an_attention_is_told(
    spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_entry.model.build.find_spec", lambda name: importlib.util.find_spec("torch"))
    with pytest.raises(ValueError, match="attention=flash_attention_2: "), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_model(spec.model, with_attention(spec.plan, Attention.FLASH), CPU)


def test_a_model_in_a_directory_keeps_its_weights(spec: TrialSpec, shape: ModelShape, tmp_path: Path) -> None:
    saved = build_model(shape, spec.plan, CPU)
    saved.save_pretrained(tmp_path)
    other_seed = dataclasses.replace(spec.plan, seed=99)
    loaded = build_model(dataclasses.replace(shape, path=str(tmp_path)), other_seed, CPU)
    assert all(map(torch.equal, saved.parameters(), loaded.parameters()))
    assert loaded.training


def test_a_directory_without_weights_gets_those_of_the_seed(
    spec: TrialSpec, shape: ModelShape, tmp_path: Path
) -> None:
    config_of(shape).save_pretrained(tmp_path)
    from_directory = build_model(dataclasses.replace(shape, path=str(tmp_path)), spec.plan, CPU)
    from_shape = build_model(shape, spec.plan, CPU)
    assert all(map(torch.equal, from_directory.parameters(), from_shape.parameters()))


def test_a_directorys_dropout_is_off_since_its_random_numbers_differ_between_strategies(
    spec: TrialSpec, tmp_path: Path
) -> None:
    shape = dataclasses.replace(spec.model, family="gpt2")
    config: Any = config_of(shape)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    config.save_pretrained(tmp_path)
    model = build_model(dataclasses.replace(shape, path=str(tmp_path)), spec.plan, CPU)
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.0}


def test_an_unknown_family_without_a_directory_is_refused(spec: TrialSpec) -> None:
    with pytest.raises(ValueError, match=r"mamba.* llama and gpt2 .* model\.path"):
        config_of(dataclasses.replace(spec.model, family="mamba"))
