"""Model shapes, and parameter counts checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweeps.config.models import gpt2_parameters, llama_parameters, model_shape
from sweeps.config.schema import ModelConfig
from sweeps.errors import ConfigError


def test_a_llama_is_counted_by_hand() -> None:
    model = ModelConfig(layers=2, hidden=8, heads=2, kv_heads=2, ffn=16, vocab=10)
    attention, feed_forward, norms = 4 * 8 * 8, 3 * 8 * 16, 2 * 8
    assert llama_parameters(model) == 2 * 10 * 8 + 2 * (attention + feed_forward + norms) + 8


def test_grouped_query_attention_shrinks_keys_and_values() -> None:
    model = ModelConfig(layers=1, hidden=8, heads=4, kv_heads=1, ffn=16, vocab=10)
    queries_and_output, keys_and_values = 2 * 8 * 8, 2 * 8 * 2
    assert llama_parameters(model) == 160 + queries_and_output + keys_and_values + 3 * 8 * 16 + 16 + 8


def test_tied_embeddings_are_counted_once() -> None:
    apart = ModelConfig(hidden=8, vocab=10)
    tied = ModelConfig(hidden=8, vocab=10, tied_embeddings=True)
    assert llama_parameters(apart) - llama_parameters(tied) == 80
    assert gpt2_parameters(apart) - gpt2_parameters(tied) == 80


def test_a_gpt2_is_counted_by_hand() -> None:
    model = ModelConfig(
        family="gpt2",
        layers=1,
        hidden=4,
        heads=2,
        kv_heads=2,
        ffn=16,
        vocab=10,
        positions=6,
        tied_embeddings=True,
    )
    attention = 4 * 12 + 12 + 4 * 4 + 4
    feed_forward = 4 * 16 + 16 + 16 * 4 + 4
    norms = 2 * (4 + 4)
    assert gpt2_parameters(model) == 10 * 4 + 6 * 4 + attention + feed_forward + norms + 8


def test_a_shape_carries_what_builds_the_model() -> None:
    model = ModelConfig(
        name="mine", layers=3, hidden=12, heads=4, kv_heads=2, ffn=20, vocab=300, positions=64
    )
    shape = model_shape(model)
    assert (shape.name, shape.family, shape.layers, shape.heads, shape.kv_heads) == ("mine", "llama", 3, 4, 2)
    assert (shape.vocab, shape.positions, shape.path) == (300, 64, None)
    assert shape.parameters == llama_parameters(model)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (4, 3)])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"hidden=64 must be a multiple of heads={heads}, .*kv_heads={kv_heads}"
    ):
        model_shape(ModelConfig(hidden=64, heads=heads, kv_heads=kv_heads))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: no config.json there"):
        model_shape(ModelConfig(family="hf", path=str(tmp_path)))


@pytest.mark.slow
def test_a_local_model_is_counted_by_transformers(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(ModelConfig(family="hf", path=str(tmp_path)))
    same = ModelConfig(layers=2, hidden=16, heads=2, kv_heads=2, ffn=24, vocab=32)
    assert shape.parameters == llama_parameters(same)
    assert (shape.family, shape.positions, shape.path) == ("llama", 64, str(tmp_path))


@pytest.mark.slow
def test_a_directory_that_is_no_language_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a causal language model: "):
        model_shape(ModelConfig(family="hf", path=str(tmp_path)))
