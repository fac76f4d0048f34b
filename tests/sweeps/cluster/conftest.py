"""Fake commands of Slurm, which tests script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = """#!/bin/sh
cd '{folder}' || exit 9
echo "$*" >> {name}.calls
cat {name}.out
cat {name}.err >&2
exit {status}
"""


@dataclass(frozen=True)
class Commands:
    """Scripted commands, first on PATH. Each records its arguments."""

    folder: Path

    def answer(self, name: str, out: str = "", err: str = "", status: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(out)
        (self.folder / f"{name}.err").write_text(err)
        (self.folder / name).write_text(SCRIPT.format(folder=self.folder, name=name, status=status))
        (self.folder / name).chmod(0o755)

    def calls(self, name: str) -> list[str]:
        calls = self.folder / f"{name}.calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    found = Commands(folder)
    for name in ("squeue", "sacct", "sinfo", "scancel", "scontrol", "sbatch", "srun"):
        found.answer(name)
    return found
