from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from train_entry.contract import ModelShape, TrialSpec
from train_entry.model.build import build_model, config_of
from train_entry.model.weights import NewWeights, SavedWeights, has_weights

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
    """Let torch fill new memory with NaN, so that values that nothing writes show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- new weights


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
    residual = std / (2 * 2) ** 0.5  # GPT-2 scales its residual matrices: two in each of two blocks
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
    with pytest.raises(ValueError, match=r"no rule to initialize forgotten of .* set model\.path"):
        NewWeights(twin, 0, CPU)


def test_a_rule_that_reads_weights_is_refused(
    model: PreTrainedModel, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = twin_of(model, shape)
    reads = next(twin.parameters()).sum()
    monkeypatch.setattr(twin, "_init_weights", lambda module: reads.item())
    with pytest.raises(ValueError, match=r"cannot be initialized with new weights: set model\.path"):
        NewWeights(twin, 0, CPU)


# ---------------------------------------------------------------- saved weights


def as_safetensors(tensors: Tensors, directory: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )


def as_two_safetensors(tensors: Tensors, directory: Path) -> None:
    in_two(tensors, directory, "model.safetensors", save_file)


def as_bin(tensors: Tensors, directory: Path) -> None:
    torch.save(tensors, directory / "pytorch_model.bin")


def as_old_bin(tensors: Tensors, directory: Path) -> None:
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


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


@pytest.mark.parametrize("save", [as_safetensors, as_two_safetensors, as_bin, as_old_bin, as_two_bins])
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
        ValueError, match=r"index\.json names model-1\.safetensors, which the directory does not hold"
    ):
        loaded(spec, shape, tmp_path)


def test_weights_under_another_name_are_not_passed_over(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"holds adapter_model\.safetensors, but none of model\.safetensors"):
        has_weights(tmp_path)


def test_buffers_that_were_saved_are_filled(model: PreTrainedModel, tmp_path: Path) -> None:
    model.register_buffer("bias_of_experts", torch.arange(3.0))
    as_safetensors({**parameters(model), "bias_of_experts": torch.ones(3)}, tmp_path)
    SavedWeights(tmp_path, model).fill_buffers(model)
    assert torch.equal(model.get_buffer("bias_of_experts"), torch.ones(3))
    assert set(load_file(tmp_path / "model.safetensors")) > {"bias_of_experts"}


# ---------------------------------------------------------------- renamed and converted tensors


EXPERTS = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}


def test_tensors_under_other_names_are_renamed(tmp_path: Path) -> None:
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**EXPERTS))
    model.save_pretrained(tmp_path)
    assert set(parameters(model)) - set(load_file(tmp_path / "model.safetensors")) != set()
    weights = SavedWeights(tmp_path, model)
    for name, values in parameters(model).items():
        assert torch.equal(weights(name), values), name


def test_old_names_of_norms_are_renamed(model: PreTrainedModel, tmp_path: Path) -> None:
    model.LayerNorm = torch.nn.LayerNorm(2)
    tensors = {
        name.replace("Norm.weight", "Norm.gamma"): tensor for name, tensor in parameters(model).items()
    }
    as_safetensors({name.replace("Norm.bias", "Norm.beta"): t + 1 for name, t in tensors.items()}, tmp_path)
    assert torch.equal(SavedWeights(tmp_path, model)("LayerNorm.weight"), torch.full((2,), 2.0))
    assert torch.equal(SavedWeights(tmp_path, model)("LayerNorm.bias"), torch.ones(2))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**EXPERTS))


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, head_dim=8))


@pytest.mark.parametrize("build", [mixtral, qwen3_moe])
def test_experts_that_are_stored_one_by_one_are_refused_by_type(
    tmp_path: Path, build: Callable[[], PreTrainedModel]
) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"experts\.0\.\S+, .* and 3 more would have to be converted"
    ) as caught:
        SavedWeights(tmp_path, model)
    assert f"stores other tensors than a model of type {build.__name__} trains" in str(caught.value)


@pytest.mark.parametrize("build", [mixtral, qwen3_moe])
def test_experts_that_are_stored_as_they_are_trained_are_loaded(
    tmp_path: Path, build: Callable[[], PreTrainedModel]
) -> None:
    model = build()
    model.save_pretrained(tmp_path, save_original_format=False)
    weights = SavedWeights(tmp_path, model)
    for name, values in parameters(model).items():
        assert torch.equal(weights(name), values), name


def test_what_transformers_does_not_miss_is_made_anew(model: PreTrainedModel, tmp_path: Path) -> None:
    first, matrix, *_ = tensors = parameters(model)
    norm = next(filter(is_norm, tensors))
    model.register_buffer("correction", torch.ones(3))
    model._keys_to_ignore_on_load_missing = {"^corr.*on$", re.escape(norm), re.escape(matrix)}
    as_safetensors({name: tensors[name] for name in tensors if name not in (matrix, norm)}, tmp_path)
    weights = SavedWeights(tmp_path, model)
    weights.fill_buffers(model)
    assert torch.equal(weights(norm), torch.ones_like(tensors[norm]))
    assert float(weights(matrix).std()) == pytest.approx(model.config.initializer_range, rel=0.1)
    assert torch.equal(weights(first), tensors[first])
    assert torch.equal(model.get_buffer("correction"), torch.ones(3))


def test_what_else_is_missing_is_still_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    _, second, third, *_ = tensors = parameters(model)
    model._keys_to_ignore_on_load_missing = {re.escape(second)}
    as_safetensors({name: tensors[name] for name in tensors if name not in (second, third)}, tmp_path)
    with pytest.raises(ValueError, match=f"missing: {re.escape(third)}$"):
        SavedWeights(tmp_path, model)


# ---------------------------------------------------------------- damaged files


@pytest.mark.parametrize("bytes_left", [0, 4, 300, -100, -1])
@pytest.mark.parametrize("save", [as_safetensors, as_bin, as_old_bin])
def test_a_file_that_is_cut_off_is_named(
    model: PreTrainedModel, tmp_path: Path, save: Callable[[Tensors, Path], None], bytes_left: int
) -> None:
    save(parameters(model), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))} cannot be read .* copy or save it again"):
        SavedWeights(tmp_path, model)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_to_a_file_elsewhere_is_named(model: PreTrainedModel, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} cannot be read"):
        SavedWeights(tmp_path, model)


def test_a_file_whose_objects_would_run_code_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    torch.save({"a": Path("b")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read \(UnpicklingError\)"):
        SavedWeights(tmp_path, model)


def test_memory_that_runs_out_is_no_damage(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_old_bin(parameters(model), tmp_path)
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(torch, "load", Mock(side_effect=full))
    with pytest.raises(RuntimeError, match="allocate"):
        SavedWeights(tmp_path, model)


def test_an_old_file_is_read_twice_whatever_it_holds(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_old_bin(parameters(model), tmp_path)
    load = Mock(side_effect=torch.load)
    monkeypatch.setattr(torch, "load", load)
    weights = SavedWeights(tmp_path, model)
    for name, values in parameters(model).items():
        assert torch.equal(weights(name), values), name
    assert load.call_count == 2  # for the shapes, and for the values
