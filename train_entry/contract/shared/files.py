"""Read and write records: documents are replaced as a whole, streams only grow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from train_entry.contract.shared.codec import ContractError, dump, load

T = TypeVar("T")


def write_atomic(path: Path, text: str) -> None:
    """Replace the file's content. A reader, or a crash, finds the old or the new text, never a part."""
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
    """Append a record as one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(dump(record, indent=None) + "\n")


def read_lines(path: Path, cls: type[T]) -> Iterator[T]:
    """Yield a stream's records. A missing file has none; a torn line (its writer was killed) is skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield load(cls, line)
        except ContractError:
            continue


def read_document(path: Path, cls: type[T]) -> T | None:
    """Return a file's record, or None if the file is missing. Raise ContractError if it is unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return load(cls, text)
    except ContractError as error:
        raise ContractError(f"{path}: {error}") from error
