"""Who writes which file, and how: documents are replaced whole, streams only grow, readers are tolerant."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from train_entry.contract.shared.codec import ContractError, dump, load

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StudyDir:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "study.json"

    @property
    def lock(self) -> Path:
        return self.path / "orchestrator.lock"

    @property
    def winner(self) -> Path:
        return self.path / "winner.json"

    @property
    def table(self) -> Path:
        return self.path / "table.csv"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def trial(self, number: int) -> TrialDir:
        return TrialDir(self.path / "trials" / f"{number:04d}")

    def trials(self) -> list[TrialDir]:
        """Those that have a record, in the order of their numbers."""
        return [TrialDir(found.parent) for found in sorted(self.path.glob("trials/[0-9]*/trial.json"))]


@dataclass(frozen=True, slots=True)
class TrialDir:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "trial.json"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / f"attempt-{number}")


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """One launch. The job writes all but spec, config, `stop` and what a scheduler says."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def ds_config(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.rank0.jsonl"

    @property
    def stop(self) -> Path:
        """Its presence asks the job to time no further step. The orchestrator writes it."""
        return self.path / "stop"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def address(self) -> Path:
        """Where ranks on several hosts meet."""
        return self.path / "address.json"

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def scheduler(self) -> Path:
        """The scheduler's word on how the job ended."""
        return self.path / "scheduler.json"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def launcher(self) -> Path:
        """The process that started the ranks over ssh."""
        return self.path / "launcher.json"

    def node(self, number: int) -> Path:
        """What leads the ranks of one host, where they were started over ssh."""
        return self.path / f"node{number}.json"

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"heartbeat.rank{rank}.json"

    def outcome(self, rank: int) -> Path:
        return self.path / f"outcome.rank{rank}.json"

    def exit(self, rank: int) -> Path:
        return self.path / f"exit.rank{rank}.json"

    def log(self, rank: int) -> Path:
        return self.path / f"log.rank{rank}.txt"

    def stacks(self, rank: int) -> Path:
        """Python stacks of a rank that was ended for being silent."""
        return self.path / f"stacks.rank{rank}.txt"


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
