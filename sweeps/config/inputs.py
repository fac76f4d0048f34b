"""Check the files and directories that a configuration names, before anything is launched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sweeps.config.schema import DataConfig, SweepConfig
from sweeps.errors import ConfigError

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".py")


def require_inputs(config: SweepConfig) -> None:
    """Raise ConfigError with a line for each path that cannot be used."""
    problems = [*_data_problems(config.data), *_studies_problems(Path(config.studies_dir))]
    if problems:
        raise ConfigError(problems)


def _data_problems(data: DataConfig) -> Iterator[str]:
    if data.kind == "text" and data.path:
        yield from _text_problems(Path(data.path))
    if data.tokenizer and not Path(data.tokenizer).is_dir():
        yield f"data.tokenizer={data.tokenizer}: no such directory; give that of a local tokenizer"


def _text_problems(path: Path) -> Iterator[str]:
    if not path.exists():
        yield f"data.path={path}: does not exist; give a text file or a directory of them"
    elif path.is_dir() and not any(found.suffix in TEXT_SUFFIXES for found in path.rglob("*")):
        yield f"data.path={path}: holds no file ending in {', '.join(TEXT_SUFFIXES)}"
    elif not os.access(path, os.R_OK):
        yield f"data.path={path}: cannot be read"


def _studies_problems(path: Path) -> Iterator[str]:
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        yield f"studies_dir={path}: {existing} is not a directory"
    elif not os.access(existing, os.W_OK):
        yield f"studies_dir={path}: {existing} cannot be written"
    # Ranks meet through a file in it, and torch takes the file's path from a URL without decoding it.
    if breaking := sorted(set("?#") & set(str(path.absolute()))):
        yield f"studies_dir={path}: torch cannot open files below a path with {' or '.join(breaking)}"
