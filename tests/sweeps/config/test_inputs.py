"""Checks of the files and directories that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.config.inputs import require_inputs
from sweeps.config.schema import DataConfig, SweepConfig
from sweeps.errors import ConfigError


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        require_inputs(SweepConfig(**changes))
    return caught.value.problems


def text(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(kind="text", path=str(path), **changes)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.py", "deep/er/a.txt"])
def test_a_directory_with_text_is_good(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("text")
    require_inputs(SweepConfig(data=text(tmp_path), studies_dir=str(tmp_path / "new")))


def test_a_file_is_good_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("text")
    require_inputs(SweepConfig(data=text(tmp_path / "corpus"), studies_dir=str(tmp_path)))


def test_missing_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert problems(data=text(path), studies_dir=str(tmp_path)) == (
        f"data.path={path}: does not exist; give a text file or a directory of them",
    )


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    assert problems(data=text(tmp_path), studies_dir=str(tmp_path)) == (
        f"data.path={tmp_path}: holds no file ending in .txt, .md, .jsonl, .py",
    )


def test_a_missing_tokenizer_is_refused_for_any_text(tmp_path: Path) -> None:
    data = DataConfig(kind="stdlib", tokenizer=str(tmp_path / "tok"))
    (problem,) = problems(data=data, studies_dir=str(tmp_path))
    assert problem == f"data.tokenizer={tmp_path}/tok: no such directory; give that of a local tokenizer"


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_studies_cannot_lie_below_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / below
    assert problems(studies_dir=str(path)) == (f"studies_dir={path}: {tmp_path / 'file'} is not a directory",)


def test_a_directory_that_torch_cannot_take_from_a_url_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "why? #2"
    message = f"studies_dir={path}: torch cannot open files below a path with # or ?"
    assert problems(studies_dir=str(path)) == (message,)
    require_inputs(SweepConfig(studies_dir=str(tmp_path / "50% näher; a, b")))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = text(tmp_path / "none", tokenizer=str(tmp_path / "tok"))
    assert len(problems(data=data, studies_dir=str(tmp_path / "file"))) == 3
