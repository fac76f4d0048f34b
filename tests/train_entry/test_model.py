from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from train_entry.contract import Checkpointing, ModelShape, TrialSpec
from train_entry.model import build_model, config_of, count_parameters, parameters_of

CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "gpt2"])
def shape(request: pytest.FixtureRequest, spec: TrialSpec) -> ModelShape:
    return dataclasses.replace(spec.model, family=request.param)


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


# transformers 5.24 has a new name for it, and older 5.x know the old one only.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_checkpointing_runs_blocks_twice_and_changes_no_gradient(spec: TrialSpec, shape: ModelShape) -> None:
    full = dataclasses.replace(spec.plan, activation_checkpointing=Checkpointing.FULL)
    batch = torch.arange(64).reshape(2, 32)
    models = [build_model(shape, plan, CPU) for plan in (spec.plan, full)]
    calls = [count_calls_of_first_mlp(model) for model in models]
    for model in models:
        model(input_ids=batch, labels=batch).loss.backward()
    assert [len(called) for called in calls] == [1, 2]
    for plain, recomputed in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(plain.grad, recomputed.grad)


def count_calls_of_first_mlp(model: torch.nn.Module) -> list[None]:
    """A list that grows by one at each call."""
    calls: list[None] = []
    mlp = next(module for name, module in model.named_modules() if name.endswith(".mlp"))
    mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


def test_a_model_in_a_directory_keeps_its_weights(spec: TrialSpec, shape: ModelShape, tmp_path: Path) -> None:
    saved = build_model(shape, spec.plan, CPU)
    saved.save_pretrained(tmp_path)
    other_seed = dataclasses.replace(spec.plan, seed=99)
    loaded = build_model(dataclasses.replace(shape, path=str(tmp_path)), other_seed, CPU)
    assert all(map(torch.equal, saved.parameters(), loaded.parameters()))
    assert loaded.training


def test_an_unknown_family_without_a_directory_is_refused(spec: TrialSpec) -> None:
    with pytest.raises(ValueError, match=r"mamba.* llama and gpt2 .* model\.path"):
        config_of(dataclasses.replace(spec.model, family="mamba"))
