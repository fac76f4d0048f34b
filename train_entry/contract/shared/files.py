"""Who writes which file, and how: documents are replaced whole, streams only grow, readers are tolerant."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from train_entry.contract.shared.codec import ContractError, dump, load

T = TypeVar("T")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` such that a reader, or a crash, sees the old or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # mkstemp's 0600 would hide results from colleagues
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def append_line(path: Path, record: object) -> None:
    """Add one JSON object as a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(dump(record, indent=None) + "\n")


def read_lines(path: Path, cls: type[T]) -> Iterator[T]:
    """The records of a stream; a missing file has none, a torn line (the writer was killed) is skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield load(cls, line)
        except ContractError:
            continue


def read_document(path: Path, cls: type[T]) -> T | None:
    """The record in a file; None where the file is missing. Raises ContractError where it is unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return load(cls, text)
    except ContractError as error:
        raise ContractError(f"{path}: {error}") from error
