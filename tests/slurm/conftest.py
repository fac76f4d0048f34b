"""A real Slurm on this host while the tests run: four nodes, each with eight cores and four fake GPUs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import QUICK, CommandLine
from tests.support.facilities import missing
from train_entry.contract import StudyDir, Trial, read_trial

HERE = Path(__file__).resolve().parent
START_LIMIT_S = 120
TINY = ("cluster=slurm", "cluster.device=cpu", "model=tiny_llama", "tracking=none", "micro_batch=1", *QUICK)


@dataclass(frozen=True)
class Slurm:
    """A running cluster. Slurm's commands find it by SLURM_CONF."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.directory / "etc" / "slurm.conf")}

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def line(self, directory: Path) -> SlurmLine:
        return SlurmLine(directory, slurm=self)


@dataclass
class SlurmLine(CommandLine):
    """`python sweep.py` on the cluster's login node."""

    slurm: Slurm | None = None

    @property
    def environment(self) -> dict[str, str]:
        assert self.slurm is not None
        return {**self.slurm.environment, "SHARDSWEEP_STATE_DIR": str(self.directory / "state")}

    def trials(self, study: str = "x") -> list[Trial]:
        places = StudyDir(self.studies / study).trials()
        return [trial for place in places if (trial := read_trial(place)) is not None]


def _started(directory: Path, **settings: str) -> Iterator[Slurm]:
    """Start a cluster and stop it afterwards. If that fails, skip the tests, or fail them in CI."""
    done = subprocess.run(
        ["bash", str(HERE / "start.sh"), str(directory)],
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    if done.returncode != 0:
        reason = f"no Slurm: {(done.stderr.strip() or 'start.sh failed').splitlines()[-1]}"
        missing(reason, done.stderr)
    try:
        yield Slurm(directory)
    finally:
        subprocess.run(["bash", str(HERE / "stop.sh"), str(directory)], capture_output=True, timeout=120)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    yield from _started(tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def slurm_without_accounting(tmp_path: Path) -> Iterator[Slurm]:
    yield from _started(tmp_path / "slurm", ACCOUNTING="0", PORT="17817")


@pytest.fixture
def line(slurm: Slurm, tmp_path: Path) -> Iterator[SlurmLine]:
    found = slurm.line(tmp_path)
    yield found
    found.end()
