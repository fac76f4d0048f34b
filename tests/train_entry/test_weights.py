from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from train_entry.contract import ModelShape, TrialSpec
from train_entry.model import build_model, config_of
from train_entry.weights import NewWeights, SavedWeights, has_weights

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["llama", "gpt2"])
def shape(request: pytest.FixtureRequest, spec: TrialSpec) -> ModelShape:
    return dataclasses.replace(spec.model, family=request.param)


@pytest.fixture
def model(spec: TrialSpec, shape: ModelShape) -> PreTrainedModel:
    return build_model(shape, spec.plan, CPU)


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that torch gives out and nobody writes to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- new ones


@pytest.mark.parametrize("tied", [True, False])
def test_no_value_is_left_as_memory_had_it(
    spec: TrialSpec, shape: ModelShape, tied: bool, poison: None
) -> None:
    assert torch.empty(3).isnan().all()
    model = build_model(dataclasses.replace(shape, tied_embeddings=tied), spec.plan, CPU)
    assert [name for name, tensor in model.named_parameters() if not tensor.isfinite().all()] == []
    assert [name for name, tensor in model.named_buffers() if not tensor.isfinite().all()] == []


def test_matrices_are_drawn_norms_are_one_and_biases_zero(model: PreTrainedModel) -> None:
    std = model.config.initializer_range
    residual = std / (2 * 2) ** 0.5  # GPT-2 scales what its two blocks add, twice each
    for name, values in model.named_parameters():
        expected = residual if "c_proj.weight" in name else std if values.ndim == 2 else 0
        assert float(values.detach().std()) == pytest.approx(expected, rel=0.1), name
        assert float(values.detach().mean()) == pytest.approx(float(is_norm(name)), abs=2e-3), name


def is_norm(name: str) -> bool:
    return name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))


def test_what_is_computed_from_the_configuration_is_as_transformers_has_it(
    model: PreTrainedModel, shape: ModelShape
) -> None:
    theirs = type(model)(config_of(shape))
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in theirs.named_buffers()]
    assert all(map(torch.equal, model.buffers(), theirs.buffers()))


def test_a_parameter_is_the_same_whichever_were_asked_for_before(
    spec: TrialSpec, model: PreTrainedModel, shape: ModelShape
) -> None:
    names = [name for name, _ in model.named_parameters()]
    weights = NewWeights(twin_of(model, shape), spec.plan.seed, CPU)
    for name in reversed(names):
        assert torch.equal(weights(name), model.get_parameter(name)), name
    other = NewWeights(twin_of(model, shape), spec.plan.seed + 1, CPU)
    assert not torch.equal(other(names[0]), model.get_parameter(names[0]))


def twin_of(model: PreTrainedModel, shape: ModelShape) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model)(config_of(shape))


def test_a_parameter_without_a_rule_is_refused_by_name(model: PreTrainedModel, shape: ModelShape) -> None:
    twin = twin_of(model, shape)
    twin.register_parameter("forgotten", torch.nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(ValueError, match=r"no rule for new weights of forgotten in .* set model\.path"):
        NewWeights(twin, 0, CPU)


def test_a_rule_that_reads_weights_is_refused(
    model: PreTrainedModel, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = twin_of(model, shape)
    reads = next(twin.parameters()).sum()
    monkeypatch.setattr(twin, "_init_weights", lambda module: reads.item())
    with pytest.raises(ValueError, match=r"cannot be given new weights here: set model\.path"):
        NewWeights(twin, 0, CPU)


# ---------------------------------------------------------------- saved ones


def as_safetensors(tensors: Tensors, directory: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )


def as_two_safetensors(tensors: Tensors, directory: Path) -> None:
    in_two(tensors, directory, "model.safetensors", save_file)


def as_bin(tensors: Tensors, directory: Path) -> None:
    torch.save(tensors, directory / "pytorch_model.bin")


def as_two_bins(tensors: Tensors, directory: Path) -> None:
    in_two(tensors, directory, "pytorch_model.bin", torch.save)


def in_two(tensors: Tensors, directory: Path, name: str, save: Callable[[Tensors, Path], None]) -> None:
    stem, suffix = name.split(".")
    places = {key: f"{stem}-{number % 2}.{suffix}" for number, key in enumerate(tensors)}
    for place in set(places.values()):
        save({key: tensors[key] for key in tensors if places[key] == place}, directory / place)
    (directory / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))


def parameters(model: PreTrainedModel) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loaded(spec: TrialSpec, shape: ModelShape, directory: Path) -> PreTrainedModel:
    config_of(shape).save_pretrained(directory)
    other_seed = dataclasses.replace(spec.plan, seed=99)
    return build_model(dataclasses.replace(shape, path=str(directory)), other_seed, CPU)


@pytest.mark.parametrize("save", [as_safetensors, as_two_safetensors, as_bin, as_two_bins])
def test_weights_come_back_from_every_kind_of_file(
    spec: TrialSpec,
    shape: ModelShape,
    model: PreTrainedModel,
    tmp_path: Path,
    save: Callable[[Tensors, Path], None],
) -> None:
    save(parameters(model), tmp_path)  # the tied output layer is absent
    assert all(map(torch.equal, loaded(spec, shape, tmp_path).parameters(), model.parameters()))


def test_half_precision_in_a_file_becomes_the_models_own(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    as_safetensors({name: tensor.bfloat16() for name, tensor in parameters(model).items()}, tmp_path)
    for ours, theirs in zip(loaded(spec, shape, tmp_path).parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.bfloat16().float())


def test_a_tied_weight_may_be_saved_under_both_its_names(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    as_bin(model.state_dict(), tmp_path)
    assert all(map(torch.equal, loaded(spec, shape, tmp_path).parameters(), model.parameters()))


def test_a_tied_weight_may_be_saved_under_the_output_layers_name(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    first, *_ = tensors = parameters(model)
    as_safetensors({"lm_head.weight": tensors.pop(first), **tensors}, tmp_path)
    assert all(map(torch.equal, loaded(spec, shape, tmp_path).parameters(), model.parameters()))


def test_a_base_models_file_lacks_the_prefix_and_old_ones_hold_what_is_computed_now(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    prefix = f"{model.base_model_prefix}."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in parameters(model).items()}
    computed = {"gpt2": "h.0.attn.bias", "llama": "layers.0.self_attn.rotary_emb.inv_freq"}[shape.family]
    as_bin({**tensors, computed: torch.ones(1)}, tmp_path)
    assert all(map(torch.equal, loaded(spec, shape, tmp_path).parameters(), model.parameters()))


def test_files_that_do_not_fit_are_refused_with_all_reasons(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    first, second, *_ = tensors = parameters(model)
    del tensors[first]
    as_safetensors({**tensors, second: torch.zeros(3), "score.weight": torch.zeros(1)}, tmp_path)
    with pytest.raises(ValueError, match=r"missing: .*; unknown to the model: score\.weight; ") as caught:
        loaded(spec, shape, tmp_path)
    assert first in str(caught.value)
    assert f"of another shape: {second} (3,) instead of (" in str(caught.value)


def test_many_missing_tensors_are_counted(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    first = next(iter(parameters(model)))
    as_safetensors({first: parameters(model)[first]}, tmp_path)
    with pytest.raises(ValueError, match=r"missing: \S+, \S+, \S+ and \d+ more$"):
        loaded(spec, shape, tmp_path)


def test_a_file_that_an_index_names_must_be_there(
    spec: TrialSpec, shape: ModelShape, model: PreTrainedModel, tmp_path: Path
) -> None:
    as_two_safetensors(parameters(model), tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"index\.json names model-1\.safetensors, which its directory lacks"
    ):
        loaded(spec, shape, tmp_path)


def test_weights_under_another_name_are_not_passed_over(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"holds adapter_model\.safetensors, and none of model\.safetensors"):
        has_weights(tmp_path)


def test_buffers_that_were_saved_are_filled(model: PreTrainedModel, tmp_path: Path) -> None:
    model.register_buffer("bias_of_experts", torch.arange(3.0))
    as_safetensors({**parameters(model), "bias_of_experts": torch.ones(3)}, tmp_path)
    SavedWeights(tmp_path, model).fill_buffers(model)
    assert torch.equal(model.get_buffer("bias_of_experts"), torch.ones(3))
    assert set(load_file(tmp_path / "model.safetensors")) > {"bias_of_experts"}
