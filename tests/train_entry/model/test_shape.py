from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from train_entry.contract import ModelShape, TrialSpec, load
from train_entry.model.build import config_of, count_parameters
from train_entry.model.shape import main


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_directory_gives_back_the_shape_it_was_made_from(
    spec: TrialSpec, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kv_heads = {"llama": 2, "gpt2": 4}[family]  # GPT-2 has one per head
    shape = dataclasses.replace(spec.model, family=family, kv_heads=kv_heads)
    config_of(shape).save_pretrained(tmp_path)
    assert main([str(tmp_path)]) == 0
    expected = dataclasses.replace(
        shape, name=tmp_path.name, path=str(tmp_path), parameters=count_parameters(config_of(shape))
    )
    assert load(ModelShape, capsys.readouterr().out) == expected


def test_gpt2_without_an_inner_size_has_four_times_the_hidden_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 24, "n_head": 2, "n_layer": 1}')
    assert main([str(tmp_path)]) == 0
    assert load(ModelShape, capsys.readouterr().out).ffn == 96


def test_a_directory_without_a_model_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no config.json" in captured.err


def test_a_model_that_transformers_does_not_know_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
